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

// Calls body with the RowConfig for rows of `packs` packs. Returns false if the row is too long for
// kMaxThreads threads.
//
// Two packs a thread were the fastest of one, two, four and eight at 256 packs: enough loads are under way,
// and rows are short-lived enough to fill the tail (NOTES, "Row kernels: how many threads share a row").
// Between powers of two stand the widths of SD3 (1536), FLUX.1 (3072), Wan (1536, 5120) and FLUX.2 (6144) in
// 16 bits.
template <int kMaxThreads = 512, typename Body>
bool dispatch_row_config(int64_t packs, const Body& body) {
  const auto try_config = [&](auto config) {
    if constexpr (config.kThreadsPerRow <= kMaxThreads) {
      if (packs <= config.kThreadsPerRow * config.kPacksPerThread) {
        body(config);
        return true;
      }
    }
    return false;
  };
  return try_config(RowConfig<4, 2>{}) || try_config(RowConfig<8, 2>{}) || try_config(RowConfig<16, 2>{}) ||
         try_config(RowConfig<32, 2>{}) || try_config(RowConfig<64, 2>{}) || try_config(RowConfig<96, 2>{}) ||
         try_config(RowConfig<128, 2>{}) || try_config(RowConfig<192, 2>{}) ||
         try_config(RowConfig<256, 2>{}) || try_config(RowConfig<320, 2>{}) ||
         try_config(RowConfig<384, 2>{}) || try_config(RowConfig<512, 2>{});
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
