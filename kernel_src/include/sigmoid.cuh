// The logistic function as a factor. kFast is for results that are rounded to 16 bits.
#pragma once

namespace h100_diffusers_kernels {

template <bool kFast>
struct Sigmoid {
  // Returns x * sigmoid(y).
  __device__ __forceinline__ static float times(float x, float y) {
    if constexpr (kFast) return __fdividef(x, 1.0f + __expf(-y));
    return x / (1.0f + expf(-y));
  }
};

}  // namespace h100_diffusers_kernels
