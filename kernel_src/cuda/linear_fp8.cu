// linear_fp8: the product of FP8 rows and FP8 weights, with a scale for each row of both.
//
// Blocks are persistent. Two blocks form a cluster: they compute adjacent tiles of 128 rows and the same
// columns, and each loads half of the weights' tile for both (multicast), because the L2 cache could not
// deliver it twice at the rate of the products. In a block one warp loads tiles of 128 bytes a row into a
// ring of stages, and two warp groups multiply, 64 rows each. The accumulator of FP8 products keeps about 14
// bits, so the products of each stage are added to float32 sums (notes/fp8.md).
#include <algorithm>

#include "fast_divisor.cuh"
#include "fp8_product.cuh"
#include "launch.cuh"
#include "params.h"
#include "tensor_copy.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "linear_fp8";
constexpr int kClusterBlocks = 2;
constexpr int kGroups = 2;  // multiplying warp groups of a block
constexpr int kTileRows = kGroups * kWarpGroupRows;
constexpr int kThreads = (1 + kGroups) * kWarpGroupThreads;
constexpr int kLoadRegisters = 24, kMultiplyRegisters = 240;
constexpr int kTileDepth = kBoxRowBytes;  // a stage has one box of each matrix, with the same depth
static_assert(kTileDepth == kFp8BlockSize);

template <int kColumns_>
struct Memory {
  static constexpr int kColumns = kColumns_;
  static constexpr uint32_t kXBytes = kTileRows * kBoxRowBytes;
  static constexpr uint32_t kWeightBytes = kColumns * kBoxRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kWeightBytes;
  static constexpr uint32_t kOutBoxBytes = kWarpGroupRows * kBoxRowBytes;  // 64 columns of 16 bits
  static constexpr int kOutBoxes = kColumns / kBoxColumns;
  static constexpr uint32_t kOutBytes = kGroups * kOutBoxes * kOutBoxBytes;
  static constexpr uint32_t kFactorBytes = kColumns * sizeof(float2);  // of each warp group
  static constexpr uint32_t kBarrierBytes = 256;
  static constexpr uint32_t kOtherBytes = kOutBytes + kGroups * kFactorBytes + kBarrierBytes;
  static constexpr int kStages =
      static_cast<int>((kMaxSharedBytes - kSwizzleBytes - kOtherBytes) / kStageBytes);
  static constexpr int64_t kBytes = kSwizzleBytes + kStages * kStageBytes + kOtherBytes;
  using StageRing = Ring<kStages>;
  static_assert(StageRing::kBytes <= kBarrierBytes);

  uint32_t base = shared_tiles();

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return x(stage) + kXBytes; }
  __device__ __forceinline__ uint32_t out(int group) const {
    return base + kStages * kStageBytes + group * kOutBoxes * kOutBoxBytes;
  }
  // The scale and the bias of each column.
  __device__ __forceinline__ uint32_t factors(int group) const { return out(kGroups) + group * kFactorBytes; }
  __device__ __forceinline__ StageRing ring() const { return {factors(kGroups)}; }
};

constexpr int kGroupPairs = 8;  // pairs of row tiles that clusters compute before those further down

struct KernelParams {
  CUtensorMap x, weight, out;
  LinearFp8Params args;
  int row_pairs, column_tiles, depth_tiles;
  FastDivisor group_tiles;  // of kGroupPairs pairs of row tiles
  bool is_out_mapped;

  __device__ __forceinline__ int tiles() const { return row_pairs * column_tiles; }
};

// First row and column of a block's tile. A cluster has a pair of row tiles. Clusters that run at the same
// time share a few rows and columns of tiles, which they read from L2.
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(const KernelParams& params, int index, int rank, int columns) {
    const int group = static_cast<int>(params.group_tiles.divide(index)), first = group * kGroupPairs;
    const int place = index - group * static_cast<int>(params.group_tiles.divisor);
    const int pairs = min(kGroupPairs, params.row_pairs - first);
    // Only the last group has fewer pairs.
    const int column_tile = pairs == kGroupPairs ? place / kGroupPairs : place / pairs;
    column = column_tile * columns;
    row = (kClusterBlocks * (first + place - column_tile * pairs) + rank) * kTileRows;
  }
};

template <class M>
__device__ __forceinline__ void load_tiles(const KernelParams& params, const M& memory, int rank) {
  constexpr int kHalf = M::kColumns / kClusterBlocks;
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  const auto ring = memory.ring();
  RingState<typename M::StageRing> state;
  for (int index = blockIdx.x / kClusterBlocks; index < params.tiles(); index += gridDim.x / kClusterBlocks) {
    const Tile tile(params, index, rank, M::kColumns);
    for (int k = 0; k < params.depth_tiles; ++k) {
      state.wait_empty(ring);
      const Barrier full = ring.full(state.stage);
      full.arrive_expect_tx(M::kStageBytes);
      tma_load(memory.x(state.stage), params.x, full, MatrixBox{k * kTileDepth, tile.row});
      tma_load_multicast(memory.weight(state.stage) + rank * kHalf * kBoxRowBytes, params.weight, full,
                         MatrixBox{k * kTileDepth, tile.column + rank * kHalf}, kAllBlocks);
      state.advance();
    }
  }
}

// The rows of a tile that a thread has values of, and their scales.
template <bool kIsBlocked>
struct RowScales {
  const float* scales[2];
  bool is_row[2];
  float next[2];

  __device__ __forceinline__ RowScales(const KernelParams& params, int row) {
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

template <class M, typename T, bool kIsBlocked>
class Multiply {
 public:
  static constexpr int kColumns = M::kColumns, kValues = kColumns / 2;
  static constexpr int kThreadColumns = (kColumns + kWarpGroupThreads - 1) / kWarpGroupThreads;

  __device__ __forceinline__ Multiply(const KernelParams& params, const M& memory, const WarpRole& role,
                                      int rank)
      : params_(params), memory_(memory), role_(role), rank_(rank) {}

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x / kClusterBlocks; index < params_.tiles();
         index += gridDim.x / kClusterBlocks) {
      const Tile tile(params_, index, rank_, kColumns);
      compute(tile);
    }
    if (role_.thread == 0) tma_wait_group();
  }

 private:
  __device__ __forceinline__ void compute(const Tile& tile) {
    const int first_row = tile.row + role_.group * kWarpGroupRows;
    RowScales<kIsBlocked> rows(params_, first_row + role_.output_row(0));
    float2 factors[kThreadColumns] = {};
    load_factors(tile, factors);
    float sums[kValues], products[kValues];
    multiply_stage(sums);
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
    for (int depth = 0; depth < kTileDepth; depth += kFp8Depth)
      Fp8Wgmma<kColumns>::multiply(products, x.plus(depth), weight.plus(depth), depth > 0);
    wgmma_commit_group();
    wgmma_wait_group();
    compiler_fence(products);
    if (role_.lane < kClusterBlocks) ring.empty(state_.stage).arrive_at(role_.lane);
    state_.advance();
  }

  // Loads the scale and bias of the columns of this thread, long before they are needed.
  __device__ __forceinline__ void load_factors(const Tile& tile, float2 (&factors)[kThreadColumns]) const {
    const LinearFp8Params& args = params_.args;
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) {
      const int column = tile.column + i * kWarpGroupThreads + role_.thread;
      if (column >= args.out_features) continue;
      factors[i].x = __ldg(args.weight_scale + (args.weight_has_one_scale ? 0 : column));
      factors[i].y = args.bias == nullptr   ? 0.0f
                     : args.bias_is_float32 ? __ldg(static_cast<const float*>(args.bias) + column)
                                            : to_float(static_cast<const T*>(args.bias)[column]);
    }
  }

  __device__ __forceinline__ void store(const Tile& tile, int first_row, const RowScales<kIsBlocked>& rows,
                                        const float2 (&factors)[kThreadColumns], float (&sums)[kValues]) {
    const LinearFp8Params& args = params_.args;
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
    if (!params_.is_out_mapped) {
      store_unmapped(tile, first_row, rows, sums);
      role_.sync_group();  // all threads have read the columns' scales and biases
      return;
    }
    const uint32_t out = memory_.out(role_.group);
#pragma unroll
    for (int p = 0; p < kColumns / 16; ++p) {
      const uint32_t fragment[4] = {
          pack_pair<T>(sums[8 * p], sums[8 * p + 1]), pack_pair<T>(sums[8 * p + 2], sums[8 * p + 3]),
          pack_pair<T>(sums[8 * p + 4], sums[8 * p + 5]), pack_pair<T>(sums[8 * p + 6], sums[8 * p + 7])};
      stmatrix(
          out + p / 4 * M::kOutBoxBytes + swizzled_piece(role_.fragment_row(), p % 4 * 2 + role_.lane / 16),
          fragment);
    }
    fence_proxy_async();
    role_.sync_group();
    if (role_.thread != 0) return;
#pragma unroll
    for (int box = 0; box < M::kOutBoxes; ++box)
      if (tile.column + box * kBoxColumns < args.out_features && first_row < args.rows)
        tma_store(params_.out, out + box * M::kOutBoxBytes,
                  MatrixBox{tile.column + box * kBoxColumns, first_row});
    tma_commit_group();
  }

  // TMA cannot write rows whose size is no multiple of 16 bytes.
  __device__ __forceinline__ void store_unmapped(const Tile& tile, int first_row,
                                                 const RowScales<kIsBlocked>& rows,
                                                 const float (&sums)[kValues]) const {
    const int64_t columns = params_.args.out_features;
    T* out = static_cast<T*>(params_.args.out);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int column = tile.column + i / 4 * 8 + 2 * (role_.lane % 4) + i % 2;
      const int64_t row = first_row + role_.output_row(i / 2 % 2);
      if (rows.is_row[i / 2 % 2] && column < columns) out[row * columns + column] = from_float<T>(sums[i]);
    }
  }

  const KernelParams& params_;
  const M& memory_;
  const WarpRole& role_;
  const int rank_;
  RingState<typename M::StageRing> state_;
};

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int kColumns, typename T, bool kIsBlocked>
__global__ void __launch_bounds__(kThreads, 1)
    linear_fp8_kernel(const __grid_constant__ KernelParams params) {
  using M = Memory<kColumns>;
  const M memory;
  const WarpRole role;
  const int rank = static_cast<int>(blockIdx.x) % kClusterBlocks;
  if (threadIdx.x == 0) {
    memory.ring().init(1, kClusterBlocks * kGroups * kWarpGroupWarps);
    fence_mbarrier_init();
  }
  sync_cluster();
  griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<kLoadRegisters>();
    if (role.thread == 0) load_tiles(params, memory, rank);
    __syncwarp();
  } else {
    setmaxnreg_inc<kMultiplyRegisters>();
    Multiply<M, T, kIsBlocked>(params, memory, role, rank).run();
  }
  // A block must not end before the other one has signalled its barriers.
  sync_cluster();
}

// ---------------------------------------------------------------------------------------------------------

CUtensorMap map_matrix(CUtensorMapDataType type, int element_bytes, const void* data, int64_t rows,
                       int64_t columns, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns * element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxRowBytes / element_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  return encode_tensor_map<2>(kOperation, type, data, sizes, strides, box);
}

template <int kColumns, typename T, bool kIsBlocked>
void launch(const LinearFp8Params& args, Stream stream) {
  using M = Memory<kColumns>;
  KernelParams params{};
  params.args = args;
  params.row_pairs = static_cast<int>(ceil_divide(args.rows, kClusterBlocks * kTileRows));
  params.column_tiles = static_cast<int>(ceil_divide(args.out_features, kColumns));
  params.depth_tiles = static_cast<int>(ceil_divide(args.in_features, kTileDepth));
  params.group_tiles.set(static_cast<uint32_t>(kGroupPairs * params.column_tiles));
  params.x = map_matrix(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.x, args.rows, args.in_features, kTileRows);
  params.weight = map_matrix(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, args.weight, args.out_features,
                             args.in_features, kColumns / kClusterBlocks);
  params.is_out_mapped = args.out_features * 2 % kVectorBytes == 0 && is_16_byte_aligned(args.out);
  if (params.is_out_mapped)
    params.out =
        map_matrix(tensor_map_type(args.dtype), 2, args.out, args.rows, args.out_features, kWarpGroupRows);
  const int clusters = std::min(multiprocessor_count(kOperation, stream.device) / kClusterBlocks,
                                params.row_pairs * params.column_tiles);
  launch_kernel_with_shared_memory<linear_fp8_kernel<kColumns, T, kIsBlocked>, kClusterBlocks>(
      kOperation, dim3(static_cast<unsigned>(clusters * kClusterBlocks)), kThreads, params, stream,
      M::kBytes);
}

// Returns a number that grows with the time of tiles of this many columns: the columns that each cluster
// computes in turn.
int64_t cost_of(const LinearFp8Params& args, int columns, int clusters) {
  const int64_t tiles =
      ceil_divide(args.rows, kClusterBlocks * kTileRows) * ceil_divide(args.out_features, columns);
  return ceil_divide(tiles, clusters) * columns;
}

}  // namespace

void linear_fp8(const LinearFp8Params& args, Stream stream) {
  const int clusters = multiprocessor_count(kOperation, stream.device) / kClusterBlocks;
  const bool is_wide = cost_of(args, 192, clusters) <= cost_of(args, 128, clusters);
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      const auto launch_columns = [&](auto columns) {
        if (args.x_is_blocked) return launch<columns, T, true>(args, stream);
        launch<columns, T, false>(args, stream);
      };
      if (is_wide) return launch_columns(Constant<192>{});
      launch_columns(Constant<128>{});
    }
  });
}

}  // namespace h100_diffusers_kernels
