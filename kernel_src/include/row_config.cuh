// How many threads and blocks share a row that is held in registers: by the row's length, for every operation
// that reduces over rows.
#pragma once

#include <cstdint>

#include "reduce.cuh"

namespace h100_diffusers_kernels {

template <int kThreads, int kPacks, int kBlocks = 1>
struct RowConfig {
  static constexpr int kThreadsPerRow = kThreads;  // of one block
  static constexpr int kPacksPerThread = kPacks;
  static constexpr int kClusterBlocks = kBlocks;
};

// Calls body with the configuration for rows of `packs` packs; false if no configuration holds such a row.
//
// Two packs a thread was the fastest of one, two, four and eight at 256 packs: enough loads under way, and
// rows short-lived enough to fill the tail. Between powers of two stand the widths of SD3 (1536), FLUX (3072)
// and Wan (1536, 5120) in 16 bits. A row that four packs a thread of 512 cannot hold is shared by a cluster.
template <typename Body>
bool dispatch_row_config(int64_t packs, const Body& body) {
  const auto try_config = [&](auto config) {
    if (packs > config.kThreadsPerRow * config.kPacksPerThread * config.kClusterBlocks) return false;
    body(config);
    return true;
  };
  return try_config(RowConfig<4, 2>{}) || try_config(RowConfig<8, 2>{}) || try_config(RowConfig<16, 2>{}) ||
         try_config(RowConfig<32, 2>{}) || try_config(RowConfig<64, 2>{}) || try_config(RowConfig<96, 2>{}) ||
         try_config(RowConfig<128, 2>{}) || try_config(RowConfig<192, 2>{}) ||
         try_config(RowConfig<256, 2>{}) || try_config(RowConfig<320, 2>{}) ||
         try_config(RowConfig<512, 2>{}) || try_config(RowConfig<512, 4>{}) ||
         try_config(RowConfig<256, 4, 4>{}) || try_config(RowConfig<256, 4, 8>{}) ||
         try_config(RowConfig<512, 4, 8>{});
}

// For rows that no configuration holds, or that 16-byte accesses cannot reach: threads of a block that goes
// through a row again and again, and how long a row is that a warp takes instead.
constexpr int kLongRowThreads = 512;
constexpr int kShortRow = 1024;

// Place of a thread among those that share a row, and of its packs in the row.
template <int kThreadsPerRow, int kClusterBlocks>
struct RowPlace {
  static constexpr int kRowsPerBlock = kBlockThreads<kThreadsPerRow> / kThreadsPerRow;
  static_assert(kRowsPerBlock == 1 || kClusterBlocks == 1);
  uint32_t row;
  int thread;  // of kThreadsPerRow * kClusterBlocks

  __device__ __forceinline__ RowPlace() {
    if constexpr (kRowsPerBlock > 1) {
      row = blockIdx.x * kRowsPerBlock + threadIdx.x / kThreadsPerRow;
      thread = threadIdx.x % kThreadsPerRow;
    } else {
      row = blockIdx.x / kClusterBlocks;
      thread = cluster_rank<kClusterBlocks>() * kThreadsPerRow + threadIdx.x;
    }
  }

  // Number of the row's pack that is the thread's i-th: neighbouring threads take neighbouring packs.
  __device__ __forceinline__ int pack(int i) const { return i * (kThreadsPerRow * kClusterBlocks) + thread; }

  static int64_t blocks(int64_t rows) { return (rows + kRowsPerBlock - 1) / kRowsPerBlock * kClusterBlocks; }
};

}  // namespace h100_diffusers_kernels
