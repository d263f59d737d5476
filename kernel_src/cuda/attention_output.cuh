// Outputs that TMA cannot write, such as those that are not aligned to 16 bytes, are computed in a workspace
// and copied element by element.
#pragma once

#include "attention_epilogue.cuh"

namespace h100_diffusers_kernels {

// in: a contiguous output
void write_output(const char* operation, const AttentionParams& args, const void* in, Stream stream);

// Bytes of the workspace for an output that TMA cannot write.
inline int64_t unmapped_output_bytes(const AttentionParams& args) {
  if (is_mappable(out_of(args))) return 0;
  return args.batch * args.query_length * args.heads * args.head_dim * bytes_of(args.dtype);
}

// Sets params.out to the output, or to a contiguous one at `offset` of the workspace if TMA cannot write it,
// and calls launch().
template <class Launch>
void write_mapped_output(const char* operation, AttentionKernelParams& params, int64_t offset, Stream stream,
                         const Launch& launch) {
  const AttentionParams& args = params.args;
  const HeadsTensor out = out_of(args);
  const bool is_mapped = is_mappable(out);
  const void* contiguous_out = static_cast<char*>(args.workspace) + offset;
  params.out = map_tensor(
      operation,
      is_mapped ? out
                : contiguous_tensor(contiguous_out, args.batch, args.query_length, args.heads, args.head_dim),
      args.dtype, kStoreRows);
  launch();
  if (!is_mapped) write_output(operation, args, contiguous_out, stream);
}

}  // namespace h100_diffusers_kernels
