// Attention with INT8 query and key and E4M3 value and probabilities. The workspace holds float32 tensors of
// the rounded query, key and value, times their scales, each (batch, heads, tokens, kColumns), and the keys'
// means (batch, key_heads, kColumns).
#include <algorithm>
#include <cstdint>

#include "attention_block.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kColumns = kMaxAttentionHeadDim;  // those beyond the head are 0

// Where the tensors begin, and the size, in floats. The query comes first.
struct Layout {
  int64_t key, value, mean, size;

  explicit Layout(const AttentionParams& p) {
    const int64_t keys = p.batch * p.key_heads * p.key_length * kColumns;
    key = p.batch * p.heads * p.query_length * kColumns;
    value = key + keys;
    mean = value + keys;
    size = mean + p.batch * p.key_heads * kColumns;
  }
};

// The rows of a tensor in the workspace.
AttentionOperand operand(const float* data, int64_t heads, int64_t length) {
  return {data, {heads * length * kColumns, kColumns, length * kColumns}};
}

// Multiplies a row by a Hadamard matrix, whose product with itself is kColumns times the identity.
void rotate(float* row) {
  for (int64_t step = 1; step < kColumns; step *= 2) {
    for (int64_t first = 0; first < kColumns; first += 2 * step) {
      for (int64_t i = first; i < first + step; ++i) {
        const float a = row[i], b = row[i + step];
        row[i] = a + b;
        row[i + step] = a - b;
      }
    }
  }
}

// Rounds a row to INT8, to nearest even, and multiplies it by its scale again.
void round_to_int8(float* row, float scale) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  for (int64_t i = 0; i < kColumns; ++i) {
    const float code = (row[i] / scale + kRound) - kRound;
    row[i] = scale == 0.0f ? 0.0f : code * scale;
  }
}

// The tokens of one batch entry and head.
struct Rows {
  float* values;  // (count, kColumns)
  int64_t count;

  float* row(int64_t token) const { return values + token * kColumns; }

  void load_from(const AttentionParams& p, const AttentionOperand& operand, int64_t batch,
                 int64_t head) const {
    std::fill_n(values, count * kColumns, 0.0f);
    for (int64_t token = 0; token < count; ++token)
      load(p.dtype, operand.data, operand.offset(batch, token, head), p.head_dim, row(token));
  }

  // The mean is rounded to the dtype.
  void subtract_mean(DType dtype, float* mean) const {
    double sums[kColumns] = {};
    for (int64_t token = 0; token < count; ++token)
      for (int64_t d = 0; d < kColumns; ++d) sums[d] += row(token)[d];
    for (int64_t d = 0; d < kColumns; ++d)
      mean[d] = count == 0 ? 0.0f : static_cast<float>(sums[d] / static_cast<double>(count));
    float rounded[kColumns];  // large enough for every dtype
    store(dtype, rounded, 0, kColumns, mean);
    load(dtype, rounded, 0, kColumns, mean);
    for (int64_t token = 0; token < count; ++token)
      for (int64_t d = 0; d < kColumns; ++d) row(token)[d] -= mean[d];
  }

  void round_queries() const {
    for (int64_t token = 0; token < count; ++token) {
      rotate(row(token));
      round_to_int8(row(token), scale_of(largest_magnitude(row(token), kColumns), kLargestInt8));
    }
  }

  void round_keys() const {
    constexpr int64_t kGroups = 4;
    const auto group = [](int64_t token) { return token % 8 / 2; };
    for (int64_t first = 0; first < count; first += kInt8KeyTile) {
      const int64_t end = std::min(first + kInt8KeyTile, count);
      uint32_t largest[kGroups] = {};
      for (int64_t token = first; token < end; ++token) {
        rotate(row(token));
        largest[group(token)] = largest_magnitude(row(token), kColumns, largest[group(token)]);
      }
      for (int64_t token = first; token < end; ++token)
        round_to_int8(row(token), scale_of(largest[group(token)], kLargestInt8));
    }
  }

  void round_values() const {
    uint32_t largest[kColumns] = {};
    for (int64_t token = 0; token < count; ++token)
      for (int64_t d = 0; d < kColumns; ++d) largest[d] = largest_magnitude(row(token) + d, 1, largest[d]);
    float scale[kColumns];
    for (int64_t d = 0; d < kColumns; ++d) scale[d] = scale_of(largest[d], kLargestFp8);
    for (int64_t token = 0; token < count; ++token) {
      float* values = row(token);
      for (int64_t d = 0; d < kColumns; ++d)
        values[d] = scale[d] == 0.0f ? 0.0f : e4m3_to_float(float_to_e4m3(values[d] / scale[d])) * scale[d];
    }
  }
};

// Adds to the logarithms what the mean adds to the scores.
void correct_lse(const AttentionParams& p, const float* means, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t head = row % p.heads, query = row / p.heads % p.query_length;
    const int64_t batch = row / p.heads / p.query_length;
    float values[kMaxAttentionHeadDim];
    load(p.dtype, p.q.data, p.q.offset(batch, query, head), p.head_dim, values);
    const float* mean = means + (batch * p.key_heads + head / (p.heads / p.key_heads)) * kColumns;
    float product = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) product += values[d] * mean[d];
    p.lse[row] += product * p.scale;
  }
}

}  // namespace

int64_t attention_int8_workspace_bytes(const AttentionParams& params) {
  return Layout(params).size * static_cast<int64_t>(sizeof(float));
}

void attention_int8(const AttentionParams& params, Stream stream) {
  const AttentionParams& p = params;
  const Layout layout(p);
  float* query = static_cast<float*>(p.workspace);
  float *keys = query + layout.key, *values = query + layout.value, *means = query + layout.mean;
  parallel_for(stream, p.batch * p.heads, p.query_length * kColumns, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const Rows rows{query + head * p.query_length * kColumns, p.query_length};
      rows.load_from(p, p.q, head / p.heads, head % p.heads);
      rows.round_queries();
    }
  });
  const int64_t per_head = p.key_length * kColumns;
  parallel_for(stream, p.batch * p.key_heads, 2 * per_head + 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const int64_t batch = head / p.key_heads, count = number_of_keys(p, batch);
      const Rows key{keys + head * per_head, count};
      key.load_from(p, p.k, batch, head % p.key_heads);
      key.subtract_mean(p.dtype, means + head * kColumns);
      key.round_keys();
      const Rows value{values + head * per_head, count};
      value.load_from(p, p.v, batch, head % p.key_heads);
      value.round_values();
    }
  });
  AttentionParams rounded = p;
  rounded.scale /= kColumns;  // of the rotations
  rounded.q = operand(query, p.heads, p.query_length);
  rounded.k = operand(keys, p.key_heads, p.key_length);
  rounded.v = operand(values, p.key_heads, p.key_length);
  launch_attention<true>(rounded, DType::kFloat32, stream);
  if (p.lse == nullptr) return;
  parallel_for(stream, p.batch * p.query_length * p.heads, p.head_dim,
               [&](int64_t begin, int64_t end) { correct_lse(p, means, begin, end); });
}

}  // namespace h100_diffusers_kernels
