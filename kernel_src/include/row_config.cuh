// This table says how many threads share a row, by its length, for every operation that reduces over rows.
// Lengths are in packs of 16 bytes.
#pragma once

#include <cstdint>

#include "reduce.cuh"

namespace h100_diffusers_kernels {

// A short row is held in registers, by kThreads threads of one block with kPacks packs each.
template <int kThreads, int kPacks>
struct RowConfig {
  static constexpr int kThreadsPerRow = kThreads;
  static constexpr int kPacksPerThread = kPacks;
};

// Two packs a thread were the fastest of one, two, four and eight at 256 packs: enough loads are under way,
// and rows are short-lived enough to fill the tail (NOTES, "Row kernels: how many threads share a row").
constexpr int kRowPacks = 2;

// Rows have the first configuration, by its number of threads, that holds them.
template <int... kThreads>
struct RowConfigs {};

// Between powers of two stand the widths of SD3 (1536), FLUX.1 (3072), Wan (1536, 5120) and FLUX.2 (6144) in
// 16 bits.
using NormRowConfigs = RowConfigs<4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512>;
// Fewer measure the same where no thread of a row waits for another (NOTES, "Fewer launch configurations").
using ElementwiseRowConfigs = RowConfigs<8, 32, 128, 256, 384, 512>;

// Calls body with the RowConfig for rows of `packs` packs. Returns false if the row is too long for
// kMaxThreads threads.
template <int kMaxThreads = 512, int... kThreads, typename Body>
bool dispatch_row_config(RowConfigs<kThreads...>, int64_t packs, const Body& body) {
  const auto try_config = [&](auto config) {
    if constexpr (config.kThreadsPerRow <= kMaxThreads) {
      if (packs <= config.kThreadsPerRow * config.kPacksPerThread) {
        body(config);
        return true;
      }
    }
    return false;
  };
  return (try_config(RowConfig<kThreads, kRowPacks>{}) || ...);
}

// A row that nothing holds (long_row.cuh holds what registers cannot), or that 16-byte accesses cannot reach,
// is read again for each step: by a block of kAnyRowThreads threads, or by a warp where it has no more than
// kWarpRow elements.
constexpr int kAnyRowThreads = 512;
constexpr int kWarpRow = 1024;

// This is the place of a thread among those that share a row, and of its packs in the row.
template <int kThreadsPerRow, int kClusterBlocks = 1>
struct RowPlace {
  static constexpr int kRowsPerBlock = kBlockThreads<kThreadsPerRow> / kThreadsPerRow;
  static constexpr int kThreads = kThreadsPerRow * kClusterBlocks;
  static_assert(kRowsPerBlock == 1 || kClusterBlocks == 1);
  uint32_t row;
  int thread;  // of kThreads

  __device__ __forceinline__ RowPlace() {
    if constexpr (kRowsPerBlock > 1) {
      row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
      thread = threadIdx.x % kThreadsPerRow;
    } else {
      row = blockIdx.x / kClusterBlocks;
      thread = cluster_rank<kClusterBlocks>() * kThreadsPerRow + threadIdx.x;
    }
  }

  // Returns the number, in the row, of the thread's i-th pack. Neighbouring threads take neighbouring packs.
  __device__ __forceinline__ int pack(int i) const { return i * kThreads + thread; }

  static int64_t blocks(int64_t rows) { return (rows + kRowsPerBlock - 1) / kRowsPerBlock * kClusterBlocks; }
};

}  // namespace h100_diffusers_kernels
