// Attention to few keys, such as the tokens of a text. All keys and values of a head stay in shared memory
// while its queries stream through in tiles of 64, one for each warp group. Time is spent on reading queries
// and writing the output (notes/attention.md, "Few keys"). A block has consecutive tiles, so that it loads
// few heads.
#pragma once

#include <algorithm>

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_products.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

// Their keys and values take 128 KiB of shared memory: of one head of 128 columns, or of two of 64.
constexpr int kMaxResidentKeyTiles = 2;

// Shared memory of a block, for heads with kKeyTiles key tiles.
template <class Tile, int kKeyTiles>
struct ResidentMemory {
  using HeadRing = Ring<Tile::kHeadDim == 64 ? 2 : 1>;
  static constexpr uint32_t kTileBytes = Tile::bytes(kTileKeys);
  static constexpr uint32_t kHeadBytes = kKeyTiles * kTileBytes;
  static constexpr uint32_t kBiasBytes = kKeyTiles * kTileKeys * 4;
  static constexpr uint32_t kQueryBytes = Tile::bytes(kWarpGroupRows);
  static constexpr uint32_t kOutBytes = Tile::kGroups * kQueryBytes;
  static constexpr uint32_t kHeadsBytes = HeadRing::kStages * (2 * kHeadBytes + kBiasBytes);

  // Each warp group always has the same stages, as many as fit. Otherwise a group could wait for a stage that
  // another group has not read yet, and the parity of its barrier would make it look full.
  static constexpr uint32_t kBarriersBytes = 512;  // upper bound
  static constexpr uint32_t kQueriesRoom =
      kMaxSharedBytes - kTileAlignment - kOutBytes - kHeadsBytes - Tile::kOnesBytes - kBarriersBytes;
  using QueryRing = Ring<std::min(kQueriesRoom / (Tile::kGroups * kQueryBytes), 4u) * Tile::kGroups>;

  uint32_t queries, out, keys, values, ones, bias;
  QueryRing query_ring;
  HeadRing key_ring, value_ring;

  __device__ __forceinline__ explicit ResidentMemory(uint32_t begin)
      : queries(begin),
        out(queries + QueryRing::kStages * kQueryBytes),
        keys(out + kOutBytes),
        values(keys + HeadRing::kStages * kHeadBytes),
        ones(values + HeadRing::kStages * kHeadBytes),
        bias(ones + Tile::kOnesBytes),
        query_ring{bias + HeadRing::kStages * kBiasBytes},
        key_ring{query_ring.address + QueryRing::kBytes},
        value_ring{key_ring.address + HeadRing::kBytes} {}

  static constexpr uint32_t kBytes = kTileAlignment + QueryRing::kStages * kQueryBytes + kOutBytes +
                                     kHeadsBytes + Tile::kOnesBytes + QueryRing::kBytes +
                                     2 * HeadRing::kBytes;
  static_assert(QueryRing::kBytes + 2 * HeadRing::kBytes <= kBarriersBytes);
};

// The tiles of a block: consecutive, head by head; the first blocks have one more. The rows of a head are
// rotated by block, so that all blocks are at about the same token at a time, most of them in different
// heads. The heads of a token are adjacent in memory, so its DRAM pages are read and written while they are
// open (notes/attention.md, "Few keys").
class TileRange {
 public:
  __device__ __forceinline__ explicit TileRange(const AttentionKernelParams& params)
      : query_tiles_(static_cast<int>(params.query_tiles.divisor)),
        block_tiles_(params.tiles / static_cast<int>(gridDim.x)),
        longer_blocks_(params.tiles % static_cast<int>(gridDim.x)) {
    const int block = static_cast<int>(blockIdx.x);
    tile_ = block * block_tiles_ + min(block, longer_blocks_);
    end_ = tile_ + block_tiles_ + (block < longer_blocks_);
  }

  __device__ __forceinline__ bool has_head() const { return tile_ < end_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int end_of_head() const { return min(end_, head_begin() + query_tiles_); }
  __device__ __forceinline__ void next_head() { tile_ = end_of_head(); }

  // Returns the first row of a tile of this head, in tiles. The first block that begins in the head starts at
  // row 0.
  __device__ __forceinline__ int row_tile(int tile) const {
    const int end_of_longer = longer_blocks_ * (block_tiles_ + 1);
    const bool is_longer = head_begin() <= end_of_longer;
    const int origin = is_longer ? 0 : end_of_longer, step = block_tiles_ + is_longer;
    const int block_begin = origin + (head_begin() - origin + step - 1) / step * step;
    const int row_tile = (tile - block_begin) % query_tiles_;
    return row_tile < 0 ? row_tile + query_tiles_ : row_tile;
  }
  // Advances by `tiles` in the same head.
  __device__ __forceinline__ int row_tile_after(int row_tile, int tiles) const {
    row_tile += tiles;
    return row_tile >= query_tiles_ ? row_tile - query_tiles_ : row_tile;
  }

 private:
  __device__ __forceinline__ int head_begin() const { return tile_ / query_tiles_ * query_tiles_; }

  int query_tiles_, block_tiles_, longer_blocks_, tile_, end_;
};

template <class Tile, int kKeyTiles, class Loader>
__device__ __forceinline__ void load_resident(const AttentionKernelParams& params,
                                              const ResidentMemory<Tile, kKeyTiles>& memory,
                                              const WarpRole& role, TileRange range) {
  using Memory = ResidentMemory<Tile, kKeyTiles>;
  const Loader loader(params, role);
  RingState<typename Memory::HeadRing> head;
  RingState<typename Memory::QueryRing> query;
#pragma unroll 1
  for (; range.has_head(); range.next_head()) {
    QueryTile position = params.tile_position(range.tile(), kWarpGroupRows);
    head.wait_empty(memory.key_ring);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
      const int key = tile * kTileKeys;
      loader.load_keys(memory.keys + head.stage * Memory::kHeadBytes + tile * Memory::kTileBytes,
                       memory.bias + head.stage * Memory::kBiasBytes + key * 4,
                       memory.key_ring.full(head.stage), position, key);
    }
    head.wait_empty(memory.value_ring);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
      loader.load_values(memory.values + head.stage * Memory::kHeadBytes + tile * Memory::kTileBytes,
                         memory.value_ring.full(head.stage), position, tile * kTileKeys);
    head.advance();
    if constexpr (Loader::kArrivals > 0) {
      int row_tile = range.row_tile(range.tile());
#pragma unroll 1
      for (int tile = range.tile(); tile < range.end_of_head(); ++tile) {
        position.row = row_tile * kWarpGroupRows;
        query.wait_empty(memory.query_ring);
        loader.load_query(memory.queries + query.stage * Memory::kQueryBytes, kWarpGroupRows,
                          memory.query_ring.full(query.stage), position);
        query.advance();
        row_tile = range.row_tile_after(row_tile, 1);
      }
    }
  }
}

// A warp group computes every kGroups-th tile of the block. The scores of its next tile are computed during
// the end of a tile.
template <class Tile, int kKeyTiles, KeyBias kBias>
class ResidentCompute {
 public:
  using Memory = ResidentMemory<Tile, kKeyTiles>;

  __device__ __forceinline__ ResidentCompute(const AttentionKernelParams& params, const Memory& memory,
                                             const WarpRole& role)
      : params_(params), memory_(memory), role_(role), query_(MatrixDescriptor::along_rows(memory.queries)) {
    advance_query(role.group);
  }

  __device__ __forceinline__ void run(TileRange range) {
    tile_ = range.tile() + role_.group;
    for (; range.has_head(); range.next_head()) {
      end_ = range.end_of_head();
      QueryTile position = params_.tile_position(range.tile(), kWarpGroupRows);
      const int key_count = params_.key_count(position.batch);
      int row_tile = range.row_tile(tile_);
      head_.wait_full(memory_.key_ring);
      issue_first_scores();
      head_.wait_full(memory_.value_ring);
      if (key_count < params_.args.key_length) clear_padding(key_count);
#pragma unroll 1
      while (tile_ < end_) {
        position.row = row_tile * kWarpGroupRows;
        row_tile = range.row_tile_after(row_tile, Tile::kGroups);
        Outputs<Tile> outputs;
        compute_tile(key_count, outputs);
        store_rows<Tile>(role_, params_.out, memory_.out + role_.group * Memory::kQueryBytes, kBoxBytes,
                         position, outputs);
      }
      if (kBias == KeyBias::kAdded || role_.is_elected()) memory_.key_ring.empty(head_.stage).arrive();
      if (role_.is_elected()) memory_.value_ring.empty(head_.stage).arrive();
      head_.advance();
    }
    if (role_.is_elected()) tma_wait_group();
  }

 private:
  static constexpr int kBoxBytes = Tile::box_bytes(kWarpGroupRows);

  // Issues the first scores of the next tile. Returns false if there is none.
  __device__ __forceinline__ bool issue_first_scores() {
    if (tile_ >= end_) return false;
    query_state_.wait_full(memory_.query_ring);
    issue_scores_for(0);
    return true;
  }
  __device__ __forceinline__ void issue_scores_for(int key) {
    const MatrixDescriptor keys =
        MatrixDescriptor::along_rows(memory_.keys + head_.stage * Memory::kHeadBytes);
    issue_scores<Tile>(query_, kBoxBytes, keys.plus(bytes_before(key)), scores_);
  }
  __device__ __forceinline__ static int bytes_before(int key) {
    return key / kTileKeys * static_cast<int>(Memory::kTileBytes);
  }

  // Clears the values of the head from key_count on, in the last key tile that is used.
  __device__ __forceinline__ void clear_padding(int key_count) const {
    const int count = key_count % kTileKeys;
    if (count == 0 && key_count > 0) return;
    const uint32_t values = memory_.values + head_.stage * Memory::kHeadBytes;
    clear_rows<Tile>(values + bytes_before(key_count), count);
  }

  // Computes a tile whose first scores have been issued, and issues the first scores of the next tile.
  __device__ __forceinline__ void compute_tile(int key_count, Outputs<Tile>& outputs) {
    using Softmax = OnlineSoftmax<Tile, kBias>;
    const uint32_t head_values = memory_.values + head_.stage * Memory::kHeadBytes;
    const uint32_t head_bias = memory_.bias + head_.stage * Memory::kBiasBytes;
    // The compile-time end saves 3% with two key tiles. With 128 columns the compiler would run out of
    // registers.
    constexpr bool kKnowsEnd = Tile::kHeadDim == 64;
    Softmax softmax(params_);
    Probabilities probabilities;
    Accumulators<Tile> accumulators;
    int key = 0;
#pragma unroll 1
    for (;;) {
      const int count = key_count - key;
      wgmma_wait_group();
      if constexpr (kBias == KeyBias::kAdded)
        add_bias(scores_, params_.score_scale, head_bias + key * 4, role_.lane);
      if (count <= kTileKeys && role_.is_elected()) memory_.query_ring.empty(query_state_.stage).arrive();
      if (count < kTileKeys) mask_scores(scores_, count, role_.lane);
      softmax.process_tile(scores_, key == 0, accumulators, probabilities);
      const MatrixDescriptor values = values_at<Tile>(head_values, memory_.ones);
      issue_outputs<Tile, Softmax>(probabilities, values_plus<Tile>(values, bytes_before(key)), key > 0,
                                   accumulators);
      key += kTileKeys;
      if ((kKnowsEnd && key == kKeyTiles * kTileKeys) || key >= key_count) break;
      issue_scores_for(key);
    }
    tile_ += Tile::kGroups;
    advance_query(Tile::kGroups);
    if (issue_first_scores())
      wgmma_wait_group<1>();
    else
      wgmma_wait_group();
    softmax.normalize(accumulators, Softmax::kValueScale, outputs);
  }

  __device__ __forceinline__ void advance_query(int stages) {
    query_ = query_.plus(query_state_.advance(stages) * static_cast<int>(Memory::kQueryBytes));
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  const WarpRole& role_;
  int tile_, end_;  // next tile, end of the tiles of this head
  RingState<typename Memory::HeadRing> head_;
  RingState<typename Memory::QueryRing> query_state_;
  MatrixDescriptor query_;  // the stage of query_state_
  Scores<Tile> scores_;
};

template <class Tile, int kKeyTiles, KeyBias kBias>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    resident_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = ResidentMemory<Tile, kKeyTiles>;
  constexpr bool kHasBias = kBias == KeyBias::kAdded;
  const Memory memory(shared_tiles());
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.query_ring.init(1, kWarpGroupWarps);
    memory.key_ring.init(
        (TensorLoader<Tile>::kKeyArrivals + (kHasBias ? BiasLoader<Tile>::kKeyArrivals : 0)) * kKeyTiles,
        Tile::template kKeyReaders<kBias>);
    memory.value_ring.init(kKeyTiles, Tile::kComputeWarps);
  }
  fill_ones<Tile>(memory.ones);
  fence_mbarrier_init();
  __syncthreads();
  griddepcontrol_wait();
  TileRange range(params);

  if (role.is_loader()) {
    setmaxnreg_dec<Tile::kLoadRegisters>();
    if (TensorLoader<Tile>::is_loader_thread(role))
      load_resident<Tile, kKeyTiles, TensorLoader<Tile>>(params, memory, role, range);
    if (kHasBias && BiasLoader<Tile>::is_loader_thread(role))
      load_resident<Tile, kKeyTiles, BiasLoader<Tile>>(params, memory, role, range);
  } else {
    setmaxnreg_inc<Tile::kComputeRegisters>();
    ResidentCompute<Tile, kKeyTiles, kBias>(params, memory, role).run(range);
  }
}

template <class Tile, int kKeyTiles, KeyBias kBias>
void launch_resident_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                               Stream stream) {
  TensorLoader<Tile>::map(operation, params, kWarpGroupRows, kTileKeys);
  params.set_tiles(kWarpGroupRows);
  launch_kernel_with_shared_memory<resident_attention_kernel<Tile, kKeyTiles, kBias>>(
      operation, dim3(std::min(multiprocessors, params.tiles)), Tile::kThreads, params, stream,
      ResidentMemory<Tile, kKeyTiles>::kBytes);
}

}  // namespace h100_diffusers_kernels
