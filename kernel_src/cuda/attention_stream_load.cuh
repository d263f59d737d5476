// Shared memory of attention to many keys (attention_stream.cuh), and the threads that fill it.
#pragma once

#include "attention_loader.cuh"
#include "attention_tiles.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

// The schedule: which query tiles a block computes, and in which order.

// kOnline: OnlineSoftmax for all tiles. kLazy: LazySoftmax, then OnlineSoftmax for the tiles where it was
// inaccurate.
enum class Rescaling { kOnline, kLazy };

// Tiles of a pass: a static share; or the tiles that the block claims, followed by those that it has marked
// inaccurate.
enum class Pass { kShare, kClaimed, kInaccurate };

// Calls body(tile) for the tiles that the block claims, until it returns false. Multiprocessors differ in
// speed by several percent, so the loading thread claims each tile when it is about to load it
// (notes/attention.md, "Claimed tiles"). The first tile of a block needs no claim.
template <class Body>
__device__ __forceinline__ void claim_each_tile(const AttentionKernelParams& params, const Body& body) {
  int tile = static_cast<int>(blockIdx.x);
#pragma unroll 1
  while (tile < params.tiles) {
    if (!body(tile)) break;
    // The reduction over one thread makes the value uniform for the compiler: coordinates of TMA copies must
    // be in uniform registers.
    tile = static_cast<int>(gridDim.x) + __reduce_max_sync(1u, atomicAdd(params.claimed_tiles, 1));
  }
}

// The tiles that a block has claimed, in order, in shared memory.
struct TileList {
  static constexpr int kCapacity = 2048;
  static constexpr uint32_t kBytes = (kCapacity + 1) * 4;
  uint32_t address;

  // Calls body(tile) for each claimed tile. A block whose list is full stops claiming; the lists of all
  // blocks together must hold all tiles.
  template <class Body>
  __device__ __forceinline__ void claim_each(const AttentionKernelParams& params, const Body& body) const {
    if (params.tiles > int64_t{gridDim.x} * kCapacity) __trap();
    int index = 0;
    claim_each_tile(params, [&](int tile) {
      store_shared(entry(index), static_cast<uint32_t>(tile));
      body(tile);
      return ++index < kCapacity;
    });
    store_shared(entry(index), kEnd);
  }

  __device__ __forceinline__ void mark_inaccurate(int index) const {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(entry(index)), "r"(kInaccurate) : "memory");
  }

  // Calls body(tile) for each marked tile.
  template <class Body>
  __device__ __forceinline__ void for_each_inaccurate(const Body& body) const {
#pragma unroll 1
    for (int index = 0;; ++index) {
      const uint32_t tile = load_shared(entry(index));
      if (tile == kEnd) return;
      if (tile & kInaccurate) body(static_cast<int>(tile & ~kInaccurate));
    }
  }

 private:
  static constexpr uint32_t kInaccurate = 1u << 31;  // flag of an entry
  static constexpr uint32_t kEnd = kInaccurate - 1;

  __device__ __forceinline__ uint32_t entry(int index) const {
    return address + static_cast<uint32_t>(index * 4);
  }
};

// Calls body(tile) for every gridDim.x-th tile.
template <class Body>
__device__ __forceinline__ void for_each_static_tile(const AttentionKernelParams& params, const Body& body) {
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles; tile += static_cast<int>(gridDim.x))
    body(tile);
}

// Addresses in a block's shared memory.
template <class Tile, KeyBias kBias, KeyOrder kOrder>
struct StreamMemory {
  using KeyRing = Ring<Tile::kBoxes == 1 ? 4 : 2>;
  // With two stages the next tile's queries arrive before a warp group needs them.
  using QueryRing = Ring<Tile::kBoxes == 1 ? 2 : 1>;
  static constexpr uint32_t kKeyBytes = Tile::bytes(kTileKeys), kQueryBytes = Tile::bytes(Tile::kRows);
  static constexpr uint32_t kBiasBytes = kBias == KeyBias::kAdded ? kTileKeys * 4 : 0;
  static constexpr uint32_t kTilesBytes = 8;
  static_assert(QueryRing::kStages * 4 <= kTilesBytes);
  static constexpr int kNoTile = -1;
  static constexpr uint32_t kPairBytes = 8;
  static constexpr uint32_t kListBytes =
      kOrder == KeyOrder::kListed ? (QueryRing::kStages + KeyRing::kStages) * kPairBytes : 0;

  uint32_t query, out, keys, values, bias;
  uint32_t tiles;  // tile number of the queries of each stage, kNoTile after the last tile of a pass
  QueryRing query_ring;
  KeyRing key_ring, value_ring;
  Barrier end_of_pass;
  TileList tile_list;
  uint32_t lists;  // with lists: the header of the queries of each stage, and the tile of the keys of each

  __device__ __forceinline__ explicit StreamMemory(uint32_t begin)
      : query(begin),
        out(query + QueryRing::kStages * kQueryBytes),
        keys(out + kQueryBytes),
        values(keys + KeyRing::kStages * kKeyBytes),
        bias(values + KeyRing::kStages * kKeyBytes),
        tiles(bias + KeyRing::kStages * kBiasBytes),
        query_ring{tiles + kTilesBytes},
        key_ring{query_ring.address + QueryRing::kBytes},
        value_ring{key_ring.address + KeyRing::kBytes},
        end_of_pass{value_ring.address + KeyRing::kBytes},
        tile_list{end_of_pass.address + Barrier::kBytes},
        lists(tile_list.address + kTileListBytes) {}

  __device__ __forceinline__ uint32_t tile_of(int stage) const {
    return tiles + static_cast<uint32_t>(stage * 4);
  }
  __device__ __forceinline__ uint32_t header_of(int query_stage) const {
    return lists + static_cast<uint32_t>(query_stage) * kPairBytes;
  }
  __device__ __forceinline__ uint32_t listed_tile_of(int key_stage) const {
    return header_of(QueryRing::kStages + key_stage);
  }

  static constexpr uint32_t kTileListBytes = (TileList::kBytes + kPairBytes - 1) / kPairBytes * kPairBytes;
  static constexpr uint32_t kBytes = kTileAlignment + (QueryRing::kStages + 1) * kQueryBytes +
                                     KeyRing::kStages * (2 * kKeyBytes + kBiasBytes) + kTilesBytes +
                                     QueryRing::kBytes + 2 * KeyRing::kBytes + Barrier::kBytes +
                                     kTileListBytes + kListBytes;
};

// The loading side of the rings.
template <class Tile, KeyBias kBias, KeyOrder kOrder, class Loader>
class StreamLoad {
 public:
  using Memory = StreamMemory<Tile, kBias, kOrder>;

  __device__ __forceinline__ StreamLoad(const AttentionKernelParams& params, const Memory& memory,
                                        const WarpRole& role)
      : params_(params), memory_(memory), loader_(params, role) {}

  template <Pass kPass>
  __device__ __forceinline__ void run() {
    const auto load = [&](int tile) { load_tile<kPass>(tile); };
    if constexpr (kPass == Pass::kShare) {
      for_each_static_tile(params_, load);
    } else if constexpr (kPass == Pass::kClaimed) {
      loader_.use_half_values(true);
      memory_.tile_list.claim_each(params_, load);
    } else {
      loader_.use_half_values(false);
      memory_.tile_list.for_each_inaccurate(load);
    }
    if constexpr (Loader::kArrivals > 0) {
      begin_query(Memory::kNoTile);
      memory_.query_ring.full(query_state_.stage).arrive();
      query_state_.advance();
    }
  }

 private:
  template <Pass kPass>
  __device__ __forceinline__ void load_tile(int tile) {
    const QueryTile position = params_.tile_position(tile, Tile::kRows);
    if constexpr (kOrder == KeyOrder::kListed) {
      load_listed<kPass>(tile, position);
    } else {
      const int key_count = params_.key_count(position.batch);
      if constexpr (Loader::kArrivals > 0) {
        begin_query(tile);
        load_query(position);
      }
      int key = 0;
#pragma unroll 1
      do {
        load_keys<kPass>(position, key);
        key += kTileKeys;
      } while (key < key_count);
    }
  }

  template <Pass kPass>
  __device__ __forceinline__ void load_listed(int tile, const QueryTile& position) {
    const uint2* const list = params_.lists.of(position);
    const int tiles = list_header(list).tiles;
    if constexpr (Loader::kArrivals > 0) {
      begin_query(tile);
      if (loader_.is_first()) store_pair(memory_.header_of(query_state_.stage), *list);
      load_query(position);
    }
    uint2 next = list[1];
#pragma unroll 1
    for (int index = 0; index < tiles; ++index) {
      const uint2 pair = next;
      next = list[1 + min(index + 1, tiles - 1)];  // ahead of the wait
      key_state_.wait_empty(memory_.key_ring);
      if (loader_.is_first()) store_pair(memory_.listed_tile_of(key_state_.stage), pair);
      load_keys<kPass>(position, ListedTile{{{pair.x}, {pair.y}}});
    }
  }

  __device__ __forceinline__ static void store_pair(uint32_t address, uint2 pair) {
    store_shared(address, pair.x);
    store_shared(address + 4, pair.y);
  }

  __device__ __forceinline__ void load_query(const QueryTile& position) {
    loader_.load_query(memory_.query + query_state_.stage * Memory::kQueryBytes, Tile::kRows,
                       memory_.query_ring.full(query_state_.stage), position);
    query_state_.advance();
  }

  // keys: the first key of a tile, or a listed tile
  template <Pass kPass, class Keys>
  __device__ __forceinline__ void load_keys(const QueryTile& position, const Keys& keys) {
    const int stage = key_state_.stage;
    key_state_.wait_empty(memory_.key_ring);
    loader_.load_keys(memory_.keys + stage * Memory::kKeyBytes, memory_.bias + stage * Memory::kBiasBytes,
                      memory_.key_ring.full(stage), position, keys);
    key_state_.wait_empty(memory_.value_ring);
    if constexpr (kPass == Pass::kClaimed) wait_for_half_values();
    loader_.load_values(memory_.values + stage * Memory::kKeyBytes, memory_.value_ring.full(stage), position,
                        keys);
    key_state_.advance();
  }

  __device__ __forceinline__ void wait_for_half_values() {
    if (!has_half_values_) griddepcontrol_wait();
    has_half_values_ = true;
  }

  __device__ __forceinline__ void begin_query(int tile) const {
    query_state_.wait_empty(memory_.query_ring);
    if (loader_.is_first()) store_shared(memory_.tile_of(query_state_.stage), static_cast<uint32_t>(tile));
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  Loader loader_;
  RingState<typename Memory::QueryRing> query_state_;
  RingState<typename Memory::KeyRing> key_state_;
  bool has_half_values_ = false;
};

}  // namespace h100_diffusers_kernels
