// Attention to few keys, as to the tokens of a text: all keys and values of a head stay in shared memory
// while the queries of that head stream by, 64 at a time, each tile treated by one warp group. What takes
// time is reading queries and writing the output. A block has consecutive tiles, so that it meets few heads.
#pragma once

#include <algorithm>

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_mainloop.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

constexpr int kMaxResidentKeys = 2 * kTileKeys;

template <class Tile>
struct ResidentMemory {
  using QueryRing = Ring<Tile::kHeadDim == 64 ? 8 : 3>;
  using HeadRing = Ring<Tile::kHeadDim == 64 ? 2 : 1>;
  static constexpr uint32_t kTileBytes = Tile::bytes(kTileKeys);
  static constexpr uint32_t kHeadBytes = kMaxResidentKeys / kTileKeys * kTileBytes;
  static constexpr uint32_t kBiasBytes = kMaxResidentKeys * 4;
  static constexpr uint32_t kQueryBytes = Tile::bytes(kWarpGroupRows);

  uint32_t queries, out, keys, values, ones, bias;
  QueryRing query_ring;
  HeadRing key_ring, value_ring;

  __device__ __forceinline__ explicit ResidentMemory(uint32_t begin)
      : queries(begin),
        out(queries + QueryRing::kStages * kQueryBytes),
        keys(out + Tile::kGroups * kQueryBytes),
        values(keys + HeadRing::kStages * kHeadBytes),
        ones(values + HeadRing::kStages * kHeadBytes),
        bias(ones + kOnesBytes),
        query_ring{bias + HeadRing::kStages * kBiasBytes},
        key_ring{query_ring.address + QueryRing::kBytes},
        value_ring{key_ring.address + HeadRing::kBytes} {}

  static constexpr uint32_t kBytes = kTileAlignment + (QueryRing::kStages + Tile::kGroups) * kQueryBytes +
                                     HeadRing::kStages * (2 * kHeadBytes + kBiasBytes) + kOnesBytes +
                                     QueryRing::kBytes + 2 * HeadRing::kBytes;
};

// The tiles of a head, of which nothing is waited for or released one by one.
template <class Tile>
class ResidentKeys {
 public:
  using Memory = ResidentMemory<Tile>;

  __device__ __forceinline__ ResidentKeys(const Memory& memory, int stage)
      : next_bias_(memory.bias + stage * Memory::kBiasBytes),
        next_keys_(Operand::along_rows(memory.keys + stage * Memory::kHeadBytes)),
        next_values_(values_at<Tile>(memory.values + stage * Memory::kHeadBytes, memory.ones)) {}

  __device__ __forceinline__ void wait_keys() const {}
  __device__ __forceinline__ Operand next_keys() const { return next_keys_; }
  __device__ __forceinline__ void advance() {
    bias_ = next_bias_;
    values_ = next_values_;
    next_bias_ += kTileKeys * 4;
    next_keys_ = next_keys_.plus(Memory::kTileBytes);
    next_values_ = values_plus<Tile>(next_values_, Memory::kTileBytes);
  }
  __device__ __forceinline__ uint32_t bias() const { return bias_; }
  __device__ __forceinline__ void release(bool) const {}
  __device__ __forceinline__ void wait_values() const {}
  __device__ __forceinline__ Operand values() const { return values_; }
  __device__ __forceinline__ void release_values() const {}

 private:
  uint32_t next_bias_, bias_ = 0;
  Operand next_keys_, next_values_, values_{};
};

// The consecutive tiles of a block, head by head.
class TileRange {
 public:
  __device__ __forceinline__ explicit TileRange(const AttentionKernelParams& params)
      : query_tiles_(params.query_tiles),
        tile_(begin_of(params.tiles, blockIdx.x)),
        end_(begin_of(params.tiles, blockIdx.x + 1)) {}

  __device__ __forceinline__ bool has_head() const { return tile_ < end_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ int end_of_head() const {
    return min(end_, (tile_ / query_tiles_ + 1) * query_tiles_);
  }
  __device__ __forceinline__ void next_head() { tile_ = end_of_head(); }

 private:
  __device__ __forceinline__ static int begin_of(int tiles, unsigned block) {
    return static_cast<int>(int64_t{tiles} * block / gridDim.x);
  }

  int query_tiles_, tile_, end_;
};

template <class Tile, class Loader>
__device__ __forceinline__ void load_resident(const AttentionKernelParams& params,
                                              const ResidentMemory<Tile>& memory, const WarpRole& role,
                                              TileRange range, int key_tiles) {
  using Memory = ResidentMemory<Tile>;
  const Loader loader(params, role);
  RingPlace<typename Memory::HeadRing> head;
  RingPlace<typename Memory::QueryRing> query;
#pragma unroll 1
  for (; range.has_head(); range.next_head()) {
    const QueryTile place = params.place_of(range.tile(), kWarpGroupRows);
    head.wait_empty(memory.key_ring);
#pragma unroll 1
    for (int tile = 0; tile < key_tiles; ++tile) {
      const int key = tile * kTileKeys;
      loader.load_keys(memory.keys + head.stage * Memory::kHeadBytes + tile * Memory::kTileBytes,
                       memory.bias + head.stage * Memory::kBiasBytes + key * 4,
                       memory.key_ring.full(head.stage), place, key);
    }
    head.wait_empty(memory.value_ring);
#pragma unroll 1
    for (int tile = 0; tile < key_tiles; ++tile)
      loader.load_values(memory.values + head.stage * Memory::kHeadBytes + tile * Memory::kTileBytes,
                         memory.value_ring.full(head.stage), place, tile * kTileKeys);
    head.advance();
    if constexpr (Loader::kArrivals > 0) {
#pragma unroll 1
      for (int tile = range.tile(); tile < range.end_of_head(); ++tile) {
        query.wait_empty(memory.query_ring);
        loader.load_query(memory.queries + query.stage * Memory::kQueryBytes, kWarpGroupRows,
                          memory.query_ring.full(query.stage), params.place_of(tile, kWarpGroupRows));
        query.advance();
      }
    }
  }
}

template <class Tile, bool kHasBias>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    resident_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = ResidentMemory<Tile>;
  using QueryRing = typename Memory::QueryRing;
  const Memory memory(shared_tiles());
  const WarpRole role;
  const int key_tiles = static_cast<int>((params.args.key_length + kTileKeys - 1) / kTileKeys);
  if (threadIdx.x == 0) {
    memory.query_ring.init(1, kWarpGroupWarps);
    memory.key_ring.init((kHasBias ? 2 : 1) * key_tiles, Tile::kComputeWarps);
    memory.value_ring.init(key_tiles, Tile::kComputeWarps);
  }
  fill_ones<typename Tile::T>(memory.ones);
  fence_barrier_init();
  __syncthreads();
  wait_for_earlier_kernels();
  TileRange range(params);

  if (role.loads()) {
    release_registers<Tile::kLoadRegisters>();
    if (TensorLoader<Tile>::is_mine(role))
      load_resident<Tile, TensorLoader<Tile>>(params, memory, role, range, key_tiles);
    if (kHasBias && BiasLoader<Tile>::is_mine(role))
      load_resident<Tile, BiasLoader<Tile>>(params, memory, role, range, key_tiles);
  } else {
    take_registers<Tile::kComputeRegisters>();
    constexpr int kQueryBytes = Memory::kQueryBytes;
    const bool is_elected = role.lane == 0;
    int tile = range.tile() + role.group;  // this group's next: every kGroups-th
    RingPlace<typename Memory::HeadRing> head;
    RingPlace<QueryRing> query;
    query.advance(role.group);
    Operand query_tile = Operand::along_rows(memory.queries).plus(query.stage * kQueryBytes);
    for (; range.has_head(); range.next_head()) {
      const int key_count = params.key_count_of(range.tile(), kWarpGroupRows);
      head.wait_full(memory.key_ring);
      head.wait_full(memory.value_ring);
      const ResidentKeys<Tile> head_keys(memory, head.stage);
#pragma unroll 1
      for (; tile < range.end_of_head(); tile += Tile::kGroups) {
        query.wait_full(memory.query_ring);
        const auto release_query = [&] {
          if (is_elected) memory.query_ring.empty(query.stage).arrive();
        };
        using Loop = Mainloop<Tile, kHasBias, false>;
        const Loop mainloop{role, params.score_scale, key_count < params.args.key_length};
        typename Loop::Softmax softmax(params.score_scale);
        typename Loop::Sums sums;
        ResidentKeys<Tile> keys = head_keys;
        mainloop.run(query_tile, Tile::box_bytes(kWarpGroupRows), keys, key_count, release_query, softmax,
                     sums);
        query_tile = query_tile.plus(query.advance(Tile::kGroups) * kQueryBytes);
        softmax.normalize(sums, 1);
        store_rows<Tile>(role, params.out, memory.out + role.group * Memory::kQueryBytes,
                         Tile::box_bytes(kWarpGroupRows), params.place_of(tile, kWarpGroupRows), sums);
      }
      if constexpr (kHasBias) __syncwarp();  // all lanes have read biases
      if (is_elected) {
        memory.key_ring.empty(head.stage).arrive();
        memory.value_ring.empty(head.stage).arrive();
      }
      head.advance();
    }
    if (role.lane == 0) wait_for_stores();
  }
}

template <class Tile, bool kHasBias>
void launch_resident_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                               Stream stream) {
  TensorLoader<Tile>::map(operation, params, kWarpGroupRows);
  params.set_tiles(kWarpGroupRows);
  launch_kernel(operation, resident_attention_kernel<Tile, kHasBias>,
                dim3(std::min(multiprocessors, params.tiles)), Tile::kThreads, params, stream,
                ResidentMemory<Tile>::kBytes);
}

}  // namespace h100_diffusers_kernels
