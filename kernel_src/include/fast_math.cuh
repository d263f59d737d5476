// Approximations that are exact beside a rounding to 16 bits.
#pragma once

namespace h100_diffusers_kernels {

// 2^x, relative error 2^-22; 0 where the result would be below the normal numbers.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x with a relative error of 2^-23 at most; of numbers below 2^-126 infinity.
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace h100_diffusers_kernels
