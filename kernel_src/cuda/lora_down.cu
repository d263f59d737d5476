// lora_down: products of FP8 or 16-bit rows and LoRA's narrow 16-bit matrices. Reading x limits the speed.
//
// A block has a tile of 64 or 128 rows and 16 to 128 columns, and a part of the inner dimension. One warp
// loads 128 bytes a row of x, and as many values of the matrices, into a ring of stages. Columns are in
// groups of 8 or 16 rows of one matrix, with a copy each. Each warp group has 64 rows of x in the registers
// of its products: FP8 is converted to 16 bits there, which is exact. The products of a stage share a scale
// of x. If there are few tiles, the blocks of a cluster split the inner dimension of one, and with tiles of
// 64 rows the warp groups take stages in turn. Their sums are added in a fixed order, so that results have
// the same bits each time.
#include <algorithm>
#include <type_traits>

#include "launch.cuh"
#include "pack.cuh"
#include "product.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "lora_down";
using Fp8 = uint8_t;  // the type of an FP8 x
static_assert(kBoxRowBytes == kFp8BlockSize);

// A tile and its shared memory. kDepthGroups warp groups take stages in turn for the same rows. In the end
// their sums are where the stages were.
template <typename X_, int kRowGroups_, int kDepthGroups_, int kColumns_>
struct DownTile {
  using X = X_;
  static constexpr bool kIsFp8 = std::is_same_v<X, Fp8>;
  static constexpr int kDepth = kBoxRowBytes / sizeof(X);  // of a stage, which has one box of x
  static constexpr int kDownBoxes = kDepth / kBoxColumns;
  static constexpr int kSteps = kDepth / kWgmmaDepth;       // products of a stage
  static constexpr int kStepBytes = kBoxRowBytes / kSteps;  // of a row of x
  static constexpr int kRowGroups = kRowGroups_, kDepthGroups = kDepthGroups_, kColumns = kColumns_;
  static constexpr int kRows = kRowGroups * kWarpGroupRows;
  static constexpr int kWarps = kRowGroups * kDepthGroups * kWarpGroupWarps, kThreads = (kWarps + 1) * 32;
  // Two blocks overlap their ends. 128 columns need too many registers, and few rows make too few blocks.
  static constexpr int kBlocksPerMultiprocessor = kColumns == 128 || kDepthGroups > 1 ? 1 : 2;
  // Products for which x is loaded at once. Eight of them would spill beside many sums.
  static constexpr int kStepsAtOnce = kColumns < 64 ? kSteps : kIsFp8 ? 2 : 4;
  static constexpr uint32_t kXBytes = kRows * kBoxRowBytes, kDownBoxBytes = kColumns * kBoxRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kDownBoxes * kDownBoxBytes;
  static constexpr uint32_t kBarrierBytes = 512;
  // A stage belongs to one warp group: a parity cannot tell a full stage from one that another group has yet
  // to read.
  static constexpr int kStages =
      static_cast<int>((kMaxSharedBytes / kBlocksPerMultiprocessor - kSwizzleBytes - kBarrierBytes) /
                       (kDepthGroups * kStageBytes)) *
      kDepthGroups;
  static constexpr int64_t kBytes = kSwizzleBytes + kStages * kStageBytes + kBarrierBytes;
  using StageRing = Ring<kStages>;
  static_assert(StageRing::kBytes <= kBarrierBytes);
  static constexpr int kSumsStride = kColumns + 8;  // without bank conflicts
  static_assert(kDepthGroups * kRows * kSumsStride * sizeof(float) <= kStages * kStageBytes);

  uint32_t base = shared_tiles();

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t down(int stage) const { return x(stage) + kXBytes; }
  __device__ __forceinline__ StageRing ring() const { return {base + kStages * kStageBytes}; }
  __device__ __forceinline__ uint32_t sums(int depth_group, int row, int column) const {
    return base + ((depth_group * kRows + row) * kSumsStride + column) * static_cast<int>(sizeof(float));
  }
};

constexpr int kMaxGroups = kMaxLoraColumns / kLoraColumnStep;

// The rows of a matrix in a group of columns.
struct ColumnGroup {
  uint8_t down, index;  // the matrix, and the number of the group in it
};

struct DownParams {
  CUtensorMap x, downs[kMaxLoraDowns];
  LoraDownParams args;
  ColumnGroup groups[kMaxGroups];
  int group_rows, group_count;
  int splits;  // of the inner dimension: the blocks of a cluster
  int column_tiles, depth_tiles;
  int scales_per_row, scales_per_block;  // strides of x_scale
};

// The part of the product that a block computes.
struct DownPart {
  int row, column, rank, first_depth, end_depth;  // rank: of the block in its cluster

  __device__ __forceinline__ DownPart(const DownParams& params, int rows, int columns) {
    const int index = static_cast<int>(blockIdx.x) / params.splits;
    rank = static_cast<int>(blockIdx.x) % params.splits;
    row = index / params.column_tiles * rows;
    column = index % params.column_tiles * columns;
    first_depth = params.depth_tiles * rank / params.splits;
    end_depth = params.depth_tiles * (rank + 1) / params.splits;
  }
};

// Each lane loads one box of a group of columns. Groups beyond the last one are not loaded, and their sums
// not stored.
template <class Tile>
__device__ __forceinline__ void load_stages(const DownParams& params, const Tile& tile, const DownPart& part,
                                            int lane) {
  static_assert(Tile::kColumns / kLoraColumnStep * Tile::kDownBoxes <= 32);
  const int group_rows = params.group_rows, first_group = part.column / group_rows;
  const int groups = min(params.group_count - first_group, Tile::kColumns / group_rows);
  const int group = lane / Tile::kDownBoxes, box = lane % Tile::kDownBoxes;
  const ColumnGroup loaded = params.groups[first_group + min(group, groups - 1)];
  const CUtensorMap& down = params.downs[loaded.down];
  const uint32_t group_bytes = group_rows * kBoxRowBytes;
  const uint32_t offset = box * Tile::kDownBoxBytes + group * group_bytes;
  const auto ring = tile.ring();
  RingState<typename Tile::StageRing> state;
#pragma unroll 1
  for (int k = part.first_depth; k < part.end_depth; ++k) {
    state.wait_empty(ring);
    const Barrier full = ring.full(state.stage);
    const int depth = k * Tile::kDepth;
    if (lane == 0) {
      full.arrive_expect_tx(Tile::kXBytes + groups * Tile::kDownBoxes * group_bytes);
      tma_load(tile.x(state.stage), params.x, full, MatrixBox{depth, part.row});
    }
    __syncwarp();
    if (group < groups)
      tma_load(tile.down(state.stage) + offset, down, full,
               MatrixBox{depth + box * kBoxColumns, loaded.index * group_rows});
    state.advance();
  }
}

// Converts two E4M3 values, exactly.
template <typename T>
__device__ __forceinline__ uint32_t convert_fp8_pair(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  if constexpr (std::is_same_v<T, __half>) return halves;
  const float2 values = unpack_pair<__half>(halves);
  return pack_pair<T>(values.x, values.y);
}

// Where a thread's part of wgmma's first a is in a box, in which row % 8 is lane / 4: two FP8 values of the
// first of its two rows, or the 16 bytes whose address it passes to ldmatrix. That of a later a is its
// exclusive or with the distance, because of the swizzle.
template <class Tile>
__device__ __forceinline__ uint32_t first_piece(int row, int lane) {
  if constexpr (Tile::kIsFp8) return row * kBoxRowBytes + lane / 4 * 16 + 2 * (lane % 4);
  return swizzled_piece(row - lane / 4 + lane % 16, lane / 16);
}

// Loads wgmma's a of 16 values a row.
template <typename T, class Tile>
__device__ __forceinline__ void load_fragment(uint32_t piece, uint32_t (&a)[4]) {
  if constexpr (Tile::kIsFp8) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] =
          convert_fp8_pair<T>(load_shared_u16(piece + i % 2 * 8 * kBoxRowBytes + i / 2 * (kWgmmaDepth / 2)));
  } else {
    ldmatrix(piece, a);
  }
}

// Adds the scaled products of a warp group's stages to the sums of a thread, in the layout of wgmma's d.
template <typename T, class Tile>
__device__ __forceinline__ void multiply_stages(const DownParams& params, const Tile& tile,
                                                const DownPart& part, int depth_group, int row,
                                                float (&sums)[Tile::kColumns / 2]) {
  const int lane = threadIdx.x % 32;
  // The scales of the thread's two rows.
  const int64_t last_row = params.args.rows - 1;
  const int64_t first_row = min(int64_t{part.row} + row, last_row);
  const int second = static_cast<int>(min(int64_t{part.row} + row + 8, last_row) - first_row);
  const float* scales = params.args.x_scale + first_row * params.scales_per_row +
                        (part.first_depth + depth_group) * params.scales_per_block;
  const uint32_t first = first_piece<Tile>(row, lane);

  const auto ring = tile.ring();
  RingState<typename Tile::StageRing> state;
  state.advance(depth_group);
#pragma unroll 1
  for (int k = part.first_depth + depth_group; k < part.end_depth; k += Tile::kDepthGroups) {
    float scale[2] = {1.0f, 1.0f};
    if constexpr (Tile::kIsFp8) {
      scale[0] = __ldg(scales);
      scale[1] = __ldg(scales + second * params.scales_per_row);
      scales += Tile::kDepthGroups * params.scales_per_block;
    }
    float products[Tile::kColumns / 2];
    state.wait_full(ring);
    const uint32_t x = tile.x(state.stage) + first;
    const auto down = MatrixDescriptor::along_rows(tile.down(state.stage));
#pragma unroll
    for (int begin = 0; begin < Tile::kSteps; begin += Tile::kStepsAtOnce) {
      uint32_t a[Tile::kStepsAtOnce][4];
#pragma unroll
      for (int step = 0; step < Tile::kStepsAtOnce; ++step)
        load_fragment<T, Tile>(x ^ (begin + step) * Tile::kStepBytes, a[step]);
      wgmma_fence();
#pragma unroll
      for (int step = begin; step < begin + Tile::kStepsAtOnce; ++step) {
        constexpr int kBoxSteps = kBoxColumns / kWgmmaDepth, kBytes = kBoxRowBytes / kBoxSteps;
        const int box = step / kBoxSteps * static_cast<int>(Tile::kDownBoxBytes);
        WgmmaAlongRows<T, Tile::kColumns>::a_from_registers(
            products, a[step - begin], down.plus(box + step % kBoxSteps * kBytes), step > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group();
    }
    compiler_fence(products);
    if (lane == 0) ring.empty(state.stage).arrive();
    state.advance(Tile::kDepthGroups);
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; ++i) sums[i] = fmaf(scale[i / 2 % 2], products[i], sums[i]);
  }
}

__device__ __forceinline__ void add(float4& sum, float4 term) {
  sum.x += term.x;
  sum.y += term.y;
  sum.z += term.z;
  sum.w += term.w;
}

// Adds the sums of a block's groups in the place of the first group's.
template <class Tile>
__device__ __forceinline__ void add_depth_groups(const Tile& tile) {
  constexpr int kFours = Tile::kColumns / 4;
  for (int i = threadIdx.x; i < Tile::kRows * kFours; i += Tile::kThreads) {
    const int row = i / kFours, column = i % kFours * 4;
    float4 sum = load_shared_float4(tile.sums(0, row, column));
#pragma unroll
    for (int group = 1; group < Tile::kDepthGroups; ++group)
      add(sum, load_shared_float4(tile.sums(group, row, column)));
    store_shared(tile.sums(0, row, column), sum);
  }
}

// Adds the sums of all blocks of the cluster for this block's part of the tile, and stores 16-bit values.
template <typename T, class Tile>
__device__ __forceinline__ void store_sums(const DownParams& params, const Tile& tile, const DownPart& part) {
  constexpr int kPack = kLoraColumnStep, kPacks = Tile::kColumns / kPack, kCount = Tile::kRows * kPacks;
  const int end = kCount * (part.rank + 1) / params.splits;
  for (int i = kCount * part.rank / params.splits + static_cast<int>(threadIdx.x); i < end;
       i += Tile::kThreads) {
    const int row = i / kPacks, column = i % kPacks * kPack;
    if (part.row + row >= params.args.rows || part.column + column >= params.args.columns) continue;
    float4 sums[2] = {};
#pragma unroll 1
    for (int rank = 0; rank < params.splits; ++rank) {
      const uint32_t address = mapa(tile.sums(0, row, column), rank);
      add(sums[0], load_cluster_float4(address));
      add(sums[1], load_cluster_float4(address + sizeof(float4)));
    }
    const float scale =
        params.args.downs[params.groups[(part.column + column) / params.group_rows].down].scale;
    float values[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) values[j] = scale * (&sums[j / 4].x)[j % 4];
    store_floats(static_cast<T*>(params.args.out) + (int64_t{part.row} + row) * params.args.columns +
                     part.column + column,
                 values);
  }
}

template <typename T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    lora_down_kernel(const __grid_constant__ DownParams params) {
  const Tile tile;
  const DownPart part(params, Tile::kRows, Tile::kColumns);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    tile.ring().init(1, Tile::kRowGroups * kWarpGroupWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();
  if (warp == Tile::kWarps) {
    load_stages(params, tile, part, lane);
    __syncwarp();
    __syncthreads();
  } else {
    constexpr int kRowWarps = Tile::kRowGroups * kWarpGroupWarps;
    const int depth_group = warp / kRowWarps, row = warp % kRowWarps * 16 + lane / 4;
    float sums[Tile::kColumns / 2] = {};
    multiply_stages<T>(params, tile, part, depth_group, row, sums);
    __syncthreads();  // all stages have been read
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 2; i += 2)
      store_shared(tile.sums(depth_group, row + i / 2 % 2 * 8, i / 4 * 8 + 2 * (lane % 4)),
                   make_float2(sums[i], sums[i + 1]));
  }
  if constexpr (Tile::kDepthGroups > 1) {
    __syncthreads();
    add_depth_groups(tile);
  }
  sync_cluster();
  store_sums<T>(params, tile, part);
  // A block must not end before the others have read its sums.
  sync_cluster();
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Calls body with the splits as a constant. Clusters of 5 and 7 would leave multiprocessors of a GPC unused.
template <typename Body>
void for_each_split(const Body& body) {
  body(Constant<1>{});
  body(Constant<2>{});
  body(Constant<3>{});
  body(Constant<4>{});
  body(Constant<6>{});
  body(Constant<kMaxClusterBlocks>{});
}

// Returns the splits with the least time, in stages that the busiest multiprocessor computes. A block's begin
// and end take about as long as three.
template <class Tile>
int choose_splits(int64_t tiles, int64_t depth_tiles, const void* kernel, int device) {
  constexpr int64_t kEnds = 3;
  int64_t best = 0;
  int best_splits = 0;
  for_each_split([&](auto splits) {
    const int clusters = cluster_count(kOperation, kernel, device, splits);
    if (clusters == 0) return;
    const int64_t blocks = ceil_divide(tiles, clusters);
    const int64_t time = blocks * ceil_divide(depth_tiles, splits) +
                         ceil_divide(blocks, Tile::kBlocksPerMultiprocessor) * kEnds;
    if (best_splits != 0 && (splits > depth_tiles || time >= best)) return;
    best = time;
    best_splits = splits;
  });
  return best_splits;
}

// Makes the groups of columns: of 16 rows, for fewer copies, if those divide all matrices.
void group_columns(DownParams& params) {
  const LoraDownParams& args = params.args;
  const auto end = args.downs + args.down_count;
  const bool is_even = std::all_of(args.downs, end, [](const LoraDown& down) { return down.rows % 16 == 0; });
  params.group_rows = is_even ? 16 : kLoraColumnStep;
  for (int32_t i = 0; i < args.down_count; ++i)
    for (int32_t index = 0; index * params.group_rows < args.downs[i].rows; ++index)
      params.groups[params.group_count++] = {static_cast<uint8_t>(i), static_cast<uint8_t>(index)};
}

template <typename T, class Tile>
void launch_tiles(const LoraDownParams& args, Stream stream) {
  using X = typename Tile::X;
  DownParams params{};
  params.args = args;
  group_columns(params);
  params.column_tiles = static_cast<int>(ceil_divide(args.columns, Tile::kColumns));
  params.depth_tiles = static_cast<int>(ceil_divide(args.in_features, Tile::kDepth));
  params.scales_per_row = args.x_is_blocked ? params.depth_tiles : 1;
  params.scales_per_block = args.x_is_blocked;
  const auto x_type = Tile::kIsFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kProductMapType<X>;
  params.x = map_matrix(kOperation, x_type, sizeof(X), args.x, args.rows, args.in_features, args.in_features,
                        Tile::kRows);
  for (int32_t i = 0; i < args.down_count; ++i)
    params.downs[i] = map_matrix(kOperation, kProductMapType<T>, sizeof(T), args.downs[i].data,
                                 args.downs[i].rows, args.in_features, args.in_features, params.group_rows);
  const int64_t tiles = ceil_divide(args.rows, Tile::kRows) * params.column_tiles;
  constexpr auto kKernel = lora_down_kernel<T, Tile>;
  allow_dynamic_shared_memory<kKernel>(kOperation, stream.device);
  params.splits =
      choose_splits<Tile>(tiles, params.depth_tiles, reinterpret_cast<const void*>(kKernel), stream.device);
  for_each_split([&](auto splits) {
    if (splits != params.splits) return;
    launch_kernel<splits>(kOperation, kKernel, dim3(static_cast<unsigned>(tiles * splits)), Tile::kThreads,
                          params, stream, Tile::kBytes);
  });
}

// With 64 rows a tile if tiles of 128 would leave multiprocessors without work.
template <typename T, typename X, int kColumns>
void launch_columns(const LoraDownParams& args, Stream stream) {
  const int64_t tiles =
      ceil_divide(args.rows, 2 * kWarpGroupRows) * ceil_divide(args.columns, int64_t{kColumns});
  if (tiles * kMaxClusterBlocks < multiprocessor_count(kOperation, stream.device))
    return launch_tiles<T, DownTile<X, 1, kColumns == 128 ? 2 : 4, kColumns>>(args, stream);
  launch_tiles<T, DownTile<X, 2, 1, kColumns>>(args, stream);
}

template <typename T, typename X>
void launch(const LoraDownParams& args, Stream stream) {
  if (args.columns <= 16) return launch_columns<T, X, 16>(args, stream);
  if (args.columns <= 32) return launch_columns<T, X, 32>(args, stream);
  if (args.columns <= 64) return launch_columns<T, X, 64>(args, stream);
  launch_columns<T, X, 128>(args, stream);
}

}  // namespace

void lora_down(const LoraDownParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (args.x_scale != nullptr) return launch<T, Fp8>(args, stream);
      launch<T, T>(args, stream);
    }
  });
}

}  // namespace h100_diffusers_kernels
