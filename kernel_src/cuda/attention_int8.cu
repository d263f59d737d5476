// attention_int8: quantization (attention_int8_quantize.cuh), then attention (attention_int8_stream.cuh).
#include <algorithm>
#include <type_traits>

#include "attention_int8_stream.cuh"
#include "attention_output.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "attention_int8";

template <typename T>
void launch(Int8AttentionParams& params, const Int8Workspace& workspace, Stream stream) {
  quantize_attention<T>(kOperation, params.args, workspace, stream);
  const int blocks = std::min(multiprocessor_count(kOperation, stream.device), params.tiles);
  launch_kernel_with_shared_memory<attention_int8_kernel<T>>(kOperation, dim3(blocks), kInt8Threads, params,
                                                             stream, Int8Memory::kBytes);
}

}  // namespace

int64_t attention_int8_workspace_bytes(const AttentionParams& args) {
  return Int8Workspace(args).bytes() + unmapped_output_bytes(args);
}

void attention_int8(const AttentionParams& args, Stream stream) {
  const Int8Workspace workspace(args);
  Int8AttentionParams params{};
  params.args = args;
  params.queries = workspace.queries;
  params.keys = workspace.keys;
  params.value_scales = workspace.value_scales;
  params.key_tiles = static_cast<int>(workspace.key_tiles);
  params.claimed_tiles = workspace.claimed_tiles;
  params.set_tiles(kInt8Queries);
  write_mapped_output(kOperation, params, workspace.bytes(), stream, [&] {
    dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
      if constexpr (sizeof(T) == 2) launch<T>(params, workspace, stream);
    });
  });
}

}  // namespace h100_diffusers_kernels
