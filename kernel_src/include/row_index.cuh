// Offsets of a row in each operand, from the row's number. A launch has fewer than 2^31 rows, the limit of
// the grid; the binding splits larger operations.
#pragma once

#include <cstdint>

#include "fast_divisor.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// Small and free of branches: blocks of one row are short, and memory idles until their first load, also
// while parameters are fetched (notes/row_kernels.md, "Work before the loads").
struct RowIndexer {
  // A RowOperand. A single leading dimension becomes the inner one of two.
  struct Operand {
    void* data;
    int64_t outer_stride, inner_stride;

    Operand(const RowOperand& operand, int ndim)
        : data(operand.data),
          outer_stride(ndim == 1 ? 0 : operand.strides[0]),
          inner_stride(operand.strides[ndim - 1]) {}
  };

  struct Index {
    uint32_t outer, inner;
    __device__ __forceinline__ int64_t offset(const Operand& operand) const {
      return outer * operand.outer_stride + inner * operand.inner_stride;
    }
  };

  FastDivisor inner_size;

  __host__ explicit RowIndexer(const RowShape& shape) {
    static_assert(kMaxRowDims == 2);
    inner_size.set(static_cast<uint32_t>(shape.sizes[shape.ndim - 1]));
  }

  __device__ __forceinline__ Index operator()(uint32_t row) const {
    const uint32_t outer = inner_size.divide(row);
    return {outer, row - outer * inner_size.divisor};
  }
};

}  // namespace h100_diffusers_kernels
