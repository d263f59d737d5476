// Softmax of attention without row maxima (notes/attention.md).
// Probabilities are float16, which has eight times the precision of bfloat16, so the largest one of a row
// need not be a power of 2, and m need not follow the maximum.
//
// m is set by a row's first key tile so that its largest probability is 2^reference_exponent. Later scores
// may exceed those of the first tile by 16 - reference_exponent powers of 2, 9 to 12 nats for thousands of
// keys, which most rows never do. It is detected by the sums of the probabilities, which are computed in
// float32 anyway and do not overflow for scores below m + 127: if a thread's sum of a tile exceeds float16,
// its warp raises m of its 16 rows by powers of 2, so that l including the tile is 2^reference_exponent
// again, and rescales the tile's probabilities, l and O. For 64 peaked rows and thousands of keys this
// happens one to four times.
//
// From 2^120 on the sum may have overflowed, and the scores have been overwritten. The warp then computes
// them again (attention_recompute.cuh), and raises m to the maximum as OnlineSoftmax does.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_softmax.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

// Factor of the float16 values (attention_values.cuh).
constexpr float kHalfValueScale = 16;

// The smallest float16 above 0 is 2^-24, so a probability has an error of up to 2^-25. If the errors of all
// `keys` probabilities have the same sign and the sum of a row is at least 2^exponent, its relative error is
// 2^-12.5, a tenth of bfloat16's rounding of the output.
inline int lazy_reference_exponent(int64_t keys) {
  constexpr double kHalfBits = 25, kRowBits = 12.5;
  constexpr int kLargest = 8;  // leaves a factor of 2^8 before float16 overflows
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

  // The first tile masks keys: m follows the maximum, since rows may have no key yet.
  __device__ __forceinline__ void expect_masked_rows() { follows_maximum_ = true; }

  // Converts the scores of the next tile to probabilities, and rescales O if m rises. recompute(scores)
  // computes the scores again.
  template <class Recompute>
  __device__ __forceinline__ void process_tile(Scores<Tile>& scores, bool is_first,
                                               Accumulators<Tile>& accumulators, Probabilities& probabilities,
                                               const Recompute& recompute) {
    typename Base::PartialSums part;
    if (follows_maximum_) follow_maximum(scores, Base::rescale_of(accumulators));
    exponentiate_tile(scores, is_first, part);
    // Rounding comes before the branch, so that it is interleaved with the exponentials.
    this->template round<Probability>(scores, probabilities);
    float sum[2];
    Base::reduce_partial_sums(part, sum);
    if (!are_within(sum)) {
      raise_reference(scores, sum, accumulators, recompute);
      this->template round<Probability>(scores, probabilities);
    }
    this->add_to_row_sums(sum);
  }

  // The same in two steps. Only the second accesses O and the rounded probabilities. factor: of O
  __device__ __forceinline__ void start_tile(Scores<Tile>& scores, bool is_first, float (&factor)[2],
                                             float (&sum)[2]) {
    typename Base::PartialSums part;
    factor[0] = factor[1] = 1;
    if (follows_maximum_)
      follow_maximum(scores, [&factor](const float (&rescaled)[2]) {
        factor[0] = rescaled[0];
        factor[1] = rescaled[1];
      });
    exponentiate_tile(scores, is_first, part);
    Base::reduce_partial_sums(part, sum);
  }
  template <class Recompute>
  __device__ __forceinline__ void finish_tile(Scores<Tile>& scores, const float (&factor)[2], float (&sum)[2],
                                              Accumulators<Tile>& accumulators, Probabilities& probabilities,
                                              const Recompute& recompute) {
    if (follows_maximum_) scale_rows(accumulators, factor);
    if (!are_within(sum)) raise_reference(scores, sum, accumulators, recompute);
    this->template round<Probability>(scores, probabilities);
    this->add_to_row_sums(sum);
  }

 private:
  static constexpr float kLargestHalf = 65504;

  template <class Rescale>
  __device__ __forceinline__ void follow_maximum(const Scores<Tile>& scores, const Rescale& rescale) {
    Base::follow_maximum(scores, static_cast<float>(exponent_), rescale);
  }

  __device__ __forceinline__ void exponentiate_tile(Scores<Tile>& scores, bool is_first,
                                                    typename Base::PartialSums& part) {
    if (is_first) this->set_reference(scores, static_cast<float>(exponent_));
    this->exponentiate(scores, part);
  }

  // Returns whether the probabilities of all rows of the warp are within float16.
  __device__ __forceinline__ static bool are_within(const float (&sum)[2]) {
    return __all_sync(~0u, sum[0] <= kLargestHalf && sum[1] <= kLargestHalf);  // NaN fails.
  }

  template <class Recompute>
  __device__ __forceinline__ void raise_reference(Scores<Tile>& scores, float (&sum)[2],
                                                  Accumulators<Tile>& accumulators,
                                                  const Recompute& recompute) {
    constexpr float kTooLarge = 0x1p120f;
    const float total[2] = {row_total(this->row_sum_[0] + sum[0]), row_total(this->row_sum_[1] + sum[1])};
    if (follows_maximum_ || __all_sync(~0u, total[0] < kTooLarge && total[1] < kTooLarge)) {
      raise_by_powers_of_2(scores, sum, total, accumulators);
    } else {
      recompute(scores);
      follows_maximum_ = has_recomputed_;
      has_recomputed_ = true;
      follow_maximum(scores, Base::rescale_of(accumulators));
      typename Base::PartialSums part;
      this->exponentiate(scores, part);
      Base::reduce_partial_sums(part, sum);
    }
  }

  // Raises m so that l of each row, including this tile, is in [2^exponent_, 2^(exponent_ + 1)).
  __device__ __forceinline__ void raise_by_powers_of_2(Scores<Tile>& probabilities, float (&sum)[2],
                                                       const float (&total)[2],
                                                       Accumulators<Tile>& accumulators) {
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int rise = max(exponent_of(total[row]) - exponent_, 0);
      factor[row] = power_of_2(-rise);
      this->reference_[row] += static_cast<float>(rise);
      this->row_sum_[row] *= factor[row];
      sum[row] *= factor[row];
    }
    scale_rows(probabilities, factor);
    scale_rows(accumulators, factor);
  }

  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  // x: a positive normal number, 0 or NaN
  __device__ __forceinline__ static int exponent_of(float x) {
    return (__float_as_int(x) >> kMantissaBits) - kExponentBias;
  }
  __device__ __forceinline__ static float power_of_2(int exponent) {
    return __int_as_float((exponent + kExponentBias) << kMantissaBits);
  }

  int exponent_;
  bool has_recomputed_ = false;
  bool follows_maximum_ = false;  // whether m follows the maximum, as in OnlineSoftmax
};

}  // namespace h100_diffusers_kernels
