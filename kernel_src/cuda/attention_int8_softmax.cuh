// Softmax of attention in 8 bits, with probabilities in E4M3.
//
// The reference m rises only if a probability would exceed E4M3. The row sums l are a product with a column
// of ones, of the rounded probabilities, so that their rounding errors cancel in O / l.
#pragma once

#include "attention_int8_quantize.cuh"
#include "attention_softmax.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

constexpr int kInt8Scores = kWarpGroupRows * kTileKeys / kWarpGroupThreads;
constexpr int kInt8Outputs = kWarpGroupRows * kInt8Columns / kWarpGroupThreads;
// O and, in each row, l twice.
constexpr int kInt8Accumulators = kInt8Outputs + 4;

// A thread's parts of S, as products of integers, and of P, which has four values in a register.
using Int8Products = int[kInt8Scores];
using Int8Probabilities = uint32_t[kTileKeys / kFp8Depth][4];

class Int8Softmax {
 public:
  __device__ __forceinline__ explicit Int8Softmax(const float (&query_scale)[2])
      : query_scale_{query_scale[0], query_scale[1]}, reference_{-INFINITY, -INFINITY} {}

  // Sets m for the first key tile. Raises it if a probability of the warp would exceed E4M3. Returns whether
  // m has changed, and the factors of O.
  __device__ __forceinline__ bool raise_reference(const Int8Products& products, float key_scale,
                                                  float (&factor)[2]) {
    constexpr float kLimit = 8.75f;  // 2^8.75 < 448
    float maximum[2], references[2];
    find_maxima(products, key_scale, maximum);
    const bool is_within =  // false for NaN
        maximum[0] <= reference_[0] + kLimit && maximum[1] <= reference_[1] + kLimit;
    if (__all_sync(~0u, is_within)) return false;
    find_references(maximum, references);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float reference = maximum_of(references[row], reference_[row]);
      factor[row] = fast_exp2(reference_[row] - reference);
      reference_[row] = reference;
    }
    return true;
  }

  // The order of the probabilities is that of the values (quantize_values).
  __device__ __forceinline__ void exponentiate(const Int8Products& products, float key_scale,
                                               Int8Probabilities& probabilities) const {
    float scale[2], part_scale[2], part_bias[2], small_scale[2], small_bias[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      scale[row] = query_scale_[row] * key_scale;
      part_scale[row] = scale[row] * kPartOfDouble;
      part_bias[row] = __fmaf_rn(reference_[row], -kPartOfDouble, kPartOfOne);
      small_scale[row] = scale[row] * kSmallPartOfDouble;
      small_bias[row] = __fmaf_rn(reference_[row], -kSmallPartOfDouble, kSmallPartOfOne);
    }
#pragma unroll
    for (int step = 0; step < kTileKeys / kFp8Depth; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2, first = 16 * step + i / 2 * 8 + row * 2;
        const int keys[4] = {first, first + 1, first + 4, first + 5};
        float values[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) values[k] = __int2float_rn(products[keys[k]]);
        if (i / 2 == 0) {
#pragma unroll
          for (int k = 0; k < 4; ++k)
            values[k] = fast_exp2(__fmaf_rn(values[k], scale[row], -reference_[row]));
          probabilities[step][i] = pack_fp8(values[0], values[1], values[2], values[3]);
        } else {
          uint32_t codes[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float part = maximum_of(saturated_fma(values[k], part_scale[row], part_bias[row]),
                                          __fmaf_rn(values[k], small_scale[row], small_bias[row]));
            codes[k] = __float_as_uint(__fmaf_rn(part, kCodes, kRoundToInteger));
          }
          const uint32_t low = __byte_perm(codes[0], codes[1], 0x0040);
          const uint32_t high = __byte_perm(codes[2], codes[3], 0x0040);
          probabilities[step][i] = __byte_perm(low, high, 0x5410);
        }
      }
  }

  __device__ __forceinline__ float reference(int row) const { return reference_[row]; }

 private:
  // The exponentials of half of the keys are computed without the special function unit, whose time would be
  // the limit. The code of an E4M3 number 2^x is 8 x + 56 if the mantissa is interpolated linearly, less 0.45
  // so that the mean of the interpolation is that of 2^x. Errors are up to 0.35 of a step, beside 0.5 of
  // rounding. From 2^-6 on down the numbers are too small, and 0 below 2^-7. A code is computed as its part
  // of kCodes, which saturates without an instruction.
  static constexpr float kCodes = 128, kPartOfDouble = 8 / kCodes, kPartOfOne = (56 - 0.45f) / kCodes;
  static constexpr float kSmallPartOfDouble = 1.25f / kCodes, kSmallPartOfOne = 12.3f / kCodes;
  static constexpr float kRoundToInteger = 0x1.8p23f;  // adding it leaves an integer in the low bits

  // Returns a * b + c from 0 to 1, or 0 for NaN.
  __device__ __forceinline__ static float saturated_fma(float a, float b, float c) {
    float result;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
  }

  // The second largest maximum of a quad's lanes gets the probability 2^kLowest, unless the largest one would
  // exceed 2^kHighest. A key that exceeds all others by far is seldom exceeded later; the others then need
  // the precision below it. Probabilities below 2^-6 lose precision.
  static constexpr float kLowest = 3, kHighest = 8;

  // Of the thread's keys, as logarithms to base 2.
  __device__ __forceinline__ void find_maxima(const Int8Products& products, float key_scale,
                                              float (&maximum)[2]) const {
    int largest[2] = {products[0], products[2]};
#pragma unroll
    for (int i = 0; i < kInt8Scores; i += 2)
      largest[i / 2 % 2] = __vimax3_s32(largest[i / 2 % 2], products[i], products[i + 1]);
#pragma unroll
    for (int row = 0; row < 2; ++row)
      maximum[row] = __int2float_rn(largest[row]) * (query_scale_[row] * key_scale);
  }

  __device__ __forceinline__ static void find_references(const float (&maximum)[2], float (&references)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float pair = __shfl_xor_sync(~0u, maximum[row], 1);
      const float high = maximum_of(maximum[row], pair), low = minimum_of(maximum[row], pair);
      const float other_high = __shfl_xor_sync(~0u, high, 2), other_low = __shfl_xor_sync(~0u, low, 2);
      const float first = maximum_of(high, other_high);
      const float second = maximum_of(minimum_of(high, other_high), maximum_of(low, other_low));
      references[row] = maximum_of(first - kHighest, second - kLowest);
    }
  }

  float query_scale_[2];  // makes logarithms to base 2 of products, together with that of the keys
  float reference_[2];    // m
};

}  // namespace h100_diffusers_kernels
