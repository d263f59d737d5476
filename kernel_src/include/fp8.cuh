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
  constexpr uint32_t kInfinity = 0x7f800000u, kNaN = 0x7fc00000u;
  constexpr float kSmallestNormal = 0x1p-126f;
  if (largest >= kInfinity) return __uint_as_float(kNaN);
  const float scale = __fdiv_rn(__uint_as_float(largest), kLargestFp8);
  return scale < kSmallestNormal ? 0.0f : scale;
}

// Divides by a scale, with the rounding of a float32 division.
struct Fp8Quotient {
  float scale, inverse;

  __device__ __forceinline__ explicit Fp8Quotient(float scale) : scale(scale) {
    inverse = scale == 0.0f ? 0.0f : __frcp_rn(scale);
  }

  // The inverse is correctly rounded, so that one correction gives the correctly rounded quotient (Markstein,
  // 1990).
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = x * inverse;
    return fmaf(fmaf(-quotient, scale, x), inverse, quotient);
  }
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
  uint32_t largest = 0;
#pragma unroll
  for (const float value : values) largest = max(largest, magnitude_of(value));
  return largest;
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
