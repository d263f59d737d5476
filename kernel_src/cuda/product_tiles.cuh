// Tiles of products (product.cuh): their memory, their order, and the warp that loads them.
#pragma once

#include "barrier.cuh"
#include "fast_divisor.cuh"
#include "launch.cuh"
#include "params.h"
#include "tensor_copy.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

constexpr int kProductClusterBlocks = 2;
constexpr int kProductGroups = 2;  // multiplying warp groups of a block
constexpr int kProductTileRows = kProductGroups * kWarpGroupRows;
constexpr int kProductThreads = (1 + kProductGroups) * kWarpGroupThreads;

// E4M3 with a scale for each row of x, or for each block of its rows; or 16-bit values of the result's dtype.
enum class Operands { kFp8Rows, kFp8Blocks, k16Bit };

// A stage has one box of each matrix, with the same depth.
template <Operands kOperands>
constexpr int kProductDepth = kOperands == Operands::k16Bit ? kBoxColumns : kBoxRowBytes;
static_assert(kProductDepth<Operands::kFp8Blocks> == kFp8BlockSize);

// Bytes of a row of an output box: 64 if 128 do not divide a tile's row, as with 160 columns of 16 bits.
template <int kColumns, int kElementBytes>
constexpr int kOutRowBytes = kColumns * kElementBytes % kBoxRowBytes == 0 ? kBoxRowBytes : kBoxRowBytes / 2;

// Shared memory. kElementBytes: of the result
template <int kColumns_, int kElementBytes>
struct ProductMemory {
  static constexpr int kColumns = kColumns_;
  static constexpr uint32_t kXBytes = kProductTileRows * kBoxRowBytes;
  static constexpr uint32_t kWeightBytes = kColumns * kBoxRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kOutBoxRowBytes = kOutRowBytes<kColumns, kElementBytes>;
  static constexpr uint32_t kOutBoxBytes = kWarpGroupRows * kOutBoxRowBytes;
  static constexpr int kOutBoxColumns = kOutBoxRowBytes / kElementBytes;
  static constexpr int kOutBoxes = kColumns / kOutBoxColumns;
  static_assert(kOutBoxes * kOutBoxColumns == kColumns);
  static constexpr uint32_t kOutBytes = kProductGroups * kOutBoxes * kOutBoxBytes;
  static constexpr uint32_t kFactorBytes = kColumns * sizeof(float2);  // of each warp group
  static constexpr uint32_t kBarrierBytes = 256;
  static constexpr uint32_t kOtherBytes = kOutBytes + kProductGroups * kFactorBytes + kBarrierBytes;
  static constexpr int kStages =
      static_cast<int>((kMaxSharedBytes - kSwizzleBytes - kOtherBytes) / kStageBytes);
  static constexpr int64_t kBytes = kSwizzleBytes + kStages * kStageBytes + kOtherBytes;
  using StageRing = Ring<kStages>;
  static_assert(StageRing::kBytes + kProductGroups * Barrier::kBytes <= kBarrierBytes);

  uint32_t base = shared_tiles();

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const { return x(stage) + kXBytes; }
  __device__ __forceinline__ uint32_t out(int group) const {
    return base + kStages * kStageBytes + group * kOutBoxes * kOutBoxBytes;
  }
  // The scale and the bias of each column.
  __device__ __forceinline__ uint32_t factors(int group) const {
    return out(kProductGroups) + group * kFactorBytes;
  }
  __device__ __forceinline__ StageRing ring() const { return {factors(kProductGroups)}; }
  __device__ __forceinline__ Barrier residual(int group) const {
    return {ring().address + StageRing::kBytes + group * Barrier::kBytes};
  }
};

// Pairs of row tiles that clusters compute before those further down. An H100 runs 66 clusters, which then
// share about as many column tiles.
constexpr int kProductGroupPairs = 8;

struct ProductParams {
  CUtensorMap x, weights[kMaxLinearLayers], lows[kMaxLinearLayers], ups[kMaxLinearLayers][kMaxLowRankUps],
      outs[kMaxLinearLayers], residual;
  LinearParams args;
  int row_pairs, column_tiles, depth_tiles;
  int low_stages[kMaxLinearLayers];  // of each layer's low-rank term
  // Each up's first stage; low_stages if it is absent.
  int first_low_stages[kMaxLinearLayers][kMaxLowRankUps];
  int first_tiles[kMaxLinearLayers];     // each layer's first tile of columns; column_tiles if it is absent
  FastDivisor group_tiles;               // of kProductGroupPairs pairs of row tiles
  bool is_out_mapped[kMaxLinearLayers];  // and the residual, if there is one

  __device__ __forceinline__ int tiles() const { return row_pairs * column_tiles; }
};

// The layer, first row and first column of a block's tile. A cluster has a pair of row tiles. Clusters that
// run at the same time share a few rows and columns of tiles, which they read from L2.
struct ProductTile {
  int layer, row, column;

  __device__ __forceinline__ ProductTile(const ProductParams& params, int index, int rank, int columns) {
    const int group = static_cast<int>(params.group_tiles.divide(index)), first = group * kProductGroupPairs;
    const int place = index - group * static_cast<int>(params.group_tiles.divisor);
    const int pairs = min(kProductGroupPairs, params.row_pairs - first);
    // Only the last group has fewer pairs.
    const int column_tile = pairs == kProductGroupPairs ? place / kProductGroupPairs : place / pairs;
    layer = 0;
#pragma unroll
    for (int i = 1; i < kMaxLinearLayers; ++i) layer += column_tile >= params.first_tiles[i];
    column = (column_tile - params.first_tiles[layer]) * columns;
    row = (kProductClusterBlocks * (first + place - column_tile * pairs) + rank) * kProductTileRows;
  }
};

// A stage of a layer's low-rank term: up to 64 columns of an up, and those of low. Beyond the up's last
// column its zeros are multiplied by what low has there.
struct LowStage {
  int up, column, low_column, columns;

  __device__ __forceinline__ LowStage(const ProductParams& params, int layer, int stage) {
    const auto& first_stages = params.first_low_stages[layer];
    up = 0;
#pragma unroll
    for (int i = 1; i < kMaxLowRankUps; ++i) up += stage >= first_stages[i];
    column = (stage - first_stages[up]) * kBoxColumns;
    const LowRankUp& operand = params.args.layers[layer].ups[up];
    low_column = operand.low_column + column;
    columns = operand.rank - column;
  }
};

// Loads the stages of each tile: those of x and the weight, then those of its low-rank term, which have the
// same size.
template <Operands kOperands, class M>
__device__ __forceinline__ void load_product_tiles(const ProductParams& params, const M& memory, int rank) {
  constexpr int kHalf = M::kColumns / kProductClusterBlocks;
  constexpr uint16_t kAllBlocks = (1 << kProductClusterBlocks) - 1;
  const auto ring = memory.ring();
  RingState<typename M::StageRing> state;
  for (int index = blockIdx.x / kProductClusterBlocks; index < params.tiles();
       index += gridDim.x / kProductClusterBlocks) {
    const ProductTile tile(params, index, rank, M::kColumns);
    const auto load = [&](const CUtensorMap& x, int x_column, const CUtensorMap& weight, int column) {
      state.wait_empty(ring);
      const Barrier full = ring.full(state.stage);
      full.arrive_expect_tx(M::kStageBytes);
      tma_load(memory.x(state.stage), x, full, MatrixBox{x_column, tile.row});
      tma_load_multicast(memory.weight(state.stage) + rank * kHalf * kBoxRowBytes, weight, full,
                         MatrixBox{column, tile.column + rank * kHalf}, kAllBlocks);
      state.advance();
    };
    for (int k = 0; k < params.depth_tiles; ++k) {
      const int feature = k * kProductDepth<kOperands>;
      load(params.x, feature, params.weights[tile.layer], feature);
    }
    for (int k = 0; k < params.low_stages[tile.layer]; ++k) {
      const LowStage stage(params, tile.layer, k);
      load(params.lows[tile.layer], stage.low_column, params.ups[tile.layer][stage.up], stage.column);
    }
  }
}

}  // namespace h100_diffusers_kernels
