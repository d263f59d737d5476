// gated_residual, alone and followed by a modulated norm.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void gated_residual(const RowNormParams& params, Stream stream) {
  launch_row_norm<GatedResidualInput, NoNorm, NoOutput>("gated_residual", params, stream);
}

void gated_residual_rms_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<GatedResidualInput, RmsNorm>("gated_residual_rms_norm_modulate", params, stream);
}

void gated_residual_layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<GatedResidualInput, LayerNorm>("gated_residual_layer_norm_modulate", params, stream);
}

}  // namespace h100_diffusers_kernels
