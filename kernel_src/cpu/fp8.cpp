// FP8: quantization of rows or of blocks of rows, and matrix products.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "functions.h"
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

// Matrix products of FP8 tensors. An item is a tile of the result. Its operands are converted to float32
// in panels of a few features; the columns of the tile are the innermost dimension, so that each loop over
// them is the same arithmetic for all.

namespace {

constexpr int64_t kTileRows = 64, kTileColumns = 64;
constexpr int64_t kPanel = 64;  // features
static_assert(kFp8BlockSize % kPanel == 0 && kFp8BlockSize % kTileColumns == 0);

// Working memory of one thread. Missing columns of a tile are computed as zeros.
struct Scratch {
  float x[kPanel];
  float weight[kPanel][kTileColumns];
  float total[kTileRows][kTileColumns];
};

struct Tile {
  const LinearFp8Params& p;
  const Fp8Weight& w;
  int64_t first_row, first_column;
  Scratch& s;

  int64_t rows() const { return std::min(kTileRows, p.rows - first_row); }
  int64_t columns() const { return std::min(kTileColumns, w.out_features - first_column); }

  void load_weight(int64_t feature, int64_t count) const {
    for (int64_t column = 0; column < kTileColumns; ++column) {
      float values[kPanel] = {};
      if (column < columns()) {
        const auto* bits =
            static_cast<const uint8_t*>(w.data) + (first_column + column) * p.in_features + feature;
        for (int64_t i = 0; i < count; ++i) values[i] = e4m3_to_float(bits[i]);
      }
      for (int64_t i = 0; i < count; ++i) s.weight[i][column] = values[i];
    }
  }

  // Adds the product of a row and the panel of the weight to the row's total.
  void add_product(int64_t row, int64_t feature, int64_t count) const {
    const auto* bits = static_cast<const uint8_t*>(p.x) + (first_row + row) * p.in_features + feature;
    for (int64_t i = 0; i < count; ++i) s.x[i] = e4m3_to_float(bits[i]);
    float sums[kTileColumns] = {};
    for (int64_t i = 0; i < count; ++i)
      for (int64_t column = 0; column < kTileColumns; ++column) sums[column] += s.x[i] * s.weight[i][column];
    const float scale = p.x_is_blocked ? block_scale(row, feature) : 1.0f;
    for (int64_t column = 0; column < kTileColumns; ++column) s.total[row][column] += scale * sums[column];
  }

  float block_scale(int64_t row, int64_t feature) const {
    const int64_t blocks = (p.in_features + kFp8BlockSize - 1) / kFp8BlockSize;
    return p.x_scale[(first_row + row) * blocks + feature / kFp8BlockSize];
  }

  // Writes columns() values of a row, with scales and bias.
  void finish_row(int64_t row, float* values) const {
    float bias[kTileColumns] = {};
    if (w.bias != nullptr) load(w.bias_dtype, w.bias, first_column, columns(), bias);
    const double scale = p.x_is_blocked ? 1.0f : p.x_scale[first_row + row];
    for (int64_t column = 0; column < columns(); ++column) {
      const float weight_scale = w.scale[w.has_one_scale ? 0 : first_column + column];
      values[column] = static_cast<float>(s.total[row][column] * (scale * weight_scale) + bias[column]);
    }
  }

  void multiply() const {
    std::fill_n(&s.total[0][0], kTileRows * kTileColumns, 0.0f);
    for (int64_t feature = 0; feature < p.in_features; feature += kPanel) {
      const int64_t count = std::min(kPanel, p.in_features - feature);
      load_weight(feature, count);
      for (int64_t row = 0; row < rows(); ++row) add_product(row, feature, count);
    }
  }
};

// Calls body(row, column, scratch) for each tile of this many columns.
template <typename Body>
void for_tiles(const LinearFp8Params& p, int64_t out_features, int64_t columns, Stream stream,
               const Body& body) {
  const int64_t tiles_per_row = (out_features + columns - 1) / columns;
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows * tiles_per_row;
  parallel_for(stream, tiles, kTileRows * columns * p.in_features, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (int64_t tile = begin; tile < end; ++tile)
      body(tile / tiles_per_row * kTileRows, tile % tiles_per_row * columns, *scratch);
  });
}

template <float (*activation)(float)>
void launch_quantized(const LinearFp8Params& params, Stream stream) {
  const Fp8Weight& weight = params.weights[0];
  for_tiles(params, weight.out_features, kFp8BlockSize, stream, [&](int64_t row, int64_t column, Scratch& s) {
    const auto values = std::make_unique_for_overwrite<float[]>(kTileRows * kFp8BlockSize);
    const int64_t columns = std::min(kFp8BlockSize, weight.out_features - column);
    const int64_t rows = std::min(kTileRows, params.rows - row);
    for (int64_t i = 0; i < columns; i += kTileColumns) {
      const Tile tile{params, weight, row, column + i, s};
      tile.multiply();
      for (int64_t r = 0; r < rows; ++r) tile.finish_row(r, values.get() + r * kFp8BlockSize + i);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* block = values.get() + r * kFp8BlockSize;
      for (int64_t i = 0; i < columns; ++i) block[i] = activation(block[i]);
      auto* out = static_cast<uint8_t*>(weight.out) + (row + r) * weight.out_stride + column;
      params.out_scale[(row + r) * params.out_scale_stride + column / kFp8BlockSize] =
          store_fp8(block, columns, out);
    }
  });
}

// values = residual + gate * values
void add_residual(const LinearFp8Params& p, int64_t row, int64_t column, int64_t count, float* values) {
  float residual[kTileColumns], gate[kTileColumns];
  std::fill_n(gate, kTileColumns, 1.0f);
  load(p.dtype, p.residual, row * p.residual_stride + column, count, residual);
  if (p.gate != nullptr)
    load(p.gate_is_float32 ? DType::kFloat32 : p.dtype, p.gate, row * p.gate_stride + column, count, gate);
  for (int64_t i = 0; i < count; ++i) values[i] = residual[i] + gate[i] * values[i];
}

}  // namespace

void linear_fp8(const LinearFp8Params& params, Stream stream) {
  for (int32_t i = 0; i < params.weight_count; ++i) {
    const Fp8Weight& weight = params.weights[i];
    for_tiles(
        params, weight.out_features, kTileColumns, stream, [&](int64_t row, int64_t column, Scratch& s) {
          const Tile tile{params, weight, row, column, s};
          tile.multiply();
          for (int64_t r = 0; r < tile.rows(); ++r) {
            float values[kTileColumns];
            tile.finish_row(r, values);
            if (params.residual != nullptr) add_residual(params, row + r, column, tile.columns(), values);
            store(params.dtype, weight.out, (row + r) * weight.out_stride + column, tile.columns(), values);
          }
        });
  }
}

void linear_gated_residual_fp8(const LinearFp8Params& params, Stream stream) { linear_fp8(params, stream); }

void linear_gelu_fp8(const LinearFp8Params& params, Stream stream) {
  if (params.tanh_approximation)
    launch_quantized<gelu_tanh>(params, stream);
  else
    launch_quantized<gelu_erf>(params, stream);
}

}  // namespace h100_diffusers_kernels
