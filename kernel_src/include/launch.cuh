// Host code of the launchers: dispatch by dtype, alignment checks, kernel launch with error check.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// A compile-time constant as a function argument: after `body(Constant<Access::kVector>{})` a generic lambda
// can use its parameter as a template argument. Types are passed as std::type_identity.
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

inline bool is_aligned(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}
inline bool is_16_byte_aligned(const void* address) { return is_aligned(address, kVectorBytes); }

// Returns whether rows of the operand can be read and written this number of bytes at a time. True if it is
// absent.
inline bool has_vector_rows(const RowOperand& operand, int ndim, int element_bytes,
                            int bytes = kVectorBytes) {
  bool aligned = is_aligned(operand.data, bytes);
  for (int dim = 0; dim < ndim; ++dim) aligned = aligned && operand.strides[dim] * element_bytes % bytes == 0;
  return operand.data == nullptr || aligned;
}

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Programmatic dependent launch: the next kernel in a stream may start while this one ends. Its blocks
// compute indices in that time and wait here until all writes of earlier kernels are visible. Every thread
// calls it before its first access to global memory. It saves 1.2 us a kernel in a stream
// (notes/launch_and_host_time.md, "Dependent launch").
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start if there is room for its blocks. Its griddepcontrol_wait still
// waits for the end of this kernel.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Of a multiprocessor. Blocks whose threads divide kMultiprocessorThreads can fill it.
constexpr int kMultiprocessorThreads = 2048;
constexpr int kMultiprocessorRegisters = 64 * 1024;

// Largest static shared memory of a block.
constexpr int kMaxStaticSharedBytes = 48 * 1024;

// Largest dynamic shared memory of a block: the multiprocessor's, minus the static memory of reductions.
constexpr int64_t kMaxSharedBytes = 224 * 1024;

// Properties are cached for devices with smaller numbers.
constexpr int kMaxDevices = 64;

inline void throw_on_error(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // Otherwise a later check would report the same error.
  throw std::runtime_error(std::string(operation) + ": the CUDA launch failed: " + cudaGetErrorString(error));
}

// Returns the number of multiprocessors, which is queried once per device (device.cu).
int multiprocessor_count(const char* operation, int device);

constexpr int kMaxClusterBlocks = 8;  // the largest portable size

// Returns the number of clusters that run at the same time, with one block on a multiprocessor (device.cu).
// Clusters do not span GPCs, of which some have fewer multiprocessors.
//
// Args:
//   kernel: any for which allow_dynamic_shared_memory has been called
//   device: the current one
//   blocks: of a cluster
int cluster_count(const char* operation, const void* kernel, int device, int blocks);

// Lets blocks of the kernel have kMaxSharedBytes of dynamic shared memory, once per device. By default the
// limit is 48 KiB, and L1 keeps much of the multiprocessor's memory.
template <auto kKernel>
void allow_dynamic_shared_memory(const char* operation, int device) {
  static std::atomic<uint64_t> allowed_devices{0};  // One bit per device.
  static_assert(kMaxDevices == 64);
  const uint64_t device_bit = device < kMaxDevices ? uint64_t{1} << device : 0;
  if (allowed_devices.load(std::memory_order_acquire) & device_bit) return;
  // Other threads may set the same attributes to the same values at the same time.
  throw_on_error(operation,
                 cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
  throw_on_error(operation, cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared));
  allowed_devices.fetch_or(device_bit, std::memory_order_release);
}

// Launches a kernel that calls griddepcontrol_wait.
//
// Args:
//   grid: a multiple of kClusterBlocks, the blocks of a cluster
//   shared_bytes: dynamic shared memory of a block; allow_dynamic_shared_memory has been called if it is not
//   0
template <int kClusterBlocks = 1, typename Params>
void launch_kernel(const char* operation, void (*kernel)(const Params), dim3 grid, int block,
                   const Params& params, Stream stream, int64_t shared_bytes = 0) {
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
  throw_on_error(operation, cudaLaunchKernelEx(&config, kernel, params));
}

// Launches a kernel that uses dynamic shared memory.
template <auto kKernel, int kClusterBlocks = 1, typename Params>
void launch_kernel_with_shared_memory(const char* operation, dim3 grid, int block, const Params& params,
                                      Stream stream, int64_t shared_bytes) {
  allow_dynamic_shared_memory<kKernel>(operation, stream.device);
  launch_kernel<kClusterBlocks>(operation, kKernel, grid, block, params, stream, shared_bytes);
}

}  // namespace h100_diffusers_kernels
