// SiLU is taken of vectors in two steps, which activation.cpp explains.
#pragma once

#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {

// F is the logistic function, 1 / (1 + exp(-x)).
template <typename T>
struct Silu {
  // Returns 1 + exp(-x), which is infinite for x = -88.9 and 1 for x = 80. Half of it, with exp(-x) / 2 =
  // scale * (1 + excess), is always finite, and is rounded once.
  template <int n>
  ALWAYS_INLINE static Floats<n> first_step(const Floats<n>& x) {
    const Floats<n> limited = limit_negative<n>(limit_positive<n>(x, 80.0f), -88.9f);
    const SplitExponent<n> split = split_exponent<n, 1>(limited, broadcast<n>(-kLog2E), -kLog2ELow);
    const Floats<n> excess = exp2_slope<n, kExp2Degree<T>>(split.fraction) * split.fraction;
    const Floats<n> scale = as_floats<n>(as_ints<n>(broadcast<n>(1.0f)) + split.integer_bits);
    const Floats<n> half = scale * excess + (scale + 0.5f);
    return half + half;
  }

  template <int n>
  ALWAYS_INLINE static Floats<n> second_step(const Floats<n>& x, const Floats<n>& divisor) {
    return x / divisor;
  }
};

}  // namespace h100_diffusers_kernels
