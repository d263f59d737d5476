// The row that a thread works on, and loops over the thread's part of it.
#pragma once

#include <cstdint>

#include "row_config.cuh"
#include "row_index.cuh"

namespace h100_diffusers_kernels {

// kThreadsPerRow threads share a row. Those beyond the last row index row 0 and have no part of it. Params
// has `indexer` and the number of `rows`.
template <int kThreadsPerRow>
struct ThreadRow {
  RowPosition<kThreadsPerRow> position;
  bool is_present;
  RowIndexer::Index index;

  template <class Params>
  __device__ __forceinline__ explicit ThreadRow(const Params& params)
      : is_present(position.kRowsPerBlock == 1 || position.row < params.rows),
        index(params.indexer(is_present ? position.row : 0)) {}

  __device__ __forceinline__ bool is_first_thread() const { return is_present && position.thread == 0; }

  // Calls body(column) for each of the thread's packs of kSize elements, in a row of any length.
  template <int kSize, class Body>
  __device__ __forceinline__ void for_each_column(int64_t hidden, const Body& body) const {
    if (!is_present) return;
    for (int64_t column = int64_t{kSize} * position.thread; column < hidden; column += kSize * kThreadsPerRow)
      body(column);
  }
};

// A row in registers: each thread holds up to kPacks packs of kSize elements.
template <int kThreadsPerRow, int kSize, int kPacks = kRowPacks>
struct HeldRow : ThreadRow<kThreadsPerRow> {
  int hidden;
  int first;  // pack of the row, if blocks of the grid share it

  template <class Params>
  __device__ __forceinline__ explicit HeldRow(const Params& params, int first_pack = 0)
      : ThreadRow<kThreadsPerRow>(params), hidden(static_cast<int>(params.hidden)), first(first_pack) {}

  // Return the number, and the first element, of the thread's i-th pack.
  __device__ __forceinline__ int pack(int i) const { return first + this->position.pack(i); }
  __device__ __forceinline__ int column(int i) const { return pack(i) * kSize; }
  __device__ __forceinline__ bool has_pack(int i) const { return this->is_present && column(i) < hidden; }

  // Calls body(i, column) for each of the thread's packs.
  template <class Body>
  __device__ __forceinline__ void for_each_pack(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (has_pack(i)) body(i, column(i));
  }
};

}  // namespace h100_diffusers_kernels
