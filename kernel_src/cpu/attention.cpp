// Attention of 16-bit tensors: attention_block.h.
#include "attention_block.h"

namespace h100_diffusers_kernels {

int64_t attention_workspace_bytes(const AttentionParams&) { return 0; }

void attention(const AttentionParams& params, Stream stream) {
  launch_attention<false>(params, params.dtype, stream);
}

}  // namespace h100_diffusers_kernels
