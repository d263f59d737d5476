// Rows of 128 values, quantized to FP8 with a scale each, in the layout of wgmma's d (warp_group.cuh): four
// lanes share a row, and a thread has 32 values of each of two rows.
#pragma once

#include "fp8.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

constexpr int kFp8RowValues = kFp8BlockSize / 2;  // of a thread

// Replaces each value by finish(value) over the scale of its row. All four lanes call store_scale(row,
// scale), with the row of the warp group's 64.
template <class Finish, class StoreScale>
__device__ __forceinline__ void quantize_rows(const WarpRole& role, float (&values)[kFp8RowValues],
                                              const Finish& finish, const StoreScale& store_scale) {
  float largest[2] = {};
#pragma unroll
  for (int i = 0; i < kFp8RowValues; ++i) {
    values[i] = finish(values[i]);
    largest[i / 2 % 2] = larger_magnitude(largest[i / 2 % 2], values[i]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2)
      largest[i] = larger_magnitude(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
    const Fp8Quotient quotient(fp8_scale(__float_as_uint(largest[i])));
    store_scale(role.output_row(i), quotient.scale);
#pragma unroll
    for (int j = 2 * i; j < kFp8RowValues; j += 4) {
      values[j] = quotient(values[j]);
      values[j + 1] = quotient(values[j + 1]);
    }
  }
}

// Rounds the quotients of a warp group's 64 rows, and stores them to a box in shared memory. Two values are
// one store. The stores of a warp have no bank conflicts: its eight rows have their pieces in different
// banks.
__device__ __forceinline__ void store_fp8_rows(uint32_t box, const WarpRole& role,
                                               const float (&values)[kFp8RowValues]) {
#pragma unroll
  for (int j = 0; j < kFp8RowValues / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_shared_u16(box + swizzled_piece(role.output_row(i), j / 2) + j % 2 * 8 + role.lane % 4 * 2,
                       pack_fp8(values[4 * j + 2 * i], values[4 * j + 2 * i + 1]));
  }
}

}  // namespace h100_diffusers_kernels
