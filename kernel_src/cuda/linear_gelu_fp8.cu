// linear_gelu_fp8: the GELU of a product of FP8 rows and an FP8 weight, quantized in blocks. A tile has the
// columns of one block, so that the four threads that share a row find its scale.
#include "activations.cuh"
#include "fp8.cuh"
#include "product.cuh"

namespace h100_diffusers_kernels {
namespace {

template <class Activation>
struct QuantizedOutput {
  using Element = uint8_t;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  static constexpr bool kHasResidual = false;
  static constexpr int kValues = kFp8BlockSize / 2;

  // Columns beyond the weight's are 0, or NaN in rows whose values are all NaN.
  __device__ __forceinline__ static void finish(const ProductParams& params, const WarpRole& role,
                                                const ProductPosition& position, float (&values)[kValues]) {
    constexpr bool kFast = true;
    float largest[2] = {};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = Activation::template apply<kFast>(values[i]);
      largest[i / 2 % 2] = larger_magnitude(largest[i / 2 % 2], values[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        largest[i] = larger_magnitude(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
      const Fp8Quotient quotient(fp8_scale(__float_as_uint(largest[i])));
      const int64_t row = position.row + role.output_row(i);
      if (role.lane % 4 == 0 && row < params.args.rows)
        params.args.out_scale[row * params.args.out_scale_stride + position.column / kFp8BlockSize] =
            quotient.scale;
#pragma unroll
      for (int j = 2 * i; j < kValues; j += 4) {
        values[j] = quotient(values[j]);
        values[j + 1] = quotient(values[j + 1]);
      }
    }
  }

  // Two values are one store. The stores of a warp have no bank conflicts: its eight rows have their pieces
  // in different banks.
  __device__ __forceinline__ static void store_shared(uint32_t out, const WarpRole& role,
                                                      const float (&values)[kValues]) {
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared_u16(out + swizzled_piece(role.output_row(i), j / 2) + j % 2 * 8 + role.lane % 4 * 2,
                         pack_fp8(values[4 * j + 2 * i], values[4 * j + 2 * i + 1]));
    }
  }

  __device__ __forceinline__ static uint8_t round(float value) {
    return static_cast<uint8_t>(pack_fp8(value, 0.0f));
  }
};

}  // namespace

void linear_gelu_fp8(const LinearParams& args, Stream stream) {
  constexpr const char* kOperation = "linear_gelu_fp8";
  if (args.gelu == Gelu::kTanh)
    launch_fp8_product<kFp8BlockSize, QuantizedOutput<CoarseGeluTanh>>(kOperation, args, stream);
  else
    launch_fp8_product<kFp8BlockSize, QuantizedOutput<GeluErf>>(kOperation, args, stream);
}

}  // namespace h100_diffusers_kernels
