// Functions of vectors of floats: what the activations need of exp and erfc, and sine and cosine.
//
// The polynomials are minimax fits; the error given with each is the largest relative one before rounding.
#pragma once

#include <cstdint>

#include "vector.h"

namespace h100_diffusers_kernels {

// exp() of a result far below the smallest float still has to be exact when multiplied, so exp_scaled()
// returns it times 2^64.
constexpr float kExpScale = 0x1p64f;

// kExpScale * exp(-(x + correction)) for 0 <= x <= 120 and a correction within rounding of x.
template <int kLanes>
ALWAYS_INLINE Floats<kLanes> exp_scaled(const Floats<kLanes>& x,
                                        const Floats<kLanes>& correction = Floats<kLanes>{}) {
  // exp(-x) = 2^n * exp(r) with r = -x - n*log(2) in [-log(2)/2, log(2)/2]. Adding 1.5 * 2^23 rounds to an
  // integer, which then is in the lowest bits; so is the scale, 64.
  constexpr float kRound = 0x1.8p23f + 64;
  constexpr float kLog2High = 0x1.62e4p-1f;  // 15 bits: times n is exact
  constexpr float kLog2Low = 0x1.7f7d1cp-20f;
  const Floats<kLanes> shifted = kRound - x * 0x1.715476p0f;
  const Floats<kLanes> n = shifted - kRound;
  const Floats<kLanes> r = (-x - n * kLog2High) - n * kLog2Low - correction;
  Floats<kLanes> p = 0.00138189388f * r + 0.00836870354f;  // 3e-9
  p = p * r + 0.0416682884f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return as_floats<kLanes>(as_ints<kLanes>(p) + (as_ints<kLanes>(shifted) << 23));
}

template <int kLanes>
struct SineCosine {
  Floats<kLanes> sine;
  Floats<kLanes> cosine;
};

// The largest angle for sincos(): its number of quarter turns must have at most 20 bits.
constexpr float kMaxAngle = 1e6f;

// Sine and cosine of |angle| <= kMaxAngle, not NaN.
template <int kLanes>
ALWAYS_INLINE SineCosine<kLanes> sincos(const Floats<kLanes>& angle) {
  // In double, angle minus a multiple of pi/2 in two parts (33 bits and the rest) is exact to 1e-13.
  constexpr double kRound = 0x1.8p52;
  constexpr double kHalfPiHigh = 0x1.921fb544p0;
  constexpr double kHalfPiLow = 0x1.0b4611a626331p-34;
  const Doubles<kLanes> wide = __builtin_convertvector(angle, Doubles<kLanes>);
  const Doubles<kLanes> quarters = (wide * 0x1.45f306dc9c883p-1 + kRound) - kRound;
  const Doubles<kLanes> remainder = (wide - quarters * kHalfPiHigh) - quarters * kHalfPiLow;
  const Floats<kLanes> r = __builtin_convertvector(remainder, Floats<kLanes>);
  const Ints<kLanes> quadrant =
      as_ints<kLanes>(__builtin_convertvector(quarters, Floats<kLanes>) + 0x1.8p23f);

  const Floats<kLanes> z = r * r;
  Floats<kLanes> s = -0.000195180997f * z + 0.00833218824f;  // 4e-9
  s = s * z + -0.166666552f;
  s = s * (z * r) + r;
  Floats<kLanes> c = 2.44325529e-05f * z + -0.00138873106f;  // 1e-10
  c = c * z + 0.0416666456f;
  c = c * (z * z) + (1.0f - 0.5f * z);

  const auto is_odd = (quadrant & 1) != 0;
  const Ints<kLanes> sine = as_ints<kLanes>(is_odd ? c : s) ^ ((quadrant & 2) << 30);
  const Ints<kLanes> cosine = as_ints<kLanes>(is_odd ? s : c) ^ (((quadrant + 1) & 2) << 30);
  return {as_floats<kLanes>(sine), as_floats<kLanes>(cosine)};
}

}  // namespace h100_diffusers_kernels
