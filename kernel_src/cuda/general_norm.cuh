// Norms and gated residuals with float32 modulators with 16-bit rows, with absent modulators, or with two
// modulations. The kernels of each input are in a file of their own, because they compile longest.
#pragma once

#include "general_policies.cuh"
#include "row_norm.cuh"

namespace h100_diffusers_kernels {
// Beside float32 rows a gate is always float32, so it needs no general policy.
template <typename T, class Input>
using InputOf = std::conditional_t<std::is_same_v<Input, GatedResidualInput> && sizeof(T) == 2,
                                   GeneralGatedResidualInput, Input>;

inline bool needs_extra_operands(const RowNormParams& args) {
  return args.second_out.data ||
         ((args.weight.data || args.bias.data) && (args.scale.data || args.shift.data));
}

template <class Input, class Norm>
void launch_general(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if (needs_extra_operands(args))
      return launch_rows<T, InputOf<T, Input>, Norm, GeneralOutput<true>>(operation, args, stream);
    launch_rows<T, InputOf<T, Input>, Norm, GeneralOutput<false>>(operation, args, stream);
  });
}

}  // namespace h100_diffusers_kernels
