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

// Rounded once: the C library's float version is less accurate than PyTorch's.
float tanh_of(float value) { return static_cast<float>(std::tanh(static_cast<double>(value))); }

// A block of a row.
struct Block {
  const RowNormParams& params;
  int64_t row, column, count;

  int64_t offset(const RowOperand& operand) const { return row_offset(params.shape, operand, row) + column; }

  void read(const RowOperand& operand, float* values) const {
    load(params.dtype, operand.data, offset(operand), count, values);
  }

  DType residual_dtype() const { return params.has_float32_residual ? DType::kFloat32 : params.dtype; }

  void write(const RowOperand& operand, const float* values) const {
    store(params.dtype, operand.data, offset(operand), count, values);
  }

  // Returns false if the modulator is absent.
  bool read_modulator(const Modulator& modulator, float* values) const {
    if (modulator.data == nullptr) return false;
    const DType dtype = modulator.is_float32 ? DType::kFloat32 : params.dtype;
    load(dtype, modulator.data, modulator_offset(modulator), count, values);
    return true;
  }

  int64_t modulator_offset(const Modulator& modulator) const {
    const RowOperand& index = params.index;
    if (index.data == nullptr) return offset(modulator);
    const int32_t given = static_cast<const int32_t*>(index.data)[row_offset(params.shape, index, row)];
    return std::clamp(given, 0, params.table_rows - 1) * modulator.strides[0] + column;
  }

  // Reads the sum of both. Returns false if both are absent.
  bool read_sum(const Modulator& modulator, const Modulator& table_row, float* values) const {
    float terms[kBlock];
    const bool is_given = read_modulator(modulator, values);
    if (!read_modulator(table_row, terms)) return is_given;
    for (int64_t i = 0; i < count; ++i) values[i] = is_given ? values[i] + terms[i] : terms[i];
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

  // Reads x, or x + addend.
  void read_x(float* values) const {
    read(params.x, values);
    if (params.addend.data == nullptr) return;
    float terms[kBlock];
    read(params.addend, terms);
    for (int64_t i = 0; i < count; ++i) values[i] += terms[i];
  }

  // Reads the norm's input: x, or residual + gate * x, which is also written. x is multiplied by x_rstd.
  void read_input(double x_rstd, float* values) const {
    read_x(values);
    if (params.residual.data == nullptr) return;
    if (params.normalizes_x) {
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(values[i] * x_rstd);
      multiply_by(params.x_weight, values);
    }
    float gates[kBlock];
    if (read_sum(params.gate, params.gate_row, gates))
      for (int64_t i = 0; i < count; ++i) values[i] *= params.has_tanh_gate ? tanh_of(gates[i]) : gates[i];
    float residual[kBlock];
    load(residual_dtype(), params.residual.data, offset(params.residual), count, residual);
    for (int64_t i = 0; i < count; ++i) values[i] += residual[i];
    store(residual_dtype(), params.residual_out.data, offset(params.residual_out), count, values);
  }

  // Computes values * (1 + scale) + shift.
  void modulate(const Modulator& scale, const Modulator& scale_row, const Modulator& shift,
                const Modulator& shift_row, float* values) const {
    float terms[kBlock];
    if (read_sum(scale, scale_row, terms))
      for (int64_t i = 0; i < count; ++i) values[i] *= 1.0f + terms[i];
    if (read_sum(shift, shift_row, terms))
      for (int64_t i = 0; i < count; ++i) values[i] += terms[i];
  }
};

// Returns 1 / sqrt(mean(x^2) + x_eps) of a row, or 1 if x is not normalized. `x` has room for a row.
double x_rstd_of(const RowNormParams& params, int64_t row, float* x) {
  if (!params.normalizes_x) return 1.0;
  const int64_t hidden = params.hidden;
  for_blocks(hidden,
             [&](int64_t column, int64_t count) { Block{params, row, column, count}.read_x(x + column); });
  return 1.0 / std::sqrt(sum_of_squares(x, hidden, 0.0) / static_cast<double>(hidden) + params.x_eps);
}

// `h` has room for a row.
void normalize_row(const RowNormParams& params, Norm norm, int64_t row, float* h) {
  const int64_t hidden = params.hidden;
  const double x_rstd = x_rstd_of(params, row, h);
  for_blocks(hidden, [&](int64_t column, int64_t count) {
    Block{params, row, column, count}.read_input(x_rstd, h + column);
  });
  const double mean = norm == Norm::kLayer ? sum(h, hidden) / static_cast<double>(hidden) : 0.0;
  const double variance = sum_of_squares(h, hidden, mean) / static_cast<double>(hidden);
  const double rstd = 1.0 / std::sqrt(variance + params.eps);
  for_blocks(hidden, [&](int64_t column, int64_t count) {
    const Block block{params, row, column, count};
    float values[kBlock], second_values[kBlock];
    for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>((h[column + i] - mean) * rstd);
    block.multiply_by(params.weight, values);
    block.add(params.bias, values);
    if (params.second_out.data != nullptr) {
      std::copy_n(values, count, second_values);
      block.modulate(params.second_scale, {}, params.second_shift, {}, second_values);
      block.write(params.second_out, second_values);
    }
    block.modulate(params.scale, params.scale_row, params.shift, params.shift_row, values);
    if (params.row_scale.data == nullptr)
      block.write(params.out, values);
    else
      std::copy_n(values, count, h + column);
  });
  if (params.row_scale.data != nullptr)
    store_fp8_row(params.shape, row, h, params.hidden, params.out, params.row_scale);
}

void launch(const RowNormParams& params, Norm norm, Stream stream) {
  // Rows without elements have a scale, too.
  const int64_t row_size =
      params.row_scale.data == nullptr ? params.hidden : std::max<int64_t>(params.hidden, 1);
  parallel_for(stream, params.shape.rows, row_size, [&](int64_t begin, int64_t end) {
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
  if (params.normalizes_x) {
    parallel_for(stream, params.shape.rows, params.hidden, [&](int64_t begin, int64_t end) {
      const auto x = std::make_unique_for_overwrite<float[]>(params.hidden);
      for (int64_t row = begin; row < end; ++row) {
        const double x_rstd = x_rstd_of(params, row, x.get());
        for_blocks(params.hidden, [&](int64_t column, int64_t count) {
          Block{params, row, column, count}.read_input(x_rstd, x.get() + column);
        });
      }
    });
    return;
  }
  parallel_for_blocks(stream, params.shape, params.hidden, [&](int64_t row, int64_t column, int64_t count) {
    float values[kBlock];
    Block{params, row, column, count}.read_input(1.0, values);
  });
}

}  // namespace h100_diffusers_kernels
