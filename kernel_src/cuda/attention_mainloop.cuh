// A warp group's way along the keys: for each tile of them the scores of its 64 queries, their weights, and
// the sums of the values so weighted.
#pragma once

#include "attention_mask.cuh"
#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// Keys: where the tiles come from, one by one. next_keys may be read after wait_keys; with advance that tile
// becomes the current one, with bias and, after wait_values, values. release(has_earlier) says that the
// current keys have been read, and the values before, where there are any; release_values that the current
// have. kIsFast: see attention_softmax.cuh; the values are float16 then.
template <class Tile, bool kHasBias, bool kIsFast>
struct Mainloop {
  using Softmax = RowSoftmax<Tile, kHasBias, kIsFast>;
  using Sums = typename Softmax::Sums;

  const WarpRole& role;
  float scale;
  bool has_padding;  // keys beyond a sample's length are there and must not count

  // Fills `sums`. query: of this group; release_query is called when it has been read. There is at least one
  // tile of keys, even if no key of it counts.
  template <class Keys, class ReleaseQuery>
  __device__ __forceinline__ void run(Operand query, int query_box_bytes, Keys& keys, int key_count,
                                      const ReleaseQuery& release_query, Softmax& softmax, Sums& sums) const {
    typename Softmax::Scores scores;
    typename Softmax::Weights weights;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) sums[i] = 0;
    int key = 0;
#pragma unroll 1
    do {
      const int count = key_count - key;
      keys.wait_keys();
      begin_products();
      multiply_query(query, query_box_bytes, keys.next_keys(), scores);
      commit_products();
      keys.advance();
      wait_for_products();
      if constexpr (kHasBias) add_bias(scores, scale, keys.bias(), role.lane);
      keys.release(key > 0);
      if (count <= kTileKeys) {
        release_query();
        if (count < kTileKeys) mask_scores(scores, count, role.lane);
        if (count < kTileKeys && has_padding) {
          keys.wait_values();
          clear_rows<Tile>(role, keys.values().address(), count);
        }
      }
      if (key == 0)
        softmax.set_pivots(scores);
      else if (!kIsFast)
        softmax.raise_pivots(scores, sums);
      softmax.take_weights(scores, weights);
      keys.wait_values();
      begin_products();
      multiply_values(weights, keys.values(), sums);
      commit_products();
      key += kTileKeys;
    } while (key < key_count);
    wait_for_products();
    keys.release_values();
  }

 private:
  __device__ __forceinline__ static void multiply_query(Operand query, int query_box_bytes, Operand keys,
                                                        typename Softmax::Scores& scores) {
    constexpr int kSteps = kBoxColumns / kProductDepth;
#pragma unroll
    for (int step = 0; step < Tile::kHeadDim / kProductDepth; ++step) {
      const int box = step / kSteps, column_bytes = step % kSteps * kProductDepth * 2;
      Product<typename Tile::T, kTileKeys>::of_shared(
          scores, query.plus(box * query_box_bytes + column_bytes),
          keys.plus(box * Tile::box_bytes(kTileKeys) + column_bytes), step > 0);
    }
  }

  __device__ __forceinline__ static void multiply_values(const typename Softmax::Weights& weights,
                                                         Operand values, Sums& sums) {
#pragma unroll
    for (int step = 0; step < kTileKeys / kProductDepth; ++step)
      Product<typename Softmax::Weight, Tile::kColumns>::of_registers(
          sums, weights[step], values_plus<Tile>(values, Tile::box_bytes(step * kProductDepth)));
  }
};

}  // namespace h100_diffusers_kernels
