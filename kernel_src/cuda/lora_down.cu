// lora_down_fp8: products of FP8 rows and LoRA's narrow 16-bit matrix. Reading x limits the speed.
//
// A block has a tile of 64 or 128 rows and 16 to 128 columns, and a part of the inner dimension. One thread
// loads 128 values a row of x, and as many of down, into a ring of stages. Each warp group converts 64 rows
// of x to 16 bits, which is exact, in the registers of its products. Those of a stage share a scale of x. If
// there are few tiles, the blocks of a cluster split the inner dimension of one, and with tiles of 64 rows
// the warp groups take stages in turn. Their sums are added in a fixed order, so that results have the same
// bits each time.
#include <type_traits>

#include "launch.cuh"
#include "product.cuh"
#include "pack.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "lora_down_fp8";
constexpr int kDepth = kBoxRowBytes;  // of a stage: one box of x and two of down
constexpr int kDownBoxes = kDepth / kBoxColumns;
constexpr int kSteps = kDepth / kWgmmaDepth;  // products of a stage
static_assert(kDepth == kFp8BlockSize);

// A tile and its shared memory. kDepthGroups warp groups take stages in turn for the same rows. In the end
// their sums are where the stages were.
template <int kRowGroups_, int kDepthGroups_, int kColumns_>
struct DownTile {
  static constexpr int kRowGroups = kRowGroups_, kDepthGroups = kDepthGroups_, kColumns = kColumns_;
  static constexpr int kRows = kRowGroups * kWarpGroupRows;
  static constexpr int kWarps = kRowGroups * kDepthGroups * kWarpGroupWarps, kThreads = (kWarps + 1) * 32;
  // Two blocks overlap their ends. 128 columns need too many registers, and few rows make too few blocks.
  static constexpr int kBlocksPerMultiprocessor = kColumns == 128 || kDepthGroups > 1 ? 1 : 2;
  // Products for which x is converted at once. A whole stage of them would spill beside many sums.
  static constexpr int kStepsAtOnce = kColumns < 64 ? kSteps : kSteps / 2;
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

struct DownParams {
  CUtensorMap x, down;
  LoraDownFp8Params args;
  int splits;  // of the inner dimension: the blocks of a cluster
  int column_tiles, depth_tiles;
  int scales_per_row, scales_per_block;  // strides of x_scale
};

// The part of the product that a block computes.
struct DownPart {
  int row, column, rank, first_depth, end_depth;

  __device__ __forceinline__ DownPart(const DownParams& params, int rows, int columns) {
    const int index = static_cast<int>(blockIdx.x) / params.splits;
    rank = static_cast<int>(blockIdx.x) % params.splits;
    row = index / params.column_tiles * rows;
    column = index % params.column_tiles * columns;
    first_depth = params.depth_tiles * rank / params.splits;
    end_depth = params.depth_tiles * (rank + 1) / params.splits;
  }
};

template <class Tile>
__device__ __forceinline__ void load_stages(const DownParams& params, const Tile& tile,
                                            const DownPart& part) {
  const auto ring = tile.ring();
  RingState<typename Tile::StageRing> state;
  for (int k = part.first_depth; k < part.end_depth; ++k) {
    state.wait_empty(ring);
    const Barrier full = ring.full(state.stage);
    full.arrive_expect_tx(Tile::kStageBytes);
    tma_load(tile.x(state.stage), params.x, full, MatrixBox{k * kDepth, part.row});
#pragma unroll
    for (int box = 0; box < kDownBoxes; ++box)
      tma_load(tile.down(state.stage) + box * Tile::kDownBoxBytes, params.down, full,
               MatrixBox{k * kDepth + box * kBoxColumns, part.column});
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

// Loads wgmma's a of 16 values a row. `piece`: the first ones of the thread, in the first of its two rows.
template <typename T>
__device__ __forceinline__ void load_fragment(uint32_t piece, uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a[i] = convert_fp8_pair<T>(load_shared_u16(piece + i % 2 * 8 * kBoxRowBytes + i / 2 * (kWgmmaDepth / 2)));
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
  // Two values in a swizzled row; row % 8 is lane / 4.
  const uint32_t first = row * kBoxRowBytes + lane / 4 * 16 + 2 * (lane % 4);

  const auto ring = tile.ring();
  RingState<typename Tile::StageRing> state;
  state.advance(depth_group);
#pragma unroll 1
  for (int k = part.first_depth + depth_group; k < part.end_depth; k += Tile::kDepthGroups) {
    const float scale[2] = {__ldg(scales), __ldg(scales + second * params.scales_per_row)};
    scales += Tile::kDepthGroups * params.scales_per_block;
    float products[Tile::kColumns / 2];
    state.wait_full(ring);
    const uint32_t x = tile.x(state.stage) + first;
    const auto down = MatrixDescriptor::along_rows(tile.down(state.stage));
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += Tile::kStepsAtOnce) {
      uint32_t a[Tile::kStepsAtOnce][4];
#pragma unroll
      for (int step = 0; step < Tile::kStepsAtOnce; ++step)
        load_fragment<T>(x ^ (begin + step) * 16, a[step]);
      wgmma_fence();
#pragma unroll
      for (int step = begin; step < begin + Tile::kStepsAtOnce; ++step) {
        constexpr int kBoxSteps = kSteps / kDownBoxes, kStepBytes = kBoxRowBytes / kBoxSteps;
        const int box = step / kBoxSteps * static_cast<int>(Tile::kDownBoxBytes);
        WgmmaAlongRows<T, Tile::kColumns>::a_from_registers(
            products, a[step - begin], down.plus(box + step % kBoxSteps * kStepBytes), step > 0);
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

// Adds the sums of all groups and blocks of the cluster for a part of the rows, and stores 16-bit values.
template <typename T, class Tile>
__device__ __forceinline__ void store_sums(const DownParams& params, const Tile& tile, const DownPart& part) {
  constexpr int kPack = kPackSize<T, Access::kVector>, kPacks = Tile::kColumns / kPack;
  for (int i = part.rank * Tile::kThreads + static_cast<int>(threadIdx.x); i < Tile::kRows * kPacks;
       i += params.splits * Tile::kThreads) {
    const int row = i / kPacks, column = i % kPacks * kPack;
    if (part.row + row >= params.args.rows || part.column + column >= params.args.rank) continue;
    float values[kPack] = {};
#pragma unroll 1
    for (int rank = 0; rank < params.splits; ++rank) {
#pragma unroll
      for (int group = 0; group < Tile::kDepthGroups; ++group) {
        const uint32_t sums = mapa(tile.sums(group, row, column), rank);
#pragma unroll
        for (int j = 0; j < kPack; j += 4) {
          const float4 four = load_cluster_float4(sums + j * sizeof(float));
          values[j] += four.x;
          values[j + 1] += four.y;
          values[j + 2] += four.z;
          values[j + 3] += four.w;
        }
      }
    }
#pragma unroll
    for (float& value : values) value *= params.args.alpha;
    store_floats(static_cast<T*>(params.args.out) + (int64_t{part.row} + row) * params.args.rank +
                     part.column + column,
                 values);
  }
}

template <typename T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerMultiprocessor)
    lora_down_fp8_kernel(const __grid_constant__ DownParams params) {
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
    if (lane == 0) load_stages(params, tile, part);
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
  sync_cluster();
  store_sums<T>(params, tile, part);
  // A block must not end before the others have read its sums.
  sync_cluster();
}

// ---------------------------------------------------------------------------------------------------------
// Launch

constexpr int kMaxSplits = 8;  // the largest cluster that every H100 runs

// Calls body with the splits as a constant. Clusters of 5 and 7 would leave multiprocessors of a GPC unused.
template <typename Body>
void for_each_split(const Body& body) {
  body(Constant<1>{});
  body(Constant<2>{});
  body(Constant<3>{});
  body(Constant<4>{});
  body(Constant<6>{});
  body(Constant<kMaxSplits>{});
}

// Returns the splits with the least time, in stages that the busiest multiprocessor computes. A block's begin
// and end take about as long as three.
int choose_splits(int64_t tiles, int64_t depth_tiles, int multiprocessors, int blocks_per_multiprocessor) {
  constexpr int64_t kEnds = 3;
  int64_t best = 0;
  int best_splits = 0;
  for_each_split([&](auto splits) {
    const int64_t blocks = tiles * splits;
    const int64_t time = ceil_divide(blocks, multiprocessors) * ceil_divide(depth_tiles, splits) +
                         ceil_divide(blocks, multiprocessors * blocks_per_multiprocessor) * kEnds;
    if (best_splits != 0 && (splits > depth_tiles || time >= best)) return;
    best = time;
    best_splits = splits;
  });
  return best_splits;
}

template <typename T, class Tile>
void launch_tiles(const LoraDownFp8Params& args, Stream stream) {
  constexpr CUtensorMapDataType kByte = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  DownParams params{};
  params.args = args;
  params.column_tiles = static_cast<int>(ceil_divide(args.rank, Tile::kColumns));
  params.depth_tiles = static_cast<int>(ceil_divide(args.in_features, kDepth));
  params.scales_per_row = args.x_is_blocked ? params.depth_tiles : 1;
  params.scales_per_block = args.x_is_blocked;
  params.x =
      map_matrix(kOperation, kByte, 1, args.x, args.rows, args.in_features, args.in_features, Tile::kRows);
  params.down = map_matrix(kOperation, kProductMapType<T>, sizeof(T), args.down, args.rank, args.in_features,
                           args.in_features, Tile::kColumns);
  const int64_t tiles = ceil_divide(args.rows, Tile::kRows) * params.column_tiles;
  params.splits = choose_splits(tiles, params.depth_tiles, multiprocessor_count(kOperation, stream.device),
                                Tile::kBlocksPerMultiprocessor);
  constexpr auto kKernel = lora_down_fp8_kernel<T, Tile>;
  allow_dynamic_shared_memory<kKernel>(kOperation, stream.device);
  for_each_split([&](auto splits) {
    if (splits != params.splits) return;
    launch_kernel<splits>(kOperation, kKernel, dim3(static_cast<unsigned>(tiles * splits)), Tile::kThreads,
                          params, stream, Tile::kBytes);
  });
}

// With 64 rows a tile if tiles of 128 would leave multiprocessors without work.
template <typename T, int kColumns>
void launch_columns(const LoraDownFp8Params& args, Stream stream) {
  const int64_t tiles =
      ceil_divide(args.rows, 2 * kWarpGroupRows) * ceil_divide(args.rank, int64_t{kColumns});
  if (tiles * kMaxSplits < multiprocessor_count(kOperation, stream.device))
    return launch_tiles<T, DownTile<1, kColumns == 128 ? 2 : 4, kColumns>>(args, stream);
  launch_tiles<T, DownTile<2, 1, kColumns>>(args, stream);
}

}  // namespace

void lora_down_fp8(const LoraDownFp8Params& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      if (args.rank <= 16) return launch_columns<T, 16>(args, stream);
      if (args.rank <= 32) return launch_columns<T, 32>(args, stream);
      if (args.rank <= 64) return launch_columns<T, 64>(args, stream);
      launch_columns<T, 128>(args, stream);
    }
  });
}

}  // namespace h100_diffusers_kernels
