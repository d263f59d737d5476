// GELU (exact and tanh) and SiLU, and their gated forms, of inputs with or without a bias.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

void load_with_bias(DType dtype, const void* in, int64_t offset, const void* bias, int64_t column,
                    int64_t count, float* values) {
  load(dtype, in, offset + column, count, values);
  if (bias == nullptr) return;
  float terms[kBlock];
  load(dtype, bias, column, count, terms);
  for (int64_t i = 0; i < count; ++i) values[i] += terms[i];
}

// Computes up to kBlock elements of a row from `column` on.
template <float (*activation)(float)>
void compute(const ActivationParams& p, int64_t row, int64_t column, int64_t count, float* values) {
  const auto offset = [&](const RowOperand& operand) { return row_offset(p.shape, operand, row); };
  float x[kBlock];
  load_with_bias(p.dtype, p.x.data, offset(p.x), p.bias, column, count, x);
  if (p.gate.data == nullptr) {
    for (int64_t i = 0; i < count; ++i) values[i] = activation(x[i]);
  } else {
    float gate[kBlock];
    load_with_bias(p.dtype, p.gate.data, offset(p.gate), p.gate_bias, column, count, gate);
    for (int64_t i = 0; i < count; ++i) values[i] = x[i] * activation(gate[i]);
  }
}

template <float (*activation)(float)>
void launch_quantized(const ActivationParams& p, Stream stream) {
  parallel_for(stream, p.shape.rows, p.hidden + 1, [&](int64_t begin, int64_t end) {
    const auto values = std::make_unique_for_overwrite<float[]>(p.hidden);
    for (int64_t row = begin; row < end; ++row) {
      for_blocks(p.hidden, [&](int64_t column, int64_t count) {
        float block[kBlock];
        compute<activation>(p, row, column, count, block);
        std::copy_n(block, count, values.get() + column);
      });
      store_fp8_row(p.shape, row, values.get(), p.hidden, p.out, p.scale, p.is_blocked);
    }
  });
}

template <float (*activation)(float)>
void launch(const ActivationParams& p, Stream stream) {
  if (p.scale.data != nullptr) return launch_quantized<activation>(p, stream);
  parallel_for_blocks(stream, p.shape, p.hidden, [&](int64_t row, int64_t column, int64_t count) {
    float values[kBlock];
    compute<activation>(p, row, column, count, values);
    store(p.dtype, p.out.data, row_offset(p.shape, p.out, row) + column, count, values);
  });
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation)
    launch<gelu_tanh>(params, stream);
  else
    launch<gelu_erf>(params, stream);
}

void silu(const ActivationParams& params, Stream stream) { launch<silu>(params, stream); }

void geglu(const ActivationParams& params, Stream stream) { gelu(params, stream); }

void swiglu(const ActivationParams& params, Stream stream) { silu(params, stream); }

}  // namespace h100_diffusers_kernels
