// The softmax of attention, taken online (Milakov and Gimelshein, 2018): weights relative to a pivot instead
// of the maximum, which is not known before the last key. Any pivot will do as long as no weight overflows;
// a new one costs a multiplication of all sums so far.
//
//   weight(key) = 2^((score(key) - pivot) in powers of 2),  out = sum(weight value) / sum(weight)
//
// Careful: the pivot moves where a score exceeds it by more than kHeadroom. Optimistic: it is the maximum of
// the first tile of keys, and stays. Of the next 2^14 keys none is likely to exceed it by a factor that even
// float16 could not hold; if one does, sums become infinite or NaN, which is seen at the end, and the tile of
// queries is computed anew, carefully.
#pragma once

#include <cmath>

#include "attention_tiles.cuh"
#include "fast_math.cuh"
#include "pack.cuh"

namespace h100_diffusers_kernels {

constexpr float kLog2E = 1.44269504f;

// Propagates NaN.
__device__ __forceinline__ float maximum_of(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Of the four lanes that share a row.
__device__ __forceinline__ float row_maximum(float x) {
  x = maximum_of(x, __shfl_xor_sync(~0u, x, 1));
  return maximum_of(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The two rows of a thread. Scores come as products of query and key, which `scale` turns into powers of 2,
// or, with a bias, as natural logarithms that are complete.
template <class Tile, bool kHasBias>
class RowSoftmax {
 public:
  using Scores = float[Tile::kScores];
  using Weights = uint32_t[kTileKeys / kProductDepth][4];
  using Sums = float[Tile::kSums];

  __device__ __forceinline__ explicit RowSoftmax(float scale) : scale_(scale * kLog2E) {}

  // Has pivots that the scores do not exceed by more than kHeadroom; `sums` are made relative to them.
  __device__ __forceinline__ void raise_pivots(const Scores& scores, Sums& sums) {
    float maxima[2][2] = {{scores[0], scores[1]}, {scores[2], scores[3]}};
#pragma unroll
    for (int i = 4; i < Tile::kScores; ++i)
      maxima[i / 2 % 2][i % 2] = maximum_of(maxima[i / 2 % 2][i % 2], scores[i]);
    float maximum[2];
    bool is_within = true;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      maximum[row] = maximum_of(maxima[row][0], maxima[row][1]) * (kHasBias ? 1.0f : scale_);
      is_within = is_within && maximum[row] - pivot_[row] <= kHeadroom;  // not of NaN
    }
    if (__all_sync(~0u, is_within)) return;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float pivot = maximum_of(row_maximum(maximum[row]), pivot_[row]);
      if (pivot == INFINITY) pivot = NAN;  // as infinity less infinity has it
      factor[row] = fast_exp2((pivot_[row] - pivot) * (kHasBias ? kLog2E : 1.0f));
      pivot_[row] = pivot;
      weight_sum_[row] *= factor[row];
    }
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) sums[i] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void take_weights(Scores& scores, Weights& weights) {
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) {
      const int row = i / 2 % 2;
      scores[i] = fast_exp2(kHasBias ? (scores[i] - pivot_[row]) * kLog2E
                                     : __fmaf_rn(scores[i], scale_, -pivot_[row]));
      part[row][i % 2] += scores[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) weight_sum_[row] += part[row][0] + part[row][1];
#pragma unroll
    for (int i = 0; i < Tile::kScores; i += 2)
      weights[i / 8][i / 2 % 4] = pack_pair<typename Tile::T>(scores[i], scores[i + 1]);
  }

  // Divides the sums by those of the weights. A row without keys is 0. Returns whether all of this thread's
  // are finite.
  __device__ __forceinline__ bool normalize(Sums& sums) {
    float not_finite = 0;
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float sum = row_sum(weight_sum_[row]);
      not_finite = __fmaf_rn(sum, 0.0f, not_finite);
      inverse[row] = sum == 0 ? 0.0f : 1 / sum;
    }
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      not_finite = __fmaf_rn(sums[i], 0.0f, not_finite);
      sums[i] *= inverse[i / 2 % 2];
    }
    return not_finite == 0;
  }

 private:
  // So much above the pivot a weight is 2^8 (or e^8), well within float16.
  static constexpr float kHeadroom = 8;
  // Below all that can be told from -infinity, which has the weight 0 then.
  static constexpr float kLowestPivot = -3.4e38f;

  float scale_;
  float pivot_[2] = {kLowestPivot, kLowestPivot};
  float weight_sum_[2] = {0, 0};
};

}  // namespace h100_diffusers_kernels
