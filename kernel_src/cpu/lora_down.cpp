// LoRA's first products: of the same rows and several narrow matrices.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

void load_x(const LoraDownParams& p, int64_t offset, int64_t count, float* values) {
  if (p.x_scale == nullptr) return load(p.dtype, p.x, offset, count, values);
  const auto* bits = static_cast<const uint8_t*>(p.x) + offset;
  for (int64_t i = 0; i < count; ++i) values[i] = e4m3_to_float(bits[i]);
}

// `totals` has room for a row of the result. Sums of a block of features are scaled and added.
void multiply_row(const LoraDownParams& p, int64_t row, float* totals) {
  const int64_t blocks = (p.in_features + kFp8BlockSize - 1) / kFp8BlockSize;
  std::fill_n(totals, p.columns, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kFp8BlockSize, count = std::min(kFp8BlockSize, p.in_features - first);
    const float x_scale =
        p.x_scale == nullptr ? 1.0f : p.x_scale[p.x_is_blocked ? row * blocks + block : row];
    float x[kFp8BlockSize], weights[kFp8BlockSize];
    load_x(p, row * p.in_features + first, count, x);
    float* columns = totals;
    for (int32_t i = 0; i < p.down_count; ++i) {
      const LoraDown& down = p.downs[i];
      for (int64_t column = 0; column < down.rows; ++column) {
        load(p.dtype, down.data, column * p.in_features + first, count, weights);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < count; ++k) sum += x[k] * weights[k];
        columns[column] += x_scale * sum;
      }
      columns += lora_columns(down.rows);
    }
  }
  float* columns = totals;
  for (int32_t i = 0; i < p.down_count; ++i) {
    const LoraDown& down = p.downs[i];
    for (int64_t column = 0; column < down.rows; ++column) columns[column] *= down.scale;
    columns += lora_columns(down.rows);
  }
}

}  // namespace

// An item is a row.
void lora_down(const LoraDownParams& params, Stream stream) {
  parallel_for(stream, params.rows, params.columns * params.in_features, [&](int64_t begin, int64_t end) {
    const auto totals = std::make_unique_for_overwrite<float[]>(params.columns);
    for (int64_t row = begin; row < end; ++row) {
      multiply_row(params, row, totals.get());
      store(params.dtype, params.out, row * params.columns, params.columns, totals.get());
    }
  });
}

}  // namespace h100_diffusers_kernels
