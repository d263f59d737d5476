// Norms with a quantized result: E4M3 rows with a float32 scale each, from the unrounded values. 16-bit rows
// that fit in registers run on row_norm_kernel, if scale and shift, or weight and bias, are all that is
// applied. branch_norm.cu computes the others.
//
// A thread holds 16 values until their row's largest magnitude is known. Nothing else is stored before that,
// so the kernels read as fast as those with a 16-bit result, and write half as much. Their limit is then near
// the rate of instructions (notes/fp8.md, "Row operations").
#include "general_policies.cuh"
#include "row_norm.cuh"

namespace h100_diffusers_kernels {
namespace {

// The values of another output, quantized.
template <class Output>
struct QuantizedOutput {
  static constexpr bool kIsQuantized = true;
  static constexpr bool kIsGeneral = std::is_same_v<Output, GeneralOutput<false>>;

  struct Operands : Output::Operands {
    RowIndexer::Operand row_scale;
    explicit Operands(const RowNormParams& p) : Output::Operands(p), row_scale(p.row_scale, p.shape.ndim) {}
  };

  template <typename T>
  struct Row : Output::template Row<T> {
    const RowIndexer::Operand& scale_operand;
    RowIndexer::Index row;
    uint8_t* quantized;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : Output::template Row<T>(operands, index),
          scale_operand(operands.row_scale),
          row(index),
          quantized(row_of<uint8_t>(operands.out, index)) {}

    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const float (&values)[kSize],
                                          const Fp8Quotient& quotient) const {
      store_fp8(quantized + column, values, quotient);
    }
    __device__ __forceinline__ void store_scale(float scale) const {
      *row_of<float>(scale_operand, row) = scale;
    }
  };
};

// ---------------------------------------------------------------------------------------------------------
// Launch

// The same as BranchThreads: narrower rows are rare.
using QuantizedRowThreads = RowThreads<64, 128, 192, 256, 320, 384, 512>;

// Return false if the rows are not such that the kernel can hold them in registers.
template <class Input, class Norm, class Output>
bool try_launch(const char* operation, const RowNormParams& args, Stream stream) {
  bool is_launched = false;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (args.hidden == 0 || !has_vector_access(args, sizeof(T))) return;
      using Result = QuantizedOutput<Output>;
      const RowKernelParams<Input, Result> params(args);
      const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
      is_launched =
          dispatch_row_threads<kMaxShortRowThreads<Norm>>(QuantizedRowThreads{}, packs, [&](auto threads) {
            launch_kernel(operation, row_norm_kernel<T, Input, Norm, Result, threads>,
                          RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>, params,
                          stream);
          });
    }
  });
  return is_launched;
}

template <class Input, class Norm>
bool try_launch_general(const char* operation, const RowNormParams& args, Stream stream) {
  using GeneralInput =
      std::conditional_t<std::is_same_v<Input, GatedResidualInput>, GeneralGatedResidualInput, Input>;
  return try_launch<GeneralInput, Norm, GeneralOutput<false>>(operation, args, stream);
}

template <class Input, class Norm>
bool try_launch_policies(const char* operation, const RowNormParams& args, Stream stream) {
  if (has_branch(args)) return false;
  const bool has_affine = args.weight.data || args.bias.data;
  if (!args.scale.data || !args.shift.data || has_mixed_dtypes(args)) {
    if (has_affine && (args.scale.data || args.shift.data)) return false;
    return try_launch_general<Input, Norm>(operation, args, stream);
  }
  if (has_affine) return try_launch<Input, Norm, ModulatedOutput<true>>(operation, args, stream);
  return try_launch<Input, Norm, ModulatedOutput<false>>(operation, args, stream);
}

}  // namespace

template <class Input, class Norm>
void launch_quantized(const char* operation, const RowNormParams& args, Stream stream) {
  if (!try_launch_policies<Input, Norm>(operation, args, stream))
    launch_branch_norm<Norm>(operation, args, stream);
}

template void launch_quantized<PlainInput, RmsNorm>(const char*, const RowNormParams&, Stream);
template void launch_quantized<PlainInput, LayerNorm>(const char*, const RowNormParams&, Stream);
template void launch_quantized<GatedResidualInput, RmsNorm>(const char*, const RowNormParams&, Stream);
template void launch_quantized<GatedResidualInput, LayerNorm>(const char*, const RowNormParams&, Stream);

}  // namespace h100_diffusers_kernels
