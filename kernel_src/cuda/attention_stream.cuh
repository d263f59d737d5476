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

  __device__ __forceinline__ void clear() const { fill_shared(address, kBytes, 0); }
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
  // Of two, the next tile's are there when a warp group comes to it.
  using QueryRing = Ring<Tile::kHeadDim == 64 ? 2 : 1>;
  static constexpr uint32_t kKeyBytes = Tile::bytes(kTileKeys), kQueryBytes = Tile::bytes(Tile::kRows);
  static constexpr uint32_t kBiasBytes = kHasBias ? kTileKeys * 4 : 0;

  uint32_t query, out, keys, values, bias;
  QueryRing query_ring;
  KeyRing key_ring, value_ring;
  Barrier end_of_pass;
  RedoList redo;

  __device__ __forceinline__ explicit StreamMemory(uint32_t begin)
      : query(begin),
        out(query + QueryRing::kStages * kQueryBytes),
        keys(out + kQueryBytes),
        values(keys + KeyRing::kStages * kKeyBytes),
        bias(values + KeyRing::kStages * kKeyBytes),
        query_ring{bias + KeyRing::kStages * kBiasBytes},
        key_ring{query_ring.address + QueryRing::kBytes},
        value_ring{key_ring.address + KeyRing::kBytes},
        end_of_pass{value_ring.address + KeyRing::kBytes},
        redo{end_of_pass.address + Barrier::kBytes} {}

  static constexpr uint32_t kBytes = kTileAlignment + (QueryRing::kStages + 1) * kQueryBytes +
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
        next_keys_(Operand::along_rows(memory.keys)),
        next_values_(Operand::across_rows(memory.values, memory.values + Tile::box_bytes(kTileKeys))) {}

  __device__ __forceinline__ void wait_keys() const {
    if (!are_keys_there_) next_.wait_full(memory_.key_ring);
  }
  __device__ __forceinline__ Operand next_keys() const { return next_keys_; }
  // Asks whether copies have arrived, of which the answer takes its time.
  __device__ __forceinline__ void advance() {
    earlier_stage_ = current_.stage;
    current_ = next_;
    values_ = next_values_;
    const int bytes = next_.advance() * static_cast<int>(Memory::kKeyBytes);
    next_keys_ = next_keys_.plus(bytes);
    next_values_ = next_values_.plus(bytes);
    if constexpr (Memory::KeyRing::kStages > 2) {
      are_values_there_ = current_.is_full(memory_.value_ring);
      are_keys_there_ = next_.is_full(memory_.key_ring);
    }
  }
  __device__ __forceinline__ uint32_t bias() const {
    return memory_.bias + current_.stage * Memory::kBiasBytes;
  }
  __device__ __forceinline__ void release(bool has_earlier) const {
    if constexpr (kHasBias) __syncwarp();  // all lanes have read biases
    if (is_elected_ && has_earlier) memory_.value_ring.empty(earlier_stage_).arrive();
    if (is_elected_) memory_.key_ring.empty(current_.stage).arrive();
  }
  __device__ __forceinline__ void wait_values() const {
    if (!are_values_there_) current_.wait_full(memory_.value_ring);
  }
  __device__ __forceinline__ Operand values() const { return values_; }
  __device__ __forceinline__ void release_values() const {
    if (is_elected_) memory_.value_ring.empty(current_.stage).arrive();
  }

 private:
  using Place = RingPlace<typename Memory::KeyRing>;

  const Memory& memory_;
  bool is_elected_;
  Place next_, current_;
  int earlier_stage_ = 0;
  Operand next_keys_, next_values_, values_{};
  bool are_keys_there_ = false, are_values_there_ = false;
};

// Which tiles are treated, and how: all, with care; or all fast, and then those with care for which that was
// not accurate.
enum class Pass { kAll, kFast, kCareful };

// A block has every gridDim.x-th tile.
template <Pass kPass, class Body>
__device__ __forceinline__ void for_each_tile(const AttentionKernelParams& params, const RedoList& redo,
                                              const Body& body) {
  int index = 0;
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles;
       tile += static_cast<int>(gridDim.x), ++index) {
    if (kPass == Pass::kCareful && !redo.has(index)) continue;
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
    for_each_tile<kPass>(params_, memory_.redo, [&](int tile, int) {
      const QueryTile place = params_.place_of(tile, Tile::kRows);
      const int key_count = params_.key_count(place.batch);
      if constexpr (Loader::kArrivals > 0) {
        query_place_.wait_empty(memory_.query_ring);
        loader_.load_query(memory_.query + query_place_.stage * Memory::kQueryBytes, Tile::kRows,
                           memory_.query_ring.full(query_place_.stage), place);
        query_place_.advance();
      }
      int key = 0;
#pragma unroll 1
      do {
        const int stage = key_place_.stage;
        key_place_.wait_empty(memory_.key_ring);
        loader_.load_keys(memory_.keys + stage * Memory::kKeyBytes, memory_.bias + stage * Memory::kBiasBytes,
                          memory_.key_ring.full(stage), place, key);
        key_place_.wait_empty(memory_.value_ring);
        loader_.load_values(memory_.values + stage * Memory::kKeyBytes, memory_.value_ring.full(stage), place,
                            key);
        key_place_.advance();
        key += kTileKeys;
      } while (key < key_count);
    });
  }

 private:
  const AttentionKernelParams& params_;
  const Memory& memory_;
  Loader loader_;
  RingPlace<typename Memory::QueryRing> query_place_;
  RingPlace<typename Memory::KeyRing> key_place_;
};

template <class Tile, bool kHasBias>
class StreamCompute {
 public:
  using Memory = StreamMemory<Tile, kHasBias>;

  __device__ __forceinline__ StreamCompute(const AttentionKernelParams& params, const Memory& memory,
                                           const WarpRole& role)
      : params_(params),
        memory_(memory),
        role_(role),
        group_offset_(Tile::box_bytes(role.group * kWarpGroupRows)),
        query_(Operand::along_rows(memory.query + group_offset_)),
        keys_(memory, role.lane == 0) {}

  template <Pass kPass>
  __device__ __forceinline__ void run() {
    constexpr bool kIsFast = kPass == Pass::kFast;
    using Loop = Mainloop<Tile, kHasBias, kIsFast>;
    const bool is_elected = role_.lane == 0;
    constexpr int kBoxBytes = Tile::box_bytes(Tile::kRows);
    for_each_tile<kPass>(params_, memory_.redo, [&](int tile, int index) {
      const int key_count = params_.key_count_of(tile, Tile::kRows);
      const Loop mainloop{role_, params_.score_scale, key_count < params_.args.key_length};
      typename Loop::Softmax softmax(params_.score_scale);
      typename Loop::Sums sums;
      query_place_.wait_full(memory_.query_ring);
      mainloop.run(
          query_, kBoxBytes, keys_, key_count,
          [&] {
            if (is_elected) memory_.query_ring.empty(query_place_.stage).arrive();
          },
          softmax, sums);
      query_ = query_.plus(query_place_.advance() * static_cast<int>(Memory::kQueryBytes));
      softmax.normalize(sums, kIsFast ? kValueScale : 1);
      if (kIsFast && !__all_sync(~0u, has_accurate_rows<Tile>(sums)) && is_elected) memory_.redo.add(index);
      QueryTile place = params_.place_of(tile, Tile::kRows);
      place.row += role_.group * kWarpGroupRows;
      store_rows<Tile>(role_, params_.out, memory_.out + group_offset_, kBoxBytes, place, sums);
    });
    // What is stored anew comes after what was stored before.
    if (role_.lane == 0) wait_for_stores();
  }

 private:
  const AttentionKernelParams& params_;
  const Memory& memory_;
  const WarpRole& role_;
  uint32_t group_offset_;
  Operand query_;  // of the next tile, in this place
  RingPlace<typename Memory::QueryRing> query_place_;
  StreamedKeys<Tile, kHasBias> keys_;
};

template <class Tile, bool kHasBias, bool kHasHalfValues, class... Loaders>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    stream_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = StreamMemory<Tile, kHasBias>;
  const Memory memory(shared_tiles());
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.query_ring.init((Loaders::kArrivals + ...), Tile::kComputeWarps);
    memory.key_ring.init((Loaders::kKeyArrivals + ...), Tile::kComputeWarps);
    memory.value_ring.init((Loaders::kArrivals + ...), Tile::kComputeWarps);
    memory.end_of_pass.init(Tile::kComputeWarps);
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
