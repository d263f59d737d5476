// Functions of float32 without branches and calls, so that compilers vectorize the loops around them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace h100_diffusers_kernels {

// Returns a polynomial in x, whose highest coefficient comes first.
template <typename... Coefficients>
float polynomial(float x, float highest, Coefficients... others) {
  float sum = highest;
  ((sum = sum * x + others), ...);
  return sum;
}

// Returns e^x for x <= 0 with a relative error of 2e-7, 0 for x < -87, and NaN for NaN.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // Products with the first are exact.
  constexpr float kRound = 0x1.8p23f;                                  // Adding it rounds to an integer.
  const float limited = x > -87.0f ? x : -87.0f;
  const float exponent = (limited * kLog2E + kRound) - kRound;
  const float r = (limited - exponent * kLn2High) - exponent * kLn2Low;
  // The coefficients are those of Cephes' expf.
  const float p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                             1.6666665459e-1f, 5.0000001201e-1f);
  const float power = p * (r * r) + r + 1.0f;
  const int32_t exponent_bits = static_cast<int32_t>(exponent) * (1 << 23);
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(power) + exponent_bits);
  return x == x ? (x < -87.0f ? 0.0f : result) : x;
}

// Returns x times the logistic function of y, 1 / (1 + e^-y).
inline float times_logistic(float x, float y) {
  const double e = exp_nonpositive(-std::fabs(y));
  return static_cast<float>((y < 0 ? x * e : x) / (1.0 + e));  // rounded once
}

inline float silu(float x) { return times_logistic(x, x); }

}  // namespace h100_diffusers_kernels
