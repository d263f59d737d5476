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
    float scale[2], code_scale[2], code_bias[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      scale[row] = query_scale_[row] * key_scale;
      code_scale[row] = scale[row] * kCodesOfDouble;
      code_bias[row] = __fmaf_rn(reference_[row], -kCodesOfDouble, kCodeOfOne + kRoundToInteger);
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
          uint32_t codes[2];
#pragma unroll
          for (int k = 0; k < 2; ++k)
            codes[k] = codes_of(__fmaf_rn(values[2 * k], code_scale[row], code_bias[row]),
                                __fmaf_rn(values[2 * k + 1], code_scale[row], code_bias[row]));
          probabilities[step][i] = __byte_perm(codes[0], codes[1], 0x6420);
        }
      }
  }

  __device__ __forceinline__ float reference(int row) const { return reference_[row]; }

 private:
  // The exponentials of half of the keys are computed without the special function unit, whose time would be
  // the limit. The code of an E4M3 number 2^x is 8 x + 56 if the mantissa is interpolated linearly, less 0.45
  // so that the mean of the interpolation is that of 2^x. Errors are up to 0.35 of a step, beside 0.5 of
  // rounding. Below 2^-6 the code of 2^x is 2^(x + 9), to which 1.25 x + 12.2 is fitted. The larger of both
  // is chosen in 16 bits. Adding 1024 to a float16 number rounds it to an integer, in its low byte.
  static constexpr float kCodesOfDouble = 8, kCodeOfOne = 56 - 0.45f, kRoundToInteger = 1024;

  // Returns the codes in bytes 0 and 2. The arguments are those of the first line, plus kRoundToInteger.
  __device__ __forceinline__ static uint32_t codes_of(float low, float high) {
    constexpr float kSmallCodesOfDouble = 1.25f, kSmallCodeOfOne = 12.2f;
    constexpr float kSlope = kSmallCodesOfDouble / kCodesOfDouble;
    constexpr float kBias = kSmallCodeOfOne + kRoundToInteger - kSlope * (kCodeOfOne + kRoundToInteger);
    const __half2 codes = __floats2half2_rn(low, high);
    const __half2 small_codes = __hfma2(codes, __float2half2_rn(kSlope), __float2half2_rn(kBias));
    // Numbers of float16 from 0 on are in the order of their bits.
    constexpr uint32_t kZeros = 0x64006400;  // kRoundToInteger twice
    return __vimax3_s16x2(*reinterpret_cast<const uint32_t*>(&codes),
                          *reinterpret_cast<const uint32_t*>(&small_codes), kZeros);
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
