// gated_residual, and gated_residual followed by a norm with one or two modulations.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void gated_residual(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "gated_residual";
  if (params.has_float32_residual) return launch_float32_residual<NoNorm>(kOperation, params, stream);
  if (has_branch(params)) return launch_branch_norm<NoNorm>(kOperation, params, stream);
  if (has_mixed_dtypes(params)) return launch_general_gate(kOperation, params, stream);
  launch_row_norm<GatedResidualInput, NoNorm, NoOutput>(kOperation, params, stream);
}

void gated_residual_rms_norm_modulate(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "gated_residual_rms_norm_modulate";
  if (params.has_float32_residual) return launch_float32_residual<RmsNorm>(kOperation, params, stream);
  launch_modulated<GatedResidualInput, RmsNorm>(kOperation, params, stream);
}

void gated_residual_layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<GatedResidualInput, LayerNorm>("gated_residual_layer_norm_modulate", params, stream);
}

void gated_residual_layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_general<GatedResidualInput, LayerNorm>("gated_residual_layer_norm_modulate_pair", params, stream);
}

}  // namespace h100_diffusers_kernels
