// Gated residuals, and norms of them, with general operands (general_norm.cuh).
#include "general_policies.cuh"

namespace h100_diffusers_kernels {

template void launch_general<GatedResidualInput, RmsNorm>(const char*, const RowNormParams&, Stream);
template void launch_general<GatedResidualInput, LayerNorm>(const char*, const RowNormParams&, Stream);

void launch_general_gate(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2)
      launch_rows<T, GeneralGatedResidualInput, NoNorm, NoOutput>(operation, args, stream);
  });
}

}  // namespace h100_diffusers_kernels
