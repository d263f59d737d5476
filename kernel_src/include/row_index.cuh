// From a row's number to its place in each operand.
#pragma once

#include <cstdint>

#include "params.h"

namespace h100_diffusers_kernels {

// Division of 0 <= n < 2^31 by a divisor known at launch: one multiplication and a shift.
// (Granlund and Montgomery, 1994, with ceil(log2(divisor)) as shift.)
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  __host__ void set(uint32_t value) {
    divisor = value;
    shift = 0;
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

constexpr int64_t kFastDivisionRows = int64_t{1} << 31;

// The index of a row in each leading dimension.
struct RowIndex {
  int64_t indices[kMaxRowDims];

  __device__ __forceinline__ int64_t offset(const RowOperand& operand, int ndim) const {
    int64_t sum = indices[0] * operand.strides[0];
#pragma unroll
    for (int dim = 1; dim < kMaxRowDims; ++dim)
      if (dim < ndim) sum += indices[dim] * operand.strides[dim];
    return sum;
  }
};

struct RowIndexer {
  RowShape shape;
  FastDivisor divisors[kMaxRowDims];

  __host__ explicit RowIndexer(const RowShape& row_shape) : shape(row_shape), divisors{} {
    if (shape.rows < kFastDivisionRows)
      for (int dim = 0; dim < shape.ndim; ++dim) divisors[dim].set(static_cast<uint32_t>(shape.sizes[dim]));
  }

  __device__ __forceinline__ RowIndex operator()(int64_t row) const {
    RowIndex index;
    if (shape.ndim == 1) {
      index.indices[0] = row;
    } else if (shape.rows < kFastDivisionRows) {
      uint32_t rest = static_cast<uint32_t>(row);
#pragma unroll
      for (int dim = kMaxRowDims - 1; dim > 0; --dim) {
        if (dim < shape.ndim) {
          const uint32_t quotient = divisors[dim].divide(rest);
          index.indices[dim] = rest - quotient * divisors[dim].divisor;
          rest = quotient;
        }
      }
      index.indices[0] = rest;
    } else {
      int64_t rest = row;
#pragma unroll
      for (int dim = kMaxRowDims - 1; dim > 0; --dim) {
        if (dim < shape.ndim) {
          index.indices[dim] = rest % shape.sizes[dim];
          rest /= shape.sizes[dim];
        }
      }
      index.indices[0] = rest;
    }
    return index;
  }
};

}  // namespace h100_diffusers_kernels
