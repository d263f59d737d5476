// attention: choice of the kernel.
//
// Names are FlashAttention's: S = Q K^T (scores), P = exp(S - m) (probabilities), O = P V (accumulators), m
// (reference) and l (row sums). A tile is 64 queries of a warp group by 128 keys.
//
// Timeline of a block of the kernel for many keys (attention_stream.cuh) over the key tiles j, with 64
// columns. Each letter is a barrier between loading and computing warps:
//
//   loading thread   Q K0   V0  K1  V1  K2  V2  K3  V3       K4                V4  K5 ...
//                    a b    c   b   c                        ^d                ^e
//   warp group 0     | S0 = Q K0 ---| P0 = softmax(S0) | O += P0 V0, S1 = Q K1 ---| P1 | O += P1 V1, S2 ...
//   warp group 1        | S0 = Q K0 ------| P0 = softmax(S0) | O += P0 V0, S1 = Q K1 ---| P1 | O += ...
//   warp group 2           | S0 = Q K0 ---------| P0 = softmax(S0) | O += P0 V0, S1 = Q K1 ---| P1 | ...
//
//   a  query_ring.full: the queries have been copied, and the number of their tile is in shared memory.
//
//   b  key_ring.full: the keys have been copied, and a loading warp has stored the biases.
//
//   c  value_ring.full: the values have been copied.
//
//   d  key_ring.empty: each computing warp arrives when its S is complete (all lanes if they read biases).
//
//   e  value_ring.empty: each computing warp arrives when the next S, and with it P V, is complete.
//
//   f  query_ring.empty: each computing warp arrives when the last S of the tile is complete. The loader then
//   loads the queries of a later tile: the second next with two query stages, the next with one.
//
//   g  end_of_pass: each computing warp arrives after the last tile of the lazy softmax. The loader then
//   reads the tiles to recompute from its list.
//
// A named barrier synchronizes the groups after they have cleared rows of V. Each group waits for its own
// products between issuing and using them (wgmma_wait_group). While one group multiplies, the others compute
// exponentials; this alternation arises without synchronization (notes/attention.md, "Claimed tiles"). With
// 128 columns there are two groups, two stages of keys and one of queries, and the lazy softmax issues the
// next S before O += P V, so that P V overlaps the next exponentials. Few keys stay in shared memory while
// queries stream through (attention_resident.cuh), with the same rings.
//
// Attention by blocks has a list of key tiles for each query tile (attention_key_lists.cuh). The loader and
// the warp groups walk through it, and a group leaves out tiles that only others attend to.
//
// The softmax is lazy (attention_lazy_softmax.cuh) for bfloat16 without biases if there are many queries and
// keys: a separate kernel converts the values to float16, blocks claim tiles one by one, and tiles with
// inaccurate float16 results are recomputed with the online softmax (attention_softmax.cuh), which all other
// cases use.
#include <type_traits>

#include "attention_output.cuh"
#include "attention_resident.cuh"
#include "attention_stream.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "attention";

// Without keys there is nothing to map.
bool is_mappable(const AttentionParams& args) {
  return args.key_length > 0 && is_mappable(q_of(args)) && is_mappable(k_of(args)) && is_mappable(v_of(args));
}

bool has_few_keys(const AttentionParams& args) { return args.key_length <= kMaxResidentKeyTiles * kTileKeys; }

// Returns whether to convert the values to float16 first, which pays off if many queries read them.
bool has_half_values(const AttentionParams& args) {
  constexpr int64_t kMinQueries = 1024, kMaxBatch = 65535;  // limit of a grid's third dimension
  return args.dtype == DType::kBFloat16 && args.key_bias == nullptr && !has_few_keys(args) &&
         args.query_length >= kMinQueries && args.batch <= kMaxBatch && is_mappable(args);
}

// The workspace holds float16 values, followed by an output that TMA cannot write.
int64_t half_value_bytes(const AttentionParams& args) {
  return has_half_values(args) ? Workspace(args).bytes() : 0;
}

template <typename T, int kHeadDim, KeyBias kBias>
void launch_resident(AttentionKernelParams& params, int multiprocessors, Stream stream) {
  using Tile = AttentionTile<T, kHeadDim, kHeadDim == 64 ? RowSums::kMultiplied : RowSums::kAdded>;
  static_assert(kMaxResidentKeyTiles == 2);
  if (params.args.key_length <= kTileKeys)
    launch_resident_attention<Tile, 1, kBias>(kOperation, params, multiprocessors, stream);
  else
    launch_resident_attention<Tile, 2, kBias>(kOperation, params, multiprocessors, stream);
}

template <typename T, int kHeadDim>
void launch_stream(AttentionKernelParams& params, int multiprocessors, Stream stream) {
  using Tile = AttentionTile<T, kHeadDim>;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (has_half_values(params.args))
      return launch_stream_attention<Tile, KeyBias::kNone, Rescaling::kLazy, KeyOrder::kAll,
                                     TensorLoader<Tile>>(kOperation, params, multiprocessors, stream);
  }
  if (params.args.key_bias != nullptr)
    launch_stream_attention<Tile, KeyBias::kAdded, Rescaling::kOnline, KeyOrder::kAll, TensorLoader<Tile>,
                            BiasLoader<Tile>>(kOperation, params, multiprocessors, stream);
  else
    launch_stream_attention<Tile, KeyBias::kNone, Rescaling::kOnline, KeyOrder::kAll, TensorLoader<Tile>>(
        kOperation, params, multiprocessors, stream);
}

// Returns whether to use the kernel for few keys. It has no registers for a gate, an addend or logarithms of
// sums, because it computes scores of the next tile while it stores the output.
bool is_resident(const AttentionParams& args) {
  return is_mappable(args) && has_few_keys(args) && args.gate.data == nullptr &&
         args.addend.data == nullptr && args.lse == nullptr;
}

template <typename T, int kHeadDim>
void launch_any(AttentionKernelParams& params, int multiprocessors, Stream stream) {
  using Tile = AttentionTile<T, kHeadDim>;
  if (!is_mappable(params.args))
    launch_stream_attention<Tile, KeyBias::kAdded, Rescaling::kOnline, KeyOrder::kAll, ScalarLoader<Tile>>(
        kOperation, params, multiprocessors, stream);
  else if (!is_resident(params.args))
    launch_stream<T, kHeadDim>(params, multiprocessors, stream);
  else if (params.args.key_bias != nullptr)
    launch_resident<T, kHeadDim, KeyBias::kAdded>(params, multiprocessors, stream);
  else
    launch_resident<T, kHeadDim, KeyBias::kNone>(params, multiprocessors, stream);
}

// Attention by blocks (attention_key_lists.cuh): warp groups of a query tile. Three are for 64 columns, and
// only the lazy softmax has the registers. A tile of three cuts every second block of 128 queries, which is
// slower if a list for each head was chosen by values, so that adjacent blocks share few keys.
int listed_groups(const AttentionParams& args) {
  const KeyBlocks& blocks = args.blocks;
  const bool is_cut =
      blocks.query_rows > kWarpGroupRows && (blocks.bounded.strides[1] != 0 || blocks.full.strides[1] != 0);
  return args.head_dim <= 64 && has_half_values(args) && !is_cut ? 3 : 2;
}

template <int kHeadDim, int kGroups>
void launch_lazy_listed(AttentionKernelParams& params, int multiprocessors, Stream stream) {
  using Tile = AttentionTile<__nv_bfloat16, kHeadDim, RowSums::kAdded, kGroups>;
  launch_stream_attention<Tile, KeyBias::kNone, Rescaling::kLazy, KeyOrder::kListed, TensorLoader<Tile>>(
      kOperation, params, multiprocessors, stream);
}

template <typename T, int kHeadDim>
void launch_listed(AttentionKernelParams& params, int multiprocessors, Stream stream) {
  using Tile = AttentionTile<T, kHeadDim, RowSums::kAdded, 2>;
  constexpr KeyOrder kListed = KeyOrder::kListed;
  if (!is_mappable(params.args))
    return launch_stream_attention<Tile, KeyBias::kAdded, Rescaling::kOnline, kListed, ScalarLoader<Tile>>(
        kOperation, params, multiprocessors, stream);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if constexpr (kHeadDim == 64) {
      if (listed_groups(params.args) == 3)
        return launch_lazy_listed<kHeadDim, 3>(params, multiprocessors, stream);
    }
    if (has_half_values(params.args)) return launch_lazy_listed<kHeadDim, 2>(params, multiprocessors, stream);
  }
  launch_stream_attention<Tile, KeyBias::kAdded, Rescaling::kOnline, kListed, TensorLoader<Tile>,
                          BiasLoader<Tile>>(kOperation, params, multiprocessors, stream);
}

// Tiles of 80, 96 and 112 columns are for many keys only. With few keys most time is spent on memory, and the
// zeros of a wider tile are not read from it.
template <typename T>
void launch(AttentionKernelParams& params, Stream stream) {
  const AttentionParams& args = params.args;
  const int multiprocessors = multiprocessor_count(kOperation, stream.device);
  if (args.blocks.is_given) {
    if (args.head_dim <= 64) return launch_listed<T, 64>(params, multiprocessors, stream);
    return launch_listed<T, 128>(params, multiprocessors, stream);
  }
  const bool has_own_tile = is_mappable(args) && !is_resident(args);
  if (args.head_dim <= 64)
    launch_any<T, 64>(params, multiprocessors, stream);
  else if (has_own_tile && args.head_dim <= 80)
    launch_stream<T, 80>(params, multiprocessors, stream);
  else if (has_own_tile && args.head_dim <= 96)
    launch_stream<T, 96>(params, multiprocessors, stream);
  else if (has_own_tile && args.head_dim <= 112)
    launch_stream<T, 112>(params, multiprocessors, stream);
  else
    launch_any<T, 128>(params, multiprocessors, stream);
}

// The lists come last in the workspace.
int64_t list_offset(const AttentionParams& args) {
  const int64_t bytes = half_value_bytes(args) + unmapped_output_bytes(args);
  return ceil_divide(bytes, kVectorBytes) * kVectorBytes;
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionParams& args) {
  return list_offset(args) + key_list_bytes(args, listed_groups(args));
}

void attention(const AttentionParams& args, Stream stream) {
  AttentionKernelParams params{};
  params.args = args;
  params.score_scale = args.scale * kLog2E;
  params.list_offset = list_offset(args);
  write_mapped_output(kOperation, params, half_value_bytes(args), stream, [&] {
    dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
      if constexpr (sizeof(T) == 2) launch<T>(params, stream);
    });
  });
}

}  // namespace h100_diffusers_kernels
