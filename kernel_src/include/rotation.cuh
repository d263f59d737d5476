// Sine and cosine of angles of any size, in radians, without local memory.
#pragma once

#include <cstdint>
#include <type_traits>

namespace h100_diffusers_kernels {

// From this angle on the short reductions below may be off by more than the polynomials allow.
constexpr float kLargeAngle = 131072.0f;  // 2^17

// Returns angle - n * 2pi in [-pi, pi] for 2^17 <= |angle| < infinity, and NaN for infinity and NaN. The
// angle is mantissa * 2^exponent, so the fraction of a turn depends on only 64 bits of 1/(2pi), starting at
// the bit of weight 2^-(exponent + 1) (Payne and Hanek, 1983).
__device__ __noinline__ inline double reduce_large_angle(float angle) {
  // 32 zeros, then the fraction of 1/(2pi).
  constexpr uint32_t kInverseTwoPi[8] = {0x00000000u, 0x28be60dbu, 0x9391054au, 0x7f09d5f4u,
                                         0x7d4d3770u, 0x36d8a566u, 0x4f10e410u, 0x7f9458eau};
  const uint32_t bits = __float_as_uint(angle);
  const int biased = (bits >> 23) & 0xff;
  if (biased == 0xff) return __longlong_as_double(0x7ff8000000000000ll);
  const int first_bit = biased - 150 + 32;  // 26 to 136
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const int first_word = first_bit >> 5, shift = first_bit & 31;
  uint32_t w0 = 0, w1 = 0, w2 = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // compile-time indices keep the table out of local memory
    w0 = i == first_word ? kInverseTwoPi[i] : w0;
    w1 = i == first_word + 1 ? kInverseTwoPi[i] : w1;
    w2 = i == first_word + 2 ? kInverseTwoPi[i] : w2;
  }
  const uint64_t window = (uint64_t{__funnelshift_l(w1, w0, shift)} << 32) | __funnelshift_l(w2, w1, shift);
  const int64_t fraction = static_cast<int64_t>(mantissa * window);  // of a turn, times 2^64, in [-1/2, 1/2)
  constexpr double kTwoPiOver2To64 = 6.283185307179586 * 5.421010862427522e-20;
  return copysign(1.0, static_cast<double>(angle)) * static_cast<double>(fraction) * kTwoPiOver2To64;
}

// Returns angle - k * period, where the period is the sum of three floats. Each product is exact within its
// fused multiply-add (Cody and Waite, 1980).
__device__ __forceinline__ float subtract_multiple(float angle, float k, float high, float middle,
                                                   float low) {
  float r = fmaf(-k, high, angle);
  r = fmaf(-k, middle, r);
  return fmaf(-k, low, r);
}

// Returns the nearest integer for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction. The rounding
// instruction (FRND) would use the special function unit (notes/row_kernels.md, "From coordinates").
__device__ __forceinline__ float round_to_integer(float x) {
  constexpr float kMagic = 12582912.0f;
  return __fsub_rn(__fadd_rn(x, kMagic), kMagic);
}

// For results that are rounded to 16 bits: the special function unit, with an absolute error of 2^-21.
struct FastSincos {
  float r;  // the angle in [-pi, pi]

  __device__ __forceinline__ void reduce(float angle) {
    const float turns = round_to_integer(angle * 0.15915494309189535f);
    r = subtract_multiple(angle, turns, 6.28318548202514648f, -1.74845553146951e-7f, -6.8604980400235e-15f);
  }
  __device__ __forceinline__ void reduce_large(float angle) {
    r = static_cast<float>(reduce_large_angle(angle));
  }
  __device__ __forceinline__ void compute(float& sine, float& cosine) const {
    sine = __sinf(r);
    cosine = __cosf(r);
  }
};

// Accurate to about one unit in the last place of a float, with the polynomials of Cephes (Moshier) on
// [-pi/4, pi/4].
struct ExactSincos {
  float r;  // the angle minus its quarter turns
  int quarters;

  __device__ __forceinline__ void reduce(float angle) {
    const float k = rintf(angle * 0.63661977236758134f);
    r = subtract_multiple(angle, k, 1.57079637050628662f, -4.371138828673793e-8f, -1.7151245100059e-15f);
    quarters = static_cast<int>(k);
  }
  __device__ __forceinline__ void reduce_large(float angle) {
    const double reduced = reduce_large_angle(angle);
    const double k = rint(reduced * 0.6366197723675814);
    r = static_cast<float>(fma(-k, 1.5707963267948966, reduced));
    quarters = static_cast<int>(k);
  }
  __device__ __forceinline__ void compute(float& sine, float& cosine) const {
    const float r2 = r * r;
    float s = fmaf(fmaf(-1.9515295891e-4f, r2, 8.3321608736e-3f), r2, -1.6666654611e-1f);
    s = fmaf(s * r2, r, r);
    float c = fmaf(fmaf(2.443315711809948e-5f, r2, -1.388731625493765e-3f), r2, 4.166664568298827e-2f);
    c = fmaf(c * r2, r2, fmaf(-0.5f, r2, 1.0f));
    sine = quarters & 1 ? c : s;
    cosine = quarters & 1 ? s : c;
    sine = quarters & 2 ? -sine : sine;
    cosine = (quarters + 1) & 2 ? -cosine : cosine;
  }
};

// Computes sines and cosines for results of type T. Angles that are too large for the short reduction are
// rare; one test for all of them keeps the common path free of branches (notes/row_kernels.md, "From
// coordinates").
template <typename T, int kCount>
__device__ __forceinline__ void sincos_of(const float (&angles)[kCount], float (&sines)[kCount],
                                          float (&cosines)[kCount]) {
  std::conditional_t<sizeof(T) == 2, FastSincos, ExactSincos> sincos[kCount];
  bool all_small = true;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    all_small = all_small && fabsf(angles[i]) < kLargeAngle;
    sincos[i].reduce(angles[i]);
  }
  if (!all_small) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (!(fabsf(angles[i]) < kLargeAngle)) sincos[i].reduce_large(angles[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sincos[i].compute(sines[i], cosines[i]);
}

}  // namespace h100_diffusers_kernels
