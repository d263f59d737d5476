// The pairs of a head are rotated by cosines and sines that are given by element.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "params.h"
#include "rows.h"
#include "vector.h"

namespace h100_diffusers_kernels {

// These are cosine and sine of one token by element, for every head.
template <typename Table>
struct TokenTables {
  const Table* cosine;
  const Table* sine;
  int64_t cosine_stride;  // The strides lead from head to head.
  int64_t sine_stride;
};

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

// Does the same for `pairs` values in memory.
template <int kLanes, typename Table>
ALWAYS_INLINE void repeat_pairs(RopeLayout layout, int64_t half, float* head, int64_t first_pair,
                                const Table* values, int64_t pairs) {
  for_columns<kLanes>(0, pairs, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
    store_pairs<n>(layout, half, head, first_pair + i, load<n>(values + i));
  });
}

// Tells whether a rotation reads the tables as float. It does so from tables of one value a pair, too, once
// they are put together by element.
inline bool are_read_as_float(const RopeTables& tables) { return tables.is_float32 || tables.is_per_pair; }

// The tables of a call are read token by token. Table is what the rotation reads, T the dtype that it
// rotates.
template <typename T, typename Table>
class CallTables {
 public:
  // `heads` is the number of heads where the tables differ between them.
  CallTables(const RopeTables& tables, RopeLayout layout, int64_t head_dim, int64_t heads)
      : tables_(tables), layout_(layout), head_dim_(head_dim), heads_(heads) {
    if (!tables.is_per_pair) return;
    cosine_.values = std::make_unique<float[]>(heads * head_dim);
    sine_.values = std::make_unique<float[]>(heads * head_dim);
  }

  template <int kLanes>
  ALWAYS_INLINE TokenTables<Table> at(int64_t batch, int64_t seq) {
    const int64_t *cos_strides = tables_.cos_strides, *sin_strides = tables_.sin_strides;
    const int64_t cos_offset = batch * cos_strides[0] + seq * cos_strides[1];
    const int64_t sin_offset = batch * sin_strides[0] + seq * sin_strides[1];
    if constexpr (std::is_same_v<Table, float>) {
      if (tables_.is_per_pair) {
        put_together<kLanes>(cosine_, tables_.cos, cos_offset, cos_strides[2]);
        put_together<kLanes>(sine_, tables_.sin, sin_offset, sin_strides[2]);
        return {cosine_.values.get(), sine_.values.get(), cos_strides[2] == 0 ? 0 : head_dim_,
                sin_strides[2] == 0 ? 0 : head_dim_};
      }
    }
    return {static_cast<const Table*>(tables_.cos) + cos_offset,
            static_cast<const Table*>(tables_.sin) + sin_offset, cos_strides[2], sin_strides[2]};
  }

 private:
  // A token's values by element are kept while the next tokens share them.
  struct ByElement {
    std::unique_ptr<float[]> values;
    int64_t offset = -1;
  };

  template <int kLanes>
  ALWAYS_INLINE void put_together(ByElement& out, const void* table, int64_t offset, int64_t head_stride) {
    if (offset == out.offset) return;
    out.offset = offset;
    const int64_t half = head_dim_ / 2;
    if (tables_.is_complex)
      return put_together_pairs(out, static_cast<const float*>(table) + offset, head_stride);
    const auto repeat = [&](const auto* values) ALWAYS_INLINE_LAMBDA {
      for (int64_t h = 0; h < (head_stride == 0 ? 1 : heads_); ++h)
        repeat_pairs<kLanes>(layout_, half, &out.values[h * head_dim_], 0, values + h * head_stride, half);
    };
    if (tables_.is_float32)
      repeat(static_cast<const float*>(table) + offset);
    else
      repeat(static_cast<const T*>(table) + offset);
  }

  // Every second value is that of a pair.
  void put_together_pairs(ByElement& out, const float* values, int64_t head_stride) {
    const int64_t half = head_dim_ / 2;
    const bool interleaved = layout_ == RopeLayout::kInterleaved;
    for (int64_t h = 0; h < (head_stride == 0 ? 1 : heads_); ++h) {
      float* head = &out.values[h * head_dim_];
      for (int64_t pair = 0; pair < half; ++pair) {
        const int64_t a = interleaved ? 2 * pair : pair;
        const int64_t b = interleaved ? a + 1 : a + half;
        head[a] = head[b] = values[h * head_stride + 2 * pair];
      }
    }
  }

  const RopeTables& tables_;
  RopeLayout layout_;
  int64_t head_dim_;
  int64_t heads_;
  ByElement cosine_;
  ByElement sine_;
};

// The rotations of one head read its elements by head.load_at<n>(column). All of a group are loaded before
// they are stored.

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

// Calls body with the rotation of the layout: `[&]<typename Rotation>(std::type_identity<Rotation>) { ... }`.
template <typename Body>
void dispatch_layout(RopeLayout layout, const Body& body) {
  if (layout == RopeLayout::kInterleaved)
    body(std::type_identity<InterleavedRotation>{});
  else
    body(std::type_identity<HalfRotation>{});
}

}  // namespace h100_diffusers_kernels
