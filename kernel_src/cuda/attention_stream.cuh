// Attention to any number of keys: their tiles stream through rings of shared memory, and a block computes
// tile after tile of queries. Blocks that run at the same time are at neighbouring tiles, most of them of the
// same head, so that its keys and values come from L2.
#pragma once

#include <algorithm>

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_mainloop.cuh"
#include "attention_values.cuh"
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
      : memory_(memory),
        is_elected_(is_elected),
        keys_(Operand::along_rows(memory.keys)),
        values_(Operand::across_rows(memory.values, Tile::box_bytes(kTileKeys))) {}

  __device__ __forceinline__ void wait_keys() const { key_.wait_full(memory_.key_ring); }
  __device__ __forceinline__ Operand keys() const { return keys_.plus(key_.stage * Memory::kKeyBytes); }
  __device__ __forceinline__ uint32_t bias() const { return memory_.bias + key_.stage * Memory::kBiasBytes; }
  __device__ __forceinline__ void release_keys() {
    if constexpr (kHasBias) __syncwarp();  // all lanes have read biases
    if (is_elected_) memory_.key_ring.empty(key_.stage).arrive();
    key_.advance();
  }
  __device__ __forceinline__ void wait_values() const { value_.wait_full(memory_.value_ring); }
  __device__ __forceinline__ Operand values() const { return values_.plus(value_.stage * Memory::kKeyBytes); }
  __device__ __forceinline__ uint32_t value_address() const {
    return memory_.values + value_.stage * Memory::kKeyBytes;
  }
  __device__ __forceinline__ void release_values() {
    if (is_elected_) memory_.value_ring.empty(value_.stage).arrive();
    value_.advance();
  }

 private:
  const Memory& memory_;
  bool is_elected_;
  Operand keys_, values_;  // of the first stage
  RingPlace<typename Memory::KeyRing> key_, value_;
};

// Which tiles are treated: all; or first those that can be treated fast, then the others and those that
// turned out not to be finite.
enum class Pass { kAll, kFast, kCareful };

// A block has every gridDim.x-th tile.
template <Pass kPass, class Body>
__device__ __forceinline__ void for_each_tile(const AttentionKernelParams& params, const RedoList& redo,
                                              int rows, const Body& body) {
  int index = 0;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles;
       tile += static_cast<int>(gridDim.x), ++index) {
    if constexpr (kPass != Pass::kAll) {
      const QueryTile place = QueryTile::at(params, tile, rows);
      const int64_t head = place.batch * params.args.key_heads + place.head / params.group_heads;
      const bool is_safe = ValueMaximum::is_safe(params.value_maxima[head]);
      if (kPass == Pass::kFast ? !is_safe : is_safe && !redo.has(index)) continue;
    }
    body(tile, index);
  }
}

template <class Tile, bool kHasBias, class Loader>
class StreamLoad {
 public:
  using Memory = StreamMemory<Tile, kHasBias>;

  __device__ __forceinline__ StreamLoad(const AttentionKernelParams& params, const Memory& memory,
                                        const WarpRole& role)
      : params_(params), memory_(memory), loader_(params, role) {}

  template <Pass kPass>
  __device__ __forceinline__ void run() {
    if constexpr (kPass != Pass::kAll) loader_.take_half_values(kPass == Pass::kFast);
    for_each_tile<kPass>(params_, memory_.redo, Tile::kRows, [&](int tile, int) {
      const QueryTile place = QueryTile::at(params_, tile, Tile::kRows);
      const int key_count = params_.key_count(place.batch);
      if constexpr (Loader::kArrivals > 0) {
        query_.wait_empty(memory_.query_ring);
        loader_.load_query(memory_.query, Tile::kRows, memory_.query_ring.full(query_.stage), place);
        query_.advance();
      }
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

 private:
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

  template <Pass kPass>
  __device__ __forceinline__ void run() {
    constexpr bool kIsFast = kPass == Pass::kFast;
    using Loop = Mainloop<Tile, kHasBias>;
    const bool is_elected = role_.lane == 0;
    const uint32_t group_offset = Tile::box_bytes(role_.group * kWarpGroupRows);
    constexpr uint32_t kBoxBytes = Tile::box_bytes(Tile::kRows);
    for_each_tile<kPass>(params_, memory_.redo, Tile::kRows, [&](int tile, int index) {
      const int key_count = params_.key_count(QueryTile::at(params_, tile, Tile::kRows).batch);
      const Loop mainloop{role_, params_.scale(), key_count < params_.args.key_length};
      typename Loop::Softmax softmax(params_.scale());
      typename Loop::Softmax::Sums sums;
      query_.wait_full(memory_.query_ring);
      mainloop.template run<kIsFast>(
          Operand::along_rows(memory_.query + group_offset), kBoxBytes, keys_, key_count,
          [&] {
            if (is_elected) memory_.query_ring.empty(query_.stage).arrive();
          },
          softmax, sums);
      query_.advance();
      const bool is_finite = softmax.normalize(sums);
      if (kIsFast && !__all_sync(~0u, is_finite) && is_elected) memory_.redo.add(index);
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

template <class Tile, bool kHasBias, bool kHasHalfValues, class... Loaders>
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
  if constexpr (kHasHalfValues) memory.redo.clear();
  fence_barrier_init();
  __syncthreads();
  wait_for_earlier_kernels();
  if (role.loads()) {
    release_registers<Tile::kLoadRegisters>();
    const auto load = [&]<class Loader>() {
      if (!Loader::is_mine(role)) return;
      StreamLoad<Tile, kHasBias, Loader> stream(params, memory, role);
      if constexpr (kHasHalfValues) {
        stream.template run<Pass::kFast>();
        memory.end_of_pass.wait(0);
        stream.template run<Pass::kCareful>();
      } else {
        stream.template run<Pass::kAll>();
      }
    };
    (load.template operator()<Loaders>(), ...);
  } else {
    take_registers<Tile::kComputeRegisters>();
    StreamCompute<Tile, kHasBias> stream(params, memory, role);
    if constexpr (kHasHalfValues) {
      stream.template run<Pass::kFast>();
      if (role.lane == 0) memory.end_of_pass.arrive();
      memory.end_of_pass.wait(0);
      stream.template run<Pass::kCareful>();
    } else {
      stream.template run<Pass::kAll>();
    }
  }
}

template <class Tile, bool kHasBias, bool kHasHalfValues, class... Loaders>
void launch_stream_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                             Stream stream) {
  (Loaders::map(operation, params, Tile::kRows), ...);
  if constexpr (kHasHalfValues) launch_value_conversion<Tile>(operation, params, stream);
  params.set_tiles(Tile::kRows);
  launch_kernel(operation, stream_attention_kernel<Tile, kHasBias, kHasHalfValues, Loaders...>,
                dim3(std::min(multiprocessors, params.tiles)), Tile::kThreads, params, stream,
                StreamMemory<Tile, kHasBias>::kBytes);
}

}  // namespace h100_diffusers_kernels
