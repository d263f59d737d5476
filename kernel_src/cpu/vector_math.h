// These functions take vectors of floats: powers of two and of e, sine and cosine.
//
// The polynomials are minimax fits; the error given with each is the largest relative one before rounding.
#pragma once

#include <cstdint>

#include "vector.h"

namespace h100_diffusers_kernels {

// Returns a polynomial in x, whose highest coefficient comes first.
template <int kLanes, typename... Coefficients>
ALWAYS_INLINE Floats<kLanes> polynomial(const Floats<kLanes>& x, float highest, Coefficients... others) {
  Floats<kLanes> sum = broadcast<kLanes>(highest);
  ((sum = sum * x + others), ...);
  return sum;
}

// An exponent t is split into its nearest integer, shifted to the place of a float's exponent, and the rest.
template <int kLanes>
struct SplitExponent {
  Ints<kLanes> integer_bits;
  Floats<kLanes> fraction;
};

// Splits t = x * (y + y_low) - kOffset. The product is not rounded where the processor multiplies and adds in
// one instruction.
template <int kLanes, int kOffset>
ALWAYS_INLINE SplitExponent<kLanes> split_exponent(const Floats<kLanes>& x, const Floats<kLanes>& y,
                                                   float y_low = 0) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the lowest bits.
  constexpr float kRound = 0x1.8p23f - kOffset;
  const Floats<kLanes> shifted = x * y + kRound;
  Floats<kLanes> fraction = x * y - (shifted - kRound);
  if (y_low != 0) fraction += x * y_low;
  return {as_ints<kLanes>(shifted) << 23, fraction};
}

// Polynomials for results of 16 bits are shorter: 3e-6 is no error beside their rounding, at least 2e-4.
template <typename T>
constexpr int kExp2Degree = sizeof(T) == 2 ? 3 : 5;

// Returns (2^f - 1) / f for |f| <= 1/2.
template <int kLanes, int kDegree>
ALWAYS_INLINE Floats<kLanes> exp2_slope(const Floats<kLanes>& f) {
  if constexpr (kDegree == 3) {  // The error of 2^f is 3e-6.
    return polynomial<kLanes>(f, 0.00958313234f, 0.0559070185f, 0.240240946f, 0.693124115f);
  } else {  // It is 3e-9.
    static_assert(kDegree == 5);
    return polynomial<kLanes>(f, 0.000153285815f, 0.00133909867f, 0.00961850118f, 0.0555035956f, 0.240226477f,
                              0.693147182f);
  }
}

// Returns 2^(t - kOffset) for exponents from -127 to 127.5. The result is 0 for -127, and only of the right
// order between this and -126, where floats are subnormal.
template <int kLanes, int kOffset, int kDegree>
ALWAYS_INLINE Floats<kLanes> exp2(const Floats<kLanes>& t) {
  const SplitExponent<kLanes> split = split_exponent<kLanes, kOffset>(t, broadcast<kLanes>(1.0f));
  const Floats<kLanes> power = exp2_slope<kLanes, kDegree>(split.fraction) * split.fraction + 1.0f;
  return as_floats<kLanes>(as_ints<kLanes>(power) + split.integer_bits);
}

constexpr float kLog2E = 1.44269504f, kLog2ELow = 1.92596299e-8f;

// Returns e^x for -87 <= x <= 88.
template <int kLanes, int kDegree>
ALWAYS_INLINE Floats<kLanes> exp(const Floats<kLanes>& x) {
  const SplitExponent<kLanes> split = split_exponent<kLanes, 0>(x, broadcast<kLanes>(kLog2E), kLog2ELow);
  const Floats<kLanes> power = exp2_slope<kLanes, kDegree>(split.fraction) * split.fraction + 1.0f;
  return as_floats<kLanes>(as_ints<kLanes>(power) + split.integer_bits);
}

template <int kLanes>
struct SineCosine {
  Floats<kLanes> sine;
  Floats<kLanes> cosine;
};

// No angle of sincos() is larger: its number of quarter turns must have at most 20 bits.
constexpr float kMaxAngle = 1e6f;

// Returns sine and cosine for |angle| <= kMaxAngle, which is not NaN.
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
  const Floats<kLanes> s =  // The error is 4e-9.
      polynomial<kLanes>(z, -0.000195180997f, 0.00833218824f, -0.166666552f) * (z * r) + r;
  const Floats<kLanes> c =  // The error is 1e-10.
      polynomial<kLanes>(z, 2.44325529e-05f, -0.00138873106f, 0.0416666456f, -0.5f) * z + 1.0f;

  const auto is_odd = (quadrant & 1) != 0;
  const Ints<kLanes> sine = as_ints<kLanes>(is_odd ? c : s) ^ ((quadrant & 2) << 30);
  const Ints<kLanes> cosine = as_ints<kLanes>(is_odd ? s : c) ^ (((quadrant + 1) & 2) << 30);
  return {as_floats<kLanes>(sine), as_floats<kLanes>(cosine)};
}

}  // namespace h100_diffusers_kernels
