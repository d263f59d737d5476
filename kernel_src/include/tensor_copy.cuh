// TMA (tensor memory accelerator) copies of boxes of a strided tensor to shared memory and back. A box is a
// number of rows of kBoxColumns elements (128 bytes). In shared memory the 16-byte pieces of a row have the
// 128-byte swizzle of wgmma: piece p of row r is at p ^ (r % 8). Rows of 64 bytes have the 64-byte swizzle:
// p ^ (r / 2 % 4).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "barrier.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

constexpr int kBoxColumns = 64;  // 16-bit elements
constexpr int kBoxRowBytes = 128;
constexpr int kSwizzleRows = 8;
constexpr uint32_t kSwizzleBytes = kSwizzleRows * kBoxRowBytes;  // A tile begins at a multiple of it.

// Returns the offset, in bytes, of a 16-byte piece of a row.
template <int kRowBytes = kBoxRowBytes>
__device__ __forceinline__ uint32_t swizzled_piece(int row, int piece) {
  static_assert(kRowBytes == kBoxRowBytes || kRowBytes == kBoxRowBytes / 2);
  const int swizzle = kRowBytes == kBoxRowBytes ? row % kSwizzleRows : row / 2 % (kSwizzleRows / 2);
  return static_cast<uint32_t>(row * kRowBytes + (piece ^ swizzle) * 16);
}

// First element of a box in (batch, seq, heads, head_dim). TMA counts dimensions from the innermost.
struct HeadsBox {
  int column, head, seq, batch;
};

__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                         const HeadsBox& box) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(box.column), "r"(box.head), "r"(box.seq), "r"(box.batch)
      : "memory");
}

// First element of a box in a matrix (rows, columns).
struct MatrixBox {
  int column, row;
};

__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                         const MatrixBox& box) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(box.column), "r"(box.row)
      : "memory");
}

// Copies contiguous memory. Addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          Barrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier.address)
      : "memory");
}

// Copies the box to the same address of each block of the cluster whose bit is set in `blocks`, and signals
// the barrier at the same address there.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                                   const MatrixBox& box, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(box.column), "r"(box.row), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t shared, const MatrixBox& box) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared), "r"(box.column), "r"(box.row)
               : "memory");
}

// Rows beyond the tensor are not stored. The same thread must commit the store and wait for it.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t shared, const HeadsBox& box) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(box.column), "r"(box.head), "r"(box.seq), "r"(box.batch)
      : "memory");
}
__device__ __forceinline__ void tma_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the committed stores have read shared memory, so that it can be overwritten.
__device__ __forceinline__ void tma_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void tma_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------

// A tensor (batch, seq, heads, head_dim). The strides are those of the first three dimensions, in elements.
struct HeadsTensor {
  const void* data;
  int64_t batch, seq, heads, head_dim;
  int64_t strides[3];
};

// Returns whether TMA can copy the tensor: all strides must be multiples of 16 bytes. The strides of heads
// and batch may be 0, the stride of the rows of a box may not.
inline bool is_mappable(const HeadsTensor& tensor) {
  constexpr int64_t kEnd = int64_t{1} << 39;
  const auto is_stride = [](int64_t size, int64_t stride) {
    return size == 1 || (stride * 2 % kVectorBytes == 0 && stride < kEnd);
  };
  return is_16_byte_aligned(tensor.data) && is_stride(tensor.batch, tensor.strides[0]) &&
         is_stride(tensor.seq, tensor.strides[1]) && (tensor.seq == 1 || tensor.strides[1] != 0) &&
         is_stride(tensor.heads, tensor.strides[2]);
}

// A tensor map. A dimension with a stride of 0 has one element in the map, and its step is 0.
struct MappedTensor {
  CUtensorMap map;
  int head_step, batch_step;

  __device__ __forceinline__ HeadsBox box(int column, int head, int seq, int batch) const {
    return {column, head * head_step, seq, batch * batch_step};
  }
};

// Makes a tensor map of boxes. The sizes are those of all dimensions, the strides, in bytes, those of all but
// the innermost one.
template <int kDims>
CUtensorMap encode_tensor_map(const char* operation, CUtensorMapDataType type, const void* data,
                              const cuuint64_t (&sizes)[kDims], const cuuint64_t (&strides)[kDims - 1],
                              const cuuint32_t (&box)[kDims],
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [&] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess)
      throw std::runtime_error(std::string(operation) + ": the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  cuuint32_t every[kDims];
  for (cuuint32_t& step : every) step = 1;
  CUtensorMap map;
  const CUresult result = encode(&map, type, kDims, const_cast<void*>(data), sizes, strides, box, every,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error(std::string(operation) + ": cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(result)));
  return map;
}

inline CUtensorMapDataType tensor_map_type(DType dtype) {
  return dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline MappedTensor map_tensor(const char* operation, const HeadsTensor& tensor, DType dtype, int box_rows) {
  const int64_t sizes_in[3] = {tensor.heads, tensor.seq, tensor.batch};
  const int64_t strides_in[3] = {tensor.strides[2], tensor.strides[1], tensor.strides[0]};
  cuuint64_t sizes[4] = {static_cast<cuuint64_t>(tensor.head_dim)}, strides[3];
  for (int dim = 0; dim < 3; ++dim) {
    const bool is_single = sizes_in[dim] == 1 || strides_in[dim] == 0;
    sizes[dim + 1] = is_single ? 1 : static_cast<cuuint64_t>(sizes_in[dim]);
    strides[dim] = is_single ? kVectorBytes : static_cast<cuuint64_t>(strides_in[dim]) * 2;
  }
  const cuuint32_t box[4] = {kBoxColumns, 1, static_cast<cuuint32_t>(box_rows), 1};
  return {encode_tensor_map(operation, tensor_map_type(dtype), tensor.data, sizes, strides, box),
          sizes[1] == 1 ? 0 : 1, sizes[3] == 1 ? 0 : 1};
}

}  // namespace h100_diffusers_kernels
