// The rotary embedding of units: two packs of a head that hold complete rotated pairs, which are any two
// packs in the interleaved layout and packs half a head apart in the half layout. Policies provide the
// cosines and sines of a unit's kSize pairs. A pair's first element is multiplied by cos_a and sin_a, its
// second by cos_b and sin_b.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "rotation.cuh"

namespace h100_diffusers_kernels {

template <int kSize>
struct UnitRotation {
  float cos_a[kSize], sin_a[kSize], cos_b[kSize], sin_b[kSize];
};

// Position of a unit: batch, seq, head, the offsets of its packs in the head (first, second), and the number
// of its first pair if its pairs are consecutive (pair).
struct UnitPosition {
  int64_t batch, seq;
  int head, pair, first, second;
};

__device__ __forceinline__ int64_t head_offset(const int64_t (&strides)[3], const UnitPosition& position) {
  return position.batch * strides[0] + position.seq * strides[1] + position.head * strides[2];
}

template <RopeLayout kLayout>
struct Layout {
  // Return the elements of pair j of a unit with packs a and b.
  template <int kSize>
  __device__ __forceinline__ static float& first_of(float (&a)[kSize], float (&b)[kSize], int j) {
    if constexpr (kLayout == RopeLayout::kHalf) return a[j];
    return 2 * j < kSize ? a[2 * j] : b[2 * j - kSize];
  }
  template <int kSize>
  __device__ __forceinline__ static float& second_of(float (&a)[kSize], float (&b)[kSize], int j) {
    if constexpr (kLayout == RopeLayout::kHalf) return b[j];
    return 2 * j + 1 < kSize ? a[2 * j + 1] : b[2 * j + 1 - kSize];
  }
  // Returns the number of pair j in the head.
  template <int kSize>
  __device__ __forceinline__ static int number_of(const UnitPosition& position, int j) {
    if constexpr (kLayout == RopeLayout::kHalf) return position.pair + j;
    return 2 * j < kSize ? position.first / 2 + j : position.second / 2 + j - kSize / 2;
  }
};

// Policies. A Lookup belongs to one unit: `fetch` issues its loads, `rotation` uses the loaded values.
struct NoRope {
  static constexpr bool kIsRope = false;
  static constexpr bool kIsComputed = false;

  template <typename T, RopeLayout kLayout, int kSize>
  struct Lookup {
    __device__ __forceinline__ void fetch(const QkNormRopeParams&, const UnitPosition&) {}
    __device__ __forceinline__ void rotation(UnitRotation<kSize>&) const {}
  };
};

// Tables have one value for each element, or one for each pair.
enum class TableValues { kPerElement, kPerPair };

template <typename Table, TableValues kValues>
struct TableRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = false;

  template <typename T, RopeLayout kLayout, int kSize>
  class Lookup {
   public:
    template <class Params>
    __device__ __forceinline__ void fetch(const Params& params, const UnitPosition& position) {
      const RopeTables& p = params.tables;
      fetch(cos_, p.cos, p.cos_strides, position);
      fetch(sin_, p.sin, p.sin_strides, position);
    }

    __device__ __forceinline__ void rotation(UnitRotation<kSize>& rotation) const {
      spread(cos_, rotation.cos_a, rotation.cos_b);
      spread(sin_, rotation.sin_a, rotation.sin_b);
    }

   private:
    // With one value for each pair, a unit's values are consecutive in the half layout. In the interleaved
    // layout each of its packs has half of the pairs.
    static constexpr bool kIsPerPair = kValues == TableValues::kPerPair;
    static constexpr bool kIsOnePack = kIsPerPair && kLayout == RopeLayout::kHalf;
    static constexpr int kPackValues = kIsPerPair && !kIsOnePack ? kSize / 2 : kSize;
    struct Values {
      Pack<Table, kPackValues> a, b;
    };

    __device__ __forceinline__ static void fetch(Values& values, const void* table,
                                                 const int64_t (&strides)[3], const UnitPosition& position) {
      const Table* row = static_cast<const Table*>(table) + head_offset(strides, position);
      if constexpr (kIsOnePack) {
        values.a.load(row + position.pair);
      } else {
        values.a.load(row + (kIsPerPair ? position.first / 2 : position.first));
        values.b.load(row + (kIsPerPair ? position.second / 2 : position.second));
      }
    }

    // Expands the loaded values to one for each pair's first element and one for its second.
    __device__ __forceinline__ static void spread(const Values& values, float (&first)[kSize],
                                                  float (&second)[kSize]) {
      float a[kPackValues], b[kPackValues];
      values.a.to_floats(a);
      if constexpr (!kIsOnePack) values.b.to_floats(b);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        if constexpr (kIsPerPair) {
          first[j] = second[j] = j < kPackValues ? a[j] : b[j - kPackValues];
        } else {
          first[j] = Layout<kLayout>::first_of(a, b, j);
          second[j] = Layout<kLayout>::second_of(a, b, j);
        }
      }
    }

    Values cos_, sin_;
  };
};

// A table of complex numbers cos + i sin.
struct ComplexRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = false;

  template <typename T, RopeLayout kLayout, int kSize>
  class Lookup {
   public:
    template <class Params>
    __device__ __forceinline__ void fetch(const Params& params, const UnitPosition& position) {
      const RopeTables& p = params.tables;
      const float* row = static_cast<const float*>(p.cos) + head_offset(p.cos_strides, position);
      // Each pack has half of the pairs, or for a single pair one of its two values.
      const bool is_half = kLayout == RopeLayout::kHalf;
      a_.load(row + (is_half ? 2 * position.pair : position.first));
      b_.load(row + (is_half ? 2 * position.pair + kSize : position.second));
    }

    __device__ __forceinline__ void rotation(UnitRotation<kSize>& rotation) const {
      float a[kSize], b[kSize];
      a_.to_floats(a);
      b_.to_floats(b);
      const auto value = [&](int i) { return i < kSize ? a[i] : b[i - kSize]; };
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        rotation.cos_a[j] = rotation.cos_b[j] = value(2 * j);
        rotation.sin_a[j] = rotation.sin_b[j] = value(2 * j + 1);
      }
    }

   private:
    Pack<float, kSize> a_, b_;
  };
};

// Tables of any kind, which is read at run time: for kinds that no model has (qk_norm_rope_launch.cuh).
struct AnyTableRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = false;

  template <typename T, RopeLayout kLayout, int kSize>
  class Lookup {
   public:
    template <class Params>
    __device__ __forceinline__ void fetch(const Params& params, const UnitPosition& position) {
      const RopeTables& tables = params.tables;
      const auto fetch_as = [&]<class Rope>(std::type_identity<Rope>) {
        typename Rope::template Lookup<T, kLayout, kSize> lookup;
        lookup.fetch(params, position);
        lookup.rotation(rotation_);
      };
      const auto fetch_values = [&]<TableValues kValues>() {
        if (sizeof(T) == sizeof(float) || tables.is_float32)
          fetch_as(std::type_identity<TableRope<float, kValues>>{});
        else
          fetch_as(std::type_identity<TableRope<T, kValues>>{});
      };
      if (tables.is_complex)
        fetch_as(std::type_identity<ComplexRope>{});
      else if (tables.is_per_pair)
        fetch_values.template operator()<TableValues::kPerPair>();
      else
        fetch_values.template operator()<TableValues::kPerElement>();
    }

    __device__ __forceinline__ void rotation(UnitRotation<kSize>& rotation) const { rotation = rotation_; }

   private:
    UnitRotation<kSize> rotation_;
  };
};

// Computes angles from coordinates. The unit's pairs must be consecutive.
struct CoordinateRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = true;

  template <typename T, RopeLayout kLayout, int kSize>
  class Lookup {
   public:
    __device__ __forceinline__ void fetch(const QkNormRopeParams& p, const UnitPosition& position) {
      const float* coordinates =
          p.coordinates + position.batch * p.coordinate_strides[0] + position.seq * p.coordinate_strides[1];
      const int half = static_cast<int>(p.head_dim) / 2;
      const int rotated = position.head * half + position.pair - p.identity_pairs;  // negative: not rotated
      int frequency = rotated > 0 ? rotated / p.axes : 0;
      int axis = rotated > 0 ? rotated - frequency * p.axes : 0;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        angles_[j] = 0.0f;
        if (rotated + j >= 0) {
          angles_[j] = __fmul_rn(__ldg(p.frequencies + frequency), __ldg(coordinates + axis));
          const bool wraps = ++axis == p.axes;
          axis = wraps ? 0 : axis;
          frequency += wraps;
        }
      }
    }

    __device__ __forceinline__ void rotation(UnitRotation<kSize>& rotation) const {
      float sines[kSize], cosines[kSize];
      sincos_of<T>(angles_, sines, cosines);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        rotation.cos_a[j] = rotation.cos_b[j] = cosines[j];
        rotation.sin_a[j] = rotation.sin_b[j] = sines[j];
      }
    }

   private:
    float angles_[kSize];
  };
};

// Rotates the pairs of a unit with packs a and b.
template <RopeLayout kLayout, int kSize>
__device__ __forceinline__ void rotate(float (&a)[kSize], float (&b)[kSize],
                                       const UnitRotation<kSize>& rotation) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    float& first = Layout<kLayout>::first_of(a, b, j);
    float& second = Layout<kLayout>::second_of(a, b, j);
    const float x = first, y = second;
    first = fmaf(x, rotation.cos_a[j], -y * rotation.sin_a[j]);
    second = fmaf(y, rotation.cos_b[j], x * rotation.sin_b[j]);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Calls body with the layout, as a Constant.
template <typename Body>
void dispatch_layout(RopeLayout layout, const Body& body) {
  if (layout == RopeLayout::kHalf) return body(Constant<RopeLayout::kHalf>{});
  body(Constant<RopeLayout::kInterleaved>{});
}

inline bool has_vector_rows(const HeadsOperand& operand, int element_bytes) {
  bool vector =
      is_16_byte_aligned(operand.in) && is_16_byte_aligned(operand.out) && is_16_byte_aligned(operand.weight);
  vector = vector && operand.out_chunk_gap * element_bytes % kVectorBytes == 0;
  for (int dim = 0; dim < 3; ++dim)
    vector = vector && operand.in_strides[dim] * element_bytes % kVectorBytes == 0 &&
             operand.out_strides[dim] * element_bytes % kVectorBytes == 0;
  return vector;
}

inline bool has_vector_rows(const RopeTables& tables, int element_bytes) {
  const int64_t table_bytes = tables.is_float32 ? 4 : element_bytes;
  bool vector = is_16_byte_aligned(tables.cos) && (tables.is_complex || is_16_byte_aligned(tables.sin));
  for (int dim = 0; dim < 3; ++dim)
    vector = vector && tables.cos_strides[dim] * table_bytes % kVectorBytes == 0 &&
             tables.sin_strides[dim] * table_bytes % kVectorBytes == 0;
  return vector;
}

}  // namespace h100_diffusers_kernels
