// Sums over the threads that share a row. The order of additions is fixed: the same bits on every run.
#pragma once

namespace h100_diffusers_kernels {

constexpr int kWarpThreads = 32;

// Threads of a block for groups of kGroupThreads: a block holds several groups within a warp, or one larger.
template <int kGroupThreads>
constexpr int kBlockThreads = kGroupThreads > kWarpThreads ? kGroupThreads : 4 * kWarpThreads;

// Sum over aligned groups of kLanes lanes (a power of two up to 32), in every lane.
template <int kLanes, typename Sum>
__device__ __forceinline__ Sum warp_sum(Sum value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Sums kValues values over each group of kGroupThreads consecutive threads of a block, in every thread. A
// group is part of a warp, or the whole block. All threads of the block must call it.
// kRounds calls can be made without a barrier between them, each with its own `round`.
template <typename Sum, int kGroupThreads, int kValues = 1, int kRounds = 1>
struct GroupSum {
  __device__ __forceinline__ void operator()(Sum (&values)[kValues], int round = 0) const {
    if constexpr (kGroupThreads <= kWarpThreads) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = warp_sum<kGroupThreads>(values[i]);
    } else {
      constexpr int kWarps = kGroupThreads / kWarpThreads;
      __shared__ Sum partial[kRounds][kValues][kWarps];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        values[i] = warp_sum<kWarpThreads>(values[i]);
        if (threadIdx.x % kWarpThreads == 0) partial[round][i][threadIdx.x / kWarpThreads] = values[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        Sum sum = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) sum += partial[round][i][warp];
        values[i] = sum;
      }
    }
  }
};

}  // namespace h100_diffusers_kernels
