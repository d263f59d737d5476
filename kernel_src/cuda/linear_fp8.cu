// linear_fp8: products of FP8 rows and FP8 weights, rounded to 16 bits.
#include "linear_fp8.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "linear_fp8";

template <typename T>
struct RoundedOutput {
  using Element = T;
  static constexpr CUtensorMapDataType kMapType =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

  template <int kValues>
  __device__ __forceinline__ static void finish(const ProductParams&, const WarpRole&, const ProductPosition&,
                                                float (&)[kValues]) {}

  template <int kValues>
  __device__ __forceinline__ static void store_shared(uint32_t out, const WarpRole& role,
                                                      const float (&values)[kValues]) {
    constexpr uint32_t kBoxBytes = kWarpGroupRows * kBoxRowBytes;
#pragma unroll
    for (int p = 0; p < kValues / 8; ++p) {
      const float* v = values + 8 * p;
      const uint32_t fragment[4] = {pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                                    pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])};
      stmatrix(out + p / 4 * kBoxBytes + swizzled_piece(role.fragment_row(), p % 4 * 2 + role.lane / 16),
               fragment);
    }
  }

  __device__ __forceinline__ static T round(float value) { return from_float<T>(value); }
};

// Returns a number that grows with the time of tiles of this many columns: the columns that each cluster
// computes in turn.
int64_t cost_of(const LinearFp8Params& args, int columns, int clusters) {
  int64_t column_tiles = 0;
  for (int i = 0; i < args.weight_count; ++i)
    column_tiles += ceil_divide(args.weights[i].out_features, columns);
  const int64_t row_pairs = ceil_divide(args.rows, kProductClusterBlocks * kProductTileRows);
  return ceil_divide(row_pairs * column_tiles, clusters) * columns;
}

}  // namespace

void linear_fp8(const LinearFp8Params& args, Stream stream) {
  const int clusters = product_clusters(kOperation, stream);
  const bool is_wide = cost_of(args, 192, clusters) <= cost_of(args, 128, clusters);
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      const auto launch_columns = [&](auto columns) {
        using Output = RoundedOutput<T>;
        if (args.x_is_blocked) return launch_product<columns, Output, true>(kOperation, args, stream);
        launch_product<columns, Output, false>(kOperation, args, stream);
      };
      if (is_wide) return launch_columns(Constant<192>{});
      launch_columns(Constant<128>{});
    }
  });
}

}  // namespace h100_diffusers_kernels
