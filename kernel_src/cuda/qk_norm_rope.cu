// qk_norm_rope: norm and rotation of query and key in one pass over both.
//
// A group of threads shares the span of one norm: a token or a head. Each thread has units (rope.cuh) of
// query and key at the same position, so that a rotation is loaded or computed once for both.
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

template <typename T, int kSize>
__device__ __forceinline__ void add_bias(float (&n)[kSize], const T* bias) {
  Pack<T, kSize> pack;
  pack.load(bias);
  add(n, pack);
}

// Returns the sum of the values, in double for float32 results.
template <typename T, int kSize>
__device__ __forceinline__ RowSum<T> sum_of(const float (&values)[kSize]) {
  if constexpr (!kHasExactStatistics<T>) return tree_sum<kSize>([&](int j) { return values[j]; });
  RowSum<T> sum = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum += values[j];
  return sum;
}

// Query and key, with weights of their dtype or none. Kernels for these alone need fewer registers.
struct PlainOperands {
  using Params = QkNormRopeParams;
  static constexpr bool kHasKey = true;
  static constexpr bool kIsGeneral = false;
  static constexpr bool kIsLayerNorm = false;
};

// Query, key if kHasKey_, and values if they are given, with weights that may be float32 with 16-bit rows.
template <bool kHasKey_>
struct GeneralOperands {
  using Params = QkvNormRopeParams;
  static constexpr bool kHasKey = kHasKey_;
  static constexpr bool kIsGeneral = true;
  static constexpr bool kIsLayerNorm = false;
};

// Likewise with LayerNorm of each head.
struct LayerNormOperands : GeneralOperands<true> {
  static constexpr bool kIsLayerNorm = true;
};

template <class Params>
struct QkKernelParams : Params {
  FastDivisor seq_divisor, max_heads_divisor, units_per_head;
  ShortDivisor out_chunk_heads[3];  // of query, key and values
};

__device__ __forceinline__ int64_t out_offset(const HeadsOperand& tensor, const ShortDivisor& chunk_heads,
                                              const UnitPosition& position) {
  const int64_t chunk = chunk_heads.divide(static_cast<uint32_t>(position.head));
  return chunk * tensor.out_chunk_gap + head_offset(tensor.out_strides, position);
}

// Available numbers of threads in a group, in ascending order.
template <int... kThreads>
struct GroupThreads {};
using AllGroupThreads = GroupThreads<4, 8, 32, 64, 96, 128, 192, 256, 320, 512>;
using LayerNormThreads = GroupThreads<4, 8, 32>;
constexpr int kMaxGroupThreads = 512;

// Units of query, and of key, that a thread holds in registers.
template <int kGroupThreads>
constexpr int kUnitsPerThread = kGroupThreads == kMaxGroupThreads ? 2 : 1;

// There is one group for each token, or one for each head of each token unless the norm spans all heads. A
// block has one or more groups.
template <typename T, class Rope, RopeLayout kLayout, int kGroupThreads, class Operands>
__global__ void __launch_bounds__(kBlockThreads<kGroupThreads>)
    qk_norm_rope_kernel(const __grid_constant__ QkKernelParams<typename Operands::Params> p) {
  constexpr int kSize = kPackSize<T, Access::kVector>, kUnits = kUnitsPerThread<kGroupThreads>;
  constexpr int kGroups = kBlockThreads<kGroupThreads> / kGroupThreads;
  // A unit's packs are half a head apart, so that adjacent threads read adjacent packs
  // (notes/rotary_embedding.md, "From tables"). In the interleaved layout computed rotations need consecutive
  // pairs instead.
  constexpr bool kIsSplit = kLayout == RopeLayout::kHalf || !Rope::kIsComputed;
  // The rotation is computed, or its loads are issued, before the norm is reduced
  // (notes/rotary_embedding.md).
  constexpr bool kPrefetchesRotation = Rope::kIsComputed || kUnits == 1;
  // Values are loaded along with a key. Larger groups have no registers for them.
  constexpr bool kPrefetchesValues = Operands::kIsGeneral && Operands::kHasKey;
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  if constexpr (Operands::kIsGeneral) max_heads = max(max_heads, static_cast<int>(p.v.heads));
  const int lane = threadIdx.x % kGroupThreads;
  const uint32_t group = blockIdx.x * kGroups + threadIdx.x / kGroupThreads;
  const uint32_t token = spans_heads ? group : p.max_heads_divisor.divide(group);
  const bool is_group = token < p.batch * p.seq;
  const int group_head = spans_heads ? 0 : static_cast<int>(group - token * max_heads);
  const int q_heads = static_cast<int>(p.q.heads), k_heads = static_cast<int>(p.k.heads);
  const int group_heads = spans_heads ? max_heads : 1;
  const uint32_t batch = p.seq_divisor.divide(token);

  struct Unit {
    Pack<T, kSize> first, second;
    bool is_present;
  };
  griddepcontrol_wait();
  UnitPosition positions[kUnits];
  Unit q[kUnits], k[kUnits], v[kUnits];
  const auto fetch = [&](Unit& unit, const HeadsOperand& tensor, int heads, const UnitPosition& position,
                         bool is_unit) {
    unit.is_present = is_unit && position.head < heads;
    if (unit.is_present) {
      const T* head = static_cast<const T*>(tensor.in) + head_offset(tensor.in_strides, position);
      unit.first.load(head + position.first);
      unit.second.load(head + position.second);
    }
  };
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = i * kGroupThreads + lane;
    const int unit_head = p.units_per_head.divide(unit);
    const int within = unit - unit_head * p.units_per_head.divisor;
    UnitPosition& position = positions[i];
    position.batch = batch;
    position.seq = token - batch * p.seq_divisor.divisor;
    position.head = group_head + unit_head;
    position.pair = within * kSize;
    position.first = within * (kIsSplit ? kSize : 2 * kSize);
    position.second = position.first + (kIsSplit ? head_dim / 2 : kSize);
    const bool is_unit = is_group && unit_head < group_heads;
    fetch(q[i], p.q, q_heads, position, is_unit);
    k[i].is_present = v[i].is_present = false;
    if constexpr (Operands::kHasKey) fetch(k[i], p.k, k_heads, position, is_unit);
    if constexpr (kPrefetchesValues) fetch(v[i], p.v, static_cast<int>(p.v.heads), position, is_unit);
  }

  UnitRotation<kSize> rotations[kUnits];
  const auto look_up = [&](int i) {
    if (!q[i].is_present && !k[i].is_present) return;
    typename Rope::template Lookup<T, kLayout, kSize> lookup;
    lookup.fetch(p, positions[i]);
    lookup.rotation(rotations[i]);
  };
  if constexpr (kPrefetchesRotation) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) look_up(i);
  }

  const auto store = [&](const Unit& unit, const HeadsOperand& tensor, const ShortDivisor& chunk_heads,
                         const UnitPosition& position) {
    if (!unit.is_present) return;
    T* head = static_cast<T*>(tensor.out) + out_offset(tensor, chunk_heads, position);
    unit.first.store(head + position.first);
    unit.second.store(head + position.second);
  };
  // Stored before the norm of query and key, which frees the registers of the values.
  if constexpr (kPrefetchesValues) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) store(v[i], p.v, p.out_chunk_heads[2], positions[i]);
  }

  const bool is_norm = p.norm != NormScope::kNone;
  Statistic<T> q_mean, k_mean, q_scale, k_scale;
  // The values of a unit, without their mean if it is a LayerNorm.
  const auto read = [&](const Unit& unit, const Statistic<T>& mean, float (&a)[kSize], float (&b)[kSize]) {
    unit.first.to_floats(a);
    unit.second.to_floats(b);
    if constexpr (Operands::kIsLayerNorm) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        a[j] = mean.subtracted_from(a[j]);
        b[j] = mean.subtracted_from(b[j]);
      }
    }
  };
  if (is_norm) {
    constexpr int kNorms = Operands::kHasKey ? 2 : 1;
    using Reduce = GroupReduce<Sum, RowSum<T>, kGroupThreads, kNorms>;
    RowSum<T> sums[kNorms] = {};
    if constexpr (Operands::kIsLayerNorm) {
      const auto add_values = [&](RowSum<T>& sum, const Unit& unit) {
        if (!unit.is_present) return;
        float a[kSize], b[kSize];
        read(unit, {}, a, b);
        sum += sum_of<T>(a) + sum_of<T>(b);
      };
      add_values(sums[0], q[0]);
      add_values(sums[1], k[0]);
      Reduce{}(sums);
      q_mean = Statistic<T>::from(divide<T>(sums[0], static_cast<RowSum<T>>(head_dim)));
      k_mean = Statistic<T>::from(divide<T>(sums[1], static_cast<RowSum<T>>(head_dim)));
      sums[0] = sums[1] = 0;
    }
    const auto accumulate = [&](RowSum<T>& sum, const Unit& unit, const Statistic<T>& mean) {
      if (!unit.is_present) return;
      float a[kSize], b[kSize];
      read(unit, mean, a, b);
      sum += tree_sum<kSize>([&](int j) { return fmaf(a[j], a[j], b[j] * b[j]); });
    };
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      accumulate(sums[0], q[i], q_mean);
      if constexpr (Operands::kHasKey) accumulate(sums[1], k[i], k_mean);
    }
    Reduce{}(sums);
    q_scale = rms_scale_of<T>(sums[0], spans_heads ? q_heads * head_dim : head_dim, p.eps);
    if constexpr (Operands::kHasKey)
      k_scale = rms_scale_of<T>(sums[1], spans_heads ? k_heads * head_dim : head_dim, p.eps);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const UnitPosition& position = positions[i];
    if constexpr (!kPrefetchesRotation) look_up(i);
    const auto finish = [&](const Unit& unit, const HeadsOperand& tensor, const ShortDivisor& chunk_heads,
                            const Statistic<T>& mean, const Statistic<T>& scale, bool weight_is_float32,
                            const Bias& bias) {
      if (!unit.is_present) return;
      float a[kSize], b[kSize];
      read(unit, mean, a, b);
      if (is_norm) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          a[j] = scale.times(a[j]);
          b[j] = scale.times(b[j]);
        }
      }
      const auto multiply_by_weights = [&](const auto* weight) {
        weight += spans_heads ? position.head * head_dim : 0;
        multiply_by_weight(a, weight + position.first);
        multiply_by_weight(b, weight + position.second);
      };
      if (tensor.weight) {
        if (Operands::kIsGeneral && sizeof(T) < sizeof(float) && weight_is_float32)
          multiply_by_weights(static_cast<const float*>(tensor.weight));
        else
          multiply_by_weights(static_cast<const T*>(tensor.weight));
      }
      if constexpr (Operands::kIsLayerNorm) {
        const auto add_biases = [&](const auto* values) {
          add_bias(a, values + position.first);
          add_bias(b, values + position.second);
        };
        if (bias.values && sizeof(T) < sizeof(float) && bias.is_float32)
          add_biases(static_cast<const float*>(bias.values));
        else if (bias.values)
          add_biases(static_cast<const T*>(bias.values));
      }
      if constexpr (Rope::kIsRope) rotate<kLayout>(a, b, rotations[i]);
      T* head = static_cast<T*>(tensor.out) + out_offset(tensor, chunk_heads, position);
      store_floats(head + position.first, a);
      store_floats(head + position.second, b);
    };
    if constexpr (Operands::kIsGeneral) {
      finish(q[i], p.q, p.out_chunk_heads[0], q_mean, q_scale, p.q_weight_is_float32, p.q_bias);
      if constexpr (Operands::kHasKey)
        finish(k[i], p.k, p.out_chunk_heads[1], k_mean, k_scale, p.k_weight_is_float32, p.k_bias);
      if constexpr (!kPrefetchesValues) {
        const bool is_unit = is_group && position.head - group_head < group_heads;
        fetch(v[i], p.v, static_cast<int>(p.v.heads), position, is_unit);
        store(v[i], p.v, p.out_chunk_heads[2], position);
      }
    } else {
      finish(q[i], p.q, p.out_chunk_heads[0], q_mean, q_scale, false, {});
      finish(k[i], p.k, p.out_chunk_heads[1], k_mean, k_scale, false, {});
    }
  }
}

constexpr int kScalarThreads = 256;

template <class Operands>
__device__ __forceinline__ const HeadsOperand& operand_of(const typename Operands::Params& p,
                                                          uint32_t number) {
  if constexpr (Operands::kIsGeneral)
    if (number == 2) return p.v;
  return number == 0 ? p.q : p.k;
}

// Heads of any size and alignment: read twice, one element at a time. A block has one norm span of one
// tensor; blockIdx.y is 0 for the query, 1 for the key, 2 for the values.
template <typename T, class Rope, RopeLayout kLayout, class Operands>
__global__ void __launch_bounds__(kScalarThreads)
    scalar_qk_norm_rope_kernel(const __grid_constant__ typename Operands::Params p) {
  const HeadsOperand& tensor = operand_of<Operands>(p, blockIdx.y);
  const bool spans_heads = !Operands::kIsLayerNorm && p.norm == NormScope::kAcrossHeads;
  const int head_dim = static_cast<int>(p.head_dim);
  int max_heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  if constexpr (Operands::kIsGeneral) max_heads = max(max_heads, static_cast<int>(p.v.heads));
  const int64_t token = spans_heads ? blockIdx.x : blockIdx.x / max_heads;
  const int group_head = spans_heads ? 0 : static_cast<int>(blockIdx.x - token * max_heads);
  const int group_heads = spans_heads ? static_cast<int>(tensor.heads) : 1;
  griddepcontrol_wait();
  if (group_head >= tensor.heads) return;
  const int span = group_heads * head_dim;
  UnitPosition position;
  position.batch = token / p.seq;
  position.seq = token - position.batch * p.seq;
  const auto position_of = [&](int i) {
    UnitPosition at = position;
    at.head = group_head + i / head_dim;
    return at;
  };
  const auto in_element = [&](int i) {
    return static_cast<const T*>(tensor.in)[head_offset(tensor.in_strides, position_of(i)) + i % head_dim];
  };
  const auto out_element = [&](int i) -> T& {
    const UnitPosition at = position_of(i);
    int64_t offset = head_offset(tensor.out_strides, at) + i % head_dim;
    if (tensor.out_chunk_heads > 0)
      offset += at.head / static_cast<int>(tensor.out_chunk_heads) * tensor.out_chunk_gap;
    return static_cast<T*>(tensor.out)[offset];
  };
  // The counter is unsigned because the last step may exceed an int.
  const auto for_each_element = [&](const auto& body) {
    for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(span); i += kScalarThreads)
      body(static_cast<int>(i));
  };
  if constexpr (Operands::kIsGeneral) {
    if (blockIdx.y == 2) {
      for_each_element([&](int i) { out_element(i) = in_element(i); });
      return;
    }
  }

  const bool is_norm = Operands::kIsLayerNorm || p.norm != NormScope::kNone;
  Statistic<T> mean, scale;
  const auto read = [&](int i) {
    const float x = to_float(in_element(i));
    return Operands::kIsLayerNorm ? mean.subtracted_from(x) : x;
  };
  if (is_norm) {
    using Reduce = GroupReduce<Sum, RowSum<T>, kScalarThreads, 1, Operands::kIsLayerNorm ? 2 : 1>;
    RowSum<T> sum[1] = {0};
    if constexpr (Operands::kIsLayerNorm) {
      for_each_element([&](int i) { sum[0] += read(i); });
      Reduce{}(sum, 1);
      mean = Statistic<T>::from(divide<T>(sum[0], static_cast<RowSum<T>>(span)));
      sum[0] = 0;
    }
    for_each_element([&](int i) {
      const float x = read(i);
      sum[0] += x * x;
    });
    // Its barrier also separates these reads from in-place writes.
    Reduce{}(sum);
    scale = rms_scale_of<T>(sum[0], span, p.eps);
  }
  const auto weighted = [&](int i) {
    const float x = read(i);
    const float n = is_norm ? scale.times(x) : x;
    if constexpr (Operands::kIsGeneral && sizeof(T) < sizeof(float)) {
      const bool is_float32 = blockIdx.y == 0 ? p.q_weight_is_float32 : p.k_weight_is_float32;
      if (tensor.weight && is_float32) return n * static_cast<const float*>(tensor.weight)[i];
    }
    const T* weight = static_cast<const T*>(tensor.weight);
    return weight ? n * to_float(weight[i]) : n;
  };
  const auto normalized = [&](int i) {
    const float n = weighted(i);
    if constexpr (Operands::kIsLayerNorm) {
      const Bias& bias = blockIdx.y == 0 ? p.q_bias : p.k_bias;
      if (!bias.values) return n;
      if (sizeof(T) < sizeof(float) && bias.is_float32) return n + static_cast<const float*>(bias.values)[i];
      return n + to_float(static_cast<const T*>(bias.values)[i]);
    }
    return n;
  };
  const auto store = [&](int i, float value) { out_element(i) = from_float<T>(value); };
  if constexpr (Rope::kIsRope) {
    const int half = head_dim / 2;
    for (int pair = threadIdx.x; pair < span / 2; pair += kScalarThreads) {
      const int head = pair / half, within = pair - head * half;
      position.head = group_head + head;
      position.pair = within;
      position.first = kLayout == RopeLayout::kHalf ? within : 2 * within;
      position.second = kLayout == RopeLayout::kHalf ? within + half : 2 * within + 1;
      // A pair is two packs of one element, as in the half layout.
      typename Rope::template Lookup<T, RopeLayout::kHalf, 1> lookup;
      lookup.fetch(p, position);
      UnitRotation<1> rotation;
      lookup.rotation(rotation);
      const int first = head * head_dim + position.first, second = head * head_dim + position.second;
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
// Launch

// Calls body with the smallest number of threads, as a Constant, that hold a group of `units`. Returns false
// if there is none.
template <int... kThreads, typename Body>
bool dispatch_group_threads(GroupThreads<kThreads...>, int64_t units, const Body& body) {
  const auto try_threads = [&](auto threads) {
    if (units > threads * kUnitsPerThread<threads>) return false;
    body(threads);
    return true;
  };
  return (try_threads(Constant<kThreads>{}) || ...);
}

template <class Operands>
bool has_vector_access(const typename Operands::Params& p, int element_bytes) {
  const int64_t unit_bytes = 2 * kVectorBytes;
  bool vector = p.head_dim * element_bytes % unit_bytes == 0;
  for (const HeadsOperand* operand : {&p.q, &p.k})
    vector = vector && has_vector_rows(*operand, element_bytes);
  if constexpr (Operands::kIsGeneral) vector = vector && has_vector_rows(p.v, element_bytes);
  if constexpr (Operands::kIsLayerNorm)
    vector = vector && is_16_byte_aligned(p.q_bias.values) && is_16_byte_aligned(p.k_bias.values);
  return vector && (!p.tables.cos || has_vector_rows(p.tables, element_bytes));
}

// Groups of more threads process query and key in one launch only if the operands are plain.
constexpr int kMaxKeyThreads = 32;

template <typename T, class Rope, RopeLayout kLayout, class Operands>
void launch(const typename Operands::Params& p, Stream stream) {
  constexpr const char* kOperation = "qk_norm_rope";
  const bool spans_heads = p.norm == NormScope::kAcrossHeads;
  int64_t max_heads = std::max(p.q.heads, p.k.heads);
  if constexpr (Operands::kIsGeneral) max_heads = std::max(max_heads, p.v.heads);
  const int64_t groups = p.batch * p.seq * (spans_heads ? 1 : max_heads);
  const int64_t units = (spans_heads ? max_heads : 1) * p.head_dim / (2 * kPackSize<T, Access::kVector>);
  const bool has_vectors = has_vector_access<Operands>(p, sizeof(T));
  if constexpr (Operands::kIsGeneral && !Operands::kIsLayerNorm) {
    if (has_vectors && units > kMaxKeyThreads && p.k.in) {
      QkvNormRopeParams part = p;
      part.k = part.v = {};
      launch<T, Rope, kLayout, Operands>(part, stream);
      part.q = p.k;
      part.q_weight_is_float32 = p.k_weight_is_float32;
      part.v = p.v;
      return launch<T, Rope, kLayout, Operands>(part, stream);
    }
  }
  const auto launch_groups = [&](auto threads) {
    constexpr int kBlock = kBlockThreads<threads>;
    using Launched = std::conditional_t<Operands::kIsGeneral && !Operands::kIsLayerNorm,
                                        GeneralOperands<(threads <= kMaxKeyThreads)>, Operands>;
    QkKernelParams<typename Operands::Params> params{p, {}, {}, {}, {}};
    const auto set_chunk_heads = [&](int number, const HeadsOperand& operand) {
      if (operand.out_chunk_heads > 0)
        params.out_chunk_heads[number].set(static_cast<uint32_t>(operand.out_chunk_heads));
    };
    set_chunk_heads(0, p.q);
    set_chunk_heads(1, p.k);
    if constexpr (Operands::kIsGeneral) set_chunk_heads(2, p.v);
    params.seq_divisor.set(static_cast<uint32_t>(p.seq));
    params.max_heads_divisor.set(static_cast<uint32_t>(max_heads));
    params.units_per_head.set(static_cast<uint32_t>(p.head_dim / (2 * kPackSize<T, Access::kVector>)));
    launch_kernel(kOperation, qk_norm_rope_kernel<T, Rope, kLayout, threads, Launched>,
                  dim3(ceil_divide(groups, kBlock / threads)), kBlock, params, stream);
  };
  using Available = std::conditional_t<Operands::kIsLayerNorm, LayerNormThreads, AllGroupThreads>;
  const bool launched = has_vectors && dispatch_group_threads(Available{}, units, launch_groups);
  if (!launched)
    launch_kernel(kOperation, scalar_qk_norm_rope_kernel<T, Rope, kLayout, Operands>,
                  dim3(groups, Operands::kIsGeneral ? 3 : 2), kScalarThreads, p, stream);
}

template <class Operands>
void dispatch(const typename Operands::Params& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T> dtype) {
    const auto launch_with = [&]<class Rope>(std::type_identity<Rope>) {
      dispatch_layout(params.layout, [&](auto layout) { launch<T, Rope, layout, Operands>(params, stream); });
    };
    if (params.coordinates) return launch_with(std::type_identity<CoordinateRope>{});
    if (!params.tables.cos) return launch<T, NoRope, RopeLayout::kInterleaved, Operands>(params, stream);
    if constexpr (Operands::kIsGeneral)
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

// Returns whether the heads of one tensor can be split into a query and a key, so that a group loads a
// rotation once for two heads: all heads of a token have the same rotation, no norm spans them, and no chunk
// of the output has heads of both.
bool can_split_heads(const QkvNormRopeParams& p) {
  const bool share_rotation =
      !p.coordinates && p.tables.cos_strides[2] == 0 && (p.tables.is_complex || p.tables.sin_strides[2] == 0);
  if (p.k.in || p.v.in || p.norm == NormScope::kAcrossHeads || p.q.heads % 2 != 0 || !share_rotation)
    return false;
  return p.q.out_chunk_heads == 0 || p.q.heads / 2 % p.q.out_chunk_heads == 0;
}

void split_heads(QkvNormRopeParams& p) {
  p.q.heads /= 2;
  p.k = p.q;
  p.k_weight_is_float32 = p.q_weight_is_float32;
  p.k_bias = p.q_bias;
  const int64_t bytes = p.q.heads * bytes_of(p.dtype);
  p.k.in = static_cast<const char*>(p.q.in) + p.q.in_strides[2] * bytes;
  p.k.out = static_cast<char*>(p.q.out) + p.q.out_strides[2] * bytes;
  if (p.q.out_chunk_heads > 0)
    p.k.out = static_cast<char*>(p.k.out) + p.q.out_chunk_gap * bytes / p.q.out_chunk_heads;
}

}  // namespace

void qk_norm_rope(const QkvNormRopeParams& params, Stream stream) {
  QkvNormRopeParams p = params;
  if (can_split_heads(p)) split_heads(p);
  if (p.norm == NormScope::kLayerPerHead) return dispatch<LayerNormOperands>(p, stream);
  const bool has_more = !p.k.in || p.v.in || p.q_weight_is_float32 || p.k_weight_is_float32;
  if (has_more || p.tables.is_complex) return dispatch<GeneralOperands<true>>(p, stream);
  dispatch<PlainOperands>(p, stream);
}

}  // namespace h100_diffusers_kernels
