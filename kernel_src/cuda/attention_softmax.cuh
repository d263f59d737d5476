// The softmax of attention, taken online (Milakov and Gimelshein, 2018): weights are relative to a pivot, and
// where the pivot rises all sums so far are multiplied anew.
//
//   weight(key) = 2^((score(key) - pivot) in powers of 2),  out = sum(weight value) / sum(weight)
//
// Weights are rounded to 16 bits for the tensor cores.
//
// Careful: the largest weight so far is a power of 2. The rounding of any other would be most of the error of
// a row that depends on few keys. To find the maximum of a tile takes a third of the time of its
// exponentials, which have to wait for it.
//
// Fast: weights in float16, which has eight times the precision of bfloat16, so that any pivot within its
// range will do: the one that a quarter of the first tile of keys gives. A weight out of range is infinity,
// and the row infinite or NaN, which is seen at the end; such tiles are computed again with care.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention_tiles.cuh"
#include "fast_math.cuh"
#include "pack.cuh"

namespace h100_diffusers_kernels {

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

// What a thread has of a tile: scores of queries and keys, their weights in pairs of 16 bits, the sums of the
// values so weighted, and the output.
template <class Tile>
using Scores = float[Tile::kScores];
using Weights = uint32_t[kTileKeys / kProductDepth][4];
template <class Tile>
using Sums = float[Tile::kSums];
template <class Tile>
using Outputs = float[Tile::kOutputs];

// The two rows of a thread. Scores are powers of 2 with a bias, and without one products of query and key
// that the scale makes such.
template <class Tile, bool kHasBias, bool kIsFast>
class RowSoftmax {
 public:
  using Weight = std::conditional_t<kIsFast, __half, typename Tile::T>;  // as it is rounded

  // scale: of the products, to powers of 2.
  __device__ __forceinline__ explicit RowSoftmax(float scale) : scale_(scale) {}

  // Of the next tile of keys. `sums`, of those before, are made relative to the pivots if these rise.
  __device__ __forceinline__ void take_weights(Scores<Tile>& scores, bool is_first, Sums<Tile>& sums,
                                               Weights& weights) {
    if (is_first)
      set_pivots(scores);
    else if (!kIsFast)
      raise_pivots(scores, sums);
    float part[2][2];
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) {
      const int row = i / 2 % 2;
      scores[i] = fast_exp2(kHasBias ? scores[i] - pivot_[row] : __fmaf_rn(scores[i], scale_, -pivot_[row]));
      if constexpr (!Tile::kHasOnes) part[row][i % 2] = i < 4 ? scores[i] : part[row][i % 2] + scores[i];
    }
    if constexpr (!Tile::kHasOnes) {
#pragma unroll
      for (int row = 0; row < 2; ++row) weight_sum_[row] += part[row][0] + part[row][1];
    }
#pragma unroll
    for (int i = 0; i < Tile::kScores; i += 2)
      weights[i / 8][i / 2 % 4] = pack_pair<Weight>(scores[i], scores[i + 1]);
  }

  // Divides the sums by those of the weights, times the scale of the values. A row without keys is 0.
  __device__ __forceinline__ void normalize(const Sums<Tile>& sums, float value_scale,
                                            Outputs<Tile>& outputs) const {
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum;
      if constexpr (Tile::kHasOnes)
        sum = sums[Tile::kOutputs + 2 * row];
      else
        sum = row_sum(weight_sum_[row]);
      inverse[row] = sum == 0 ? 0.0f : fast_reciprocal(sum * value_scale);
    }
#pragma unroll
    for (int i = 0; i < Tile::kOutputs; ++i) outputs[i] = sums[i] * inverse[i / 2 % 2];
  }

 private:
  // By the scores of the first tile.
  __device__ __forceinline__ void set_pivots(const Scores<Tile>& scores) {
    float maximum[2];
    find_maxima<kIsFast ? 4 : 1>(scores, maximum);
#pragma unroll
    for (int row = 0; row < 2; ++row) pivot_[row] = pivot_below(row_maximum(maximum[row]));
  }

  // Has weights that are not larger; `sums` are made relative to the pivots.
  __device__ __forceinline__ void raise_pivots(const Scores<Tile>& scores, Sums<Tile>& sums) {
    float maximum[2];
    find_maxima<1>(scores, maximum);
    const bool is_within =  // not of NaN
        maximum[0] <= pivot_[0] + kLargest && maximum[1] <= pivot_[1] + kLargest;
    if (__all_sync(~0u, is_within)) return;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float pivot = maximum_of(pivot_below(row_maximum(maximum[row])), pivot_[row]);
      factor[row] = fast_exp2(pivot_[row] - pivot);
      pivot_[row] = pivot;
      if constexpr (!Tile::kHasOnes) weight_sum_[row] *= factor[row];
    }
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) sums[i] *= factor[i / 2 % 2];
  }

  // This thread's part of the rows' maxima, of every kEvery-th 8 keys, in the units of the pivots.
  template <int kEvery>
  __device__ __forceinline__ void find_maxima(const Scores<Tile>& scores, float (&maximum)[2]) const {
    float part[2][2] = {{scores[0], scores[1]}, {scores[2], scores[3]}};
#pragma unroll
    for (int i = 4 * kEvery; i < Tile::kScores; i += 4 * kEvery)
#pragma unroll
      for (int k = 0; k < 4; ++k) part[k / 2][k % 2] = maximum_of(part[k / 2][k % 2], scores[i + k]);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      maximum[row] = maximum_of(part[row][0], part[row][1]) * (kHasBias ? 1.0f : scale_);
  }

  // By which the maximum has the largest weight.
  __device__ __forceinline__ static float pivot_below(float maximum) {
    // Below all that can be told from -infinity, which has the weight 0 then.
    constexpr float kLowest = -3.4e38f;
    const float pivot = maximum_of(maximum, kLowest) - kLargest;
    return pivot == INFINITY ? NAN : pivot;  // as infinity less infinity has it
  }

  // The exponent of the largest weight. Fast: it leaves 13 powers of 2, a factor of 8192, for larger weights
  // that follow, and 28 for smaller ones before they are lost: all keys of a million, each as large as can be
  // lost, are less than bfloat16's rounding of the sum. Careful: as large as the type has it.
  static constexpr float kLargest = kIsFast ? 3 : std::is_same_v<Weight, __half> ? 15 : 0;

  float scale_;
  float pivot_[2];
  float weight_sum_[2] = {0, 0};  // without a column of ones
};

}  // namespace h100_diffusers_kernels
