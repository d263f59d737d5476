// qk_norm_rope: query and key are normalized and rotated in one pass over both.
//
// A group of threads shares what one norm spans, a token or a head. Each thread treats units (rope.cuh) of
// query and key at the same place, so that an angle is looked up or computed once for both.
#include <algorithm>
#include <type_traits>

#include "fast_divisor.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "rope.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

// ---------------------------------------------------------------------------------------------------------
// Kernels

template <typename T, int kSize>
__device__ __forceinline__ void multiply_by_weight(float (&n)[kSize], const T* weight) {
  Pack<T, kSize> pack;
  pack.load(weight);
  multiply(n, pack);
}

// What a launch takes. Weights in float32 beside 16-bit rows, values, and a key that is absent have kernels
// of their own, so that the others keep their registers.
struct QueryAndKey {
  using Params = QkNormRopeParams;
  static constexpr bool kHasKey = true;
  static constexpr bool kHasMore = false;
};

// One tensor is the query; then no registers are held for a key.
template <bool kKey>
struct AnyTensors {
  using Params = QkvNormRopeParams;
  static constexpr bool kHasKey = kKey;
  static constexpr bool kHasMore = true;
};

template <class Params>
struct QkKernelParams : Params {
  FastDivisor seq_divisor, max_heads_divisor, units_per_head;
};

// A group of kGroupThreads threads holds up to kGroupThreads * kUnits units of query and of key. There is a
// group for each token, or for each head of each token where the norm spans a head; gridDim.x counts blocks
// of groups.
template <typename T, class Rope, RopeLayout kLayout, int kGroupThreads, int kUnits, class Form>
__global__ void __launch_bounds__(kBlockThreads<kGroupThreads>)
    qk_norm_rope_kernel(const __grid_constant__ QkKernelParams<typename Form::Params> p) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  constexpr int kGroups = kBlockThreads<kGroupThreads> / kGroupThreads;
  // A unit's packs are half a head apart, so that neighbouring threads read neighbouring packs (NOTES,
  // "Rotary embedding from tables"), but where computed rotations want pairs that follow each other.
  constexpr bool kIsApart = kLayout == RopeLayout::kHalf || !Rope::kIsComputed;
  // The rotation waits in registers, computed or on its way, while the norm is being taken (NOTES, "Rotary
  // embedding from tables" and "from coordinates").
  constexpr bool kLooksUpAhead = Rope::kIsComputed || kUnits == 1;
  // Beside a key, values are loaded with it; groups of many threads have no registers for them.
  constexpr bool kFetchesValues = Form::kHasMore && Form::kHasKey;
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  if constexpr (Form::kHasMore) max_heads = max(max_heads, static_cast<int>(p.v.heads));
  const int lane = threadIdx.x % kGroupThreads;
  const uint32_t group = blockIdx.x * kGroups + threadIdx.x / kGroupThreads;
  const uint32_t token = spans_heads ? group : p.max_heads_divisor.divide(group);
  const bool is_group = token < p.batch * p.seq;
  const int group_head = spans_heads ? 0 : static_cast<int>(group - token * max_heads);
  const int q_heads = static_cast<int>(p.q.heads), k_heads = static_cast<int>(p.k.heads);
  const int group_heads = spans_heads ? max_heads : 1;
  const uint32_t batch = p.seq_divisor.divide(token);

  struct Operand {
    Pack<T, kSize> first, second;
    bool is_present;
  };
  wait_for_earlier_kernels();
  UnitPlace places[kUnits];
  Operand q[kUnits], k[kUnits], v[kUnits];
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
    const int unit_head = p.units_per_head.divide(unit);
    const int within = unit - unit_head * p.units_per_head.divisor;
    UnitPlace& place = places[i];
    place.batch = batch;
    place.seq = token - batch * p.seq_divisor.divisor;
    place.head = group_head + unit_head;
    place.pair = within * kSize;
    place.first = within * (kIsApart ? kSize : 2 * kSize);
    place.second = place.first + (kIsApart ? head_dim / 2 : kSize);
    const bool is_unit = is_group && unit_head < group_heads;
    fetch(q[i], p.q, q_heads, place, is_unit);
    k[i].is_present = v[i].is_present = false;
    if constexpr (Form::kHasKey) fetch(k[i], p.k, k_heads, place, is_unit);
    if constexpr (kFetchesValues) fetch(v[i], p.v, static_cast<int>(p.v.heads), place, is_unit);
  }

  UnitRotation<kSize> rotations[kUnits];
  const auto look_up = [&](int i) {
    if (!q[i].is_present && !k[i].is_present) return;
    typename Rope::template Lookup<T, kLayout, kSize> lookup;
    lookup.fetch(p, places[i]);
    lookup.rotation(rotations[i]);
  };
  if constexpr (kLooksUpAhead) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) look_up(i);
  }

  const auto store = [&](const Operand& unit, const HeadsOperand& tensor, const UnitPlace& place) {
    if (!unit.is_present) return;
    T* head = static_cast<T*>(tensor.out) + head_offset(tensor.out_strides, place);
    unit.first.store(head + place.first);
    unit.second.store(head + place.second);
  };
  // They have come when queries and keys have. Stored before these are treated, they leave their registers.
  if constexpr (kFetchesValues) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store(v[i], p.v, places[i]);
  }

  const bool is_norm = p.norm != NormScope::kNone;
  Statistic<T> q_scale, k_scale;
  if (is_norm) {
    constexpr int kNorms = Form::kHasKey ? 2 : 1;
    RowSum<T> sums[kNorms] = {};
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
      if constexpr (Form::kHasKey) accumulate(sums[1], k[i]);
    }
    GroupReduce<Sum, RowSum<T>, kGroupThreads, kNorms>{}(sums);
    q_scale = rms_scale_of<T>(sums[0], spans_heads ? q_heads * head_dim : head_dim, p.eps);
    if constexpr (Form::kHasKey)
      k_scale = rms_scale_of<T>(sums[1], spans_heads ? k_heads * head_dim : head_dim, p.eps);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const UnitPlace& place = places[i];
    if constexpr (!kLooksUpAhead) look_up(i);
    const auto finish = [&](const Operand& unit, const HeadsOperand& tensor, const Statistic<T>& scale,
                            bool weight_is_float32) {
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
      const auto multiply_by_weights = [&](const auto* weight) {
        weight += spans_heads ? place.head * head_dim : 0;
        multiply_by_weight(a, weight + place.first);
        multiply_by_weight(b, weight + place.second);
      };
      if (tensor.weight) {
        if (Form::kHasMore && sizeof(T) < sizeof(float) && weight_is_float32)
          multiply_by_weights(static_cast<const float*>(tensor.weight));
        else
          multiply_by_weights(static_cast<const T*>(tensor.weight));
      }
      if constexpr (Rope::kIsRope) rotate<kLayout>(a, b, rotations[i]);
      T* head = static_cast<T*>(tensor.out) + head_offset(tensor.out_strides, place);
      store_floats(head + place.first, a);
      store_floats(head + place.second, b);
    };
    if constexpr (Form::kHasMore) {
      finish(q[i], p.q, q_scale, p.q_weight_is_float32);
      if constexpr (Form::kHasKey) finish(k[i], p.k, k_scale, p.k_weight_is_float32);
      if constexpr (!kFetchesValues) {
        const bool is_unit = is_group && place.head - group_head < group_heads;
        fetch(v[i], p.v, static_cast<int>(p.v.heads), place, is_unit);
        store(v[i], p.v, place);
      }
    } else {
      finish(q[i], p.q, q_scale, false);
      finish(k[i], p.k, k_scale, false);
    }
  }
}

constexpr int kAnyShapeThreads = 256;

template <class Form>
__device__ __forceinline__ const HeadsOperand& operand_of(const typename Form::Params& p, uint32_t number) {
  if constexpr (Form::kHasMore)
    if (number == 2) return p.v;
  return number == 0 ? p.q : p.k;
}

// Heads and spans of any size and alignment are read twice, an element at a time. A block treats one span of
// one tensor; blockIdx.y is 0 for the query, 1 for the key, 2 for the value.
template <typename T, class Rope, RopeLayout kLayout, Access kAccess, class Form>
__global__ void __launch_bounds__(kAnyShapeThreads)
    qk_norm_rope_any_shape_kernel(const __grid_constant__ typename Form::Params p) {
  static_assert(kAccess == Access::kScalar);
  const HeadsOperand& tensor = operand_of<Form>(p, blockIdx.y);
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  if constexpr (Form::kHasMore) max_heads = max(max_heads, static_cast<int>(p.v.heads));
  const int64_t token = spans_heads ? blockIdx.x : blockIdx.x / max_heads;
  const int group_head = spans_heads ? 0 : static_cast<int>(blockIdx.x - token * max_heads);
  const int group_heads = spans_heads ? static_cast<int>(tensor.heads) : 1;
  wait_for_earlier_kernels();
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
  // The counter is unsigned, because the last step may lead beyond what an int holds.
  const auto for_each_element = [&](const auto& body) {
    for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(span); i += kAnyShapeThreads)
      body(static_cast<int>(i));
  };
  if constexpr (Form::kHasMore) {
    if (blockIdx.y == 2) {
      for_each_element([&](int i) {
        static_cast<T*>(tensor.out)[element(i, tensor.out_strides)] =
            static_cast<const T*>(tensor.in)[element(i, tensor.in_strides)];
      });
      return;
    }
  }

  const bool is_norm = p.norm != NormScope::kNone;
  Statistic<T> scale;
  if (is_norm) {
    RowSum<T> sum[1] = {0};
    for_each_element([&](int i) {
      const float x = to_float(static_cast<const T*>(tensor.in)[element(i, tensor.in_strides)]);
      sum[0] += x * x;
    });
    // Its barrier ends all reads before the first write in place.
    GroupReduce<Sum, RowSum<T>, kAnyShapeThreads>{}(sum);
    scale = rms_scale_of<T>(sum[0], span, p.eps);
  }
  const auto normalized = [&](int i) {
    const float x = to_float(static_cast<const T*>(tensor.in)[element(i, tensor.in_strides)]);
    const float n = is_norm ? scale.times(x) : x;
    if constexpr (Form::kHasMore && sizeof(T) < sizeof(float)) {
      const bool is_float32 = blockIdx.y == 0 ? p.q_weight_is_float32 : p.k_weight_is_float32;
      if (tensor.weight && is_float32) return n * static_cast<const float*>(tensor.weight)[i];
    }
    const T* weight = static_cast<const T*>(tensor.weight);
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
      // Two packs of one element each hold one pair, as in the half layout.
      typename Rope::template Lookup<T, RopeLayout::kHalf, 1> lookup;
      lookup.fetch(p, place);
      UnitRotation<1> rotation;
      lookup.rotation(rotation);
      const int first = head * head_dim + place.first, second = head * head_dim + place.second;
      float a[1] = {normalized(first)}, b[1] = {normalized(second)};
      rotate<RopeLayout::kHalf>(a, b, rotation);
      store(first, a[0]);
      store(second, b[0]);
    }
  } else {
    for_each_element([&](int i) { store(i, normalized(i)); });
  }
}

// ---------------------------------------------------------------------------------------------------------
// The launch configuration is chosen by the number of units in a group: threads a group, units a thread.

template <int kThreads, int kUnits>
struct GroupConfig {
  static constexpr int kGroupThreads = kThreads;
  static constexpr int kUnitsPerThread = kUnits;
};

// Calls body with the configuration for groups of `units`. Returns false if no configuration holds such a
// group.
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

template <class Form>
bool has_vector_access(const typename Form::Params& p, int element_bytes) {
  const int64_t unit_bytes = 2 * kVectorBytes;
  bool vector = p.head_dim * element_bytes % unit_bytes == 0;
  for (const HeadsOperand* operand : {&p.q, &p.k})
    vector = vector && has_vector_rows(*operand, element_bytes);
  if constexpr (Form::kHasMore) vector = vector && has_vector_rows(p.v, element_bytes);
  return vector && (!p.tables.cos || has_vector_rows(p.tables, element_bytes));
}

// Of groups of more threads, query and key have kernels together in the plain form alone.
constexpr int kMaxKeyThreads = 32;

template <typename T, class Rope, RopeLayout kLayout, class Form>
void launch(const typename Form::Params& p, Stream stream) {
  constexpr const char* kOperation = "qk_norm_rope";
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  int64_t max_heads = std::max(p.q.heads, p.k.heads);
  if constexpr (Form::kHasMore) max_heads = std::max(max_heads, p.v.heads);
  const int64_t groups = p.batch * p.seq * (spans_heads ? 1 : max_heads);
  const int64_t units = (spans_heads ? max_heads : 1) * p.head_dim / (2 * kPackSize<T, Access::kVector>);
  const bool has_vectors = has_vector_access<Form>(p, sizeof(T));
  if constexpr (Form::kHasMore) {
    if (has_vectors && units > kMaxKeyThreads && p.k.in) {
      QkvNormRopeParams part = p;
      part.k = part.v = {};
      launch<T, Rope, kLayout, Form>(part, stream);
      part.q = p.k;
      part.q_weight_is_float32 = p.k_weight_is_float32;
      part.v = p.v;
      return launch<T, Rope, kLayout, Form>(part, stream);
    }
  }
  const auto launch_units = [&](auto config) {
    constexpr int kGroupThreads = config.kGroupThreads;
    constexpr int kBlock = kBlockThreads<kGroupThreads>;
    // Here a key is treated with the query in groups of few threads.
    using Launched = std::conditional_t<Form::kHasMore, AnyTensors<(kGroupThreads <= kMaxKeyThreads)>, Form>;
    QkKernelParams<typename Form::Params> params{p, {}, {}, {}};
    params.seq_divisor.set(static_cast<uint32_t>(p.seq));
    params.max_heads_divisor.set(static_cast<uint32_t>(max_heads));
    params.units_per_head.set(static_cast<uint32_t>(p.head_dim / (2 * kPackSize<T, Access::kVector>)));
    launch_kernel(kOperation,
                  qk_norm_rope_kernel<T, Rope, kLayout, kGroupThreads, config.kUnitsPerThread, Launched>,
                  dim3(ceil_divide(groups, kBlock / kGroupThreads)), kBlock, params, stream);
  };
  const bool launched = has_vectors && dispatch_group_config(units, launch_units);
  if (!launched)
    launch_kernel(kOperation, qk_norm_rope_any_shape_kernel<T, Rope, kLayout, Access::kScalar, Form>,
                  dim3(groups, Form::kHasMore ? 3 : 2), kAnyShapeThreads, p, stream);
}

template <class Form>
void dispatch(const typename Form::Params& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T> dtype) {
    const auto launch_with = [&]<class Rope>(std::type_identity<Rope>) {
      dispatch_layout(params.layout, [&](auto layout) { launch<T, Rope, layout, Form>(params, stream); });
    };
    if (params.coordinates) return launch_with(std::type_identity<CoordinateRope>{});
    if (!params.tables.cos) return launch<T, NoRope, RopeLayout::kInterleaved, Form>(params, stream);
    if constexpr (Form::kHasMore)
      if (params.tables.is_complex) return launch_with(std::type_identity<ComplexRope>{});
    const auto launch_with_tables = [&]<typename Table>(std::type_identity<Table>) {
      using PairRope = TableRope<Table, TableValues::kPerPair>;
      using ElementRope = TableRope<Table, TableValues::kPerElement>;
      if (params.tables.is_per_pair) return launch_with(std::type_identity<PairRope>{});
      launch_with(std::type_identity<ElementRope>{});
    };
    if (params.tables.is_float32) return launch_with_tables(std::type_identity<float>{});
    launch_with_tables(dtype);
  });
}

// Tells whether the heads of one tensor can be treated as query and key: all of a token turn alike, and no
// norm spans them. A group then looks up an angle once for two heads.
bool can_be_halved(const QkvNormRopeParams& p) {
  const bool turn_alike =
      !p.coordinates && p.tables.cos_strides[2] == 0 && (p.tables.is_complex || p.tables.sin_strides[2] == 0);
  return !p.k.in && !p.v.in && p.norm != NormScope::kAcrossHeads && p.q.heads % 2 == 0 && turn_alike;
}

void halve(QkvNormRopeParams& p) {
  p.q.heads /= 2;
  p.k = p.q;
  p.k_weight_is_float32 = p.q_weight_is_float32;
  const int64_t bytes = p.q.heads * bytes_of(p.dtype);
  p.k.in = static_cast<const char*>(p.q.in) + p.q.in_strides[2] * bytes;
  p.k.out = static_cast<char*>(p.q.out) + p.q.out_strides[2] * bytes;
}

}  // namespace

void qk_norm_rope(const QkvNormRopeParams& params, Stream stream) {
  QkvNormRopeParams p = params;
  if (can_be_halved(p)) halve(p);
  const bool has_more = !p.k.in || p.v.in || p.q_weight_is_float32 || p.k_weight_is_float32;
  if (has_more || p.tables.is_complex) return dispatch<AnyTensors<true>>(p, stream);
  dispatch<QueryAndKey>(p, stream);
}

}  // namespace h100_diffusers_kernels
