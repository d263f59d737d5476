// A float32 residual beside a 16-bit branch, alone or with an RMS norm after it, as in the decoder of
// MiniMax-H3: the sum is float32, the norm's result 16-bit.
#include "general_policies.cuh"

namespace h100_diffusers_kernels {
namespace {

struct Float32ResidualInput : GatedInput<GeneralGate, true> {};

// One model has these, so they have fewer widths than other norms. Among them is its own, 2048.
template <typename T, class Norm, class Output>
void launch(const char* operation, const RowNormParams& args, Stream stream) {
  launch_rows<T, Float32ResidualInput, Norm, Output, ElementwiseRowThreads>(operation, args, stream);
}

}  // namespace

template <class Norm>
void launch_float32_residual(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if constexpr (!Norm::kIsNorm)
        launch<T, Norm, NoOutput>(operation, args, stream);
      else if (needs_extra_operands(args))
        launch<T, Norm, GeneralOutput<true>>(operation, args, stream);
      else
        launch<T, Norm, GeneralOutput<false>>(operation, args, stream);
    }
  });
}

template void launch_float32_residual<NoNorm>(const char*, const RowNormParams&, Stream);
template void launch_float32_residual<RmsNorm>(const char*, const RowNormParams&, Stream);

}  // namespace h100_diffusers_kernels
