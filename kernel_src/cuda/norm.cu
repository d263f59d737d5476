// rms_norm and layer_norm, with or without weight and bias.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void rms_norm(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "rms_norm";
  if (has_mixed_dtypes(params)) return launch_general<PlainInput, RmsNorm>(kOperation, params, stream);
  if (params.weight.data)
    return launch_row_norm<PlainInput, RmsNorm, AffineOutput<true, false>>(kOperation, params, stream);
  launch_row_norm<PlainInput, RmsNorm, AffineOutput<false, false>>(kOperation, params, stream);
}

void layer_norm(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "layer_norm";
  if (has_mixed_dtypes(params)) return launch_general<PlainInput, LayerNorm>(kOperation, params, stream);
  if (params.weight.data && params.bias.data)
    return launch_row_norm<PlainInput, LayerNorm, AffineOutput<true, true>>(kOperation, params, stream);
  if (params.weight.data)
    return launch_row_norm<PlainInput, LayerNorm, AffineOutput<true, false>>(kOperation, params, stream);
  if (params.bias.data)
    return launch_row_norm<PlainInput, LayerNorm, AffineOutput<false, true>>(kOperation, params, stream);
  launch_row_norm<PlainInput, LayerNorm, AffineOutput<false, false>>(kOperation, params, stream);
}

}  // namespace h100_diffusers_kernels
