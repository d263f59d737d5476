// GELU and SiLU take a float and return one. Their fast forms are for results that are rounded to 16 bits.
#pragma once

#include <cfloat>

#include "fast_math.cuh"

namespace h100_diffusers_kernels {

template <bool kFast>
struct Sigmoid {
  // Returns x * sigmoid(y).
  __device__ __forceinline__ static float times(float x, float y) {
    if constexpr (kFast) return __fdividef(x, 1.0f + __expf(-y));
    return x / (1.0f + expf(-y));
  }
};

struct Silu {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    return Sigmoid<kFast>::times(x, x);
  }
};

struct GeluErf {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    if constexpr (!kFast) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    // GELU is max(x, 0) - |x| * tail, where the tail of the normal distribution beyond a = |x| is taken as
    // 2^(a * polynomial(a) - 1). The polynomial is a fit of log2(erfc(a / sqrt(2))) / a; the tail's relative
    // error is 2e-6 for a < 1, 1e-5 for a = 4. With erff the arithmetic takes longer than the memory (NOTES,
    // "Activations").
    const float a = fabsf(x);
    float slope = -2.69856475e-08f;
    for (const float coefficient : {-8.29682847e-07f, 4.87766993e-05f, -0.000853764534f, 0.00827150792f,
                                    -0.0535870492f, -0.458741397f, -1.15117264f})
      slope = fmaf(slope, a, coefficient);
    const float tail = fast_exp2(fmaf(a, slope, -1.0f));
    // For x = infinity the product must be 0; for -infinity it is NaN, as in PyTorch.
    return fmaf(-fabsf(fminf(x, FLT_MAX)), tail, fmaxf(x, 0.0f));
  }
};

struct GeluTanh {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
    const float u = kSqrtTwoOverPi * fmaf(0.044715f * x * x, x, x);
    // (1 + tanh(u)) / 2 is sigmoid(2u), which takes an exponential and a division, and no hyperbolic tangent.
    if constexpr (kFast) return Sigmoid<kFast>::times(x, 2.0f * u);
    return 0.5f * x * (1.0f + tanhf(u));
  }
};

}  // namespace h100_diffusers_kernels
