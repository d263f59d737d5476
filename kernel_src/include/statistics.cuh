// The statistics of a row are sums, mean, and the reciprocal of the root mean square.
//
// An error in a statistic is common to the whole row and so does not average out. For results in 16 bits
// float32 statistics are far more exact than needed. For float32 results they would be the largest error, so
// there they are summed in double and applied as a sum of two floats (NOTES, "Accuracy of float32 results").
#pragma once

#include <cstdint>
#include <type_traits>

namespace h100_diffusers_kernels {

template <typename T>
constexpr bool kHasExactStatistics = sizeof(T) == 4;

template <typename T>
using RowSum = std::conditional_t<kHasExactStatistics<T>, double, float>;

// Returns the sum of term(0) to term(kSize - 1), added up as a tree.
template <int kSize, typename Term>
__device__ __forceinline__ float tree_sum(const Term& term) {
  if constexpr (kSize == 1) {
    return term(0);
  } else {
    const auto upper = [&](int i) { return term(i + kSize / 2); };
    return tree_sum<kSize / 2>(term) + tree_sum<kSize - kSize / 2>(upper);
  }
}

// A Statistic is a value as the sum of two floats; the second is there for float32 results alone.
template <typename T>
struct Statistic {
  float high = 0.0f;
  float low = 0.0f;

  __device__ __forceinline__ static Statistic from(RowSum<T> value) {
    Statistic result;
    result.high = static_cast<float>(value);
    if constexpr (kHasExactStatistics<T>)
      result.low = isfinite(result.high) ? static_cast<float>(value - result.high) : 0.0f;
    return result;
  }

  __device__ __forceinline__ float subtracted_from(float x) const {
    if constexpr (kHasExactStatistics<T>) return (x - high) - low;
    return x - high;
  }

  __device__ __forceinline__ float times(float x) const {
    if constexpr (kHasExactStatistics<T>) return fmaf(x, high, x * low);
    return x * high;
  }
};

// The error of an approximate division does not show beside the rounding to 16 bits.
template <typename T>
__device__ __forceinline__ RowSum<T> divide(RowSum<T> sum, RowSum<T> count) {
  if constexpr (kHasExactStatistics<T>) return sum / count;
  return __fdividef(sum, count);
}

// Returns 1 / sqrt(sum_of_squares / count + eps).
template <typename T>
__device__ __forceinline__ Statistic<T> rms_scale_of(RowSum<T> sum_of_squares, int64_t count, float eps) {
  return Statistic<T>::from(rsqrt(divide<T>(sum_of_squares, static_cast<RowSum<T>>(count)) + eps));
}

}  // namespace h100_diffusers_kernels
