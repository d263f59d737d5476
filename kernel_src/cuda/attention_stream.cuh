// Attention to any number of keys: their tiles stream through rings of shared memory, and a block computes
// tile after tile of queries. Blocks that run at the same time are at neighbouring tiles, most of them of the
// same head, so that its keys and values come from L2.
#pragma once

#include <algorithm>

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_mainloop.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

// The tiles of a block that have to be computed anew, one bit each.
struct RedoList {
  static constexpr int kWords = 256;
  static constexpr int kTiles = kWords * 32;
  static constexpr uint32_t kBytes = kWords * 4;
  uint32_t address;

  __device__ __forceinline__ void clear() const {
    for (int word = static_cast<int>(threadIdx.x); word < kWords; word += static_cast<int>(blockDim.x))
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(address + word * 4), "r"(0) : "memory");
  }
  __device__ __forceinline__ void add(int index) const {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address + index / 32 * 4), "r"(1 << index % 32)
                 : "memory");
  }
  __device__ __forceinline__ bool has(int index) const {
    int word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address + index / 32 * 4) : "memory");
    return word >> index % 32 & 1;
  }
};

// Shared memory of a block, by address.
template <class Tile, bool kHasBias>
struct StreamMemory {
  using KeyRing = Ring<Tile::kHeadDim == 64 ? 4 : 2>;
  using QueryRing = Ring<1>;
  static constexpr uint32_t kKeyBytes = Tile::bytes(kTileKeys), kQueryBytes = Tile::bytes(Tile::kRows);
  static constexpr uint32_t kBiasBytes = kHasBias ? kTileKeys * 4 : 0;

  uint32_t query, out, keys, values, bias;
  QueryRing query_ring;
  KeyRing key_ring, value_ring;
  Barrier end_of_pass;
  RedoList redo;

  __device__ __forceinline__ explicit StreamMemory(uint32_t begin)
      : query(begin),
        out(query + kQueryBytes),
        keys(out + kQueryBytes),
        values(keys + KeyRing::kStages * kKeyBytes),
        bias(values + KeyRing::kStages * kKeyBytes),
        query_ring{bias + KeyRing::kStages * kBiasBytes},
        key_ring{query_ring.address + QueryRing::kBytes},
        value_ring{key_ring.address + KeyRing::kBytes},
        end_of_pass{value_ring.address + KeyRing::kBytes},
        redo{end_of_pass.address + Barrier::kBytes} {}

  static constexpr uint32_t kBytes = kTileAlignment + 2 * kQueryBytes +
                                     KeyRing::kStages * (2 * kKeyBytes + kBiasBytes) + QueryRing::kBytes +
                                     2 * KeyRing::kBytes + Barrier::kBytes + RedoList::kBytes;
};

// The side of the rings that computes.
template <class Tile, bool kHasBias>
class StreamedKeys {
 public:
  using Memory = StreamMemory<Tile, kHasBias>;

  __device__ __forceinline__ StreamedKeys(const Memory& memory, bool is_elected)
      : memory_(memory), is_elected_(is_elected) {}

  __device__ __forceinline__ void wait_keys() const { key_.wait_full(memory_.key_ring); }
  __device__ __forceinline__ uint32_t keys() const { return memory_.keys + key_.stage * Memory::kKeyBytes; }
  __device__ __forceinline__ uint32_t bias() const { return memory_.bias + key_.stage * Memory::kBiasBytes; }
  __device__ __forceinline__ void release_keys() {
    if (is_elected_) memory_.key_ring.empty(key_.stage).arrive();
    key_.advance();
  }
  __device__ __forceinline__ void wait_values() const { value_.wait_full(memory_.value_ring); }
  __device__ __forceinline__ uint32_t values() const {
    return memory_.values + value_.stage * Memory::kKeyBytes;
  }
  __device__ __forceinline__ void release_values() {
    if (is_elected_) memory_.value_ring.empty(value_.stage).arrive();
    value_.advance();
  }

 private:
  const Memory& memory_;
  bool is_elected_;
  RingPlace<typename Memory::KeyRing> key_, value_;
};

// The tiles of a block: every gridDim.x-th. In the first pass all of them, in the second those listed.
struct TilePass {
  const AttentionKernelParams& params;
  const RedoList& redo;
  bool is_listed;

  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    int index = 0;
#pragma unroll 1
    for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles;
         tile += static_cast<int>(gridDim.x), ++index) {
      if (!is_listed || redo.has(index)) body(tile, index);
    }
  }
};

template <class Tile, bool kHasBias, class Loader>
class StreamLoad {
 public:
  using Memory = StreamMemory<Tile, kHasBias>;

  __device__ __forceinline__ StreamLoad(const AttentionKernelParams& params, const Memory& memory,
                                        const WarpRole& role)
      : params_(params), memory_(memory), loader_(params, role) {}

  __device__ __forceinline__ void run(const TilePass& first, const TilePass& last, bool has_first) {
    if (has_first) {
      run(first);
      memory_.end_of_pass.wait(0);
    }
    run(last);
  }

 private:
  __device__ __forceinline__ void run(const TilePass& pass) {
    pass.for_each([&](int tile, int) {
      const QueryTile place = QueryTile::at(params_, tile, Tile::kRows);
      const int key_count = params_.key_count(place.batch);
      query_.wait_empty(memory_.query_ring);
      loader_.load_query(memory_.query, Tile::kRows, memory_.query_ring.full(query_.stage), place);
      query_.advance();
#pragma unroll 1
      for (int key = 0; key < key_count; key += kTileKeys) {
        key_.wait_empty(memory_.key_ring);
        loader_.load_keys(memory_.keys + key_.stage * Memory::kKeyBytes,
                          memory_.bias + key_.stage * Memory::kBiasBytes, memory_.key_ring.full(key_.stage),
                          place, key);
        key_.advance();
        value_.wait_empty(memory_.value_ring);
        loader_.load_values(memory_.values + value_.stage * Memory::kKeyBytes,
                            memory_.value_ring.full(value_.stage), place, key);
        value_.advance();
      }
    });
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  Loader loader_;
  RingPlace<typename Memory::QueryRing> query_;
  RingPlace<typename Memory::KeyRing> key_, value_;
};

template <class Tile, bool kHasBias>
class StreamCompute {
 public:
  using Memory = StreamMemory<Tile, kHasBias>;

  __device__ __forceinline__ StreamCompute(const AttentionKernelParams& params, const Memory& memory,
                                           const WarpRole& role)
      : params_(params), memory_(memory), role_(role), keys_(memory, role.lane == 0) {}

  template <bool kIsOptimistic>
  __device__ __forceinline__ void run(const TilePass& pass) {
    using Loop = Mainloop<Tile, kHasBias>;
    const bool is_elected = role_.lane == 0;
    const uint32_t group_offset = Tile::box_bytes(role_.group * kWarpGroupRows);
    constexpr uint32_t kBoxBytes = Tile::box_bytes(Tile::kRows);
    pass.for_each([&](int tile, int index) {
      const int key_count = params_.key_count(QueryTile::at(params_, tile, Tile::kRows).batch);
      const Loop mainloop{role_, params_.args.scale, key_count < params_.args.key_length};
      typename Loop::Softmax softmax(params_.args.scale);
      typename Loop::Softmax::Sums sums;
      query_.wait_full(memory_.query_ring);
      mainloop.template run<kIsOptimistic>(
          Operand::along_rows(memory_.query + group_offset), kBoxBytes, keys_, key_count,
          [&] {
            if (is_elected) memory_.query_ring.empty(query_.stage).arrive();
          },
          softmax, sums);
      query_.advance();
      const bool is_finite = softmax.normalize(sums);
      if (kIsOptimistic && !__all_sync(~0u, is_finite) && is_elected) memory_.redo.add(index);
      QueryTile place = QueryTile::at(params_, tile, Tile::kRows);
      place.row += role_.group * kWarpGroupRows;
      store_rows<Tile>(role_, params_.out, memory_.out + group_offset, kBoxBytes, place, sums);
    });
    // What is stored anew comes after what was stored before.
    if (role_.thread == 0) wait_for_stores();
  }

 private:
  const AttentionKernelParams& params_;
  const Memory& memory_;
  const WarpRole& role_;
  RingPlace<typename Memory::QueryRing> query_;
  StreamedKeys<Tile, kHasBias> keys_;
};

// Without a bias all tiles are computed optimistically, then those anew that have to be.
template <class Tile, bool kHasBias, class... Loaders>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    stream_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = StreamMemory<Tile, kHasBias>;
  const Memory memory(shared_tiles());
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.query_ring.init((Loaders::kArrivals + ...), Tile::kGroups * 4);
    memory.key_ring.init((Loaders::kKeyArrivals + ...), Tile::kGroups * 4);
    memory.value_ring.init((Loaders::kArrivals + ...), Tile::kGroups * 4);
    memory.end_of_pass.init(Tile::kGroups * 4);
  }
  if constexpr (!kHasBias) memory.redo.clear();
  publish_barriers();
  wait_for_earlier_kernels();

  // Of more tiles than the list can hold none is tried optimistically.
  const bool is_optimistic = !kHasBias && params.tiles <= RedoList::kTiles * static_cast<int>(gridDim.x);
  const TilePass all{params, memory.redo, false}, last{params, memory.redo, is_optimistic};
  if (role.loads()) {
    release_registers<Tile::kLoadRegisters>();
    const auto load = [&]<class Loader>() {
      if (Loader::is_mine(role))
        StreamLoad<Tile, kHasBias, Loader>(params, memory, role).run(all, last, is_optimistic);
    };
    (load.template operator()<Loaders>(), ...);
  } else {
    take_registers<Tile::kComputeRegisters>();
    StreamCompute<Tile, kHasBias> compute(params, memory, role);
    if constexpr (!kHasBias) {
      if (is_optimistic) {
        compute.template run<true>(all);
        if (role.lane == 0) memory.end_of_pass.arrive();
        memory.end_of_pass.wait(0);
      }
    }
    compute.template run<false>(last);
  }
}

template <class Tile, bool kHasBias, class... Loaders>
void launch_stream_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                             Stream stream) {
  (Loaders::map(operation, params, Tile::kRows), ...);
  params.query_tiles = static_cast<int>(ceil_divide(params.args.query_length, Tile::kRows));
  params.tiles = static_cast<int>(params.args.batch * params.args.heads * params.query_tiles);
  launch_kernel(operation, stream_attention_kernel<Tile, kHasBias, Loaders...>,
                dim3(std::min(multiprocessors, params.tiles)), Tile::kThreads, params, stream,
                StreamMemory<Tile, kHasBias>::kBytes);
}

}  // namespace h100_diffusers_kernels
