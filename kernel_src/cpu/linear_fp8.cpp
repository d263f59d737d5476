// The matrix product of FP8 tensors. An item is a tile of the result. Its operands are converted to float32
// in panels of a few features; the columns of the tile are the innermost dimension, so that each loop over
// them is the same arithmetic for all.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kTileRows = 64, kTileColumns = 64;
constexpr int64_t kPanel = 64;  // features
static_assert(kFp8BlockSize % kPanel == 0);

// Working memory of one thread. Missing columns of a tile are computed as zeros.
struct Scratch {
  float x[kPanel];
  float weight[kPanel][kTileColumns];
  float total[kTileRows][kTileColumns];
};

struct Tile {
  const LinearFp8Params& p;
  int64_t first_row, first_column;
  Scratch& s;

  int64_t rows() const { return std::min(kTileRows, p.rows - first_row); }
  int64_t columns() const { return std::min(kTileColumns, p.out_features - first_column); }

  void load_weight(int64_t feature, int64_t count) const {
    for (int64_t column = 0; column < kTileColumns; ++column) {
      float values[kPanel] = {};
      if (column < columns()) {
        const auto* bits =
            static_cast<const uint8_t*>(p.weight) + (first_column + column) * p.in_features + feature;
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

  void store_row(int64_t row) const {
    float bias[kTileColumns] = {};
    if (p.bias != nullptr)
      load(p.bias_is_float32 ? DType::kFloat32 : p.dtype, p.bias, first_column, columns(), bias);
    const double scale = p.x_is_blocked ? 1.0f : p.x_scale[first_row + row];
    float values[kTileColumns];
    for (int64_t column = 0; column < columns(); ++column) {
      const float weight_scale = p.weight_scale[p.weight_has_one_scale ? 0 : first_column + column];
      values[column] = static_cast<float>(s.total[row][column] * (scale * weight_scale) + bias[column]);
    }
    store(p.dtype, p.out, (first_row + row) * p.out_features + first_column, columns(), values);
  }

  void compute() const {
    std::fill_n(&s.total[0][0], kTileRows * kTileColumns, 0.0f);
    for (int64_t feature = 0; feature < p.in_features; feature += kPanel) {
      const int64_t count = std::min(kPanel, p.in_features - feature);
      load_weight(feature, count);
      for (int64_t row = 0; row < rows(); ++row) add_product(row, feature, count);
    }
    for (int64_t row = 0; row < rows(); ++row) store_row(row);
  }
};

}  // namespace

void linear_fp8(const LinearFp8Params& params, Stream stream) {
  const int64_t tiles_per_row = (params.out_features + kTileColumns - 1) / kTileColumns;
  const int64_t tiles = (params.rows + kTileRows - 1) / kTileRows * tiles_per_row;
  const int64_t products = kTileRows * kTileColumns * params.in_features;
  parallel_for(stream, tiles, products, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile / tiles_per_row * kTileRows, column = tile % tiles_per_row * kTileColumns;
      Tile{params, row, column, *scratch}.compute();
    }
  });
}

}  // namespace h100_diffusers_kernels
