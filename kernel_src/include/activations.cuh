// GELU and SiLU of a float. The fast form is for results that are rounded to 16 bits.
#pragma once

namespace h100_diffusers_kernels {

template <bool kFast>
struct Sigmoid {
  // x * sigmoid(y)
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
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
  }
};

struct GeluTanh {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
    const float u = kSqrtTwoOverPi * fmaf(0.044715f * x * x, x, x);
    // (1 + tanh(u)) / 2 = sigmoid(2u): an exponential and a division instead of a hyperbolic tangent.
    if constexpr (kFast) return Sigmoid<kFast>::times(x, 2.0f * u);
    return 0.5f * x * (1.0f + tanhf(u));
  }
};

}  // namespace h100_diffusers_kernels
