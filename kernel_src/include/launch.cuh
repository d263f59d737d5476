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

template <typename Params>
void launch_kernel(const char* operation, void (*kernel)(Params), dim3 grid, int block, const Params& params,
                   Stream stream) {
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream.handle)>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(operation) +
                             ": the CUDA launch failed: " + cudaGetErrorString(error));
}

}  // namespace h100_diffusers_kernels
