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

// Returns x times the normal distribution function of x, whose tail is erfc(|x| / sqrt(2)) / 2.
inline float gelu_erf(float x) {
  constexpr float kLn2 = 0.693147181f;
  const float a = std::fabs(x);
  // A minimax fit of log2(erfc(a / sqrt(2))) / a. The relative error of the tail is 3e-8 for a < 1, 2e-7 for
  // a = 4, 8e-5 for a = 8.
  const float slope = polynomial(a, -8.23667384e-11f, 4.66212358e-09f, -1.1562156e-07f, 1.65379083e-06f,
                                 -1.50252699e-05f, 8.8209963e-05f, -0.000297175109f, 6.47803699e-06f,
                                 0.00696322881f, -0.0524634048f, -0.45921126f, -1.1511054f);
  const float tail = 0.5f * exp_nonpositive(a * slope * kLn2);
  return x * (x < 0 ? tail : 1.0f - tail);
}

// (1 + tanh(u)) / 2 is the logistic function of 2u.
inline float gelu_tanh(float x) {
  constexpr float kScale = 1.59576912f;  // 2 * sqrt(2 / pi)
  return times_logistic(x, kScale * x * (0.044715f * x * x + 1.0f));
}

}  // namespace h100_diffusers_kernels
