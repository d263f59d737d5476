// qk_norm_rope: query and key are normalized and rotated in one pass over both.
//
// The kernel's unit of work is two packs of a head that hold whole rotated pairs: neighbouring packs in the
// interleaved layout, packs half a head apart in the half layout. A group of threads shares what one norm
// spans, a token or a head, and each thread treats query and key at the same place, so that an angle is
// looked up or computed once for both.
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "rotation.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

// ---------------------------------------------------------------------------------------------------------
// Policies: where the cosine and sine of a unit come from. kSize pairs a unit; a pair's first element is
// multiplied by cos_a and sin_a, its second by cos_b and sin_b.

template <int kSize>
struct UnitRotation {
  float cos_a[kSize], sin_a[kSize], cos_b[kSize], sin_b[kSize];
};

// Place of a unit: batch, seq, head, the number of its first pair and the offsets of its packs in the head.
struct UnitPlace {
  int64_t batch, seq;
  int head, pair, first, second;
};

template <RopeLayout kLayout>
struct Layout {
  // Pair j of a unit whose packs are a and b.
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
};

struct NoRope {
  static constexpr bool kIsRope = false;
  static constexpr bool kIsComputed = false;
};

template <typename Table>
struct TableRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = false;

  template <typename T, RopeLayout kLayout, int kSize>
  __device__ __forceinline__ static void look_up(const QkNormRopeParams& p, const UnitPlace& place,
                                                 UnitRotation<kSize>& rotation) {
    const auto load = [&](const void* table, const int64_t (&strides)[3], float (&a)[kSize],
                          float (&b)[kSize]) {
      const Table* row = static_cast<const Table*>(table) + place.batch * strides[0] +
                         place.seq * strides[1] + place.head * strides[2];
      load_floats(row + place.first, a);
      load_floats(row + place.second, b);
    };
    float a[kSize], b[kSize];
    load(p.cos, p.cos_strides, a, b);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      rotation.cos_a[j] = Layout<kLayout>::first_of(a, b, j);
      rotation.cos_b[j] = Layout<kLayout>::second_of(a, b, j);
    }
    load(p.sin, p.sin_strides, a, b);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      rotation.sin_a[j] = Layout<kLayout>::first_of(a, b, j);
      rotation.sin_b[j] = Layout<kLayout>::second_of(a, b, j);
    }
  }
};

struct CoordinateRope {
  static constexpr bool kIsRope = true;
  static constexpr bool kIsComputed = true;

  template <typename T, RopeLayout kLayout, int kSize>
  __device__ __forceinline__ static void look_up(const QkNormRopeParams& p, const UnitPlace& place,
                                                 UnitRotation<kSize>& rotation) {
    const float* coordinates =
        p.coordinates + place.batch * p.coordinate_strides[0] + place.seq * p.coordinate_strides[1];
    const int half = static_cast<int>(p.head_dim) / 2;
    const int rotated = place.head * half + place.pair - p.identity_pairs;  // negative: left alone
    int frequency = rotated > 0 ? rotated / p.axes : 0;
    int axis = rotated > 0 ? rotated - frequency * p.axes : 0;
    float angles[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      angles[j] = 0.0f;
      if (rotated + j >= 0) {
        angles[j] = __fmul_rn(__ldg(p.frequencies + frequency), __ldg(coordinates + axis));
        const bool wraps = ++axis == p.axes;
        axis = wraps ? 0 : axis;
        frequency += wraps;
      }
    }
    float sines[kSize], cosines[kSize];
    sincos_of<T>(angles, sines, cosines);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      rotation.cos_a[j] = rotation.cos_b[j] = cosines[j];
      rotation.sin_a[j] = rotation.sin_b[j] = sines[j];
    }
  }
};

// ---------------------------------------------------------------------------------------------------------
// Kernels

template <typename T, int kSize>
__device__ __forceinline__ void multiply_by_weight(float (&n)[kSize], const T* weight) {
  float w[kSize];
  load_floats(weight, w);
#pragma unroll
  for (int i = 0; i < kSize; ++i) n[i] *= w[i];
}

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

__device__ __forceinline__ int64_t head_offset(const int64_t (&strides)[3], const UnitPlace& place) {
  return place.batch * strides[0] + place.seq * strides[1] + place.head * strides[2];
}

// A group of kGroupThreads threads holds up to kGroupThreads * kUnits units of query and of key.
// gridDim.x: tokens, or tokens * heads where the norm spans a head, in blocks of groups.
template <typename T, class Rope, RopeLayout kLayout, int kGroupThreads, int kUnits>
__global__ void __launch_bounds__(kBlockThreads<kGroupThreads>)
    qk_norm_rope_kernel(const __grid_constant__ QkNormRopeParams p) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  constexpr int kGroups = kBlockThreads<kGroupThreads> / kGroupThreads;
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  const int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  const int lane = threadIdx.x % kGroupThreads;
  const int64_t tokens = p.batch * p.seq;
  const int64_t group = blockIdx.x * int64_t{kGroups} + threadIdx.x / kGroupThreads;
  const int64_t token = spans_heads ? group : group / max_heads;
  const bool is_group = token < tokens;
  const int group_head = spans_heads ? 0 : static_cast<int>(group - token * max_heads);
  const int units_per_head = head_dim / (2 * kSize);
  const int q_heads = static_cast<int>(p.q.heads), k_heads = static_cast<int>(p.k.heads);
  const int group_heads = spans_heads ? max_heads : 1;

  struct Operand {
    Pack<T, kSize> first, second;
    bool is_present;
  };
  UnitPlace places[kUnits];
  Operand q[kUnits], k[kUnits];
  const auto fetch = [&](Operand& unit, const HeadsOperand& tensor, int heads, const UnitPlace& place,
                         bool is_unit) {
    unit.is_present = is_unit && place.head < heads;
    if (unit.is_present) {
      const T* head = static_cast<const T*>(tensor.in) + head_offset(tensor.in_strides, place);
      unit.first.load(head + place.first);
      unit.second.load(head + place.second);
    }
  };
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * kGroupThreads + lane;
    const int unit_head = unit / units_per_head;
    const int within = unit - unit_head * units_per_head;
    UnitPlace& place = places[i];
    place.batch = token / p.seq;
    place.seq = token - place.batch * p.seq;
    place.head = group_head + unit_head;
    place.pair = within * kSize;
    place.first = kLayout == RopeLayout::kHalf ? within * kSize : within * 2 * kSize;
    place.second = kLayout == RopeLayout::kHalf ? place.first + head_dim / 2 : place.first + kSize;
    const bool is_unit = is_group && unit_head < group_heads;
    fetch(q[i], p.q, q_heads, place, is_unit);
    fetch(k[i], p.k, k_heads, place, is_unit);
  }

  // Angles are computed while query and key are on their way; tables are read when their turn comes.
  UnitRotation<kSize> rotations[kUnits];
  const auto look_up = [&](int i) {
    if constexpr (Rope::kIsRope) {
      if (q[i].is_present || k[i].is_present) Rope::template look_up<T, kLayout>(p, places[i], rotations[i]);
    }
  };
  if constexpr (Rope::kIsComputed) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) look_up(i);
  }

  const bool is_norm = p.norm != NormScope::kNone;
  Statistic<T> q_scale, k_scale;
  if (is_norm) {
    RowSum<T> sums[2] = {0, 0};
    const auto accumulate = [&](RowSum<T>& sum, const Operand& unit) {
      if (!unit.is_present) return;
      float a[kSize], b[kSize];
      unit.first.to_floats(a);
      unit.second.to_floats(b);
      sum += tree_sum<kSize>([&](int j) { return fmaf(a[j], a[j], b[j] * b[j]); });
    };
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      accumulate(sums[0], q[i]);
      accumulate(sums[1], k[i]);
    }
    GroupSum<RowSum<T>, kGroupThreads, 2>{}(sums);
    q_scale = rms_scale_of<T>(sums[0], spans_heads ? q_heads * head_dim : head_dim, p.eps);
    k_scale = rms_scale_of<T>(sums[1], spans_heads ? k_heads * head_dim : head_dim, p.eps);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const UnitPlace& place = places[i];
    if constexpr (!Rope::kIsComputed) look_up(i);
    const auto finish = [&](const Operand& unit, const HeadsOperand& tensor, const Statistic<T>& scale) {
      if (!unit.is_present) return;
      float a[kSize], b[kSize];
      unit.first.to_floats(a);
      unit.second.to_floats(b);
      if (is_norm) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          a[j] = scale.times(a[j]);
          b[j] = scale.times(b[j]);
        }
      }
      if (tensor.weight) {
        const T* weight = static_cast<const T*>(tensor.weight) + (spans_heads ? place.head * head_dim : 0);
        multiply_by_weight(a, weight + place.first);
        multiply_by_weight(b, weight + place.second);
      }
      if constexpr (Rope::kIsRope) rotate<kLayout>(a, b, rotations[i]);
      T* head = static_cast<T*>(tensor.out) + head_offset(tensor.out_strides, place);
      store_floats(head + place.first, a);
      store_floats(head + place.second, b);
    };
    finish(q[i], p.q, q_scale);
    finish(k[i], p.k, k_scale);
  }
}

constexpr int kAnyShapeThreads = 256;

// Any head size, span and alignment: a block treats one span of one tensor (blockIdx.y: query, key), an
// element at a time, and reads it twice.
template <typename T, class Rope, RopeLayout kLayout, Access kAccess>
__global__ void __launch_bounds__(kAnyShapeThreads)
    qk_norm_rope_any_shape_kernel(const __grid_constant__ QkNormRopeParams p) {
  static_assert(kAccess == Access::kScalar);
  const HeadsOperand& tensor = blockIdx.y == 0 ? p.q : p.k;
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  const int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  const int64_t token = spans_heads ? blockIdx.x : blockIdx.x / max_heads;
  const int group_head = spans_heads ? 0 : static_cast<int>(blockIdx.x - token * max_heads);
  const int group_heads = spans_heads ? static_cast<int>(tensor.heads) : 1;
  if (group_head >= tensor.heads) return;
  const int span = group_heads * head_dim;
  UnitPlace place;
  place.batch = token / p.seq;
  place.seq = token - place.batch * p.seq;
  const auto element = [&](int i, const int64_t (&strides)[3]) {
    UnitPlace at = place;
    at.head = group_head + i / head_dim;
    return head_offset(strides, at) + i % head_dim;
  };

  const bool is_norm = p.norm != NormScope::kNone;
  Statistic<T> scale;
  if (is_norm) {
    RowSum<T> sum[1] = {0};
    for (int i = threadIdx.x; i < span; i += kAnyShapeThreads) {
      const float x = to_float(static_cast<const T*>(tensor.in)[element(i, tensor.in_strides)]);
      sum[0] += x * x;
    }
    GroupSum<RowSum<T>, kAnyShapeThreads>{}(
        sum);  // its barrier ends all reads before the first write in place
    scale = rms_scale_of<T>(sum[0], span, p.eps);
  }
  const auto normalized = [&](int i) {
    const float x = to_float(static_cast<const T*>(tensor.in)[element(i, tensor.in_strides)]);
    const T* weight = static_cast<const T*>(tensor.weight);
    const float n = is_norm ? scale.times(x) : x;
    return weight ? n * to_float(weight[i]) : n;
  };
  const auto store = [&](int i, float value) {
    static_cast<T*>(tensor.out)[element(i, tensor.out_strides)] = from_float<T>(value);
  };
  if constexpr (Rope::kIsRope) {
    const int half = head_dim / 2;
    for (int pair = threadIdx.x; pair < span / 2; pair += kAnyShapeThreads) {
      const int head = pair / half, within = pair - head * half;
      place.head = group_head + head;
      place.pair = within;
      place.first = kLayout == RopeLayout::kHalf ? within : 2 * within;
      place.second = kLayout == RopeLayout::kHalf ? within + half : 2 * within + 1;
      UnitRotation<1> rotation;
      // Two packs of one element each: what the half layout is to larger packs.
      Rope::template look_up<T, RopeLayout::kHalf>(p, place, rotation);
      const int first = head * head_dim + place.first, second = head * head_dim + place.second;
      float a[1] = {normalized(first)}, b[1] = {normalized(second)};
      rotate<RopeLayout::kHalf>(a, b, rotation);
      store(first, a[0]);
      store(second, b[0]);
    }
  } else {
    for (int i = threadIdx.x; i < span; i += kAnyShapeThreads) store(i, normalized(i));
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launch configuration: units in a group -> threads a group, units a thread

template <int kThreads, int kUnits>
struct GroupConfig {
  static constexpr int kGroupThreads = kThreads;
  static constexpr int kUnitsPerThread = kUnits;
};

// Calls body with the configuration for groups of `units`; false if no configuration holds such a group.
template <typename Body>
bool dispatch_group_config(int64_t units, const Body& body) {
  const auto try_config = [&](auto config) {
    if (units > config.kGroupThreads * config.kUnitsPerThread) return false;
    body(config);
    return true;
  };
  return try_config(GroupConfig<4, 1>{}) || try_config(GroupConfig<8, 1>{}) ||
         try_config(GroupConfig<32, 1>{}) || try_config(GroupConfig<64, 1>{}) ||
         try_config(GroupConfig<96, 1>{}) || try_config(GroupConfig<128, 1>{}) ||
         try_config(GroupConfig<192, 1>{}) || try_config(GroupConfig<256, 1>{}) ||
         try_config(GroupConfig<320, 1>{}) || try_config(GroupConfig<512, 2>{});
}

bool has_vector_access(const QkNormRopeParams& p, int element_bytes) {
  const int64_t unit_bytes = 2 * kVectorBytes;
  bool vector = p.head_dim * element_bytes % unit_bytes == 0;
  for (const HeadsOperand* operand : {&p.q, &p.k}) {
    vector = vector && is_16_byte_aligned(operand->in) && is_16_byte_aligned(operand->out) &&
             is_16_byte_aligned(operand->weight);
    for (int dim = 0; dim < 3; ++dim)
      vector = vector && operand->in_strides[dim] * element_bytes % kVectorBytes == 0 &&
               operand->out_strides[dim] * element_bytes % kVectorBytes == 0;
  }
  if (p.cos) {
    const int64_t table_bytes = p.table_is_float32 ? 4 : element_bytes;
    vector = vector && is_16_byte_aligned(p.cos) && is_16_byte_aligned(p.sin);
    for (int dim = 0; dim < 3; ++dim)
      vector = vector && p.cos_strides[dim] * table_bytes % kVectorBytes == 0 &&
               p.sin_strides[dim] * table_bytes % kVectorBytes == 0;
  }
  return vector;
}

template <typename T, class Rope, RopeLayout kLayout>
void launch(const QkNormRopeParams& p, Stream stream) {
  constexpr const char* kOperation = "qk_norm_rope";
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int64_t max_heads = p.q.heads > p.k.heads ? p.q.heads : p.k.heads;
  const int64_t groups = p.batch * p.seq * (spans_heads ? 1 : max_heads);
  const int64_t units = (spans_heads ? max_heads : 1) * p.head_dim / (2 * kPackSize<T, Access::kVector>);
  const bool launched =
      has_vector_access(p, sizeof(T)) && dispatch_group_config(units, [&](auto config) {
        constexpr int kGroupThreads = config.kGroupThreads;
        constexpr int kBlock = kBlockThreads<kGroupThreads>;
        launch_kernel<const QkNormRopeParams>(
            kOperation, qk_norm_rope_kernel<T, Rope, kLayout, kGroupThreads, config.kUnitsPerThread>,
            dim3(ceil_divide(groups, kBlock / kGroupThreads)), kBlock, p, stream);
      });
  if (!launched)
    launch_kernel<const QkNormRopeParams>(kOperation,
                                          qk_norm_rope_any_shape_kernel<T, Rope, kLayout, Access::kScalar>,
                                          dim3(groups, 2), kAnyShapeThreads, p, stream);
}

template <typename T, class Rope>
void dispatch_layout(const QkNormRopeParams& p, Stream stream) {
  if (p.layout == RopeLayout::kHalf) return launch<T, Rope, RopeLayout::kHalf>(p, stream);
  launch<T, Rope, RopeLayout::kInterleaved>(p, stream);
}

}  // namespace

void qk_norm_rope(const QkNormRopeParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.coordinates) return dispatch_layout<T, CoordinateRope>(params, stream);
    if (!params.cos) return launch<T, NoRope, RopeLayout::kInterleaved>(params, stream);
    if (params.table_is_float32) return dispatch_layout<T, TableRope<float>>(params, stream);
    dispatch_layout<T, TableRope<T>>(params, stream);
  });
}

}  // namespace h100_diffusers_kernels
