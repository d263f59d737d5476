// linear_gated_residual_fp8: a residual plus a gate times the product of FP8 rows and an FP8 weight. TMA
// copies the tile of the residual to shared memory while the tile is multiplied. A gate that all rows share
// is a factor of the columns' scales and biases, if there is no low-rank term.
#include "product.cuh"

namespace h100_diffusers_kernels {
namespace {

template <typename T>
struct GatedResidualOutput {
  using Element = T;
  static constexpr CUtensorMapDataType kMapType = kProductMapType<T>;
  static constexpr bool kHasResidual = true;

  // The gate's element at this offset.
  __device__ __forceinline__ static float load_gate(const LinearParams& args, int64_t offset) {
    return args.gate_is_float32 ? __ldg(static_cast<const float*>(args.gate) + offset)
                                : to_float(static_cast<const T*>(args.gate)[offset]);
  }

  // Whether all rows share a gate.
  __device__ __forceinline__ static bool has_shared_gate(const LinearParams& args) {
    return args.gate != nullptr && args.gate_stride == 0;
  }

  // Multiplies by a gate of which each row has its own.
  template <int kValues>
  __device__ __forceinline__ static void finish(const ProductParams& params, const WarpRole& role,
                                                const ProductPosition& position, float (&values)[kValues]) {
    const LinearParams& args = params.args;
    if (args.gate == nullptr || args.gate_stride == 0) return;
    const int first = position.column + 2 * (role.lane % 4);
    const int columns = static_cast<int>(args.layers[0].out_features);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = position.row + role.output_row(i);
      if (row >= args.rows) continue;
#pragma unroll
      for (int j = 0; j < kValues / 2; ++j)
        if (const int column = first + j / 2 * 8 + j % 2; column < columns)
          values[j / 2 * 4 + 2 * i + j % 2] *= load_gate(args, row * args.gate_stride + column);
    }
  }

  template <int kValues>
  __device__ __forceinline__ static void store_shared(uint32_t out, const WarpRole& role,
                                                      const float (&values)[kValues]) {
    constexpr uint32_t kBoxBytes = kWarpGroupRows * kBoxRowBytes;
#pragma unroll
    for (int p = 0; p < kValues / 8; ++p) {
      const uint32_t address =
          out + p / 4 * kBoxBytes + swizzled_piece(role.fragment_row(), p % 4 * 2 + role.lane / 16);
      uint32_t fragment[4];
      ldmatrix(address, fragment);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 residual = unpack_pair<T>(fragment[i]);
        fragment[i] =
            pack_pair<T>(residual.x + values[8 * p + 2 * i], residual.y + values[8 * p + 2 * i + 1]);
      }
      stmatrix(address, fragment);
    }
  }

  __device__ __forceinline__ static T round(float value) { return from_float<T>(value); }
};

}  // namespace

void linear_gated_residual_fp8(const LinearParams& args, Stream stream) {
  constexpr const char* kOperation = "linear_gated_residual_fp8";
  dispatch_16_bit_product<192, 128>(
      kOperation, args, stream, [&]<typename T>(std::type_identity<T>, auto columns) {
        launch_fp8_product<columns, GatedResidualOutput<T>>(kOperation, args, stream);
      });
}

}  // namespace h100_diffusers_kernels
