// The matrix products of a warp group for its 64 queries and one key tile: S = Q K^T, and O += P V with the
// probabilities P of the softmax of S. Both are asynchronous until wgmma_wait_group returns.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// Issues S = Q K^T. query_box_bytes: the distance between boxes of queries.
template <class Tile>
__device__ __forceinline__ void issue_scores(MatrixDescriptor query, int query_box_bytes,
                                             MatrixDescriptor keys, Scores<Tile>& scores) {
  constexpr int kSteps = kBoxColumns / kWgmmaDepth;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / kWgmmaDepth; ++step) {
    const int box = step / kSteps, column_bytes = step % kSteps * kWgmmaDepth * 2;
    Wgmma<typename Tile::T, kTileKeys>::a_from_shared(
        scores, query.plus(box * query_box_bytes + column_bytes),
        keys.plus(box * Tile::box_bytes(kTileKeys) + column_bytes), step > 0);
  }
  wgmma_commit_group();
}

// Issues O += P V, or O = P V without `accumulate`.
template <class Tile, class Softmax>
__device__ __forceinline__ void issue_outputs(const Probabilities& probabilities, MatrixDescriptor values,
                                              bool accumulate, Accumulators<Tile>& accumulators) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileKeys / kWgmmaDepth; ++step)
    Wgmma<typename Softmax::Probability, Tile::kColumns>::a_from_registers(
        accumulators, probabilities[step], values_plus<Tile>(values, Tile::box_bytes(step * kWgmmaDepth)),
        accumulate || step > 0);
  wgmma_commit_group();
}

}  // namespace h100_diffusers_kernels
