// Splits work among threads and rows into blocks, and sums the values of a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "elements.h"
#include "params.h"

namespace h100_diffusers_kernels {

// Calls body(begin, end), compiled for AVX2 and for any processor. Its callees are inlined, so that they are
// compiled for both.
template <typename Body>
__attribute__((flatten)) void run_baseline(void* body, int64_t begin, int64_t end) {
  (*static_cast<const Body*>(body))(begin, end);
}

#if defined(__x86_64__)
template <typename Body>
__attribute__((flatten, target("avx2,fma"))) void run_avx2(void* body, int64_t begin, int64_t end) {
  (*static_cast<const Body*>(body))(begin, end);
}
#endif

// Calls body(begin, end) for ranges of `items` items of `item_size` elements from several threads.
template <typename Body>
void parallel_for(Stream stream, int64_t items, int64_t item_size, Body body) {
  constexpr int64_t kElementsPerThread = 32768;  // With fewer a thread does not pay off.
  if (items == 0 || item_size == 0) return;
  const int64_t grain = (kElementsPerThread + item_size - 1) / item_size;
  RangeBody run = run_baseline<Body>;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) run = run_avx2<Body>;
#endif
  stream.parallel_for(0, items, grain, run, &body);
}

// Calls body(start, count) for blocks of up to kBlock of `size` values.
template <typename Body>
void for_blocks(int64_t size, const Body& body) {
  for (int64_t start = 0; start < size; start += kBlock) body(start, std::min(kBlock, size - start));
}

// Calls body(row, column, count) for the blocks of all rows. Blocks are the items, so that several threads
// share a long row.
template <typename Body>
void parallel_for_blocks(Stream stream, const RowShape& shape, int64_t hidden, const Body& body) {
  const int64_t per_row = (hidden + kBlock - 1) / kBlock;
  parallel_for(stream, shape.rows * per_row, std::min(hidden, kBlock), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item % per_row * kBlock;
      body(item / per_row, column, std::min(kBlock, hidden - column));
    }
  });
}

// Returns the offset of a row's first element.
inline int64_t row_offset(const RowShape& shape, const RowOperand& operand, int64_t row) {
  int64_t offset = 0;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    offset += row % shape.sizes[d] * operand.strides[d];
    row /= shape.sizes[d];
  }
  return offset;
}

// Stores a row's values over their scale, or over that of their block, and the scales.
inline void store_fp8_row(const RowShape& shape, int64_t row, const float* values, int64_t count,
                          const RowOperand& out, const RowOperand& scale, bool is_blocked = false) {
  auto* codes = static_cast<uint8_t*>(out.data) + row_offset(shape, out, row);
  auto* scales = static_cast<float*>(scale.data) + row_offset(shape, scale, row);
  if (!is_blocked) {
    *scales = store_fp8(values, count, codes);
    return;
  }
  for (int64_t i = 0; i < count; i += kFp8BlockSize)
    *scales++ = store_fp8(values + i, std::min(kFp8BlockSize, count - i), codes + i);
}

// Compilers vectorize a sum only if a directive allows them to reorder its terms. The order is the same in
// every call.

inline double sum(const float* values, int64_t count) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += values[i];
  return total;
}

// Returns the sum of the squares of the differences from the mean.
inline double sum_of_squares(const float* values, int64_t count, double mean = 0) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) total += (values[i] - mean) * (values[i] - mean);
  return total;
}

}  // namespace h100_diffusers_kernels
