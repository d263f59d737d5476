// Row norms, with an optional gated residual before and an optional modulation after the norm, and the gated
// residual alone.
//
// The float32 values of a row are kept between its passes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

enum class Norm { kRms, kLayer };

// A block of a row.
struct Block {
  const RowNormParams& params;
  int64_t row, column, count;

  int64_t offset(const RowOperand& operand) const { return row_offset(params.shape, operand, row) + column; }

  void read(const RowOperand& operand, float* values) const {
    load(params.dtype, operand.data, offset(operand), count, values);
  }

  void write(const RowOperand& operand, const float* values) const {
    store(params.dtype, operand.data, offset(operand), count, values);
  }

  // Returns false if the modulator is absent.
  bool read_modulator(const Modulator& modulator, float* values) const {
    if (modulator.data == nullptr) return false;
    const DType dtype = modulator.is_float32 ? DType::kFloat32 : params.dtype;
    load(dtype, modulator.data, offset(modulator), count, values);
    return true;
  }

  void multiply_by(const Modulator& factor, float* values) const {
    float factors[kBlock];
    if (!read_modulator(factor, factors)) return;
    for (int64_t i = 0; i < count; ++i) values[i] *= factors[i];
  }

  void add(const Modulator& term, float* values) const {
    float terms[kBlock];
    if (!read_modulator(term, terms)) return;
    for (int64_t i = 0; i < count; ++i) values[i] += terms[i];
  }

  // Reads the norm's input: x, or residual + gate * x, which is also written.
  void read_input(float* values) const {
    read(params.x, values);
    if (params.residual.data == nullptr) return;
    multiply_by(params.gate, values);
    float residual[kBlock];
    read(params.residual, residual);
    for (int64_t i = 0; i < count; ++i) values[i] += residual[i];
    write(params.residual_out, values);
  }

  // Writes normalized * (1 + scale) + shift.
  void write_output(const float* normalized, const Modulator& scale, const Modulator& shift,
                    const RowOperand& out) const {
    float values[kBlock], scales[kBlock];
    std::copy_n(normalized, count, values);
    if (read_modulator(scale, scales))
      for (int64_t i = 0; i < count; ++i) values[i] *= 1.0f + scales[i];
    add(shift, values);
    write(out, values);
  }
};

// `h` has room for a row.
void normalize_row(const RowNormParams& params, Norm norm, int64_t row, float* h) {
  const int64_t hidden = params.hidden;
  for_blocks(hidden, [&](int64_t column, int64_t count) {
    Block{params, row, column, count}.read_input(h + column);
  });
  const double mean = norm == Norm::kLayer ? sum(h, hidden) / static_cast<double>(hidden) : 0.0;
  const double variance = sum_of_squares(h, hidden, mean) / static_cast<double>(hidden);
  const double rstd = 1.0 / std::sqrt(variance + params.eps);
  for_blocks(hidden, [&](int64_t column, int64_t count) {
    const Block block{params, row, column, count};
    float values[kBlock];
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>((h[column + i] - mean) * rstd);
    block.multiply_by(params.weight, values);
    block.add(params.bias, values);
    block.write_output(values, params.scale, params.shift, params.out);
    if (params.second_out.data != nullptr)
      block.write_output(values, params.second_scale, params.second_shift, params.second_out);
  });
}

void launch(const RowNormParams& params, Norm norm, Stream stream) {
  parallel_for(stream, params.shape.rows, params.hidden, [&](int64_t begin, int64_t end) {
    const auto h = std::make_unique_for_overwrite<float[]>(params.hidden);
    for (int64_t row = begin; row < end; ++row) normalize_row(params, norm, row, h.get());
  });
}

}  // namespace

void rms_norm(const RowNormParams& params, Stream stream) { launch(params, Norm::kRms, stream); }

void layer_norm(const RowNormParams& params, Stream stream) { launch(params, Norm::kLayer, stream); }

void rms_norm_modulate(const RowNormParams& params, Stream stream) { launch(params, Norm::kRms, stream); }

void layer_norm_modulate(const RowNormParams& params, Stream stream) { launch(params, Norm::kLayer, stream); }

void layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch(params, Norm::kLayer, stream);
}

void gated_residual_rms_norm_modulate(const RowNormParams& params, Stream stream) {
  launch(params, Norm::kRms, stream);
}

void gated_residual_layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch(params, Norm::kLayer, stream);
}

void gated_residual_layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch(params, Norm::kLayer, stream);
}

void gated_residual(const RowNormParams& params, Stream stream) {
  parallel_for_blocks(stream, params.shape, params.hidden, [&](int64_t row, int64_t column, int64_t count) {
    float values[kBlock];
    Block{params, row, column, count}.read_input(values);
  });
}

}  // namespace h100_diffusers_kernels
