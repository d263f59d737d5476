// The matrix products on a warp group's way along the keys. For each tile of them: the scores of its 64
// queries and, when the softmax has made weights of these, the sums of the values so weighted. Both are
// ordered, and are there when wait_for_products lets through.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// query_box_bytes: from one box of queries to the next.
template <class Tile>
__device__ __forceinline__ void order_scores(Operand query, int query_box_bytes, Operand keys,
                                             Scores<Tile>& scores) {
  constexpr int kSteps = kBoxColumns / kProductDepth;
  begin_products();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / kProductDepth; ++step) {
    const int box = step / kSteps, column_bytes = step % kSteps * kProductDepth * 2;
    Product<typename Tile::T, kTileKeys>::of_shared(
        scores, query.plus(box * query_box_bytes + column_bytes),
        keys.plus(box * Tile::box_bytes(kTileKeys) + column_bytes), step > 0);
  }
  commit_products();
}

// Weight: the type of weights and values. accumulate: or the sums begin with this tile.
template <class Tile, typename Weight>
__device__ __forceinline__ void order_sums(const Weights& weights, Operand values, bool accumulate,
                                           Sums<Tile>& sums) {
  begin_products();
#pragma unroll
  for (int step = 0; step < kTileKeys / kProductDepth; ++step)
    Product<Weight, Tile::kColumns>::of_registers(
        sums, weights[step], values_plus<Tile>(values, Tile::box_bytes(step * kProductDepth)),
        accumulate || step > 0);
  commit_products();
}

}  // namespace h100_diffusers_kernels
