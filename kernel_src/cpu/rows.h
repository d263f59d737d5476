// These lead through the rows of an operation and the columns of a row, and sum over columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "params.h"
#include "vector.h"

namespace h100_diffusers_kernels {

// Calls body with the C++ type of the dtype: `[&]<typename T>(std::type_identity<T>) { ... }`.
template <typename Body>
void dispatch_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(std::type_identity<float>{});
    case DType::kFloat16:
      return body(std::type_identity<Float16>{});
    case DType::kBFloat16:
      return body(std::type_identity<BFloat16>{});
  }
}

// A cursor is a position in the leading dimensions, which moves row by row.
class RowCursor {
 public:
  RowCursor(const RowShape& shape, int64_t row) : shape_(shape) {
    for (int d = shape.ndim - 1; d >= 0; --d) {
      index_[d] = row % shape.sizes[d];
      row /= shape.sizes[d];
    }
  }

  void advance() {
    for (int d = shape_.ndim - 1; d >= 0; --d) {
      if (++index_[d] < shape_.sizes[d]) return;
      index_[d] = 0;
    }
  }

  // Returns the first element of the operand's row, or null if the operand is absent.
  template <typename T>
  T* pointer(const RowOperand& operand) const {
    if (operand.data == nullptr) return nullptr;
    int64_t offset = 0;
    for (int d = 0; d < shape_.ndim; ++d) offset += index_[d] * operand.strides[d];
    return static_cast<T*>(operand.data) + offset;
  }

 private:
  const RowShape& shape_;
  int64_t index_[kMaxRowDims];
};

// Rows are cut into segments, the items of an elementwise operation, so that few long rows make enough of
// them. Rows that follow each other without a gap in every operand are one row, unless columns have a
// meaning.
class SegmentGrid {
 public:
  SegmentGrid(const RowShape& shape, int64_t hidden, std::initializer_list<const RowOperand*> operands,
              bool columns_matter = false)
      : shape_(shape), hidden_(hidden) {
    const bool is_contiguous = std::all_of(operands.begin(), operands.end(), [&](const RowOperand* operand) {
      return operand->data == nullptr || operand->strides[0] == hidden;
    });
    if (shape.ndim == 1 && is_contiguous && !columns_matter) {
      shape_.rows = shape_.sizes[0] = 1;
      hidden_ = shape.rows * hidden;
    }
    per_row_ = (hidden_ + kSize - 1) / kSize;
  }

  int64_t segments() const { return shape_.rows * per_row_; }
  int64_t segment_size() const { return std::min(hidden_, kSize); }

  // Calls function(row, first column, column after the last) for segments begin to end - 1.
  template <typename Function>
  ALWAYS_INLINE void for_segments(int64_t begin, int64_t end, const Function& function) const {
    if (begin >= end) return;
    RowCursor row(shape_, begin / per_row_);
    int64_t column = begin % per_row_ * kSize;
    for (; begin < end; ++begin) {
      function(row, column, std::min(column + kSize, hidden_));
      column += kSize;
      if (column >= hidden_) {
        column = 0;
        row.advance();
      }
    }
  }

 private:
  static constexpr int64_t kSize = 8192;

  RowShape shape_;
  int64_t hidden_;
  int64_t per_row_;
};

template <int kLanes>
struct Lanes {};

// Calls function(Lanes<n>, column) for groups of n columns, n = kLanes as long as they last, then fewer.
// No group has less than kMinLanes columns.
template <int kLanes, int kMinLanes = 1, typename Function>
ALWAYS_INLINE void for_columns(int64_t begin, int64_t end, const Function& function) {
  for (; begin + kLanes <= end; begin += kLanes) function(Lanes<kLanes>{}, begin);
  if constexpr (kLanes > kMinLanes)
    for_columns<std::max(kLanes / 4, kMinLanes), kMinLanes>(begin, end, function);
}

// Sums over the columns: function(Lanes<n>, column, sums) adds the terms of a group of columns to the kSums
// vectors of `sums`. They are added up in float within a block, in double across lanes and blocks, and always
// in the same order.
template <int kLanes, int kSums, typename Function>
ALWAYS_INLINE void sum_columns(int64_t count, double (&totals)[kSums], const Function& function) {
  constexpr int64_t kBlock = 4096;
  for (double& total : totals) total = 0;
  for (int64_t block = 0; block < count; block += kBlock) {
    const int64_t end = std::min(block + kBlock, count);
    int64_t i = block;
    Floats<kLanes> sums[4][kSums] = {};  // Each is a chain of dependent additions.
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      function(Lanes<kLanes>{}, i, sums[0]);
      function(Lanes<kLanes>{}, i + kLanes, sums[1]);
      function(Lanes<kLanes>{}, i + 2 * kLanes, sums[2]);
      function(Lanes<kLanes>{}, i + 3 * kLanes, sums[3]);
    }
    for (; i + kLanes <= end; i += kLanes) function(Lanes<kLanes>{}, i, sums[0]);
    Floats<1> rest[kSums] = {};
    for (; i < end; ++i) function(Lanes<1>{}, i, rest);
    for (int k = 0; k < kSums; ++k)
      totals[k] += sum_in_double<kLanes>((sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k])) + rest[k][0];
  }
}

inline float reciprocal_deviation(double variance, float eps) {
  return static_cast<float>(1.0 / std::sqrt(variance + eps));
}

}  // namespace h100_diffusers_kernels
