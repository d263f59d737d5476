// The kernel of products of FP8 rows and FP8 weights, with a scale for each row of both. One launch
// multiplies the same rows by up to kMaxFp8Weights weights. A template parameter, the output, stores the
// sums: linear_fp8.cu rounds them, linear_gelu_fp8.cu quantizes their GELU, linear_gated_residual_fp8.cu adds
// a residual.
//
// Blocks are persistent. Two blocks form a cluster: they compute adjacent tiles of 128 rows and the same
// columns, and each loads half of the weights' tile for both (multicast), because the L2 cache could not
// deliver it twice at the rate of the products. In a block one warp loads tiles of 128 bytes a row into a
// ring of stages, and two warp groups multiply, 64 rows each. The accumulator of FP8 products keeps about 14
// bits, so the products of each stage are added to float32 sums (notes/fp8.md).
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "linear_fp8_tiles.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

// The rows of a tile that a thread has values of, and their scales.
template <bool kIsBlocked>
struct ProductRows {
  const float* scales[2];
  bool is_row[2];
  float next[2];

  __device__ __forceinline__ ProductRows(const ProductParams& params, int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_row[i] = row + 8 * i < params.args.rows;
      scales[i] = params.args.x_scale +
                  (is_row[i] ? (row + 8 * i) * static_cast<int64_t>(kIsBlocked ? params.depth_tiles : 1) : 0);
    }
    fetch(0);
  }
  __device__ __forceinline__ void fetch(int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next[i] = __ldg(scales[i] + block);
  }
};

// Where a warp group's values are in the result. A thread has them in the layout of wgmma's d
// (warp_group.cuh).
struct ProductPosition {
  int64_t row;  // first row of the warp group
  int column;   // first column of the tile
};

__device__ __forceinline__ float load_bias(const Fp8Weight& weight, int column) {
  if (weight.bias == nullptr) return 0.0f;
  switch (weight.bias_dtype) {
    case DType::kFloat32:
      return __ldg(static_cast<const float*>(weight.bias) + column);
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(weight.bias)[column]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(weight.bias)[column]);
  }
}

template <typename T>
constexpr CUtensorMapDataType kProductMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// An Output has the type Element of the result, the type kMapType of its tensor map, kHasResidual, and
//   finish(params, role, position, sums)   makes the stored values of a thread's sums
//   store_shared(out, role, values)        writes them to the boxes of a warp group, which TMA then copies
//   round(value)                           returns one of them as an Element
// With kHasResidual the boxes hold the residual before, and store_shared adds it.
template <class M, class Output, bool kIsBlocked>
class Product {
 public:
  static constexpr int kColumns = M::kColumns, kValues = kColumns / 2;
  static constexpr int kThreadColumns = (kColumns + kWarpGroupThreads - 1) / kWarpGroupThreads;

  __device__ __forceinline__ Product(const ProductParams& params, const M& memory, const WarpRole& role,
                                     int rank)
      : params_(params), memory_(memory), role_(role), rank_(rank) {}

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x / kProductClusterBlocks; index < params_.tiles();
         index += gridDim.x / kProductClusterBlocks) {
      const ProductTile tile(params_, index, rank_, kColumns);
      compute(tile);
    }
    if (role_.thread == 0) tma_wait_group();
  }

 private:
  __device__ __forceinline__ void compute(const ProductTile& tile) {
    const int first_row = tile.row + role_.group * kWarpGroupRows;
    ProductRows<kIsBlocked> rows(params_, first_row + role_.output_row(0));
    float2 factors[kThreadColumns] = {};
    load_factors(tile, factors);
    float sums[kValues], products[kValues];
    multiply_stage(sums);
    if constexpr (Output::kHasResidual) load_residual(tile, first_row);
    if constexpr (kIsBlocked) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] *= rows.next[i / 2 % 2];
    }
#pragma unroll 1
    for (int k = 1; k < params_.depth_tiles; ++k) {
      if constexpr (kIsBlocked) rows.fetch(k);
      multiply_stage(products);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        sums[i] = kIsBlocked ? fmaf(rows.next[i / 2 % 2], products[i], sums[i]) : sums[i] + products[i];
    }
    store(tile, first_row, rows, factors, sums);
  }

  // Multiplies what the next stage holds and releases it.
  __device__ __forceinline__ void multiply_stage(float (&products)[kValues]) {
    const auto ring = memory_.ring();
    state_.wait_full(ring);
    const auto x =
        MatrixDescriptor::along_rows(memory_.x(state_.stage) + role_.group * kWarpGroupRows * kBoxRowBytes);
    const auto weight = MatrixDescriptor::along_rows(memory_.weight(state_.stage));
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kProductDepth; depth += kFp8Depth)
      Fp8Wgmma<kColumns>::multiply(products, x.plus(depth), weight.plus(depth), depth > 0);
    wgmma_commit_group();
    wgmma_wait_group();
    compiler_fence(products);
    if (role_.lane < kProductClusterBlocks) ring.empty(state_.stage).arrive_at(role_.lane);
    state_.advance();
  }

  // Loads the scale and bias of the columns of this thread, long before they are needed.
  __device__ __forceinline__ void load_factors(const ProductTile& tile,
                                               float2 (&factors)[kThreadColumns]) const {
    const Fp8Weight& weight = params_.args.weights[tile.weight];
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      const int column = tile.column + i * kWarpGroupThreads + role_.thread;
      if (column >= weight.out_features) continue;
      factors[i].x = __ldg(weight.scale + (weight.has_one_scale ? 0 : column));
      factors[i].y = load_bias(weight, column);
      if constexpr (Output::kHasResidual) {
        if (params_.args.gate == nullptr || params_.args.gate_stride != 0) continue;
        const float gate = Output::load_gate(params_.args, column);
        factors[i].x *= gate;
        factors[i].y *= gate;
      }
    }
  }

  // Starts to copy the residual of the tile to where its result will be, long before it is needed.
  __device__ __forceinline__ void load_residual(const ProductTile& tile, int first_row) const {
    if (role_.thread != 0 || !params_.is_out_mapped[0] || first_row >= params_.args.rows) return;
    tma_wait_group_read();  // the earlier tile's stores have read the memory
    const Barrier barrier = memory_.residual(role_.group);
    const int columns = static_cast<int>(params_.args.weights[0].out_features) - tile.column;
    const int boxes = min(M::kOutBoxes, (columns + M::kOutBoxColumns - 1) / M::kOutBoxColumns);
    barrier.arrive_expect_tx(boxes * M::kOutBoxBytes);
    for (int box = 0; box < boxes; ++box)
      tma_load(memory_.out(role_.group) + box * M::kOutBoxBytes, params_.residual, barrier,
               MatrixBox{tile.column + box * M::kOutBoxColumns, first_row});
  }

  __device__ __forceinline__ void store(const ProductTile& tile, int first_row,
                                        const ProductRows<kIsBlocked>& rows,
                                        const float2 (&factors)[kThreadColumns], float (&sums)[kValues]) {
    const uint32_t columns = memory_.factors(role_.group);
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i)
      if (const int column = i * kWarpGroupThreads + role_.thread; column < kColumns)
        store_shared(columns + column * sizeof(float2), factors[i]);
    // The earlier tile's stores have read the memory.
    if (role_.thread == 0) tma_wait_group_read();
    role_.sync_group();
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 pair = load_shared_float4(columns + (8 * j + 2 * (role_.lane % 4)) * sizeof(float2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float row_scale = kIsBlocked ? 1.0f : rows.next[i];
        float* values = sums + 4 * j + 2 * i;
        values[0] = fmaf(values[0], row_scale * pair.x, pair.y);
        values[1] = fmaf(values[1], row_scale * pair.z, pair.w);
      }
    }
    Output::finish(params_, role_, ProductPosition{first_row, tile.column}, sums);
    if (!params_.is_out_mapped[tile.weight]) {
      store_unmapped(tile, first_row, rows, sums);
      role_.sync_group();  // all threads have read the columns' scales and biases
      return;
    }
    const uint32_t out = memory_.out(role_.group);
    if constexpr (Output::kHasResidual) {
      if (first_row < params_.args.rows) {
        memory_.residual(role_.group).wait(residual_parity_);
        residual_parity_ ^= 1;
      }
    }
    Output::store_shared(out, role_, sums);
    fence_proxy_async();
    role_.sync_group();
    if (role_.thread != 0) return;
#pragma unroll
    for (int box = 0; box < M::kOutBoxes; ++box)
      if (const int column = tile.column + box * M::kOutBoxColumns;
          column < params_.args.weights[tile.weight].out_features && first_row < params_.args.rows)
        tma_store(params_.outs[tile.weight], out + box * M::kOutBoxBytes, MatrixBox{column, first_row});
    tma_commit_group();
  }

  // TMA cannot write rows whose distance is no multiple of 16 bytes.
  __device__ __forceinline__ void store_unmapped(const ProductTile& tile, int first_row,
                                                 const ProductRows<kIsBlocked>& rows,
                                                 const float (&values)[kValues]) const {
    using T = typename Output::Element;
    const Fp8Weight& weight = params_.args.weights[tile.weight];
    const int first = tile.column + 2 * (role_.lane % 4), columns = static_cast<int>(weight.out_features);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.is_row[i]) continue;
      T* out = static_cast<T*>(weight.out) + (first_row + role_.output_row(i)) * weight.out_stride + first;
#pragma unroll
      for (int j = 0; j < kValues / 2; ++j) {
        const int offset = j / 2 * 8 + j % 2;
        if (first + offset >= columns) continue;
        float value = values[j / 2 * 4 + 2 * i + j % 2];
        if constexpr (Output::kHasResidual)
          value += to_float(static_cast<const T*>(
              params_.args.residual)[(first_row + role_.output_row(i)) * params_.args.residual_stride +
                                     first + offset]);
        out[offset] = Output::round(value);
      }
    }
  }

  const ProductParams& params_;
  const M& memory_;
  const WarpRole& role_;
  const int rank_;
  RingState<typename M::StageRing> state_;
  uint32_t residual_parity_ = 0;
};

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int kColumns, class Output, bool kIsBlocked>
__global__ void __launch_bounds__(kProductThreads, 1)
    linear_fp8_kernel(const __grid_constant__ ProductParams params) {
  constexpr int kLoadRegisters = 24, kMultiplyRegisters = 240;  // the least of setmaxnreg, and what is left
  static_assert((kProductGroups * kMultiplyRegisters + kLoadRegisters) * kWarpGroupThreads <=
                kMultiprocessorRegisters);
  using M = ProductMemory<kColumns, sizeof(typename Output::Element)>;
  const M memory;
  const WarpRole role;
  const int rank = static_cast<int>(blockIdx.x) % kProductClusterBlocks;
  if (threadIdx.x == 0) {
    memory.ring().init(1, kProductClusterBlocks * kProductGroups * kWarpGroupWarps);
    if constexpr (Output::kHasResidual)
      for (int group = 0; group < kProductGroups; ++group) memory.residual(group).init(1);
    fence_mbarrier_init();
  }
  sync_cluster();
  griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<kLoadRegisters>();
    if (role.thread == 0) load_product_tiles(params, memory, rank);
    __syncwarp();
  } else {
    setmaxnreg_inc<kMultiplyRegisters>();
    Product<M, Output, kIsBlocked>(params, memory, role, rank).run();
  }
  // A block must not end before the other one has signalled its barriers.
  sync_cluster();
}

// ---------------------------------------------------------------------------------------------------------

// A matrix in boxes of 128 bytes a row. The stride is that of its rows, in elements.
inline CUtensorMap map_matrix(const char* operation, CUtensorMapDataType type, int element_bytes,
                              const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  // The stride of one row has no meaning, but must be a multiple of 16 bytes.
  if (rows == 1) stride = ceil_divide(columns, kVectorBytes) * kVectorBytes;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxRowBytes / element_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  return encode_tensor_map<2>(operation, type, data, sizes, strides, box);
}

inline int product_clusters(const char* operation, Stream stream) {
  return multiprocessor_count(operation, stream.device) / kProductClusterBlocks;
}

// Returns the cycles that tiles of 128 or 192 columns take: those that each cluster computes in turn, with so
// many cycles a stage and at the end of a tile (notes/fp8.md).
inline int64_t product_cycles(const LinearFp8Params& args, int columns, int clusters) {
  const int64_t stage = columns == 128 ? 565 : 807, end = columns == 128 ? 1800 : 2700;
  int64_t column_tiles = 0;
  for (int i = 0; i < args.weight_count; ++i)
    column_tiles += ceil_divide(args.weights[i].out_features, columns);
  const int64_t row_pairs = ceil_divide(args.rows, kProductClusterBlocks * kProductTileRows);
  const int64_t stages = ceil_divide(args.in_features, kProductDepth);
  return ceil_divide(row_pairs * column_tiles, clusters) * (stages * stage + end);
}

template <int kColumns, class Output, bool kIsBlocked>
void launch_product(const char* operation, const LinearFp8Params& args, Stream stream) {
  constexpr int kElementBytes = sizeof(typename Output::Element);
  using M = ProductMemory<kColumns, kElementBytes>;
  ProductParams params{};
  params.args = args;
  params.row_pairs = static_cast<int>(ceil_divide(args.rows, kProductClusterBlocks * kProductTileRows));
  params.depth_tiles = static_cast<int>(ceil_divide(args.in_features, kProductDepth));
  params.x = map_matrix(operation, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.x, args.rows, args.in_features,
                        args.in_features, kProductTileRows);
  for (int i = 0; i < kMaxFp8Weights; ++i) {
    params.first_tiles[i] = params.column_tiles;
    if (i >= args.weight_count) continue;
    const Fp8Weight& weight = args.weights[i];
    params.weights[i] =
        map_matrix(operation, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, weight.data, weight.out_features,
                   args.in_features, args.in_features, kColumns / kProductClusterBlocks);
    params.is_out_mapped[i] = is_16_byte_aligned(weight.out) &&
                              (args.rows == 1 || weight.out_stride * kElementBytes % kVectorBytes == 0);
    if (params.is_out_mapped[i])
      params.outs[i] = map_matrix(operation, Output::kMapType, kElementBytes, weight.out, args.rows,
                                  weight.out_features, weight.out_stride, kWarpGroupRows);
    params.column_tiles += static_cast<int>(ceil_divide(weight.out_features, kColumns));
  }
  if constexpr (Output::kHasResidual) {
    params.is_out_mapped[0] = params.is_out_mapped[0] && is_16_byte_aligned(args.residual) &&
                              (args.rows == 1 || args.residual_stride * kElementBytes % kVectorBytes == 0);
    if (params.is_out_mapped[0])
      params.residual = map_matrix(operation, Output::kMapType, kElementBytes, args.residual, args.rows,
                                   args.weights[0].out_features, args.residual_stride, kWarpGroupRows);
  }
  for (int i = args.weight_count; i < kMaxFp8Weights; ++i) params.first_tiles[i] = params.column_tiles;
  params.group_tiles.set(static_cast<uint32_t>(kProductGroupPairs * params.column_tiles));
  const int clusters = std::min(product_clusters(operation, stream), params.row_pairs * params.column_tiles);
  launch_kernel_with_shared_memory<linear_fp8_kernel<kColumns, Output, kIsBlocked>, kProductClusterBlocks>(
      operation, dim3(static_cast<unsigned>(clusters * kProductClusterBlocks)), kProductThreads, params,
      stream, M::kBytes);
}

// With tiles of 128 or 192 columns, by their cycles, and an output of 16-bit values.
template <template <typename> class Output>
void launch_16_bit_product(const char* operation, const LinearFp8Params& args, Stream stream) {
  const int clusters = product_clusters(operation, stream);
  const bool is_wide = product_cycles(args, 192, clusters) <= product_cycles(args, 128, clusters);
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      const auto launch_columns = [&](auto columns) {
        if (args.x_is_blocked) return launch_product<columns, Output<T>, true>(operation, args, stream);
        launch_product<columns, Output<T>, false>(operation, args, stream);
      };
      if (is_wide) return launch_columns(Constant<192>{});
      launch_columns(Constant<128>{});
    }
  });
}

}  // namespace h100_diffusers_kernels
