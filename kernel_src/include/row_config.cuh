// Launch configurations of all operations that reduce over rows: threads per row, by row length in packs of
// 16 bytes.
#pragma once

#include <cstdint>

#include "launch.cuh"
#include "reduce.cuh"
#include "row_index.cuh"

namespace h100_diffusers_kernels {

// Packs per thread of a short row, which is held in registers. Two were the fastest of one, two, four and
// eight at 256 packs: enough loads are in flight, and blocks are short enough to fill the last wave
// (notes/row_kernels.md, "Threads per row").
constexpr int kRowPacks = 2;

// Available numbers of threads per row, in ascending order.
template <int... kThreads>
struct RowThreads {};

// The values between powers of two fit the widths of SD3 (1536), FLUX.1 (3072), Wan (1536, 5120) and FLUX.2
// (6144) in 16 bits.
using NormRowThreads = RowThreads<4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512>;
// Without a reduction fewer values measure the same (notes/binary_size.md, "Fewer launch configurations").
using ElementwiseRowThreads = RowThreads<8, 32, 128, 256, 384, 512>;

// Calls body with the smallest number of threads, as a Constant, whose registers hold rows of `packs` packs.
// Returns false if kMaxThreads threads are too few.
template <int kMaxThreads = 512, int... kThreads, typename Body>
bool dispatch_row_threads(RowThreads<kThreads...>, int64_t packs, const Body& body) {
  const auto try_threads = [&](auto threads) {
    if constexpr (threads <= kMaxThreads) {
      if (packs <= threads * kRowPacks) {
        body(threads);
        return true;
      }
    }
    return false;
  };
  return (try_threads(Constant<kThreads>{}) || ...);
}

// Rows that are too long for long_row.cuh, or not aligned to 16 bytes, are read again in each step: by a
// block of kAnyRowThreads threads, or by one warp if they have at most kWarpRow elements: two for each thread
// of the block.
constexpr int kAnyRowThreads = 512;
static_assert(kMultiprocessorThreads % kAnyRowThreads == 0);
constexpr int kWarpRow = 1024;

// Which row a thread works on, and which packs of it.
template <int kThreadsPerRow, int kClusterBlocks = 1>
struct RowPosition {
  static constexpr int kRowsPerBlock = kBlockThreads<kThreadsPerRow> / kThreadsPerRow;
  static constexpr int kThreads = kThreadsPerRow * kClusterBlocks;
  static_assert(kRowsPerBlock == 1 || kClusterBlocks == 1);
  uint32_t row;
  int thread;  // of the kThreads that share the row

  __device__ __forceinline__ RowPosition() {
    if constexpr (kRowsPerBlock > 1) {
      row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
      thread = threadIdx.x % kThreadsPerRow;
    } else {
      row = blockIdx.x / kClusterBlocks;
      thread = cluster_rank<kClusterBlocks>() * kThreadsPerRow + threadIdx.x;
    }
  }

  // Returns the index, in the row, of the thread's i-th pack. Adjacent threads have adjacent packs.
  __device__ __forceinline__ int pack(int i) const { return i * kThreads + thread; }

  static int64_t blocks(int64_t rows) { return (rows + kRowsPerBlock - 1) / kRowsPerBlock * kClusterBlocks; }
};

// The row that a thread works on, and loops over the thread's part of it.

// kThreadsPerRow threads share a row. Those beyond the last row index row 0 and have no part of it. Params
// has `indexer` and the number of `rows`.
template <int kThreadsPerRow>
struct ThreadRow {
  RowPosition<kThreadsPerRow> position;
  bool is_present;
  RowIndexer::Index index;

  template <class Params>
  __device__ __forceinline__ explicit ThreadRow(const Params& params)
      : is_present(position.kRowsPerBlock == 1 || position.row < params.rows),
        index(params.indexer(is_present ? position.row : 0)) {}

  __device__ __forceinline__ bool is_first_thread() const { return is_present && position.thread == 0; }

  // Calls body(column) for each of the thread's packs of kSize elements, in a row of any length.
  template <int kSize, class Body>
  __device__ __forceinline__ void for_each_column(int64_t hidden, const Body& body) const {
    if (!is_present) return;
    for (int64_t column = int64_t{kSize} * position.thread; column < hidden; column += kSize * kThreadsPerRow)
      body(column);
  }
};

// A row in registers: each thread holds up to kPacks packs of kSize elements.
template <int kThreadsPerRow, int kSize, int kPacks = kRowPacks>
struct HeldRow : ThreadRow<kThreadsPerRow> {
  int hidden;
  int first;  // pack of the row, if blocks of the grid share it

  template <class Params>
  __device__ __forceinline__ explicit HeldRow(const Params& params, int first_pack = 0)
      : ThreadRow<kThreadsPerRow>(params), hidden(static_cast<int>(params.hidden)), first(first_pack) {}

  // Return the number, and the first element, of the thread's i-th pack.
  __device__ __forceinline__ int pack(int i) const { return first + this->position.pack(i); }
  __device__ __forceinline__ int column(int i) const { return pack(i) * kSize; }
  __device__ __forceinline__ bool has_pack(int i) const { return this->is_present && column(i) < hidden; }

  // Calls body(i, column) for each of the thread's packs.
  template <class Body>
  __device__ __forceinline__ void for_each_pack(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (has_pack(i)) body(i, column(i));
  }
};

}  // namespace h100_diffusers_kernels
