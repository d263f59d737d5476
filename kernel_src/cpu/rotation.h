// Rotation of the pairs of a head by cosines and sines given by element.
#pragma once

#include <cstdint>

#include "params.h"
#include "rows.h"
#include "vector.h"

namespace h100_diffusers_kernels {

// Cosine and sine of one token by element, for every head.
template <typename Table>
struct TokenTables {
  const Table* cosine;
  const Table* sine;
  int64_t cosine_stride;  // from head to head
  int64_t sine_stride;
};

template <typename Table>
TokenTables<Table> tables_of_token(const RopeTables& tables, int64_t batch, int64_t seq) {
  const auto at = [&](const void* data, const int64_t* strides) {
    return static_cast<const Table*>(data) + batch * strides[0] + seq * strides[1];
  };
  return {at(tables.cos, tables.cos_strides), at(tables.sin, tables.sin_strides), tables.cos_strides[2],
          tables.sin_strides[2]};
}

// Stores the values of n pairs of a head, from `pair` on, at both elements of each.
template <int n>
ALWAYS_INLINE void store_pairs(RopeLayout layout, int64_t half, float* head, int64_t pair,
                               const Floats<n>& values) {
  if (layout == RopeLayout::kInterleaved) {
    store_twice<n>(head + 2 * pair, values);
  } else {
    store<n>(head + pair, values);
    store<n>(head + pair + half, values);
  }
}

// Rotations of one head, whose elements are head.load_at<n>(column). All of a group are loaded before they
// are stored.

// Pairs are neighbours: a group holds whole pairs.
struct InterleavedRotation {
  template <int kLanes, typename Head, typename Table, typename T>
  ALWAYS_INLINE static void apply(const Head& head, int64_t head_dim, const Table* cosine, const Table* sine,
                                  T* out) {
    for_columns<kLanes, 2>(0, head_dim, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      const Floats<n> v = head.template load_at<n>(column);
      const Floats<n> signed_sine = negate_even<n>(load<n>(sine + column));
      store<n>(out + column, v * load<n>(cosine + column) + swap_pairs<n>(v) * signed_sine);
    });
  }
};

// Pairs are half a head apart: a group holds a part of each half.
struct HalfRotation {
  template <int kLanes, typename Head, typename Table, typename T>
  ALWAYS_INLINE static void apply(const Head& head, int64_t head_dim, const Table* cosine, const Table* sine,
                                  T* out) {
    const int64_t half = head_dim / 2;
    for_columns<kLanes>(0, half, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      const int64_t other = column + half;
      const Floats<n> a = head.template load_at<n>(column);
      const Floats<n> b = head.template load_at<n>(other);
      store<n>(out + column, a * load<n>(cosine + column) - b * load<n>(sine + column));
      store<n>(out + other, b * load<n>(cosine + other) + a * load<n>(sine + other));
    });
  }
};

// Calls function(Rotation{}) with the rotation of the layout.
template <typename Function>
void with_rotation(RopeLayout layout, const Function& function) {
  if (layout == RopeLayout::kInterleaved) {
    function(InterleavedRotation{});
  } else {
    function(HalfRotation{});
  }
}

}  // namespace h100_diffusers_kernels
