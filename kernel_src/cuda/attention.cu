// attention: which kernel takes which tensors.
#include <type_traits>

#include "attention_resident.cuh"
#include "attention_stream.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "attention";

int count_multiprocessors() {
  int device = 0, count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  throw_on_error(kOperation, error);
  return count;
}

bool is_mappable(const AttentionParams& args) {
  return is_mappable(q_of(args)) && is_mappable(k_of(args)) && is_mappable(v_of(args));
}

// Whether it pays to convert the values first: where they are read for many queries.
bool has_half_values(const AttentionParams& args) {
  constexpr int64_t kMinQueries = 1024, kMaxBatch = 65535;  // of a grid
  if (args.dtype != DType::kBFloat16 || args.key_bias != nullptr ||
      args.key_length <= kMaxResidentKeyTiles * kTileKeys || args.query_length < kMinQueries ||
      args.batch > kMaxBatch || !is_mappable(args))
    return false;
  const int rows = args.head_dim == 64 ? AttentionTile<__nv_bfloat16, 64>::kRows
                                       : AttentionTile<__nv_bfloat16, 128>::kRows;
  return ceil_divide(query_tiles_of(args, rows), count_multiprocessors()) <= TileList::kCapacity;
}

template <typename T, int kHeadDim>
void launch(AttentionKernelParams& params, Stream stream) {
  using Tile = AttentionTile<T, kHeadDim>;
  using ResidentTile = AttentionTile<T, kHeadDim, kHeadDim == 64>;
  const AttentionParams& args = params.args;
  const int multiprocessors = count_multiprocessors();
  params.out = map_tensor(kOperation, out_of(args), args.dtype, kStoreRows);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (args.workspace != nullptr)
      return launch_stream_attention<Tile, false, true, TensorLoader<Tile>>(kOperation, params,
                                                                            multiprocessors, stream);
  }
  if (!is_mappable(args))
    return launch_stream_attention<Tile, true, false, ElementLoader<Tile, Access::kScalar>>(
        kOperation, params, multiprocessors, stream);
  const auto launch_with = [&]<bool kHasBias>() {
    const int64_t key_tiles = ceil_divide(args.key_length, kTileKeys);
    static_assert(kMaxResidentKeyTiles == 2);
    if (key_tiles == 1)
      return launch_resident_attention<ResidentTile, 1, kHasBias>(kOperation, params, multiprocessors,
                                                                  stream);
    if (key_tiles == 2)
      return launch_resident_attention<ResidentTile, 2, kHasBias>(kOperation, params, multiprocessors,
                                                                  stream);
    if constexpr (kHasBias)
      launch_stream_attention<Tile, true, false, TensorLoader<Tile>, BiasLoader<Tile>>(
          kOperation, params, multiprocessors, stream);
    else
      launch_stream_attention<Tile, false, false, TensorLoader<Tile>>(kOperation, params, multiprocessors,
                                                                      stream);
  };
  if (args.key_bias != nullptr)
    launch_with.template operator()<true>();
  else
    launch_with.template operator()<false>();
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionParams& args) {
  return has_half_values(args) ? Workspace(args).bytes() : 0;
}

void attention(const AttentionParams& args, Stream stream) {
  if (args.key_length == 0) {
    const int64_t bytes = args.batch * args.query_length * args.heads * args.head_dim * bytes_of(args.dtype);
    return throw_on_error(kOperation, cudaMemsetAsync(args.out, 0, static_cast<size_t>(bytes),
                                                      static_cast<cudaStream_t>(stream.handle)));
  }
  AttentionKernelParams params{};
  params.args = args;
  params.score_scale = args.scale * kLog2E;
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (args.head_dim == 64) return launch<T, 64>(params, stream);
      return launch<T, 128>(params, stream);
    }
  });
}

}  // namespace h100_diffusers_kernels
