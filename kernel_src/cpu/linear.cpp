// Linear layers of FP8 or 16-bit operands, with a low-rank term. An item is a tile of the result. Its
// operands are converted to float32 in panels of a few features; the columns of the tile are the innermost
// dimension, so that each loop over them is the same arithmetic for all.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kTileRows = 64, kTileColumns = 64;
constexpr int64_t kPanel = 64;  // features
static_assert(kFp8BlockSize % kPanel == 0 && kFp8BlockSize % kTileColumns == 0);

using TileSums = float[kTileRows][kTileColumns];

// Working memory of one thread. Missing columns of a tile are computed as zeros.
struct Scratch {
  float x[kPanel];
  float weight[kPanel][kTileColumns];
  TileSums products;
  TileSums low_rank;
};

// Rows of an operand.
struct Matrix {
  const void* data;
  int64_t stride;
  bool is_fp8;
  DType dtype;  // if it is not FP8

  void load_row(int64_t row, int64_t column, int64_t count, float* values) const {
    const int64_t offset = row * stride + column;
    if (!is_fp8) return load(dtype, data, offset, count, values);
    const auto* bits = static_cast<const uint8_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) values[i] = e4m3_to_float(bits[i]);
  }
};

struct Tile {
  const LinearParams& p;
  const LinearLayer& layer;
  int64_t first_row, first_column;
  Scratch& s;

  int64_t rows() const { return std::min(kTileRows, p.rows - first_row); }
  int64_t columns() const { return std::min(kTileColumns, layer.out_features - first_column); }
  bool is_fp8() const { return p.x_scale != nullptr; }

  void load_weight(const Matrix& weight, int64_t feature, int64_t count) const {
    for (int64_t column = 0; column < kTileColumns; ++column) {
      float values[kPanel] = {};
      if (column < columns()) weight.load_row(first_column + column, feature, count, values);
      for (int64_t i = 0; i < count; ++i) s.weight[i][column] = values[i];
    }
  }

  // Adds the product of a row and the panel of the weight, times the scale, to the row's total.
  void add_product(const Matrix& x, int64_t row, int64_t feature, int64_t count, float scale,
                   float (&total)[kTileColumns]) const {
    x.load_row(first_row + row, feature, count, s.x);
    float sums[kTileColumns] = {};
    for (int64_t i = 0; i < count; ++i)
      for (int64_t column = 0; column < kTileColumns; ++column) sums[column] += s.x[i] * s.weight[i][column];
    for (int64_t column = 0; column < kTileColumns; ++column) total[column] += scale * sums[column];
  }

  float block_scale(int64_t row, int64_t feature) const {
    const int64_t blocks = (p.in_features + kFp8BlockSize - 1) / kFp8BlockSize;
    return p.x_scale[(first_row + row) * blocks + feature / kFp8BlockSize];
  }

  // Adds the product to the totals.
  template <typename Scale>
  void multiply(const Matrix& x, const Matrix& weight, int64_t features, TileSums& totals,
                const Scale& scale) const {
    for (int64_t feature = 0; feature < features; feature += kPanel) {
      const int64_t count = std::min(kPanel, features - feature);
      load_weight(weight, feature, count);
      for (int64_t row = 0; row < rows(); ++row)
        add_product(x, row, feature, count, scale(row, feature), totals[row]);
    }
  }

  void multiply() const {
    const auto one = [](int64_t, int64_t) { return 1.0f; };
    for (TileSums* sums : {&s.products, &s.low_rank})
      std::fill_n(&(*sums)[0][0], kTileRows * kTileColumns, 0.0f);
    const Matrix x{p.x, p.in_features, is_fp8(), p.dtype};
    const Matrix weight{layer.weight, p.in_features, is_fp8(), p.dtype};
    if (p.x_is_blocked)
      multiply(x, weight, p.in_features, s.products,
               [&](int64_t row, int64_t feature) { return block_scale(row, feature); });
    else
      multiply(x, weight, p.in_features, s.products, one);
    for (const LowRankUp& up : std::span(layer.ups).first(static_cast<size_t>(layer.up_count))) {
      const void* low = static_cast<const uint16_t*>(layer.low) + up.low_column;
      multiply(Matrix{low, layer.low_stride, false, p.low_dtype},
               Matrix{up.data, up.rank, false, p.low_dtype}, up.rank, s.low_rank, one);
    }
  }

  // Writes columns() values of a row: with scales, low-rank term and bias.
  void finish_row(int64_t row, float* values) const {
    float bias[kTileColumns] = {};
    if (layer.bias != nullptr) load(layer.bias_dtype, layer.bias, first_column, columns(), bias);
    const double scale = is_fp8() && !p.x_is_blocked ? p.x_scale[first_row + row] : 1.0f;
    for (int64_t column = 0; column < columns(); ++column) {
      const float weight_scale =
          is_fp8() ? layer.scale[layer.has_one_scale ? 0 : first_column + column] : 1.0f;
      values[column] = static_cast<float>(s.products[row][column] * (scale * weight_scale) +
                                          s.low_rank[row][column] + bias[column]);
    }
  }
};

// Calls body(row, column, scratch) for each tile of this many columns.
template <typename Body>
void for_tiles(const LinearParams& p, const LinearLayer& layer, int64_t columns, Stream stream,
               const Body& body) {
  const int64_t tiles_per_row = (layer.out_features + columns - 1) / columns;
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows * tiles_per_row;
  parallel_for(stream, tiles, kTileRows * columns * (p.in_features + layer.rank),
               [&](int64_t begin, int64_t end) {
                 const auto scratch = std::make_unique_for_overwrite<Scratch>();
                 for (int64_t tile = begin; tile < end; ++tile)
                   body(tile / tiles_per_row * kTileRows, tile % tiles_per_row * columns, *scratch);
               });
}

template <float (*activation)(float)>
void launch_quantized(const LinearParams& params, Stream stream) {
  const LinearLayer& layer = params.layers[0];
  for_tiles(params, layer, kFp8BlockSize, stream, [&](int64_t row, int64_t column, Scratch& s) {
    const auto values = std::make_unique_for_overwrite<float[]>(kTileRows * kFp8BlockSize);
    const int64_t columns = std::min(kFp8BlockSize, layer.out_features - column);
    const int64_t rows = std::min(kTileRows, params.rows - row);
    for (int64_t i = 0; i < columns; i += kTileColumns) {
      const Tile tile{params, layer, row, column + i, s};
      tile.multiply();
      for (int64_t r = 0; r < rows; ++r) tile.finish_row(r, values.get() + r * kFp8BlockSize + i);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* block = values.get() + r * kFp8BlockSize;
      for (int64_t i = 0; i < columns; ++i) block[i] = activation(block[i]);
      auto* out = static_cast<uint8_t*>(layer.out) + (row + r) * layer.out_stride + column;
      params.out_scale[(row + r) * params.out_scale_stride + column / kFp8BlockSize] =
          store_fp8(block, columns, out);
    }
  });
}

// values = residual + gate * values
void add_residual(const LinearParams& p, int64_t row, int64_t column, int64_t count, float* values) {
  float residual[kTileColumns], gate[kTileColumns];
  std::fill_n(gate, kTileColumns, 1.0f);
  load(p.dtype, p.residual, row * p.residual_stride + column, count, residual);
  if (p.gate != nullptr)
    load(p.gate_is_float32 ? DType::kFloat32 : p.dtype, p.gate, row * p.gate_stride + column, count, gate);
  for (int64_t i = 0; i < count; ++i) values[i] = residual[i] + gate[i] * values[i];
}

// Stores the 16-bit results of all layers. finish(row, column, count, values) changes values before.
template <typename Finish>
void launch_rounded(const LinearParams& params, Stream stream, const Finish& finish) {
  for (int32_t i = 0; i < params.layer_count; ++i) {
    const LinearLayer& layer = params.layers[i];
    for_tiles(params, layer, kTileColumns, stream, [&](int64_t row, int64_t column, Scratch& s) {
      const Tile tile{params, layer, row, column, s};
      tile.multiply();
      for (int64_t r = 0; r < tile.rows(); ++r) {
        float values[kTileColumns];
        tile.finish_row(r, values);
        finish(row + r, column, tile.columns(), values);
        store(params.dtype, layer.out, (row + r) * layer.out_stride + column, tile.columns(), values);
      }
    });
  }
}

}  // namespace

void linear_fp8(const LinearParams& params, Stream stream) {
  launch_rounded(params, stream, [](int64_t, int64_t, int64_t, float*) {});
}

void linear_gated_residual_fp8(const LinearParams& params, Stream stream) {
  launch_rounded(params, stream, [&](int64_t row, int64_t column, int64_t count, float* values) {
    add_residual(params, row, column, count, values);
  });
}

void linear_gelu_fp8(const LinearParams& params, Stream stream) {
  if (params.gelu == Gelu::kTanh)
    launch_quantized<gelu_tanh>(params, stream);
  else
    launch_quantized<gelu_erf>(params, stream);
}

void linears_lora(const LinearParams& params, Stream stream) {
  launch_rounded(params, stream, [&](int64_t, int64_t, int64_t count, float* values) {
    if (params.gelu == Gelu::kErf)
      for (int64_t i = 0; i < count; ++i) values[i] = gelu_erf(values[i]);
    if (params.gelu == Gelu::kTanh)
      for (int64_t i = 0; i < count; ++i) values[i] = gelu_tanh(values[i]);
  });
}

}  // namespace h100_diffusers_kernels
