// Activation functions, and the values that they are applied to.
#pragma once

#include <cfloat>

#include "fast_math.cuh"
#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// kFast is for results that are rounded to 16 bits or fewer.

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
    // GELU is max(x, 0) - |x| * tail, where tail is the normal distribution's beyond a = |x|, approximated by
    // 2^(a * polynomial(a) - 1). The polynomial is a fit of log2(erfc(a / sqrt(2))) / a; the relative error
    // of the tail is 2e-6 for a < 1 and 1e-5 for a = 4. With erff arithmetic takes longer than memory
    // (notes/row_kernels.md, "Activations").
    const float a = fabsf(x);
    float slope = -2.69856475e-08f;
    for (const float coefficient : {-8.29682847e-07f, 4.87766993e-05f, -0.000853764534f, 0.00827150792f,
                                    -0.0535870492f, -0.458741397f, -1.15117264f})
      slope = fmaf(slope, a, coefficient);
    const float tail = fast_exp2(fmaf(a, slope, -1.0f));
    // FLT_MAX makes the product 0 for x = infinity. For -infinity the result is NaN, as in PyTorch.
    return fmaf(-fabsf(fminf(x, FLT_MAX)), tail, fmaxf(x, 0.0f));
  }
};

struct GeluTanh {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kSqrtTwoOverPi = 0.79788456080286536f, kCubic = 0.044715f;
    if constexpr (kFast) {
      // (1 + tanh(u)) / 2 is sigmoid(2u), which is cheaper than tanh. The constants turn x into -2u / ln(2).
      constexpr float kScale = -2.0f * 1.44269504f * kSqrtTwoOverPi;
      const float exponent = x * fmaf(kScale * kCubic, x * x, kScale);
      return x * fast_reciprocal(1.0f + fast_exp2(exponent));
    }
    const float u = kSqrtTwoOverPi * fmaf(kCubic * x * x, x, x);
    return 0.5f * x * (1.0f + tanhf(u));
  }
};

// For results in E4M3, which keeps 4 bits.
struct CoarseGeluTanh {
  template <bool kFast>
  __device__ __forceinline__ static float apply(float x) {
    constexpr float kSqrtTwoOverPi = 0.79788456080286536f, kCubic = 0.044715f;
    const float u = x * fmaf(kSqrtTwoOverPi * kCubic, x * x, kSqrtTwoOverPi), half = 0.5f * x;
    return fmaf(half, fast_tanh(u), half);
  }
};

// A pack of x and of its bias, if there is one.
template <typename T, int kSize>
struct BiasedPack {
  Pack<T, kSize> value, bias;

  __device__ __forceinline__ void load(const T* x, const T* x_bias) {
    value.load(x);
    if (x_bias) bias.load(x_bias);
  }
  __device__ __forceinline__ void to_floats(float (&sum)[kSize], bool has_bias) const {
    value.to_floats(sum);
    if (has_bias) add(sum, bias);
  }
};

// Defined in quantize_fp8.cu: the launch of an activation with a quantized output.
template <class Activation, bool kIsGated>
void launch_quantized_activation(const char* operation, const ActivationParams& args, Stream stream);

}  // namespace h100_diffusers_kernels
