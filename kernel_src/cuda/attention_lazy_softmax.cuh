// This is the softmax of attention without maxima (NOTES, "Peaked scores: rescaling where float16 would
// overflow"). Probabilities are float16, which has eight times the precision of bfloat16, so that the largest
// of a row need not be a power of 2, and m need not follow the maximum.
//
// m comes from a row's first tile of keys, by which the largest probability is 2^reference_exponent. Scores
// that come later may exceed those of the first tile by 16 - reference_exponent powers of 2, 9 to 12 nats of
// thousands of keys: of most rows none does. Whether one does is told by the sums of the probabilities, which
// are taken in float32 anyway, and which no score below m + 127 overflows: where a thread's sum of a tile is
// beyond float16, its warp raises m of its 16 rows by powers of 2 to where l, with the tile, is
// 2^reference_exponent again, and multiplies the tile's probabilities, l and O by what that leaves of them.
// That happens one to four times on the way of 64 peaked rows along thousands of keys.
//
// Beyond 2^120 the row becomes NaN. Such tiles of queries are computed again by OnlineSoftmax.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_softmax.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

// The values, which are in float16, too, are multiplied by this (attention_values.cuh).
constexpr float kHalfValueScale = 16;

// Float16 has nothing between 0 and 2^-24, so that a probability is off by up to 2^-25. With `keys` of them,
// all off in the same direction, a row whose probabilities have at least 2^exponent as their sum is off by
// 2^-12.5, a tenth of bfloat16's rounding of the output.
inline int lazy_reference_exponent(int64_t keys) {
  constexpr double kHalfBits = 25, kRowBits = 12.5;
  constexpr int kLargest = 8;  // That leaves as much to rise.
  return std::min(static_cast<int>(std::ceil(std::log2(static_cast<double>(keys)) + kRowBits - kHalfBits)),
                  kLargest);
}

template <class Tile>
class LazySoftmax : public RowSoftmax<Tile, KeyBias::kNone> {
  using Base = RowSoftmax<Tile, KeyBias::kNone>;
  static_assert(!Tile::kHasOnes);

 public:
  using Probability = __half;
  static constexpr float kValueScale = kHalfValueScale;

  __device__ __forceinline__ explicit LazySoftmax(const AttentionKernelParams& params)
      : Base(params.score_scale), exponent_(params.reference_exponent) {}

  // Makes probabilities of the next tile's scores, and rescales O, of those before, if m rises.
  __device__ __forceinline__ void take_tile(Scores<Tile>& scores, bool is_first,
                                            Accumulators<Tile>& accumulators, Probabilities& probabilities) {
    typename Base::PartialSums part;
    exponentiate_tile(scores, is_first, part);
    // Rounding stands before the branch, so that it goes on between the exponentials.
    this->template round<Probability>(scores, probabilities);
    float sum[2];
    Base::add_up(part, sum);
    if (!are_within(sum)) {
      raise_reference(scores, sum, accumulators);
      this->template round<Probability>(scores, probabilities);
    }
    this->add_to_row_sums(sum);
  }

  // The same in two steps, of which only the second touches O and the rounded probabilities.
  __device__ __forceinline__ void begin_tile(Scores<Tile>& scores, bool is_first, float (&sum)[2]) {
    typename Base::PartialSums part;
    exponentiate_tile(scores, is_first, part);
    Base::add_up(part, sum);
  }
  __device__ __forceinline__ void end_tile(Scores<Tile>& scores, float (&sum)[2],
                                           Accumulators<Tile>& accumulators, Probabilities& probabilities) {
    if (!are_within(sum)) raise_reference(scores, sum, accumulators);
    this->template round<Probability>(scores, probabilities);
    this->add_to_row_sums(sum);
  }

 private:
  static constexpr float kLargestHalf = 65504;

  __device__ __forceinline__ void exponentiate_tile(Scores<Tile>& scores, bool is_first,
                                                    typename Base::PartialSums& part) {
    if (is_first) this->set_reference(scores, static_cast<float>(exponent_));
    this->exponentiate(scores, part);
  }

  // Tells whether float16 has the probabilities of all rows of the warp.
  __device__ __forceinline__ static bool are_within(const float (&sum)[2]) {
    return __all_sync(~0u, sum[0] <= kLargestHalf && sum[1] <= kLargestHalf);  // NaN fails.
  }

  // Raises m so that l of each row, with this tile's part, becomes 2^exponent_ to 2^(exponent_ + 1).
  __device__ __forceinline__ void raise_reference(Scores<Tile>& probabilities, float (&sum)[2],
                                                  Accumulators<Tile>& accumulators) {
    constexpr float kTooLarge = 0x1p120f;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float total = row_total(this->row_sum_[row] + sum[row]);
      const int rise = max(exponent_of(total) - exponent_, 0);
      factor[row] = total < kTooLarge ? power_of_2(-rise) : NAN;
      this->reference_[row] += static_cast<float>(rise);
      this->row_sum_[row] *= factor[row];
      sum[row] *= factor[row];
    }
    scale_rows(probabilities, factor);
    scale_rows(accumulators, factor);
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
