// linear_gelu_fp8: the GELU of a product of FP8 rows and an FP8 weight, quantized in blocks. A tile has the
// columns of one block, so that the four threads that share a row find its scale.
#include "activations.cuh"
#include "fp8_rows.cuh"
#include "linear_fp8.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "linear_gelu_fp8";

template <class Activation>
struct QuantizedOutput {
  using Element = uint8_t;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static constexpr bool kHasResidual = false;
  static constexpr int kValues = kFp8RowValues;

  // Columns beyond the weight's are 0, or NaN in rows whose values are all NaN.
  __device__ __forceinline__ static void finish(const ProductParams& params, const WarpRole& role,
                                                const ProductPosition& position, float (&values)[kValues]) {
    constexpr bool kFast = true;
    const auto activate = [](float value) { return Activation::template apply<kFast>(value); };
    quantize_rows(role, values, activate, [&](int group_row, float scale) {
      const int64_t row = position.row + group_row;
      if (role.lane % 4 == 0 && row < params.args.rows)
        params.args.out_scale[row * params.args.out_scale_stride + position.column / kFp8BlockSize] = scale;
    });
  }

  __device__ __forceinline__ static void store_shared(uint32_t out, const WarpRole& role,
                                                      const float (&values)[kValues]) {
    store_fp8_rows(out, role, values);
  }

  __device__ __forceinline__ static uint8_t round(float value) {
    return static_cast<uint8_t>(pack_fp8(value, 0.0f));
  }
};

}  // namespace

void linear_gelu_fp8(const LinearFp8Params& args, Stream stream) {
  const auto launch = [&]<class Activation>(std::type_identity<Activation>) {
    using Output = QuantizedOutput<Activation>;
    constexpr int kColumns = kFp8BlockSize;
    if (args.x_is_blocked) return launch_product<kColumns, Output, true>(kOperation, args, stream);
    launch_product<kColumns, Output, false>(kOperation, args, stream);
  };
  if (args.tanh_approximation)
    launch(std::type_identity<CoarseGeluTanh>{});
  else
    launch(std::type_identity<GeluErf>{});
}

}  // namespace h100_diffusers_kernels
