// attention: which kernel takes which tensors.
#include <algorithm>

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

template <class Tile>
void launch(AttentionKernelParams& params, Stream stream) {
  const AttentionParams& args = params.args;
  const int multiprocessors = count_multiprocessors();
  params.out = map_tensor(kOperation, out_of(args), args.dtype, kWarpGroupRows);
  if (!is_mappable(q_of(args)) || !is_mappable(k_of(args)) || !is_mappable(v_of(args)))
    return launch_stream_attention<Tile, true, ElementLoader<Tile>>(kOperation, params, multiprocessors,
                                                                    stream);
  if (args.key_length <= kMaxResidentKeys)
    return launch_resident_attention<Tile>(kOperation, params, multiprocessors, stream);
  if (args.key_bias != nullptr)
    return launch_stream_attention<Tile, true, TensorLoader<Tile>, BiasLoader<Tile>>(kOperation, params,
                                                                                     multiprocessors, stream);
  launch_stream_attention<Tile, false, TensorLoader<Tile>>(kOperation, params, multiprocessors, stream);
}

}  // namespace

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
