// Elements in memory are float32, float16 or bfloat16. Kernels convert blocks of them to float32, compute,
// and convert the results. The blocks are small arrays of the kernel's own, so that the compiler knows that
// they do not overlap and vectorizes the loops, even where the output is the input.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "params.h"

namespace h100_diffusers_kernels {

constexpr int64_t kBlock = 512;

// Integer arithmetic, since compilers vectorize it for every processor and _Float16 for few.
inline float float16_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  // The exponent bias differs by 112. The product also normalizes subnormal numbers.
  const auto finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>((magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite) | sign);
}

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Rounds to nearest even. NaN becomes a quiet NaN.
inline uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves the subnormal number, rounded, in the lowest bits.
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  int32_t rounded = magnitude < (113 << 23) ? subnormal : normal;
  rounded = magnitude >= (143 << 23) ? 0x7c00 : rounded;
  rounded = magnitude > 0x7f800000 ? 0x7e00 : rounded;
  return static_cast<uint16_t>(rounded | ((bits >> 16) & 0x8000));
}

inline uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>((is_nan ? 0x7fc00000 : rounded) >> 16);
}

inline float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  // The exponent bias differs by 120. The product also normalizes subnormal numbers.
  const auto finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
  return std::bit_cast<float>((magnitude == 0x7fu ? 0x7fc00000u : finite) | (bits & 0x80u) << 24);
}

// Rounds to nearest even, at most to the largest E4M3 number, 448. NaN stays NaN.
inline uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t normal = (magnitude - (120 << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  // 2^14 has a spacing of 2^-9, which is that of subnormal numbers: the sum leaves them in its lowest bits.
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000;
  int32_t rounded = magnitude < (121 << 23) ? subnormal : normal;
  rounded = magnitude >= 0x43e00000 ? 0x7e : rounded;
  rounded = magnitude > 0x7f800000 ? 0x7f : rounded;
  return static_cast<uint8_t>(rounded | ((bits >> 24) & 0x80));
}

// Returns the bits of the largest magnitude, or `largest` if they are larger. As integers, so that NaN is the
// largest.
inline uint32_t largest_magnitude(const float* values, int64_t count, uint32_t largest = 0) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return largest;
}

// Returns the scale of values with this largest magnitude: 0 if it would be subnormal, NaN if a value is not
// finite.
inline float scale_of(uint32_t largest, float largest_code) {
  if (largest >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
  const float scale = std::bit_cast<float>(largest) / largest_code;
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// Stores values over their scale. Returns the scale.
inline float store_fp8(const float* values, int64_t count, uint8_t* out) {
  const float scale = scale_of(largest_magnitude(values, count), kLargestFp8);
  if (scale == 0.0f)
    std::fill_n(out, count, uint8_t{0});
  else
    for (int64_t i = 0; i < count; ++i) out[i] = float_to_e4m3(values[i] / scale);
  return scale;
}

// Loads elements data[offset] to data[offset + count - 1].
inline void load(DType dtype, const void* data, int64_t offset, int64_t count, float* values) {
  if (dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(data) + offset, count, values);
    return;
  }
  const uint16_t* bits = static_cast<const uint16_t*>(data) + offset;
  if (dtype == DType::kFloat16)
    for (int64_t i = 0; i < count; ++i) values[i] = float16_to_float(bits[i]);
  else
    for (int64_t i = 0; i < count; ++i) values[i] = bfloat16_to_float(bits[i]);
}

inline void store(DType dtype, void* data, int64_t offset, int64_t count, const float* values) {
  if (dtype == DType::kFloat32) {
    std::copy_n(values, count, static_cast<float*>(data) + offset);
    return;
  }
  uint16_t* bits = static_cast<uint16_t*>(data) + offset;
  if (dtype == DType::kFloat16)
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_float16(values[i]);
  else
    for (int64_t i = 0; i < count; ++i) bits[i] = float_to_bfloat16(values[i]);
}

}  // namespace h100_diffusers_kernels
