// FP8 (E4M3): the scale of a group of values, and their quotients, four of which fit a register.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"

namespace h100_diffusers_kernels {

// The magnitude of a value as an integer. The largest one of several is that of a NaN, if there is one.
__device__ __forceinline__ uint32_t magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Returns the larger one of two magnitudes, or NaN if one is NaN.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}

// Returns the scale of values of which this is the largest magnitude: 0 if it would be subnormal, NaN if the
// magnitude is not finite.
__device__ __forceinline__ float fp8_scale(uint32_t largest) {
  constexpr float kSmallestNormal = 0x1p-126f, kInverse = 1.0f / kLargestFp8;
  // The correctly rounded quotient, from an approximate one (Markstein, 1990).
  const float x = __uint_as_float(largest), quotient = x * kInverse;
  const float scale = fmaf(fmaf(-quotient, kLargestFp8, x), kInverse, quotient);
  return scale < kSmallestNormal ? 0.0f : scale;
}

// Divides by a scale of fp8_scale. The quotient may differ from the float32 division's in the last place, but
// rounds to the same E4M3 value: tried for all significands of scales, with the values beside all bounds
// between E4M3 values. From scales of 2^100 on the error of the inverse is less exact.
struct Fp8Quotient {
  float scale, inverse, inverse_error;  // 1 / scale is inverse + inverse_error

  // A scale is 0, NaN, or from 2^-126 to 2^120, so that the inverse is normal.
  __device__ __forceinline__ explicit Fp8Quotient(float scale) : scale(scale) {
    float estimate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(scale));
    inverse = scale == 0.0f ? 0.0f : fmaf(fmaf(-scale, estimate, 1.0f), estimate, estimate);
    const float residual = fmaf(-inverse, scale, 1.0f);
    inverse_error = residual * inverse;
    inverse_error = fmaf(inverse_error, residual, inverse_error);
  }

  __device__ __forceinline__ float operator()(float x) const { return fmaf(x, inverse, x * inverse_error); }
};

// Rounds values to nearest even. NaN stays NaN.
__device__ __forceinline__ uint16_t pack_fp8(float a, float b) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
}
__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d) {
  return pack_fp8(a, b) | uint32_t{pack_fp8(c, d)} << 16;
}

template <int kSize>
__device__ __forceinline__ uint32_t largest_magnitude(const float (&values)[kSize]) {
  float largest = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < kSize; ++i) largest = larger_magnitude(largest, values[i]);
  return __float_as_uint(largest);
}

// One store for a pack. kSize: 1, 4 or 8
template <int kSize>
__device__ __forceinline__ void store_fp8(uint8_t* address, const float (&values)[kSize],
                                          const Fp8Quotient& quotient) {
  float quotients[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) quotients[i] = quotient(values[i]);
  if constexpr (kSize == 1) {
    *address = static_cast<uint8_t>(pack_fp8(quotients[0], 0, 0, 0));
  } else {
    const uint32_t lower = pack_fp8(quotients[0], quotients[1], quotients[2], quotients[3]);
    if constexpr (kSize == 4)
      *reinterpret_cast<uint32_t*>(address) = lower;
    else
      *reinterpret_cast<uint2*>(address) =
          make_uint2(lower, pack_fp8(quotients[4], quotients[5], quotients[6], quotients[7]));
  }
}

}  // namespace h100_diffusers_kernels
