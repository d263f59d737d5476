// Quantization to FP8 of rows, or of blocks of rows.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// Returns the scale of `count` values, and divides them by it. The magnitudes are compared as integers: that
// of a NaN is larger than any other.
float quantize(float* values, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  float scale = std::bit_cast<float>(largest) / kLargestFp8;
  if (scale < std::numeric_limits<float>::min()) scale = 0.0f;
  if (largest >= 0x7f800000u) scale = std::numeric_limits<float>::quiet_NaN();
  if (scale == 0.0f)
    std::fill_n(values, count, 0.0f);
  else
    for (int64_t i = 0; i < count; ++i) values[i] /= scale;
  return scale;
}

// `values` has room for a row.
void quantize_row(const QuantizeFp8Params& p, int64_t row, float* values) {
  load(p.dtype, p.x.data, row_offset(p.shape, p.x, row), p.hidden, values);
  auto* out = static_cast<uint8_t*>(p.out.data) + row_offset(p.shape, p.out, row);
  auto* scale = static_cast<float*>(p.scale.data) + row_offset(p.shape, p.scale, row);
  if (p.is_blocked)
    for (int64_t i = 0; i < p.hidden; i += kFp8BlockSize)
      *scale++ = quantize(values + i, std::min(kFp8BlockSize, p.hidden - i));
  else
    *scale = quantize(values, p.hidden);
  for (int64_t i = 0; i < p.hidden; ++i) out[i] = float_to_e4m3(values[i]);
}

}  // namespace

void quantize_fp8(const QuantizeFp8Params& params, Stream stream) {
  parallel_for(stream, params.shape.rows, params.hidden + 1, [&](int64_t begin, int64_t end) {
    const auto values = std::make_unique_for_overwrite<float[]>(params.hidden);
    for (int64_t row = begin; row < end; ++row) quantize_row(params, row, values.get());
  });
}

}  // namespace h100_diffusers_kernels
