// Kernels of qk_norm_rope.
//
// A group of threads shares the span of one norm: a token or a head. Each thread has units (rope.cuh) of
// query and key at the same position, so that a rotation is loaded or computed once for both.
#pragma once

#include <type_traits>

#include "fast_divisor.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "rope.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {

// ---------------------------------------------------------------------------------------------------------
// Operands

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

// Numbers of the tensors. Query and key are normalized and rotated, values are copied.
constexpr int kQuery = 0, kKey = 1, kValues = 2, kTensors = 3;

template <class Params>
struct QkKernelParams : Params {
  FastDivisor seq_divisor, max_heads_divisor, units_per_head;
  ShortDivisor out_chunk_heads[kTensors];
};

template <class Operands>
__device__ __forceinline__ const HeadsOperand& operand_of(const typename Operands::Params& p, int number) {
  if constexpr (Operands::kIsGeneral)
    if (number == kValues) return p.v;
  return number == kQuery ? p.q : p.k;
}

// Calls body with kQuery, and with kKey if there is one, as Constants: from the number of an unrolled loop
// the compiler would select addresses at run time, in up to eight more registers.
template <int kNormalized, class Body>
__device__ __forceinline__ void for_each_normalized(const Body& body) {
  body(Constant<kQuery>{});
  if constexpr (kNormalized > 1) body(Constant<kKey>{});
}

template <class Operands>
__device__ __forceinline__ int max_heads_of(const typename Operands::Params& p) {
  const int heads = static_cast<int>(p.q.heads > p.k.heads ? p.q.heads : p.k.heads);
  if constexpr (Operands::kIsGeneral) return max(heads, static_cast<int>(p.v.heads));
  return heads;
}

// Calls body with the address of a weight or bias, of its type, if it is given.
template <typename T, typename Body>
__device__ __forceinline__ void with_parameter(const void* values, bool is_float32, const Body& body) {
  if (!values) return;
  if (sizeof(T) < sizeof(float) && is_float32)
    body(static_cast<const float*>(values));
  else
    body(static_cast<const T*>(values));
}

// Likewise with those of query or key.
template <class Operands, typename T, typename Body>
__device__ __forceinline__ void with_weight(const typename Operands::Params& p, int number,
                                            const Body& body) {
  bool is_float32 = false;
  if constexpr (Operands::kIsGeneral)
    is_float32 = number == kQuery ? p.q_weight_is_float32 : p.k_weight_is_float32;
  with_parameter<T>(operand_of<Operands>(p, number).weight, is_float32, body);
}
template <class Operands, typename T, typename Body>
__device__ __forceinline__ void with_bias(const typename Operands::Params& p, int number, const Body& body) {
  if constexpr (Operands::kIsLayerNorm) {
    const Bias& bias = number == kQuery ? p.q_bias : p.k_bias;
    with_parameter<T>(bias.values, bias.is_float32, body);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Units

// Available numbers of threads in a group, in ascending order.
template <int... kThreads>
struct GroupThreads {};
constexpr int kMaxGroupThreads = 512;

// Units of query, and of key, that a thread holds in registers.
template <int kGroupThreads>
constexpr int kUnitsPerThread = kGroupThreads == kMaxGroupThreads ? 2 : 1;

// The token or head of a group of threads. A block has one or more groups.
template <class Operands, int kGroupThreads>
struct GroupPosition {
  bool spans_heads;  // whether the group has a token
  bool is_present;
  int lane, head, heads;  // of the token's heads
  uint32_t batch, seq;

  template <class Params>
  __device__ __forceinline__ explicit GroupPosition(const Params& p)
      : spans_heads(p.norm == NormScope::kAcrossHeads), lane(threadIdx.x % kGroupThreads) {
    constexpr int kGroups = kBlockThreads<kGroupThreads> / kGroupThreads;
    const int max_heads = max_heads_of<Operands>(p);
    const uint32_t group = blockIdx.x * kGroups + threadIdx.x / kGroupThreads;
    const uint32_t token = spans_heads ? group : p.max_heads_divisor.divide(group);
    is_present = token < p.batch * p.seq;
    head = spans_heads ? 0 : static_cast<int>(group - token * max_heads);
    heads = spans_heads ? max_heads : 1;
    batch = p.seq_divisor.divide(token);
    seq = token - batch * p.seq_divisor.divisor;
  }

  // Returns the position of the thread's i-th unit of kSize pairs. kIsSplit: its packs are half a head apart.
  // Returns whether it is in the group.
  template <int kSize, bool kIsSplit, class Params>
  __device__ __forceinline__ bool find_unit(const Params& p, int i, UnitPosition& position) const {
    const int number = i * kGroupThreads + lane;
    const int unit_head = p.units_per_head.divide(number);
    const int within = number - unit_head * p.units_per_head.divisor;
    position.batch = batch;
    position.seq = seq;
    position.head = head + unit_head;
    position.pair = within * kSize;
    position.first = within * (kIsSplit ? kSize : 2 * kSize);
    position.second = position.first + (kIsSplit ? static_cast<int>(p.head_dim) / 2 : kSize);
    return is_present && unit_head < heads;
  }

  __device__ __forceinline__ bool has(const UnitPosition& position) const {
    return is_present && position.head - head < heads;
  }
};

template <typename T>
__device__ __forceinline__ T* out_head(const HeadsOperand& tensor, const ShortDivisor& chunk_heads,
                                       const UnitPosition& position) {
  const int64_t chunk = chunk_heads.divide(static_cast<uint32_t>(position.head));
  return static_cast<T*>(tensor.out) +
         (chunk * tensor.out_chunk_gap + head_offset(tensor.out_strides, position));
}

template <typename T, int kSize>
struct Unit {
  Pack<T, kSize> first, second;
  bool is_present;

  __device__ __forceinline__ void load(const HeadsOperand& tensor, const UnitPosition& position,
                                       bool is_in_group) {
    is_present = is_in_group && position.head < static_cast<int>(tensor.heads);
    if (!is_present) return;
    const T* head = static_cast<const T*>(tensor.in) + head_offset(tensor.in_strides, position);
    first.load(head + position.first);
    second.load(head + position.second);
  }

  __device__ __forceinline__ void store(const HeadsOperand& tensor, const ShortDivisor& chunk_heads,
                                        const UnitPosition& position) const {
    if (!is_present) return;
    T* head = out_head<T>(tensor, chunk_heads, position);
    first.store(head + position.first);
    second.store(head + position.second);
  }

  // The values, minus the mean of a LayerNorm.
  template <bool kIsCentered>
  __device__ __forceinline__ void read(const Statistic<T>& mean, float (&a)[kSize], float (&b)[kSize]) const {
    first.to_floats(a);
    second.to_floats(b);
    if constexpr (kIsCentered) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        a[j] = mean.subtracted_from(a[j]);
        b[j] = mean.subtracted_from(b[j]);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------
// Norm

// Returns the sum of the values, in double for float32 results.
template <typename T, int kSize>
__device__ __forceinline__ RowSum<T> sum_of(const float (&values)[kSize]) {
  if constexpr (!kHasExactStatistics<T>) return tree_sum<kSize>([&](int j) { return values[j]; });
  RowSum<T> sum = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum += values[j];
  return sum;
}

// Sets the statistics of query, and of key if there is one, over the groups of threads that hold them.
// count_of(t) returns the number of elements of a tensor's span.
template <int kGroupThreads, bool kIsCentered, typename T, int kSize, int kNormalized, int kUnits,
          class CountOf>
__device__ __forceinline__ void set_statistics(const Unit<T, kSize> (&units)[kNormalized][kUnits],
                                               const CountOf& count_of, float eps,
                                               RowStatistics<T> (&statistics)[kNormalized]) {
  using Reduce = GroupReduce<Sum, RowSum<T>, kGroupThreads, kNormalized>;
  // The sum of term(a, b) over the values of each tensor's units.
  const auto total = [&](RowSum<T>(&sums)[kNormalized], const auto& term) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      for_each_normalized<kNormalized>([&](auto t) {
        if (!units[t][i].is_present) return;
        float a[kSize], b[kSize];
        units[t][i].template read<kIsCentered>(statistics[t].mean, a, b);
        sums[t] += term(a, b);
      });
    }
    Reduce{}(sums);
  };
  if constexpr (kIsCentered) {
    static_assert(kUnits == 1 && kGroupThreads <= kWarpThreads);  // Reduce has memory for one exchange
    RowSum<T> sums[kNormalized] = {};
    total(sums, [](const float (&a)[kSize], const float (&b)[kSize]) { return sum_of<T>(a) + sum_of<T>(b); });
    for_each_normalized<kNormalized>([&](auto t) {
      statistics[t].mean = Statistic<T>::from(divide<T>(sums[t], static_cast<RowSum<T>>(count_of(t))));
    });
  }
  RowSum<T> sums[kNormalized] = {};
  total(sums, [](const float (&a)[kSize], const float (&b)[kSize]) {
    return tree_sum<kSize>([&](int j) { return fmaf(a[j], a[j], b[j] * b[j]); });
  });
  for_each_normalized<kNormalized>(
      [&](auto t) { statistics[t].scale = rms_scale_of<T>(sums[t], count_of(t), eps); });
}

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

// Normalizes the unit's values, read without their mean, and applies weight and bias.
template <class Operands, typename T, int kSize>
__device__ __forceinline__ void apply_norm(const typename Operands::Params& p, int number, bool spans_heads,
                                           const UnitPosition& position, const Statistic<T>& scale,
                                           float (&a)[kSize], float (&b)[kSize]) {
  if (p.norm != NormScope::kNone) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      a[j] = scale.times(a[j]);
      b[j] = scale.times(b[j]);
    }
  }
  with_weight<Operands, T>(p, number, [&](const auto* weight) {
    weight += spans_heads ? position.head * static_cast<int>(p.head_dim) : 0;
    multiply_by_weight(a, weight + position.first);
    multiply_by_weight(b, weight + position.second);
  });
  with_bias<Operands, T>(p, number, [&](const auto* bias) {
    add_bias(a, bias + position.first);
    add_bias(b, bias + position.second);
  });
}

// ---------------------------------------------------------------------------------------------------------
// Kernels

// Second argument of __launch_bounds__. With 0 the compiler chooses how many blocks' registers fit; for one
// of these kernels in float32 it would spill.
template <typename T, class Rope, class Operands>
constexpr int kMinGroupBlocks =
    sizeof(T) == 4 && std::is_same_v<Rope, AnyTableRope> && !Operands::kHasKey ? 1 : 0;

// There is one group for each token, or one for each head of each token unless the norm spans all heads.
template <typename T, class Rope, RopeLayout kLayout, int kGroupThreads, class Operands>
__global__ void __launch_bounds__(kBlockThreads<kGroupThreads>, (kMinGroupBlocks<T, Rope, Operands>))
    qk_norm_rope_kernel(const __grid_constant__ QkKernelParams<typename Operands::Params> p) {
  constexpr int kSize = kPackSize<T, Access::kVector>, kUnits = kUnitsPerThread<kGroupThreads>;
  constexpr int kNormalized = Operands::kHasKey ? 2 : 1;
  // A unit's packs are half a head apart, so that adjacent threads read adjacent packs
  // (notes/row_kernels.md, "From tables"). In the interleaved layout computed rotations need consecutive
  // pairs instead.
  constexpr bool kIsSplit = kLayout == RopeLayout::kHalf || !Rope::kIsComputed;
  // The rotation is computed, or its loads are issued, before the norm is reduced
  // (notes/row_kernels.md).
  constexpr bool kPrefetchesRotation = Rope::kIsComputed || kUnits == 1;
  // Values are loaded along with a key. Larger groups have no registers for them.
  constexpr bool kPrefetchesValues = Operands::kIsGeneral && Operands::kHasKey;
  const GroupPosition<Operands, kGroupThreads> group(p);
  griddepcontrol_wait();

  UnitPosition positions[kUnits];
  Unit<T, kSize> units[kNormalized][kUnits], values[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool is_in_group = group.template find_unit<kSize, kIsSplit>(p, i, positions[i]);
    for_each_normalized<kNormalized>(
        [&](auto t) { units[t][i].load(operand_of<Operands>(p, t), positions[i], is_in_group); });
    if constexpr (kPrefetchesValues) values[i].load(p.v, positions[i], is_in_group);
  }

  UnitRotation<kSize> rotations[kUnits];
  const auto look_up = [&](int i) {
    bool is_needed = units[0][i].is_present;
    if constexpr (kNormalized > 1) is_needed = is_needed || units[1][i].is_present;
    if (!is_needed) return;
    typename Rope::template Lookup<T, kLayout, kSize> lookup;
    lookup.fetch(p, positions[i]);
    lookup.rotation(rotations[i]);
  };
  if constexpr (kPrefetchesRotation) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) look_up(i);
  }
  // Stored before the norm of query and key, which frees the registers of the values.
  if constexpr (kPrefetchesValues) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) values[i].store(p.v, p.out_chunk_heads[kValues], positions[i]);
  }

  RowStatistics<T> statistics[kNormalized];
  if (p.norm != NormScope::kNone) {
    const auto count_of = [&](int t) {
      const int head_dim = static_cast<int>(p.head_dim);
      const bool is_head = Operands::kIsLayerNorm || !group.spans_heads;
      return is_head ? head_dim : static_cast<int>(operand_of<Operands>(p, t).heads) * head_dim;
    };
    set_statistics<kGroupThreads, Operands::kIsLayerNorm>(units, count_of, p.eps, statistics);
  }

#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const UnitPosition& position = positions[i];
    if constexpr (!kPrefetchesRotation) look_up(i);
    for_each_normalized<kNormalized>([&](auto t) {
      const Unit<T, kSize>& unit = units[t][i];
      if (!unit.is_present) return;
      float a[kSize], b[kSize];
      unit.template read<Operands::kIsLayerNorm>(statistics[t].mean, a, b);
      apply_norm<Operands>(p, t, group.spans_heads, position, statistics[t].scale, a, b);
      if constexpr (Rope::kIsRope) rotate<kLayout>(a, b, rotations[i]);
      T* head = out_head<T>(operand_of<Operands>(p, t), p.out_chunk_heads[t], position);
      store_floats(head + position.first, a);
      store_floats(head + position.second, b);
    });
    if constexpr (Operands::kIsGeneral && !kPrefetchesValues) {
      values[i].load(p.v, position, group.has(position));
      values[i].store(p.v, p.out_chunk_heads[kValues], position);
    }
  }
}

}  // namespace h100_diffusers_kernels
