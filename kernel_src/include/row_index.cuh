// A row's number leads to its place in each operand. A launch has fewer than 2^31 rows, because its blocks
// are numbered so; the binding splits what is larger.
#pragma once

#include <cstdint>

#include "fast_divisor.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// It is small and free of branches: a kernel that treats one row a block is short, and what it does before
// its first load, the fetching of its parameters included, is time in which memory idles (NOTES, "Row
// kernels: what a block does before its loads").
struct RowIndexer {
  // It stands for a RowOperand. If that has one leading dimension, it is the inner one of two here.
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
