// A warp group on its way along the keys multiplies S = Q K^T of its 64 queries and a tile of keys, and O +=
// P V with the probabilities that the softmax has made of S. Both are issued, and have come to their end when
// wait_for_products lets through. Each product is kProductDepth deep: warp_group.cuh has one written out.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// Issues S = Q K^T. query_box_bytes lead from one box of queries to the next.
template <class Tile>
__device__ __forceinline__ void issue_scores(Operand query, int query_box_bytes, Operand keys,
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

// Issues O += P V, or O = P V where the products are not to accumulate.
template <class Tile, class Softmax>
__device__ __forceinline__ void issue_outputs(const Probabilities& probabilities, Operand values,
                                              bool accumulate, Accumulators<Tile>& accumulators) {
  begin_products();
#pragma unroll
  for (int step = 0; step < kTileKeys / kProductDepth; ++step)
    Product<typename Softmax::Probability, Tile::kColumns>::of_registers(
        accumulators, probabilities[step], values_plus<Tile>(values, Tile::box_bytes(step * kProductDepth)),
        accumulate || step > 0);
  commit_products();
}

}  // namespace h100_diffusers_kernels
