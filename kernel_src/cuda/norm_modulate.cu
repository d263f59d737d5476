// rms_norm_modulate, layer_norm_modulate (adaptive layer norm) and layer_norm_modulate_pair.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void rms_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<PlainInput, RmsNorm>("rms_norm_modulate", params, stream);
}

void layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<PlainInput, LayerNorm>("layer_norm_modulate", params, stream);
}

void layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_general<PlainInput, LayerNorm>("layer_norm_modulate_pair", params, stream);
}

}  // namespace h100_diffusers_kernels
