// A head is rotated in float32, by cosines and sines for each of its elements.
#pragma once

#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"

namespace h100_diffusers_kernels {

// The arrays have head_dim values.
struct HeadScratch {
  explicit HeadScratch(int64_t head_dim)
      : memory(std::make_unique_for_overwrite<float[]>(4 * head_dim)),
        values(memory.get()),
        cosine(values + head_dim),
        sine(cosine + head_dim),
        operand(sine + head_dim) {}

  std::unique_ptr<float[]> memory;
  float *values, *cosine, *sine;
  float* operand;  // a weight, or a table before its values are repeated
};

// Returns the offset of a head. The strides are those of (batch, seq, head).
inline int64_t head_offset(const int64_t* strides, int64_t batch, int64_t seq, int64_t head) {
  return batch * strides[0] + seq * strides[1] + head * strides[2];
}

// Stores values[0], values[step], ... at both elements of `count` pairs of a head.
inline void repeat_pairs(RopeLayout layout, int64_t head_dim, int64_t first_pair, int64_t count,
                         const float* values, int64_t step, float* head) {
  const bool is_interleaved = layout == RopeLayout::kInterleaved;
  float* a = head + (is_interleaved ? 2 * first_pair : first_pair);
  float* b = a + (is_interleaved ? 1 : head_dim / 2);
  const int64_t pair_step = is_interleaved ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) a[i * pair_step] = b[i * pair_step] = values[i * step];
}

// Loads the cosines and sines of a head, which has T's layout, head_dim and dtype.
template <typename T>
void load_tables(const T& params, const RopeTables& tables, int64_t batch, int64_t seq, int64_t head,
                 const HeadScratch& scratch) {
  const DType dtype = tables.is_float32 || tables.is_complex ? DType::kFloat32 : params.dtype;
  const int64_t pairs = params.head_dim / 2, step = tables.is_complex ? 2 : 1;
  const auto load_table = [&](const void* table, const int64_t* strides, float* values) {
    const int64_t offset = head_offset(strides, batch, seq, head);
    if (!tables.is_per_pair) return load(dtype, table, offset, params.head_dim, values);
    load(dtype, table, offset, step * (pairs - 1) + 1, scratch.operand);
    repeat_pairs(params.layout, params.head_dim, 0, pairs, scratch.operand, step, values);
  };
  load_table(tables.cos, tables.cos_strides, scratch.cosine);
  load_table(tables.sin, tables.sin_strides, scratch.sine);
}

inline bool heads_differ(const RopeTables& tables) {
  return tables.cos_strides[2] != 0 || tables.sin_strides[2] != 0;
}

inline void rotate(RopeLayout layout, int64_t head_dim, const HeadScratch& scratch) {
  float* values = scratch.values;
  const float *cosine = scratch.cosine, *sine = scratch.sine;
  const auto rotate_pair = [&](int64_t i, int64_t j) {
    const float a = values[i], b = values[j];
    values[i] = a * cosine[i] - b * sine[i];
    values[j] = b * cosine[j] + a * sine[j];
  };
  const int64_t half = head_dim / 2;
  if (layout == RopeLayout::kInterleaved) {
#pragma omp simd
    for (int64_t pair = 0; pair < half; ++pair) rotate_pair(2 * pair, 2 * pair + 1);
  } else {
#pragma omp simd
    for (int64_t pair = 0; pair < half; ++pair) rotate_pair(pair, pair + half);
  }
}

}  // namespace h100_diffusers_kernels
