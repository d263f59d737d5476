// Statistics of groups in group norm: sums of parts of a group, mean and deviation, and the factor and offset
// of each channel.
//
// Sums are double, because a mean may be far from zero and a group has hundreds of thousands of values. For
// 16-bit values a few differences from a thread's first value, and their squares, are first added in float:
// one conversion to double takes as long as eight additions.
#pragma once

#include <cstdint>

#include "channel_operands.cuh"
#include "fast_divisor.cuh"
#include "params.h"
#include "reduce.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {

// Sums of values and of their squares.
struct alignas(16) Moments {
  double sum;
  double squares;

  __device__ __forceinline__ void add(double value) {
    sum += value;
    squares = fma(value, value, squares);
  }

  // Adds term(0) to term(kSize - 1) in float first.
  template <int kSize, typename Term>
  __device__ __forceinline__ void add_few(const Term& term) {
    sum += tree_sum<kSize>(term);
    squares += tree_sum<kSize>([&](int i) { return term(i) * term(i); });
  }

  __device__ __forceinline__ void add(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
  }

  // Updates the sums as if `by` had been added to each of the `count` values.
  __device__ __forceinline__ void shift(double by, double count) {
    squares += by * (2.0 * sum + by * count);
    sum += by * count;
  }

  __device__ __forceinline__ void reduce_warp() {
    sum = warp_reduce<Sum, kWarpThreads>(sum);
    squares = warp_reduce<Sum, kWarpThreads>(squares);
  }
};

struct GroupNormKernelParams : GroupNormParams {
  int32_t chunks;        // of pixels, or of the packs of a group
  int64_t chunk_size;    // the last chunk may be smaller
  int64_t outer_stride;  // between rows of a group, which are channels, or pixels if channels are last
  int64_t inner_stride;  // between packs of a row
  int64_t outer_out_stride;
  int64_t inner_out_stride;
  int64_t group_packs;
  int64_t per_group;     // channels of a group
  FastDivisor by_row;    // divides by the packs of a row
  FastDivisor by_group;  // divides by per_group
  bool operands_are_aligned;

  __device__ __forceinline__ Moments* partial(int64_t group) const {
    return static_cast<Moments*>(workspace) + group * chunks;
  }
};

// Mean of a group and reciprocal of its deviation, computed by all lanes of a warp.
struct GroupStatistics {
  double mean, rstd;

  __device__ __forceinline__ GroupStatistics(const GroupNormKernelParams& params, int64_t group) {
    const Moments* partial = params.partial(group);
    Moments moments{};
    for (int chunk = threadIdx.x % kWarpThreads; chunk < params.chunks; chunk += kWarpThreads)
      moments.add(partial[chunk]);
    moments.reduce_warp();
    const double count = static_cast<double>(params.per_group) * static_cast<double>(params.pixels);
    mean = moments.sum / count;
    // Not fmax, which would turn NaN into 0.
    const double variance = moments.squares / count - mean * mean;
    rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + params.eps);
  }
};

// A channel's normalization: (x - pivot) * factor + offset, where offset is rounded once.
struct alignas(16) Channel {
  float pivot, factor, offset;

  // added: the channel's bias before the norm
  __device__ __forceinline__ static Channel of(double group_mean, double rstd, float added, float weight,
                                               float bias) {
    const double mean = group_mean - added;
    const float factor = static_cast<float>(rstd * weight);
    // If the mean is far from zero, x - mean cancels, which is exact as a separate subtraction. Near zero the
    // subtraction would add a rounding. With an infinite factor the sign of the difference decides.
    const bool is_infinite = isinf(factor);
    const float pivot = fabs(mean) * rstd > 1.0 || is_infinite ? static_cast<float>(mean) : 0.0f;
    const double offset = is_infinite ? bias : bias - (mean - pivot) * factor;
    return {pivot, factor, static_cast<float>(offset)};
  }

  __device__ __forceinline__ float normalized(float x) const { return fmaf(x - pivot, factor, offset); }
};

}  // namespace h100_diffusers_kernels
