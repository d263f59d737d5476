// Softmax of attention, one key tile at a time (online softmax: Milakov and Gimelshein, 2018;
// FlashAttention). With S = scale Q K^T as logarithms to base 2,
//
//   P = 2^(S - m),  l += sum of a row of P,  O += P V,  and at the end out = O / l
//
// where m is the reference of a row. When it rises, l and O are rescaled. P is rounded to 16 bits for the
// tensor cores. There are two ways to choose m:
//
// OnlineSoftmax uses the maximum of each row, so that its largest probability is a power of 2. Otherwise the
// rounding of that probability would be most of the error of a row that depends on few keys. The maximum of a
// tile takes a third of the time of its exponentials, which depend on it (notes/attention.md, "Instruction
// throughput beside wgmma").
//
// LazySoftmax (attention_lazy_softmax.cuh) rescales only if float16 would overflow.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention_tiles.cuh"
#include "fast_math.cuh"
#include "pack.cuh"

namespace h100_diffusers_kernels {

// The maximum of NaN and anything is NaN.
__device__ __forceinline__ float maximum_of(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float minimum_of(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Four lanes share a row.
__device__ __forceinline__ float row_maximum(float x) {
  x = maximum_of(x, __shfl_xor_sync(~0u, x, 1));
  return maximum_of(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_total(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// A thread's parts of S, of P (pairs of 16-bit values), of O (with its column of row sums if there is one)
// and of the output.
template <class Tile>
using Scores = float[Tile::kScores];
using Probabilities = uint32_t[kTileKeys / kWgmmaDepth][4];
template <class Tile>
using Accumulators = float[Tile::kAccumulators];
template <class Tile>
using Outputs = float[Tile::kOutputs];

// Multiplies the values of a thread's two rows, which alternate in pairs.
template <int kSize>
__device__ __forceinline__ void scale_rows(float (&values)[kSize], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] *= factor[i / 2 % 2];
}

// Common part of both. A thread has two rows. Scores with a bias are already logarithms to base 2; without a
// bias they are products of query and key, which the scale converts.
template <class Tile, KeyBias kBias>
class RowSoftmax {
 public:
  // Divides O by the sums of the probabilities times the scale of the values. A row without keys is 0.
  __device__ __forceinline__ void normalize(const Accumulators<Tile>& accumulators, float value_scale,
                                            Outputs<Tile>& outputs) const {
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum;
      if constexpr (Tile::kHasOnes)
        sum = accumulators[Tile::kOutputs + 2 * row];
      else
        sum = row_total(row_sum_[row]);
      inverse[row] = sum == 0 ? 0.0f : fast_reciprocal(sum * value_scale);
    }
#pragma unroll
    for (int i = 0; i < Tile::kOutputs; ++i) outputs[i] = accumulators[i] * inverse[i / 2 % 2];
  }

  // Whether each row has a key.
  __device__ __forceinline__ void find_rows_with_keys(bool (&has_keys)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) has_keys[row] = row_total(row_sum_[row]) != 0;
  }

  // Before the first tile, if that masks keys.
  __device__ __forceinline__ void expect_masked_rows() {}

  // Computes the natural logarithm of the sum of the exponentials of each row. A row without keys has l = 0
  // and a finite m, so it is -infinity.
  __device__ __forceinline__ void log_sum_exp(float (&result)[2]) const {
    static_assert(!Tile::kHasOnes);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      result[row] = (reference_[row] + __log2f(row_total(row_sum_[row]))) * kLn2;
  }

 protected:
  // A row maximum that makes the probability of -infinity 0.
  static constexpr float kLowestScore = -3.4e38f;

  // scale: converts products of query and key to logarithms to base 2
  __device__ __forceinline__ explicit RowSoftmax(float scale) : scale_(scale) {}

  // Computes the maxima of this thread's scores, as logarithms to base 2.
  __device__ __forceinline__ void find_maxima(const Scores<Tile>& scores, float (&maximum)[2]) const {
    float part[2][2] = {{scores[0], scores[1]}, {scores[2], scores[3]}};
#pragma unroll
    for (int i = 4; i < Tile::kScores; i += 4)
#pragma unroll
      for (int k = 0; k < 4; ++k) part[k / 2][k % 2] = maximum_of(part[k / 2][k % 2], scores[i + k]);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      maximum[row] = maximum_of(part[row][0], part[row][1]) * (kBias == KeyBias::kAdded ? 1.0f : scale_);
  }

  // Returns the m with which the largest probability of a row is 2^exponent.
  __device__ __forceinline__ static float reference_of(float maximum, float exponent) {
    const float reference = maximum_of(maximum, kLowestScore) - exponent;
    return reference == INFINITY ? NAN : reference;  // Infinity minus infinity is also NaN.
  }

  // Sets m from the scores of the first key tile.
  __device__ __forceinline__ void set_reference(const Scores<Tile>& scores, float exponent) {
    float maximum[2];
    find_maxima(scores, maximum);
#pragma unroll
    for (int row = 0; row < 2; ++row) reference_[row] = reference_of(row_maximum(maximum[row]), exponent);
  }

  // Converts scores to probabilities. The sum of a row is two chains of additions.
  using PartialSums = float[2][2];
  __device__ __forceinline__ void exponentiate(Scores<Tile>& scores, PartialSums& part) const {
#pragma unroll
    for (int i = 0; i < Tile::kScores; ++i) {
      const int row = i / 2 % 2;
      scores[i] = fast_exp2(kBias == KeyBias::kAdded ? scores[i] - reference_[row]
                                                     : __fmaf_rn(scores[i], scale_, -reference_[row]));
      if constexpr (!Tile::kHasOnes) part[row][i % 2] = i < 4 ? scores[i] : part[row][i % 2] + scores[i];
    }
  }
  __device__ __forceinline__ static void reduce_partial_sums(const PartialSums& part, float (&sum)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] = Tile::kHasOnes ? 0.0f : part[row][0] + part[row][1];
  }

  // Raises m where a score exceeds m + exponent, to its row's maximum - exponent, and rescales l. If m rises
  // in a row of the warp, calls rescale(factor) with the factors of O.
  template <class Rescale>
  __device__ __forceinline__ void follow_maximum(const Scores<Tile>& scores, float exponent,
                                                 const Rescale& rescale) {
    float maximum[2];
    find_maxima(scores, maximum);
    const bool is_within =  // false for NaN
        maximum[0] <= reference_[0] + exponent && maximum[1] <= reference_[1] + exponent;
    if (__all_sync(~0u, is_within)) return;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float reference = maximum_of(reference_of(row_maximum(maximum[row]), exponent), reference_[row]);
      factor[row] = fast_exp2(reference_[row] - reference);
      reference_[row] = reference;
      row_sum_[row] *= factor[row];
    }
    rescale(factor);
  }
  // Returns a function that multiplies O by factors of its rows.
  __device__ __forceinline__ static auto rescale_of(Accumulators<Tile>& accumulators) {
    return [&accumulators](const float (&factor)[2]) { scale_rows(accumulators, factor); };
  }

  template <typename Probability>
  __device__ __forceinline__ static void round(const Scores<Tile>& scores, Probabilities& probabilities) {
#pragma unroll
    for (int i = 0; i < Tile::kScores; i += 2)
      probabilities[i / 8][i / 2 % 4] = pack_pair<Probability>(scores[i], scores[i + 1]);
  }

  __device__ __forceinline__ void add_to_row_sums(const float (&sum)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) row_sum_[row] += sum[row];
  }

  float scale_;
  float reference_[2] = {kLowestScore, kLowestScore};  // m
  float row_sum_[2] = {0, 0};  // the thread's part of l, if there is no column of ones
};

template <class Tile, KeyBias kBias>
class OnlineSoftmax : public RowSoftmax<Tile, kBias> {
  using Base = RowSoftmax<Tile, kBias>;

 public:
  using Probability = typename Tile::T;
  static constexpr float kValueScale = 1;

  __device__ __forceinline__ explicit OnlineSoftmax(const AttentionKernelParams& params)
      : Base(params.score_scale) {}

  // Converts the scores of the next key tile to probabilities, and rescales O if m rises.
  template <class... Unused>
  __device__ __forceinline__ void process_tile(Scores<Tile>& scores, bool is_first,
                                               Accumulators<Tile>& accumulators, Probabilities& probabilities,
                                               const Unused&...) {
    if (is_first)
      this->set_reference(scores, kExponent);
    else
      this->follow_maximum(scores, kExponent, Base::rescale_of(accumulators));
    typename Base::PartialSums part;
    float sum[2];
    this->exponentiate(scores, part);
    Base::reduce_partial_sums(part, sum);
    this->add_to_row_sums(sum);
    this->template round<Probability>(scores, probabilities);
  }

 private:
  // The largest probability is 2^kExponent, the largest power of 2 of float16.
  static constexpr float kExponent = std::is_same_v<Probability, __half> ? 15 : 0;
};

}  // namespace h100_diffusers_kernels
