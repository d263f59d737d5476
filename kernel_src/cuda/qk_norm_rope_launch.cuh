// Which kernel a call of qk_norm_rope runs on. qk_norm_rope_<dtype>.cu compile the kernels of one dtype.
//
// The combinations that diffusers' models have in bfloat16 have kernels of their own. The others run on more
// general kernels, a little slower and with the same results:
// - Tables of other kinds, and all tables in float16 and float32: AnyTableRope reads the kind at run time. In
//   bfloat16 it has GeneralOperands for all query and key, with two launches for more than 32 threads.
// - Coordinates with groups of 4 or 8 threads in float16 and float32: groups of 32 threads.
// - Heads that are not aligned to 16 bytes or not whole units: scalar_qk_norm_rope_kernel.
#pragma once

#include <algorithm>
#include <type_traits>

#include "qk_norm_rope.cuh"
#include "scalar_qk_norm_rope.cuh"

namespace h100_diffusers_kernels {

// A head of 64 or 128 16-bit elements is 4 or 8 units. The others are as in NormRowThreads (row_config.cuh).
using HeadThreads = GroupThreads<4, 8, 32>;
using AnyThreads = GroupThreads<4, 8, 32, 64, 96, 128, 192, 256, 320, kMaxGroupThreads>;
// Of coordinates in float16 and float32. A model's norm spans the heads.
using WideThreads = GroupThreads<32, 64, 96, 128, 192, 256, 320, kMaxGroupThreads>;

// Groups of more threads process query and key in one launch only if the operands are plain.
constexpr int kMaxKeyThreads = kWarpThreads;

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

// Returns the units of the largest group.
template <int... kThreads>
constexpr int64_t max_units(GroupThreads<kThreads...>) {
  return std::max({kThreads * kUnitsPerThread<kThreads>...});
}

// The groups of a launch.
template <typename T>
struct Groups {
  static constexpr int64_t kUnitElements = 2 * kPackSize<T, Access::kVector>;
  int64_t max_heads, count, units;  // units of a group

  explicit Groups(const QkvNormRopeParams& p) : max_heads(std::max({p.q.heads, p.k.heads, p.v.heads})) {
    const bool spans_heads = p.norm == NormScope::kAcrossHeads;
    count = p.batch * p.seq * (spans_heads ? 1 : max_heads);
    units = (spans_heads ? max_heads : 1) * p.head_dim / kUnitElements;
  }
};

template <typename T, class Rope, RopeLayout kLayout, int kThreads, class Operands>
void launch_threads(const QkvNormRopeParams& p, const Groups<T>& groups, Stream stream) {
  QkKernelParams<typename Operands::Params> params{p, {}, {}, {}, {}};
  params.seq_divisor.set(static_cast<uint32_t>(p.seq));
  params.max_heads_divisor.set(static_cast<uint32_t>(groups.max_heads));
  params.units_per_head.set(static_cast<uint32_t>(p.head_dim / Groups<T>::kUnitElements));
  const HeadsOperand* tensors[kTensors] = {&p.q, &p.k, &p.v};
  for (int t = 0; t < kTensors; ++t)
    if (tensors[t]->out_chunk_heads > 0)
      params.out_chunk_heads[t].set(static_cast<uint32_t>(tensors[t]->out_chunk_heads));
  constexpr int kBlock = kBlockThreads<kThreads>;
  launch_kernel("qk_norm_rope", qk_norm_rope_kernel<T, Rope, kLayout, kThreads, Operands>,
                dim3(ceil_divide(groups.count, kBlock / kThreads)), kBlock, params, stream);
}

// Launches the kernel of the smallest group that holds a token or head. Returns false if there is none.
template <typename T, class Rope, RopeLayout kLayout, class Operands, class Threads>
bool launch_groups(const QkvNormRopeParams& p, Stream stream) {
  const Groups<T> groups(p);
  if constexpr (Operands::kIsLayerNorm) {
    return dispatch_group_threads(HeadThreads{}, groups.units, [&](auto threads) {
      launch_threads<T, Rope, kLayout, threads, Operands>(p, groups, stream);
    });
  } else if constexpr (!Operands::kIsGeneral) {
    return dispatch_group_threads(Threads{}, groups.units, [&](auto threads) {
      launch_threads<T, Rope, kLayout, threads, Operands>(p, groups, stream);
    });
  } else {
    if (groups.units > max_units(Threads{})) return false;
    if (groups.units > kMaxKeyThreads && p.k.in) {
      QkvNormRopeParams part = p;
      part.k = part.v = {};
      launch_groups<T, Rope, kLayout, Operands, Threads>(part, stream);
      part.q = p.k;
      part.q_weight_is_float32 = p.k_weight_is_float32;
      part.v = p.v;
      return launch_groups<T, Rope, kLayout, Operands, Threads>(part, stream);
    }
    return dispatch_group_threads(Threads{}, groups.units, [&](auto threads) {
      using Launched = GeneralOperands<(threads <= kMaxKeyThreads)>;
      launch_threads<T, Rope, kLayout, threads, Launched>(p, groups, stream);
    });
  }
}

// Launch a kernel for tables of one kind if a model has them in T = bfloat16. Otherwise they return false.
using FloatElements = TableRope<float, TableValues::kPerElement>;
using FloatPairs = TableRope<float, TableValues::kPerPair>;

template <typename T>
bool launch_own_table(PlainOperands, const QkvNormRopeParams& p, Stream stream) {
  using Plain = PlainOperands;
  constexpr RopeLayout kInterleaved = RopeLayout::kInterleaved, kHalf = RopeLayout::kHalf;
  if (p.tables.is_per_pair) {
    if (p.layout == kHalf) return false;
    // Wan, whose tables may be cast with the model, Lumina 2, Z-Image
    if (p.tables.is_float32) return launch_groups<T, FloatPairs, kInterleaved, Plain, AnyThreads>(p, stream);
    return launch_groups<T, TableRope<T, TableValues::kPerPair>, kInterleaved, Plain, AnyThreads>(p, stream);
  }
  if (!p.tables.is_float32) return false;
  // Cosmos, MiniMax-H3
  if (p.layout == kHalf) return launch_groups<T, FloatElements, kHalf, Plain, HeadThreads>(p, stream);
  // FLUX, HunyuanVideo; across heads LTX-Video and LTX-2, if ranks split their tables
  return launch_groups<T, FloatElements, kInterleaved, Plain, AnyThreads>(p, stream);
}

template <typename T>
bool launch_own_table(GeneralOperands<true>, const QkvNormRopeParams& p, Stream stream) {
  using General = GeneralOperands<true>;
  constexpr RopeLayout kInterleaved = RopeLayout::kInterleaved;
  if (p.layout != kInterleaved) return false;
  // Qwen-Image
  if (p.tables.is_complex)
    return launch_groups<T, ComplexRope, kInterleaved, General, HeadThreads>(p, stream);
  if (!p.tables.is_float32) return false;
  // Mochi
  if (p.tables.is_per_pair)
    return launch_groups<T, FloatPairs, kInterleaved, General, HeadThreads>(p, stream);
  // FLUX, HunyuanVideo, Krea 2
  return launch_groups<T, FloatElements, kInterleaved, General, HeadThreads>(p, stream);
}

template <typename T>
bool launch_own_table(LayerNormOperands, const QkvNormRopeParams& p, Stream stream) {
  constexpr RopeLayout kInterleaved = RopeLayout::kInterleaved;
  if (p.layout != kInterleaved || !p.tables.is_float32 || p.tables.is_per_pair) return false;
  // CogVideoX
  return launch_groups<T, FloatElements, kInterleaved, LayerNormOperands, HeadThreads>(p, stream);
}

template <typename T, class Operands>
bool launch_vectors(const QkvNormRopeParams& p, Stream stream) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  if (!p.coordinates && !p.tables.cos)
    return launch_groups<T, NoRope, RopeLayout::kInterleaved, Operands, AnyThreads>(p, stream);
  if constexpr (kIsBFloat16)
    if (!p.coordinates && launch_own_table<T>(Operands{}, p, stream)) return true;
  bool is_launched = false;
  dispatch_layout(p.layout, [&](auto layout) {
    if (p.coordinates) {
      using Threads = std::conditional_t<kIsBFloat16, AnyThreads, WideThreads>;
      is_launched = launch_groups<T, CoordinateRope, layout, Operands, Threads>(p, stream);
    } else {
      constexpr bool kUsesGeneral = kIsBFloat16 && !Operands::kIsGeneral;
      using Used = std::conditional_t<kUsesGeneral, GeneralOperands<true>, Operands>;
      is_launched = launch_groups<T, AnyTableRope, layout, Used, AnyThreads>(p, stream);
    }
  });
  return is_launched;
}

inline bool has_vector_access(const QkvNormRopeParams& p, int element_bytes) {
  const int64_t unit_bytes = 2 * kVectorBytes;
  bool vector = p.head_dim * element_bytes % unit_bytes == 0;
  for (const HeadsOperand* operand : {&p.q, &p.k, &p.v})
    vector = vector && has_vector_rows(*operand, element_bytes);
  vector = vector && is_16_byte_aligned(p.q_bias.values) && is_16_byte_aligned(p.k_bias.values);
  return vector && (!p.tables.cos || has_vector_rows(p.tables, element_bytes));
}

template <typename T>
void launch_qk_norm_rope(const QkvNormRopeParams& p, Stream stream) {
  const auto launch_vectors_of = [&] {
    if (!has_vector_access(p, sizeof(T))) return false;
    if (p.norm == NormScope::kLayerPerHead) return launch_vectors<T, LayerNormOperands>(p, stream);
    const bool is_plain = p.k.in && !p.v.in && !p.q_weight_is_float32 && !p.k_weight_is_float32;
    if (is_plain && !p.tables.is_complex) return launch_vectors<T, PlainOperands>(p, stream);
    return launch_vectors<T, GeneralOperands<true>>(p, stream);
  };
  if (launch_vectors_of()) return;
  const int64_t spans = p.norm == NormScope::kAcrossHeads ? 1 : std::max({p.q.heads, p.k.heads, p.v.heads});
  launch_kernel("qk_norm_rope", scalar_qk_norm_rope_kernel<T>, dim3(p.batch * p.seq * spans, kTensors),
                kScalarThreads, p, stream);
}

}  // namespace h100_diffusers_kernels
