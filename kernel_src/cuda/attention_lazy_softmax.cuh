// The softmax of attention without maxima: probabilities in float16, which has eight times the precision of
// bfloat16, so that the largest of a row need not be a power of 2, and m need not follow the maximum.
//
// m comes from a row's first tile of keys, by which the largest probability is 2^reference_exponent. Scores
// that come later may exceed those of the first tile by 16 - reference_exponent powers of 2, 9 to 12 nats of
// thousands of keys: of most rows none does. Whether one does is told by the sums of the probabilities, which
// are taken in float32 anyway, and which no score below m + 127 overflows: where a thread's sum of a tile is
// beyond float16, its warp raises m in powers of 2, and multiplies the tile's probabilities, l and O by what
// that leaves of them. That happens once or twice on the way of a peaked row along thousands of keys.
//
// Beyond 2^120 the row becomes NaN. Such tiles of queries are computed again by OnlineSoftmax.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_softmax.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

// Of the values, which are in float16 too; see attention_values.cuh.
constexpr float kHalfValueScale = 16;

// Float16 has nothing between 0 and 2^-24, so that a probability is off by up to 2^-25. With `keys` of them,
// all off in the same direction, a row whose probabilities have at least 2^exponent as their sum is off by
// 2^-12.5, a tenth of bfloat16's rounding of the output.
inline int lazy_reference_exponent(int64_t keys) {
  constexpr double kHalfBits = 25, kRowBits = 12.5;
  constexpr int kLargest = 8;  // which leaves as much to rise
  return std::min(static_cast<int>(std::ceil(std::log2(static_cast<double>(keys)) + kRowBits - kHalfBits)),
                  kLargest);
}

template <class Tile>
class LazySoftmax : public RowSoftmax<Tile, KeyBias::kNone> {
  using Base = RowSoftmax<Tile, KeyBias::kNone>;
  static_assert(!Tile::kHasOnes);

 public:
  using Probability = __half;
  // With 128 columns the tensor cores are the limit: they begin with half of a tile's keys while the other
  // half is at its exponentials. With 64 the exponentials are, and one part is 3% faster.
  static constexpr int kParts = Tile::kHeadDim == 128 ? 2 : 1;
  static constexpr float kValueScale = kHalfValueScale;

  __device__ __forceinline__ explicit LazySoftmax(const AttentionKernelParams& params)
      : Base(params.score_scale), exponent_(params.reference_exponent) {}

  // Makes probabilities of a part of the next tile's scores. The products of the part before may be on their
  // way to O.
  template <int kPart>
  __device__ __forceinline__ void take_part(Scores<Tile>& scores, bool is_first,
                                            Accumulators<Tile>& accumulators, Probabilities& probabilities) {
    constexpr int kSize = Tile::kScores / kParts, kBegin = kPart * kSize, kEnd = kBegin + kSize;
    if (kPart == 0 && is_first) this->set_reference(scores, static_cast<float>(exponent_));
    typename Base::PartialSums part;
    float sum[2];
    this->template exponentiate<kBegin, kEnd>(scores, part);
    // Rounding stands before the branch, so that it goes on between the exponentials.
    this->template round<Probability, kBegin, kEnd>(scores, probabilities);
    Base::add_up(part, sum);
    // This is not within the branch because all warps of the group have to wait at the same instruction.
    if constexpr (kPart > 0) wait_for_products();
    const bool is_within = sum[0] <= kLargestHalf && sum[1] <= kLargestHalf;  // not of NaN
    if (!__all_sync(~0u, is_within)) {
      raise_reference<kBegin, kEnd>(scores, sum, accumulators);
      this->template round<Probability, kBegin, kEnd>(scores, probabilities);
    }
    this->add_to_row_sums(sum);
  }

 private:
  static constexpr float kLargestHalf = 65504;

  // The largest of a row's four sums becomes 2^exponent_ to 2^(exponent_ + 1).
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void raise_reference(Scores<Tile>& probabilities, float (&sum)[2],
                                                  Accumulators<Tile>& accumulators) {
    constexpr float kTooLarge = 0x1p120f;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float largest = row_maximum(sum[row]);
      const int rise = max(exponent_of(largest) - exponent_, 0);
      factor[row] = largest < kTooLarge ? power_of_2(-rise) : NAN;
      this->reference_[row] += static_cast<float>(rise);
      this->row_sum_[row] *= factor[row];
      sum[row] *= factor[row];
    }
    scale_rows<kBegin, kEnd>(probabilities, factor);
    scale_rows<0, Tile::kAccumulators>(accumulators, factor);
  }

  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  // x is a positive normal number, 0 or NaN.
  __device__ __forceinline__ static int exponent_of(float x) {
    return (__float_as_int(x) >> kMantissaBits) - kExponentBias;
  }
  __device__ __forceinline__ static float power_of_2(int exponent) {
    return __int_as_float((exponent + kExponentBias) << kMantissaBits);
  }

  int exponent_;
};

}  // namespace h100_diffusers_kernels
