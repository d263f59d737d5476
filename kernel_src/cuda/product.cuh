// The kernel of linear layers: products of rows and up to kMaxLinearLayers weights in one launch, either FP8
// with a scale for each row of both, or 16-bit. A layer may have a low-rank term. A template parameter, the
// output, stores the sums: linear_fp8.cu rounds them, linear_gelu_fp8.cu quantizes their GELU,
// linear_gated_residual_fp8.cu adds a residual, linears_lora.cu rounds them or their GELU.
//
// Blocks are persistent. Two blocks form a cluster: they compute adjacent tiles of 128 rows and the same
// columns, and each loads half of the weights' tile for both (multicast), because the L2 cache could not
// deliver it twice at the rate of the products. In a block one warp loads tiles of 128 bytes a row into a
// ring of stages, and two warp groups multiply, 64 rows each. The accumulator of FP8 products keeps about 14
// bits, so the products of one or two stages are added to float32 sums (notes/fp8.md). 16-bit products, also
// those of the low-rank term, accumulate in the sums themselves.
#pragma once

#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "product_tiles.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

// The rows of a tile that a thread has values of, and the scales of FP8 rows.
template <Operands kOperands>
struct ProductRows {
  const float* scales[2];
  bool is_row[2];
  float next[2];

  __device__ __forceinline__ ProductRows(const ProductParams& params, int row) {
    const int64_t row_scales = kOperands == Operands::kFp8Blocks ? params.depth_tiles : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      is_row[i] = row + 8 * i < params.args.rows;
      next[i] = 1.0f;
      scales[i] = params.args.x_scale + (is_row[i] ? (row + 8 * i) * row_scales : 0);
    }
    if constexpr (kOperands != Operands::k16Bit) fetch(0);
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

__device__ __forceinline__ float load_bias(const LinearLayer& layer, int column) {
  if (layer.bias == nullptr) return 0.0f;
  switch (layer.bias_dtype) {
    case DType::kFloat32:
      return __ldg(static_cast<const float*>(layer.bias) + column);
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(layer.bias)[column]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(layer.bias)[column]);
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
template <class M, class Output, Operands kOperands>
class Product {
 public:
  static constexpr int kColumns = M::kColumns, kValues = kColumns / 2;
  static constexpr bool kIs16Bit = kOperands == Operands::k16Bit;
  static constexpr bool kIsBlocked = kOperands == Operands::kFp8Blocks;
  static constexpr int kSummedStages = kIsBlocked ? 1 : 2;  // FP8 stages that the tensor cores sum
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
    ProductRows<kOperands> rows(params_, first_row + role_.output_row(0));
    float2 factors[kThreadColumns] = {};
    load_factors(tile, factors);
    float sums[kValues];
    if constexpr (kIs16Bit)
      multiply_16_bit(tile, sums);
    else
      multiply_fp8(tile, first_row, rows, sums);
    store(tile, first_row, rows, factors, sums);
  }

  __device__ __forceinline__ void multiply_fp8(const ProductTile& tile, int first_row,
                                               ProductRows<kOperands>& rows, float (&sums)[kValues]) {
    float products[kValues];
    multiply_fp8_stages<1>(sums);
    if constexpr (Output::kHasResidual) load_residual(tile, first_row);
    if constexpr (kIsBlocked) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] *= rows.next[i / 2 % 2];
    }
    int k = 1;
    for (; (params_.depth_tiles - k) % kSummedStages != 0; ++k) multiply_fp8_stages<1>(sums, true);
#pragma unroll 1
    for (; k < params_.depth_tiles; k += kSummedStages) {
      if constexpr (kIsBlocked) rows.fetch(k);
      multiply_fp8_stages<kSummedStages>(products);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        sums[i] = kIsBlocked ? fmaf(rows.next[i / 2 % 2], products[i], sums[i]) : sums[i] + products[i];
    }
  }

  // Multiplies what the next stages hold, with their products in one sum, and releases them.
  template <int kStages>
  __device__ __forceinline__ void multiply_fp8_stages(float (&products)[kValues], bool accumulate = false) {
    int previous = 0;
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      state_.wait_full(memory_.ring());
      const MatrixDescriptor x = stage_rows(), weight = MatrixDescriptor::along_rows(stage_weight());
      wgmma_fence();
#pragma unroll
      for (int byte = 0; byte < kBoxRowBytes; byte += kFp8Depth)
        Fp8Wgmma<kColumns>::multiply(products, x.plus(byte), weight.plus(byte),
                                     accumulate || i > 0 || byte > 0);
      wgmma_commit_group();
      if (i > 0) {
        wgmma_wait_group<1>();
        release(previous);
      }
      previous = state_.stage;
      state_.advance();
    }
    wgmma_wait_group();
    compiler_fence(products);
    release(previous);
  }

  // Waits for the next stage and starts to add the product of the first 16 kSteps columns of its 16-bit
  // operands.
  template <typename T, int kSteps>
  __device__ __forceinline__ void begin_16_bit_stage(float (&sums)[kValues], bool accumulate = true) {
    constexpr int kStepBytes = kWgmmaDepth * sizeof(T);
    state_.wait_full(memory_.ring());
    const MatrixDescriptor x = stage_rows(), weight = MatrixDescriptor::along_rows(stage_weight());
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      Wgmma<T, kColumns>::a_from_shared(sums, x.plus(step * kStepBytes), weight.plus(step * kStepBytes),
                                        accumulate || step > 0);
    wgmma_commit_group();
  }

  // One wgmma group is in flight while the next stage is awaited. The low-rank term's stages come last.
  __device__ __forceinline__ void multiply_16_bit(const ProductTile& tile, float (&sums)[kValues]) {
    using T = typename Output::Element;
    constexpr int kSteps = kBoxColumns / kWgmmaDepth;
    begin_16_bit_stage<T, kSteps>(sums, false);
    int previous = state_.stage;
    state_.advance();
    const auto next = [&] {
      wgmma_wait_group<1>();
      release(previous);
      previous = state_.stage;
      state_.advance();
    };
#pragma unroll 1
    for (int k = 1; k < params_.depth_tiles; ++k) {
      begin_16_bit_stage<T, kSteps>(sums);
      next();
    }
#pragma unroll 1
    for (int k = 0; k < params_.low_stages[tile.layer]; ++k) {
      begin_low_stage<T>(tile, k, sums);
      next();
    }
    wgmma_wait_group();
    compiler_fence(sums);
    release(previous);
  }

  // Adds the low-rank term to scaled sums, and multiplies by a gate that all rows share, by way of the memory
  // of the columns' scales and biases.
  __device__ __forceinline__ void add_low_rank(const ProductTile& tile, uint32_t gates,
                                               float (&sums)[kValues]) {
    if constexpr (Output::kHasResidual) {
      if (Output::has_shared_gate(params_.args)) {
        role_.sync_group();  // all threads have read the scales and biases
        store_gates(tile, gates);
        add_low_stages(tile, sums);
        role_.sync_group();
        multiply_by_gates(gates, sums);
        return;
      }
    }
    add_low_stages(tile, sums);
  }

  __device__ __forceinline__ void store_gates(const ProductTile& tile, uint32_t gates) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      const int offset = i * kWarpGroupThreads + role_.thread, column = tile.column + offset;
      if (offset < kColumns && column < params_.args.layers[0].out_features)
        store_shared(gates + offset * sizeof(float2), float2{Output::load_gate(params_.args, column), 0.0f});
    }
  }

  __device__ __forceinline__ void multiply_by_gates(uint32_t gates, float (&sums)[kValues]) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 pair = load_shared_float4(gates + (8 * j + 2 * (role_.lane % 4)) * sizeof(float2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[4 * j + 2 * i] *= pair.x;
        sums[4 * j + 2 * i + 1] *= pair.z;
      }
    }
  }

  __device__ __forceinline__ void add_low_stages(const ProductTile& tile, float (&sums)[kValues]) {
#pragma unroll 1
    for (int k = 0; k < params_.low_stages[tile.layer]; ++k) {
      if constexpr (sizeof(typename Output::Element) == 2)
        begin_low_stage<typename Output::Element>(tile, k, sums);
      else if (params_.args.low_dtype == DType::kFloat16)
        begin_low_stage<__half>(tile, k, sums);
      else
        begin_low_stage<__nv_bfloat16>(tile, k, sums);
      wgmma_wait_group();
      compiler_fence(sums);
      release(state_.stage);
      state_.advance();
    }
  }

  // The branches have a fixed number of wgmmas each: otherwise the compiler adds a fence to each of them.
  template <typename T>
  __device__ __forceinline__ void begin_low_stage(const ProductTile& tile, int k, float (&sums)[kValues]) {
    const int columns = LowStage(params_, tile.layer, k).columns;
    if (columns <= kWgmmaDepth)
      begin_16_bit_stage<T, 1>(sums);
    else if (columns <= 2 * kWgmmaDepth)
      begin_16_bit_stage<T, 2>(sums);
    else
      begin_16_bit_stage<T, 4>(sums);
  }

  // This warp group's rows in the next stage.
  __device__ __forceinline__ MatrixDescriptor stage_rows() const {
    return MatrixDescriptor::along_rows(memory_.x(state_.stage) +
                                        role_.group * kWarpGroupRows * kBoxRowBytes);
  }
  __device__ __forceinline__ uint32_t stage_weight() const { return memory_.weight(state_.stage); }

  // Lets the loaders of both blocks overwrite the stage.
  __device__ __forceinline__ void release(int stage) const {
    if (role_.lane < kProductClusterBlocks) memory_.ring().empty(stage).arrive_at(role_.lane);
  }

  // Loads the scale and bias of the columns of this thread, long before they are needed.
  __device__ __forceinline__ void load_factors(const ProductTile& tile,
                                               float2 (&factors)[kThreadColumns]) const {
    const LinearLayer& layer = params_.args.layers[tile.layer];
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      const int column = tile.column + i * kWarpGroupThreads + role_.thread;
      if (column >= layer.out_features) continue;
      factors[i].x = kIs16Bit ? 1.0f : __ldg(layer.scale + (layer.has_one_scale ? 0 : column));
      factors[i].y = load_bias(layer, column);
      if constexpr (Output::kHasResidual) {
        if (!Output::has_shared_gate(params_.args) || layer.rank > 0) continue;
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
    const int columns = static_cast<int>(params_.args.layers[0].out_features) - tile.column;
    const int boxes = min(M::kOutBoxes, (columns + M::kOutBoxColumns - 1) / M::kOutBoxColumns);
    barrier.arrive_expect_tx(boxes * M::kOutBoxBytes);
    for (int box = 0; box < boxes; ++box)
      tma_load(memory_.out(role_.group) + box * M::kOutBoxBytes, params_.residual, barrier,
               MatrixBox{tile.column + box * M::kOutBoxColumns, first_row});
  }

  __device__ __forceinline__ void store(const ProductTile& tile, int first_row,
                                        const ProductRows<kOperands>& rows,
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
        const float row_scale = kOperands == Operands::kFp8Rows ? rows.next[i] : 1.0f;
        float* values = sums + 4 * j + 2 * i;
        values[0] = fmaf(values[0], row_scale * pair.x, pair.y);
        values[1] = fmaf(values[1], row_scale * pair.z, pair.w);
      }
    }
    if (!kIs16Bit && params_.low_stages[tile.layer] > 0) add_low_rank(tile, columns, sums);
    Output::finish(params_, role_, ProductPosition{first_row, tile.column}, sums);
    if (!params_.is_out_mapped[tile.layer]) {
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
          column < params_.args.layers[tile.layer].out_features && first_row < params_.args.rows)
        tma_store(params_.outs[tile.layer], out + box * M::kOutBoxBytes, MatrixBox{column, first_row});
    tma_commit_group();
  }

  // TMA cannot write rows whose distance is no multiple of 16 bytes.
  __device__ __forceinline__ void store_unmapped(const ProductTile& tile, int first_row,
                                                 const ProductRows<kOperands>& rows,
                                                 const float (&values)[kValues]) const {
    using T = typename Output::Element;
    const LinearLayer& layer = params_.args.layers[tile.layer];
    const int first = tile.column + 2 * (role_.lane % 4), columns = static_cast<int>(layer.out_features);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.is_row[i]) continue;
      T* out = static_cast<T*>(layer.out) + (first_row + role_.output_row(i)) * layer.out_stride + first;
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

template <int kColumns, class Output, Operands kOperands>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(const __grid_constant__ ProductParams params) {
  constexpr int kLoadRegisters = 40, kMultiplyRegisters = 232;
  // A block gets as many as its launch has. With more, setmaxnreg would wait for ever.
  constexpr int kLaunchRegisters = kMultiprocessorRegisters / kProductThreads / 8 * 8;
  static_assert(kProductGroups * kMultiplyRegisters + kLoadRegisters <=
                (kProductGroups + 1) * kLaunchRegisters);
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
    if (role.thread == 0) load_product_tiles<kOperands>(params, memory, rank);
    __syncwarp();
  } else {
    setmaxnreg_inc<kMultiplyRegisters>();
    Product<M, Output, kOperands>(params, memory, role, rank).run();
  }
  // A block must not end before the other one has signalled its barriers.
  sync_cluster();
}

// ---------------------------------------------------------------------------------------------------------

// A matrix in boxes of 128 or 64 bytes a row. The stride is that of its rows, in elements.
inline CUtensorMap map_matrix(const char* operation, CUtensorMapDataType type, int element_bytes,
                              const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows,
                              int row_bytes = kBoxRowBytes) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  // The stride of one row has no meaning, but must be a multiple of 16 bytes.
  if (rows == 1) stride = ceil_divide(columns, kVectorBytes) * kVectorBytes;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(row_bytes / element_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const auto swizzle = row_bytes == kBoxRowBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode_tensor_map<2>(operation, type, data, sizes, strides, box, swizzle);
}

inline int product_clusters(const char* operation, Stream stream) {
  return multiprocessor_count(operation, stream.device) / kProductClusterBlocks;
}

// Returns the cycles of a product with tiles of this width: a cluster's number of tiles times the cycles of a
// tile's stages and of its epilogue (notes/fp8.md, notes/lora.md). With 16-bit operands a stage takes little
// more than its products do.
inline int64_t product_cycles(const LinearParams& args, int columns, int clusters) {
  const bool is_16_bit = args.x_scale == nullptr;
  const int64_t of_rows = columns == 128 ? 542 : 800, of_blocks = columns == 128 ? 680 : 887;
  const int64_t fp8_stage = args.x_is_blocked ? of_blocks : of_rows, end = 14 * columns;
  const int64_t stage = is_16_bit ? 4 * columns + 48 : fp8_stage;
  int64_t column_tiles = 0;
  for (int i = 0; i < args.layer_count; ++i)
    column_tiles += ceil_divide(args.layers[i].out_features, columns);
  const int64_t row_pairs = ceil_divide(args.rows, kProductClusterBlocks * kProductTileRows);
  const int64_t stages = ceil_divide(args.in_features, is_16_bit ? kBoxColumns : kBoxRowBytes);
  return ceil_divide(row_pairs * column_tiles, clusters) * (stages * stage + end);
}

template <int kColumns, class Output, Operands kOperands>
void launch_product(const char* operation, const LinearParams& args, Stream stream) {
  constexpr int kOutBytes = sizeof(typename Output::Element);
  constexpr bool kIs16Bit = kOperands == Operands::k16Bit;
  constexpr int kBytes = kIs16Bit ? kOutBytes : 1;  // of an operand's element
  constexpr int kHalf = kColumns / kProductClusterBlocks;
  const CUtensorMapDataType type = kIs16Bit ? Output::kMapType : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  using M = ProductMemory<kColumns, kOutBytes>;
  ProductParams params{};
  params.args = args;
  params.row_pairs = static_cast<int>(ceil_divide(args.rows, kProductClusterBlocks * kProductTileRows));
  params.depth_tiles = static_cast<int>(ceil_divide(args.in_features, kProductDepth<kOperands>));
  params.x = map_matrix(operation, type, kBytes, args.x, args.rows, args.in_features, args.in_features,
                        kProductTileRows);
  for (int i = 0; i < kMaxLinearLayers; ++i) {
    params.first_tiles[i] = params.column_tiles;
    if (i >= args.layer_count) continue;
    const LinearLayer& layer = args.layers[i];
    params.weights[i] = map_matrix(operation, type, kBytes, layer.weight, layer.out_features,
                                   args.in_features, args.in_features, kHalf);
    if (layer.rank > 0) {
      const CUtensorMapDataType low_type = tensor_map_type(args.low_dtype);
      params.lows[i] = map_matrix(operation, low_type, 2, layer.low, args.rows, layer.rank, layer.low_stride,
                                  kProductTileRows);
      for (int j = 0; j < kMaxLowRankUps; ++j) {
        params.first_low_stages[i][j] = params.low_stages[i];
        if (j >= layer.up_count) continue;
        const LowRankUp& up = layer.ups[j];
        params.ups[i][j] =
            map_matrix(operation, low_type, 2, up.data, layer.out_features, up.rank, up.rank, kHalf);
        params.low_stages[i] += static_cast<int>(ceil_divide(up.rank, kBoxColumns));
      }
    }
    params.is_out_mapped[i] =
        is_16_byte_aligned(layer.out) && (args.rows == 1 || layer.out_stride * kOutBytes % kVectorBytes == 0);
    if (params.is_out_mapped[i])
      params.outs[i] = map_matrix(operation, Output::kMapType, kOutBytes, layer.out, args.rows,
                                  layer.out_features, layer.out_stride, kWarpGroupRows, M::kOutBoxRowBytes);
    params.column_tiles += static_cast<int>(ceil_divide(layer.out_features, kColumns));
  }
  if constexpr (Output::kHasResidual) {
    params.is_out_mapped[0] = params.is_out_mapped[0] && is_16_byte_aligned(args.residual) &&
                              (args.rows == 1 || args.residual_stride * kOutBytes % kVectorBytes == 0);
    if (params.is_out_mapped[0])
      params.residual = map_matrix(operation, Output::kMapType, kOutBytes, args.residual, args.rows,
                                   args.layers[0].out_features, args.residual_stride, kWarpGroupRows);
  }
  for (int i = args.layer_count; i < kMaxLinearLayers; ++i) params.first_tiles[i] = params.column_tiles;
  params.group_tiles.set(static_cast<uint32_t>(kProductGroupPairs * params.column_tiles));
  const int clusters = std::min(product_clusters(operation, stream), params.row_pairs * params.column_tiles);
  launch_kernel_with_shared_memory<product_kernel<kColumns, Output, kOperands>, kProductClusterBlocks>(
      operation, dim3(static_cast<unsigned>(clusters * kProductClusterBlocks)), kProductThreads, params,
      stream, M::kBytes);
}

// Calls launch(type, columns) with the type of 16-bit results and the width of tiles that takes the fewest
// cycles. FP8 products have no registers for more than 192 columns: they have two accumulators.
template <int... kColumns, typename Launch>
void dispatch_16_bit_product(const char* operation, const LinearParams& args, Stream stream,
                             const Launch& launch) {
  const int clusters = product_clusters(operation, stream);
  const int columns = std::min({kColumns...}, [&](int one, int other) {
    return product_cycles(args, one, clusters) < product_cycles(args, other, clusters);
  });
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T> type) {
    if constexpr (sizeof(T) == 2) ((columns == kColumns ? launch(type, Constant<kColumns>{}) : void()), ...);
  });
}

template <int kColumns, class Output>
void launch_fp8_product(const char* operation, const LinearParams& args, Stream stream) {
  if (args.x_is_blocked)
    return launch_product<kColumns, Output, Operands::kFp8Blocks>(operation, args, stream);
  launch_product<kColumns, Output, Operands::kFp8Rows>(operation, args, stream);
}

}  // namespace h100_diffusers_kernels
