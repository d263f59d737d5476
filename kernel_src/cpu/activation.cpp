// GELU (exact and tanh) and SiLU, and their gated forms, of inputs with or without a bias.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// Returns x times the normal distribution function of x, whose tail is erfc(|x| / sqrt(2)) / 2.
float gelu_erf(float x) {
  constexpr float kLn2 = 0.693147181f;
  const float a = std::fabs(x);
  // A minimax fit of log2(erfc(a / sqrt(2))) / a. The relative error of the tail is 3e-8 for a < 1, 2e-7 for
  // a = 4, 8e-5 for a = 8.
  const float slope = polynomial(a, -8.23667384e-11f, 4.66212358e-09f, -1.1562156e-07f, 1.65379083e-06f,
                                 -1.50252699e-05f, 8.8209963e-05f, -0.000297175109f, 6.47803699e-06f,
                                 0.00696322881f, -0.0524634048f, -0.45921126f, -1.1511054f);
  const float tail = 0.5f * exp_nonpositive(a * slope * kLn2);
  return x * (x < 0 ? tail : 1.0f - tail);
}

// (1 + tanh(u)) / 2 is the logistic function of 2u.
float gelu_tanh(float x) {
  constexpr float kScale = 1.59576912f;  // 2 * sqrt(2 / pi)
  return times_logistic(x, kScale * x * (0.044715f * x * x + 1.0f));
}

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
      store_fp8_row(p.shape, row, values.get(), p.hidden, p.out, p.scale);
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
