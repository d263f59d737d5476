// Approximations whose errors are negligible if the result is rounded to 16 bits.
#pragma once

namespace h100_diffusers_kernels {

// Returns 2^x with a relative error of 2^-22, and 0 where the result would be below the normal numbers.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns 1 / x with a relative error of at most 2^-23, and infinity for numbers below 2^-126.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Returns tanh(x) with a relative error of at most 2^-11, by one instruction.
__device__ __forceinline__ float fast_tanh(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The logistic function as a factor. kFast is for results that are rounded to 16 bits.
template <bool kFast>
struct Sigmoid {
  // Returns x * sigmoid(y).
  __device__ __forceinline__ static float times(float x, float y) {
    if constexpr (kFast) return __fdividef(x, 1.0f + __expf(-y));
    return x / (1.0f + expf(-y));
  }
};

}  // namespace h100_diffusers_kernels
