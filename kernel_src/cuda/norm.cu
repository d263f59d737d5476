// rms_norm and layer_norm, with or without weight and bias.
#include "row_norm.cuh"

namespace h100_diffusers_kernels {

void rms_norm(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "rms_norm";
  if (params.weight)
    return launch_row_norm<PlainInput, RmsNorm, AffineOutput<Affine::kWeight>>(kOperation, params, stream);
  launch_row_norm<PlainInput, RmsNorm, AffineOutput<Affine::kNone>>(kOperation, params, stream);
}

void layer_norm(const RowNormParams& params, Stream stream) {
  constexpr const char* kOperation = "layer_norm";
  const auto launch_with = [&](auto affine) {
    launch_row_norm<PlainInput, LayerNorm, AffineOutput<affine>>(kOperation, params, stream);
  };
  if (params.weight && params.bias) return launch_with(Constant<Affine::kWeightAndBias>{});
  if (params.weight || params.bias) return launch_with(Constant<Affine::kAny>{});
  launch_with(Constant<Affine::kNone>{});
}

}  // namespace h100_diffusers_kernels
