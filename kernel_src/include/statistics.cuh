// Statistics of a row: sums, mean, and the reciprocal of the root mean square.
//
// An error of a statistic affects the whole row and does not average out. For 16-bit results float32
// statistics are far more accurate than needed. For float32 results they would be the largest error, so they
// are summed in double and applied as a sum of two floats (notes/accuracy.md, "float32 results").
#pragma once

#include <cstdint>
#include <type_traits>

namespace h100_diffusers_kernels {

template <typename T>
constexpr bool kHasExactStatistics = sizeof(T) == 4;

template <typename T>
using RowSum = std::conditional_t<kHasExactStatistics<T>, double, float>;

// Returns the sum of term(0) to term(kSize - 1), added as a tree.
template <int kSize, typename Term>
__device__ __forceinline__ float tree_sum(const Term& term) {
  if constexpr (kSize == 1) {
    return term(0);
  } else {
    const auto upper = [&](int i) { return term(i + kSize / 2); };
    return tree_sum<kSize / 2>(term) + tree_sum<kSize - kSize / 2>(upper);
  }
}

// A value as the sum of two floats. The second is used only for float32 results.
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

// Of a norm (x - mean) * scale.
template <typename T>
struct RowStatistics {
  Statistic<T> mean;   // 0 unless the norm is centered
  Statistic<T> scale;  // 1 / sqrt(mean of the squares around the mean + eps)
};

// Approximate for 16-bit results, where the error is negligible beside their rounding.
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
