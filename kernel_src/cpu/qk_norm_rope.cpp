// Query and key are normalized (RMS norm across the heads or per head, LayerNorm per head, or none) and
// rotated in one pass.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rotation.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

int64_t out_offset(const HeadsOperand& operand, int64_t batch, int64_t seq, int64_t head) {
  const int64_t chunk = operand.out_chunk_heads == 0 ? 0 : head / operand.out_chunk_heads;
  return head_offset(operand.out_strides, batch, seq, head) + chunk * operand.out_chunk_gap;
}

struct Token {
  const QkvNormRopeParams& p;
  int64_t batch, seq;
  const HeadScratch& scratch;

  // Computes the norm's factor for each head. A LayerNorm computes it with its mean.
  void compute_rstd(const HeadsOperand& operand, float* rstd) const {
    if (p.norm == NormScope::kNone || p.norm == NormScope::kLayerPerHead) {
      std::fill_n(rstd, operand.heads, 1.0f);
      return;
    }
    double total = 0;
    for (int64_t head = 0; head < operand.heads; ++head) {
      load(p.dtype, operand.in, head_offset(operand.in_strides, batch, seq, head), p.head_dim,
           scratch.values);
      const double squares = sum_of_squares(scratch.values, p.head_dim);
      rstd[head] = rstd_of(squares, p.head_dim);
      total += squares;
    }
    if (p.norm == NormScope::kAcrossHeads)
      std::fill_n(rstd, operand.heads, rstd_of(total, operand.heads * p.head_dim));
  }

  float rstd_of(double squares, int64_t count) const {
    return static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(count) + p.eps));
  }

  void layer_norm(float* values) const {
    const double mean = sum(values, p.head_dim) / static_cast<double>(p.head_dim);
    const float rstd = rstd_of(sum_of_squares(values, p.head_dim, mean), p.head_dim);
    for (int64_t i = 0; i < p.head_dim; ++i) values[i] = static_cast<float>(values[i] - mean) * rstd;
  }

  void compute_tables(int64_t head) const {
    const float* coordinates =
        p.coordinates + batch * p.coordinate_strides[0] + seq * p.coordinate_strides[1];
    const int64_t half = p.head_dim / 2;
    const bool is_interleaved = p.layout == RopeLayout::kInterleaved;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t pair = head * half + i - p.identity_pairs;
      const float angle = pair < 0 ? 0.0f : p.frequencies[pair / p.axes] * coordinates[pair % p.axes];
      const int64_t a = is_interleaved ? 2 * i : i, b = is_interleaved ? a + 1 : i + half;
      scratch.cosine[a] = scratch.cosine[b] = std::cos(angle);
      scratch.sine[a] = scratch.sine[b] = std::sin(angle);
    }
  }

  void process_head(const HeadsOperand& operand, bool weight_is_float32, const Bias& bias, int64_t head,
                    float rstd, bool is_rotated) const {
    float *values = scratch.values, *weight = scratch.operand;
    load(p.dtype, operand.in, head_offset(operand.in_strides, batch, seq, head), p.head_dim, values);
    if (p.norm == NormScope::kLayerPerHead) layer_norm(values);
    for (int64_t i = 0; i < p.head_dim; ++i) values[i] *= rstd;
    if (operand.weight != nullptr) {
      load(weight_is_float32 ? DType::kFloat32 : p.dtype, operand.weight,
           p.norm == NormScope::kAcrossHeads ? head * p.head_dim : 0, p.head_dim, weight);
      for (int64_t i = 0; i < p.head_dim; ++i) values[i] *= weight[i];
    }
    if (bias.values != nullptr) {
      load(bias.is_float32 ? DType::kFloat32 : p.dtype, bias.values, 0, p.head_dim, weight);
      for (int64_t i = 0; i < p.head_dim; ++i) values[i] += weight[i];
    }
    if (is_rotated) rotate(p.layout, p.head_dim, scratch);
    store(p.dtype, operand.out, out_offset(operand, batch, seq, head), p.head_dim, values);
  }

  // The arrays have a value for each head.
  void process_query_and_key(float* q_rstd, float* k_rstd) const {
    compute_rstd(p.q, q_rstd);
    compute_rstd(p.k, k_rstd);
    const bool has_tables = p.tables.cos != nullptr, has_coordinates = p.coordinates != nullptr;
    const bool is_rotated = has_tables || has_coordinates;
    for (int64_t head = 0; head < std::max(p.q.heads, p.k.heads); ++head) {
      if (has_tables && (head == 0 || heads_differ(p.tables)))
        load_tables(p, p.tables, batch, seq, head, scratch);
      if (has_coordinates) compute_tables(head);
      if (head < p.q.heads)
        process_head(p.q, p.q_weight_is_float32, p.q_bias, head, q_rstd[head], is_rotated);
      if (head < p.k.heads)
        process_head(p.k, p.k_weight_is_float32, p.k_bias, head, k_rstd[head], is_rotated);
    }
  }

  void copy_value() const {
    const int64_t size = bytes_of(p.dtype);
    for (int64_t head = 0; head < p.v.heads; ++head)
      std::memmove(static_cast<char*>(p.v.out) + out_offset(p.v, batch, seq, head) * size,
                   static_cast<const char*>(p.v.in) + head_offset(p.v.in_strides, batch, seq, head) * size,
                   p.head_dim * size);
  }
};

}  // namespace

// The key and the value have no heads where they are absent.
void qk_norm_rope(const QkvNormRopeParams& params, Stream stream) {
  const int64_t heads = params.q.heads + params.k.heads + params.v.heads;
  parallel_for(stream, params.batch * params.seq, heads * params.head_dim, [&](int64_t begin, int64_t end) {
    const HeadScratch scratch(params.head_dim);
    const auto rstd = std::make_unique_for_overwrite<float[]>(params.q.heads + params.k.heads);
    for (int64_t i = begin; i < end; ++i) {
      const Token token{params, i / params.seq, i % params.seq, scratch};
      token.process_query_and_key(rstd.get(), rstd.get() + params.q.heads);
      token.copy_value();
    }
  });
}

}  // namespace h100_diffusers_kernels
