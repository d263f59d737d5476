// qk_norm_rope: query and key are normalized and rotated in one pass over both.
//
// A group of threads shares what one norm spans, a token or a head. Each thread treats units (rope.cuh) of
// query and key at the same place, so that an angle is looked up or computed once for both.
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

struct QkKernelParams : QkNormRopeParams {
  FastDivisor seq_divisor, max_heads_divisor, units_per_head;
};

// A group of kGroupThreads threads holds up to kGroupThreads * kUnits units of query and of key. There is a
// group for each token, or for each head of each token where the norm spans a head; gridDim.x counts blocks
// of groups.
template <typename T, class Rope, RopeLayout kLayout, int kGroupThreads, int kUnits>
__global__ void __launch_bounds__(kBlockThreads<kGroupThreads>)
    qk_norm_rope_kernel(const __grid_constant__ QkKernelParams p) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  constexpr int kGroups = kBlockThreads<kGroupThreads> / kGroupThreads;
  // A unit's packs are half a head apart, so that neighbouring threads read neighbouring packs (NOTES,
  // "Rotary embedding from tables"), but where computed rotations want pairs that follow each other.
  constexpr bool kIsApart = kLayout == RopeLayout::kHalf || !Rope::kIsComputed;
  // The rotation waits in registers, computed or on its way, while the norm is being taken (NOTES, "Rotary
  // embedding from tables" and "from coordinates").
  constexpr bool kLooksUpAhead = Rope::kIsComputed || kUnits == 1;
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  const int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
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
    fetch(k[i], p.k, k_heads, place, is_unit);
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
    GroupReduce<Sum, RowSum<T>, kGroupThreads, 2>{}(sums);
    q_scale = rms_scale_of<T>(sums[0], spans_heads ? q_heads * head_dim : head_dim, p.eps);
    k_scale = rms_scale_of<T>(sums[1], spans_heads ? k_heads * head_dim : head_dim, p.eps);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const UnitPlace& place = places[i];
    if constexpr (!kLooksUpAhead) look_up(i);
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

// Heads and spans of any size and alignment are read twice, an element at a time. A block treats one span of
// one tensor; blockIdx.y is 0 for the query, 1 for the key.
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

bool has_vector_access(const QkNormRopeParams& p, int element_bytes) {
  const int64_t unit_bytes = 2 * kVectorBytes;
  bool vector = p.head_dim * element_bytes % unit_bytes == 0;
  for (const HeadsOperand* operand : {&p.q, &p.k})
    vector = vector && has_vector_rows(*operand, element_bytes);
  return vector && (!p.tables.cos || has_vector_rows(p.tables, element_bytes));
}

template <typename T, class Rope, RopeLayout kLayout>
void launch(const QkNormRopeParams& p, Stream stream) {
  constexpr const char* kOperation = "qk_norm_rope";
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int64_t max_heads = p.q.heads > p.k.heads ? p.q.heads : p.k.heads;
  const int64_t groups = p.batch * p.seq * (spans_heads ? 1 : max_heads);
  const int64_t units = (spans_heads ? max_heads : 1) * p.head_dim / (2 * kPackSize<T, Access::kVector>);
  const auto launch_units = [&](auto config) {
    constexpr int kGroupThreads = config.kGroupThreads;
    constexpr int kBlock = kBlockThreads<kGroupThreads>;
    QkKernelParams params{p, {}, {}, {}};
    params.seq_divisor.set(static_cast<uint32_t>(p.seq));
    params.max_heads_divisor.set(static_cast<uint32_t>(max_heads));
    params.units_per_head.set(static_cast<uint32_t>(p.head_dim / (2 * kPackSize<T, Access::kVector>)));
    launch_kernel(kOperation, qk_norm_rope_kernel<T, Rope, kLayout, kGroupThreads, config.kUnitsPerThread>,
                  dim3(ceil_divide(groups, kBlock / kGroupThreads)), kBlock, params, stream);
  };
  const bool launched = has_vector_access(p, sizeof(T)) && dispatch_group_config(units, launch_units);
  if (!launched)
    launch_kernel(kOperation, qk_norm_rope_any_shape_kernel<T, Rope, kLayout, Access::kScalar>,
                  dim3(groups, 2), kAnyShapeThreads, p, stream);
}

}  // namespace

void qk_norm_rope(const QkNormRopeParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T> dtype) {
    const auto launch_with = [&]<class Rope>(std::type_identity<Rope>) {
      dispatch_layout(params.layout, [&](auto layout) { launch<T, Rope, layout>(params, stream); });
    };
    if (params.coordinates) return launch_with(std::type_identity<CoordinateRope>{});
    if (!params.tables.cos) return launch<T, NoRope, RopeLayout::kInterleaved>(params, stream);
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

}  // namespace h100_diffusers_kernels
