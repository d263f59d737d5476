// Every launcher needs these on the host: dispatch by dtype, questions of alignment, the launch itself with
// its check for errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// Passes a value as an argument that is known when compiled: `body(Constant<Access::kVector>{})` calls a
// generic lambda, which can use its parameter as a template argument. Types are passed as std::type_identity.
template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

// Calls body with the CUDA type of the dtype: `[&]<typename T>(std::type_identity<T>) { ... }`.
template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(std::type_identity<float>{});
    case DType::kFloat16:
      return body(std::type_identity<__half>{});
    case DType::kBFloat16:
      return body(std::type_identity<__nv_bfloat16>{});
  }
}

inline bool is_16_byte_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

// Tells whether rows of the operand can be read and written 16 bytes at a time. Those of an absent one can.
inline bool has_vector_rows(const RowOperand& operand, int ndim, int element_bytes) {
  bool aligned = is_16_byte_aligned(operand.data);
  for (int dim = 0; dim < ndim; ++dim)
    aligned = aligned && operand.strides[dim] * element_bytes % kVectorBytes == 0;
  return operand.data == nullptr || aligned;
}

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A kernel may begin while the one before it in its stream is ending (programmatic dependent launch): its
// blocks come up and find their place in that time, and wait here until all that earlier kernels have written
// is there to be read. Every thread calls it before its first access to global memory. That saves 1.2 us a
// kernel in a stream (NOTES, "Dependent launch").
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// From here on the next kernel in the stream may begin, as far as there is room for its blocks. What it waits
// for in wait_for_earlier_kernels is still the end of this one.
__device__ __forceinline__ void let_later_kernels_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// A block can have so much dynamic shared memory: all that there is, less what exchanges take.
constexpr int64_t kMaxSharedBytes = 224 * 1024;

inline void throw_on_error(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // A later check would find the error again otherwise.
  throw std::runtime_error(std::string(operation) + ": the CUDA launch failed: " + cudaGetErrorString(error));
}

// Launches a kernel that calls wait_for_earlier_kernels. kClusterBlocks blocks form a cluster, and the grid
// is a multiple of that; shared_bytes is the size of the dynamic shared memory.
template <int kClusterBlocks = 1, typename Params>
void launch_kernel(const char* operation, void (*kernel)(const Params), dim3 grid, int block,
                   const Params& params, Stream stream, int64_t shared_bytes = 0) {
  const auto check = [&](cudaError_t error) { throw_on_error(operation, error); };
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kClusterBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = attributes;
  config.numAttrs = kClusterBlocks > 1 ? 2 : 1;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  if (shared_bytes > 0) {
    // Unasked a block gets no more than 48 KiB, and L1 takes much of what a multiprocessor has. What is asked
    // for is the same in all launches of a kernel, because other threads may be launching it, too.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared));
  }
  check(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace h100_diffusers_kernels
