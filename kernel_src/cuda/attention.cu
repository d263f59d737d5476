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
  constexpr int64_t kMinQueries = 1024;
  constexpr int64_t kMinMultiprocessors = 64;
  const int64_t tiles = args.batch * args.heads * ceil_divide(args.query_length, kWarpGroupRows);
  return args.dtype == DType::kBFloat16 && args.key_bias == nullptr && args.key_length > kMaxResidentKeys &&
         args.query_length >= kMinQueries && tiles <= kMinMultiprocessors * RedoList::kTiles &&
         is_mappable(args);
}

template <class Tile>
void launch(AttentionKernelParams& params, Stream stream) {
  const AttentionParams& args = params.args;
  const int multiprocessors = count_multiprocessors();
  params.out = map_tensor(kOperation, out_of(args), args.dtype, kWarpGroupRows);
  if (!is_mappable(args))
    return launch_stream_attention<Tile, true, false, ElementLoader<Tile, Access::kScalar>>(
        kOperation, params, multiprocessors, stream);
  const bool has_bias = args.key_bias != nullptr;
  if (args.key_length <= kMaxResidentKeys && has_bias)
    return launch_resident_attention<Tile, true>(kOperation, params, multiprocessors, stream);
  if (args.key_length <= kMaxResidentKeys)
    return launch_resident_attention<Tile, false>(kOperation, params, multiprocessors, stream);
  if (has_bias)
    return launch_stream_attention<Tile, true, false, TensorLoader<Tile>, BiasLoader<Tile>>(
        kOperation, params, multiprocessors, stream);
  if constexpr (std::is_same_v<typename Tile::T, __nv_bfloat16>) {
    if (args.workspace != nullptr)
      return launch_stream_attention<Tile, false, true, TensorLoader<Tile>>(kOperation, params,
                                                                            multiprocessors, stream);
  }
  launch_stream_attention<Tile, false, false, TensorLoader<Tile>>(kOperation, params, multiprocessors,
                                                                  stream);
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionParams& args) {
  return has_half_values(args) ? ValueWorkspace(args).bytes() : 0;
}

void attention(const AttentionParams& args, Stream stream) {
  if (args.key_length == 0) {
    const int64_t bytes = args.batch * args.query_length * args.heads * args.head_dim * bytes_of(args.dtype);
    return throw_on_error(kOperation, cudaMemsetAsync(args.out, 0, static_cast<size_t>(bytes),
                                                      static_cast<cudaStream_t>(stream.handle)));
  }
  AttentionKernelParams params{};
  params.args = args;
  params.group_heads = static_cast<int>(args.heads / args.key_heads);
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 2) {
      if (args.head_dim == 64) return launch<AttentionTile<T, 64>>(params, stream);
      return launch<AttentionTile<T, 128>>(params, stream);
    }
  });
}

}  // namespace h100_diffusers_kernels
