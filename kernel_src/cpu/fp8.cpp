// FP8: quantization of rows or of blocks of rows.
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// `values` has room for a row.
void quantize_row(const QuantizeFp8Params& p, int64_t row, float* values) {
  load(p.dtype, p.x.data, row_offset(p.shape, p.x, row), p.hidden, values);
  store_fp8_row(p.shape, row, values, p.hidden, p.out, p.scale, p.is_blocked);
}

}  // namespace

void quantize_fp8(const QuantizeFp8Params& params, Stream stream) {
  parallel_for(stream, params.shape.rows, params.hidden + 1, [&](int64_t begin, int64_t end) {
    const auto values = std::make_unique_for_overwrite<float[]>(params.hidden);
    for (int64_t row = begin; row < end; ++row) quantize_row(params, row, values.get());
  });
}

// An item is a row. Sums of a block of features are scaled and added.
void lora_down_fp8(const LoraDownFp8Params& p, Stream stream) {
  const int64_t blocks = (p.in_features + kFp8BlockSize - 1) / kFp8BlockSize;
  parallel_for(stream, p.rows, p.rank * p.in_features, [&](int64_t begin, int64_t end) {
    const auto totals = std::make_unique_for_overwrite<float[]>(p.rank);
    for (int64_t row = begin; row < end; ++row) {
      std::fill_n(totals.get(), p.rank, 0.0f);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kFp8BlockSize, count = std::min(kFp8BlockSize, p.in_features - first);
        const auto* bits = static_cast<const uint8_t*>(p.x) + row * p.in_features + first;
        const float scale = p.x_scale[p.x_is_blocked ? row * blocks + block : row];
        float x[kFp8BlockSize], weights[kFp8BlockSize];
        for (int64_t i = 0; i < count; ++i) x[i] = e4m3_to_float(bits[i]);
        for (int64_t column = 0; column < p.rank; ++column) {
          load(p.dtype, p.down, column * p.in_features + first, count, weights);
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int64_t i = 0; i < count; ++i) sum += x[i] * weights[i];
          totals[column] += scale * sum;
        }
      }
      for (int64_t column = 0; column < p.rank; ++column) totals[column] *= p.alpha;
      store(p.dtype, p.out, row * p.rank, p.rank, totals.get());
    }
  });
}

}  // namespace h100_diffusers_kernels
