// A warp group's way along the keys: for each tile of them the scores of its 64 queries, their weights, and
// the sums of the values so weighted.
#pragma once

#include <type_traits>

#include "attention_mask.cuh"
#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// Keys: where the tiles come from. It has wait_keys, keys, bias, release_keys, wait_values, values,
// value_address, release_values, in this order for each tile; values of one tile are released after the
// scores of the next.
template <class Tile, bool kHasBias>
struct Mainloop {
  using T = typename Tile::T;
  using Softmax = RowSoftmax<Tile, kHasBias>;

  const WarpRole& role;
  float scale;
  bool has_padding;  // keys beyond a sample's length are there and must not count

  // Fills `sums`. kIsFast: see attention_softmax.cuh; the values are float16 then. query: of this group;
  // release_query is called when it has been read.
  template <bool kIsFast, class Keys, class ReleaseQuery>
  __device__ __forceinline__ void run(Operand query, uint32_t query_box_bytes, Keys& keys, int key_count,
                                      const ReleaseQuery& release_query, Softmax& softmax,
                                      typename Softmax::Sums& sums) const {
    typename Softmax::Scores scores;
    typename Softmax::Weights weights;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) sums[i] = 0;
    if (key_count == 0) release_query();
#pragma unroll 1
    for (int key = 0; key < key_count; key += kTileKeys) {
      const int count = key_count - key;
      keys.wait_keys();
      begin_products();
      multiply_query(query, query_box_bytes, keys.keys(), scores);
      commit_products();
      wait_for_products();
      if (key > 0) keys.release_values();
      if (count <= kTileKeys) release_query();
      if constexpr (kHasBias) add_bias(scores, scale, keys.bias(), role.lane);
      keys.release_keys();
      if (count < kTileKeys) {
        mask_scores(scores, count, role.lane);
        if (has_padding) {
          keys.wait_values();
          clear_rows<Tile>(role, keys.value_address(), count);
        }
      }
      if constexpr (kIsFast) {
        if (key == 0) softmax.fix_pivots(scores);
      } else {
        softmax.raise_pivots(scores, sums);
      }
      using Weight = std::conditional_t<kIsFast, __half, T>;
      softmax.template take_weights<Weight>(scores, weights);
      keys.wait_values();
      begin_products();
      multiply_values<Weight>(weights, keys.values(), sums);
      commit_products();
    }
    wait_for_products();
    if (key_count > 0) keys.release_values();
  }

 private:
  __device__ __forceinline__ static void multiply_query(Operand query, uint32_t query_box_bytes, Operand keys,
                                                        typename Softmax::Scores& scores) {
    constexpr int kSteps = kBoxColumns / kProductDepth;
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / kProductDepth; ++step) {
      const uint32_t box = step / kSteps, column_bytes = step % kSteps * kProductDepth * 2;
      Product<T, kTileKeys>::of_shared(scores, query.plus(box * query_box_bytes + column_bytes),
                                       keys.plus(box * Tile::box_bytes(kTileKeys) + column_bytes), step > 0);
    }
  }

  template <typename Weight>
  __device__ __forceinline__ static void multiply_values(const typename Softmax::Weights& weights,
                                                         Operand values, typename Softmax::Sums& sums) {
#pragma unroll
    for (int step = 0; step < kTileKeys / kProductDepth; ++step)
      Product<Weight, Tile::kHeadDim>::of_registers(sums, weights[step],
                                                    values.plus(Tile::box_bytes(step * kProductDepth)));
  }
};

}  // namespace h100_diffusers_kernels
