// rms_norm, layer_norm.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void rms_norm(const RowNormParams& params, Stream stream) {
  launch_row_norm<PlainInput, RmsNorm, AffineOutput<false>>("rms_norm", params, stream);
}

void layer_norm(const RowNormParams& params, Stream stream) {
  launch_row_norm<PlainInput, LayerNorm, AffineOutput<true>>("layer_norm", params, stream);
}

}  // namespace h100_diffusers_kernels
