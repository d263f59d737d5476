// Attention passes over the keys once: the largest score and the sum of the exponentials are kept for each
// query, and the output so far is rescaled when a larger score comes (online softmax).
//
// An item is a block of queries of one head. The queries are the innermost dimension of everything that is
// computed, so that each loop over them is the same arithmetic for all.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {

constexpr int64_t kQueries = 64;  // Blocks of KeyBlocks are multiples of both.
constexpr int64_t kKeys = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Returns the number of keys of a batch entry.
inline int64_t number_of_keys(const AttentionParams& p, int64_t batch) {
  if (p.key_lengths == nullptr) return p.key_length;
  return std::clamp<int64_t>(p.key_lengths[batch], 0, p.key_length);
}

// How a query block attends to a key block.
enum class Attended : char { kNone, kWithinBounds, kWhole };

// Sets the key blocks in the query block's list.
inline void mark_listed(const KeyBlockList& list, int64_t batch, int64_t head, int64_t query_block,
                        Attended value, std::vector<Attended>& attended) {
  if (list.counts == nullptr) return;
  const int64_t row = batch * list.strides[0] + head * list.strides[1] + query_block;
  const int32_t* indices = list.indices + row * list.columns;
  const int64_t count = std::clamp<int64_t>(list.counts[row], 0, list.columns);
  for (int64_t i = 0; i < count; ++i)
    if (indices[i] >= 0 && indices[i] < static_cast<int64_t>(attended.size())) attended[indices[i]] = value;
}

// Sets how the query block that begins at `first_query` attends to each key block.
inline void mark_attended(const AttentionParams& p, int64_t batch, int64_t head, int64_t first_query,
                          std::vector<Attended>& attended) {
  const KeyBlocks& blocks = p.blocks;
  const bool is_listed = blocks.bounded.counts != nullptr || blocks.full.counts != nullptr;
  attended.assign((p.key_length + blocks.key_rows - 1) / blocks.key_rows,
                  is_listed ? Attended::kNone : Attended::kWithinBounds);
  const int64_t query_block = first_query / blocks.query_rows;
  mark_listed(blocks.bounded, batch, head, query_block, Attended::kWithinBounds, attended);
  mark_listed(blocks.full, batch, head, query_block, Attended::kWhole, attended);
}

// Working memory of one thread. Missing queries of a block are computed as zeros.
struct Scratch {
  float query[kMaxAttentionHeadDim][kQueries];
  float key[kKeys][kMaxAttentionHeadDim];
  float value[kKeys][kMaxAttentionHeadDim];
  float score[kKeys][kQueries];  // later their exponentials
  float out[kMaxAttentionHeadDim][kQueries];
  float largest[kQueries];
  float total[kQueries];
  std::vector<Attended> attended;
};

// Returns a probability, at most 1, rounded to E4M3 as if 1 were 2^7.
inline float round_probability(float value) { return e4m3_to_float(float_to_e4m3(value * 0x1p7f)) * 0x1p-7f; }

// Adds sum over i of factor[i * stride] * rows[i] to `out`.
inline void add_product(const float* factor, int64_t stride, const float (*rows)[kQueries], int64_t count,
                        float* out) {
  float sums[kQueries];
  std::copy_n(out, kQueries, sums);
  for (int64_t i = 0; i < count; ++i)
    for (int64_t query = 0; query < kQueries; ++query) sums[query] += factor[i * stride] * rows[i][query];
  std::copy_n(sums, kQueries, out);
}

// Query, key and value have the operands' dtype. Probabilities may be rounded to 8 bits; the operands then
// have kMaxAttentionHeadDim columns.
template <bool kRoundsProbabilities>
struct QueryBlock {
  const AttentionParams& p;
  DType operand_dtype;
  int64_t batch, head, first;
  Scratch& s;

  int64_t count() const { return std::min(kQueries, p.query_length - first); }
  int64_t columns() const { return kRoundsProbabilities ? kMaxAttentionHeadDim : p.head_dim; }

  void load_queries() const {
    for (int64_t query = 0; query < kQueries; ++query) {
      float values[kMaxAttentionHeadDim] = {};
      if (query < count())
        load(operand_dtype, p.q.data, p.q.offset(batch, first + query, head), columns(), values);
      for (int64_t d = 0; d < columns(); ++d) s.query[d][query] = values[d];
    }
  }

  void load_keys(const AttentionOperand& operand, int64_t first_key, int64_t keys,
                 float (*rows)[kMaxAttentionHeadDim]) const {
    const int64_t key_head = head / (p.heads / p.key_heads);
    for (int64_t key = 0; key < keys; ++key)
      load(operand_dtype, operand.data, operand.offset(batch, first_key + key, key_head), columns(),
           rows[key]);
  }

  void compute_scores(int64_t first_key, int64_t keys) const {
    float bias[kKeys] = {};
    if (p.key_bias != nullptr)
      load(p.key_bias_is_float32 ? DType::kFloat32 : p.dtype, p.key_bias,
           batch * p.key_bias_stride + first_key, keys, bias);
    for (int64_t key = 0; key < keys; ++key) {
      float* score = s.score[key];
      std::fill_n(score, kQueries, 0.0f);
      add_product(s.key[key], 1, s.query, columns(), score);
      for (int64_t query = 0; query < kQueries; ++query) score[query] = score[query] * p.scale + bias[key];
    }
  }

  // Sets the scores of keys outside of each query's bounds to -infinity.
  void apply_bounds(int64_t first_key, int64_t keys) const {
    const KeyBlocks& blocks = p.blocks;
    if (blocks.bounds == nullptr) return;
    const int64_t row = batch * blocks.bounds_strides[0] + head * blocks.bounds_strides[1] + first;
    for (int64_t query = 0; query < count(); ++query) {
      const int32_t* bounds = blocks.bounds + (row + query) * 2;
      for (int64_t key = 0; key < keys; ++key)
        if (first_key + key < bounds[0] || first_key + key >= bounds[1]) s.score[key][query] = -kInfinity;
    }
  }

  // Takes the exponentials of the scores, and rescales the output and the total. A comparison with NaN is
  // false, so the largest score is one of the others.
  void compute_exponentials(int64_t keys) const {
    float subtrahend[kQueries], factor[kQueries];
    std::copy_n(s.largest, kQueries, factor);
    for (int64_t key = 0; key < keys; ++key)
      for (int64_t query = 0; query < kQueries; ++query)
        s.largest[query] = s.score[key][query] > s.largest[query] ? s.score[key][query] : s.largest[query];
    for (int64_t query = 0; query < kQueries; ++query) {
      // -infinity - -infinity would be NaN.
      subtrahend[query] = s.largest[query] == -kInfinity ? 0.0f : s.largest[query];
      factor[query] = exp_nonpositive(factor[query] - subtrahend[query]);
      s.total[query] *= factor[query];
    }
    for (int64_t key = 0; key < keys; ++key) {
      for (int64_t query = 0; query < kQueries; ++query) {
        s.score[key][query] = exp_nonpositive(s.score[key][query] - subtrahend[query]);
        if constexpr (kRoundsProbabilities) s.score[key][query] = round_probability(s.score[key][query]);
        s.total[query] += s.score[key][query];
      }
    }
    for (int64_t d = 0; d < p.head_dim; ++d)
      for (int64_t query = 0; query < kQueries; ++query) s.out[d][query] *= factor[query];
  }

  void finish(int64_t query, float* values) const {
    if (p.gate.data != nullptr) {
      float gate;
      load(p.gate_is_float32 ? DType::kFloat32 : p.dtype, p.gate.data, p.gate.offset(batch, query, head), 1,
           &gate);
      for (int64_t d = 0; d < p.head_dim; ++d) values[d] *= gate;
    }
    if (p.addend.data != nullptr) {
      float addend[kMaxAttentionHeadDim];
      load(p.dtype, p.addend.data, p.addend.offset(batch, query, head), p.head_dim, addend);
      for (int64_t d = 0; d < p.head_dim; ++d) values[d] += addend[d];
    }
  }

  void store_output() const {
    for (int64_t query = 0; query < count(); ++query) {
      float values[kMaxAttentionHeadDim];
      const float factor = s.total[query] == 0 ? 0 : 1 / s.total[query];
      for (int64_t d = 0; d < p.head_dim; ++d) values[d] = s.out[d][query] * factor;
      finish(first + query, values);
      store(p.dtype, p.out.data, p.out.offset(batch, first + query, head), p.head_dim, values);
      // Without keys both terms are -infinity.
      if (p.lse != nullptr)
        p.lse[(batch * p.query_length + first + query) * p.heads + head] =
            s.largest[query] + std::log(s.total[query]);
    }
  }

  void run() const {
    const int64_t key_length = number_of_keys(p, batch);
    load_queries();
    std::fill_n(&s.out[0][0], p.head_dim * kQueries, 0.0f);
    std::fill_n(s.largest, kQueries, -kInfinity);
    std::fill_n(s.total, kQueries, 0.0f);
    if (p.blocks.is_given) mark_attended(p, batch, head, first, s.attended);
    for (int64_t first_key = 0; first_key < key_length; first_key += kKeys) {
      const Attended attended =
          p.blocks.is_given ? s.attended[first_key / p.blocks.key_rows] : Attended::kWhole;
      if (attended == Attended::kNone) continue;
      const int64_t keys = std::min(kKeys, key_length - first_key);
      load_keys(p.k, first_key, keys, s.key);
      load_keys(p.v, first_key, keys, s.value);
      compute_scores(first_key, keys);
      if (attended == Attended::kWithinBounds) apply_bounds(first_key, keys);
      compute_exponentials(keys);
      for (int64_t d = 0; d < p.head_dim; ++d)
        add_product(&s.value[0][d], kMaxAttentionHeadDim, s.score, keys, s.out[d]);
    }
    store_output();
  }
};

template <bool kRoundsProbabilities>
void launch_attention(const AttentionParams& params, DType operand_dtype, Stream stream) {
  const int64_t blocks = (params.query_length + kQueries - 1) / kQueries;
  const int64_t block_size = std::min(kQueries, params.query_length) * (params.key_length + 1);
  parallel_for(stream, params.batch * params.heads * blocks, block_size, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<Scratch>();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / blocks;
      QueryBlock<kRoundsProbabilities>{
          params, operand_dtype, head / params.heads, head % params.heads, item % blocks * kQueries, *scratch}
          .run();
    }
  });
}

}  // namespace h100_diffusers_kernels
