// What every launcher does on the host: dtype dispatch, alignment questions, launch and error check.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body with the TypeTag of the dtype.
template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(TypeTag<float>{});
    case DType::kFloat16:
      return body(TypeTag<__half>{});
    case DType::kBFloat16:
      return body(TypeTag<__nv_bfloat16>{});
  }
}

inline bool is_16_byte_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// Whether rows of the operand can be read and written 16 bytes at a time. Absent operands can.
inline bool has_vector_rows(const RowOperand& operand, int ndim, int element_bytes) {
  bool aligned = is_16_byte_aligned(operand.data);
  for (int dim = 0; dim < ndim; ++dim)
    aligned = aligned && operand.strides[dim] * element_bytes % kVectorBytes == 0;
  return operand.data == nullptr || aligned;
}

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Ends when the kernels before this one in the stream have ended and their writes can be read. Each kernel
// begins with it, because launch_kernel lets it start earlier.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Launches with programmatic dependent launch: the blocks get to the multiprocessors while the previous
// kernel drains, and wait there.
template <typename Params>
void launch_kernel(const char* operation, void (*kernel)(Params), dim3 grid, int block, const Params& params,
                   Stream stream) {
  cudaLaunchAttribute early_start{};
  early_start.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early_start.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &early_start;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(operation) +
                             ": the CUDA launch failed: " + cudaGetErrorString(error));
}

}  // namespace h100_diffusers_kernels
