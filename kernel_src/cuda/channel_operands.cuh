// Weights, biases and modulations of channels: absent, of the dtype of x, or float32.
#pragma once

#include <cstdint>

#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

template <typename T>
__device__ __forceinline__ float value_of(const Modulator& operand, int64_t index, float otherwise) {
  if (operand.data == nullptr) return otherwise;
  if (operand.is_float32) return static_cast<const float*>(operand.data)[index];
  return to_float(static_cast<const T*>(operand.data)[index]);
}

// Loads value_of for kSize consecutive indices, with one branch for all: loads between branches would wait
// for each other.
template <typename T, int kSize>
__device__ __forceinline__ void load_values(const Modulator& operand, int64_t index, bool is_aligned,
                                            float otherwise, float (&values)[kSize]) {
  if (operand.data != nullptr && is_aligned) {
    if (operand.is_float32)
      load_floats(static_cast<const float*>(operand.data) + index, values);
    else
      load_floats(static_cast<const T*>(operand.data) + index, values);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = value_of<T>(operand, index + j, otherwise);
  }
}

}  // namespace h100_diffusers_kernels
