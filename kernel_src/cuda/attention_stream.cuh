// Tiles of any number of keys stream through rings of shared memory (attention_stream_load.cuh), and a block
// computes tile after tile of queries. Blocks that run at the same time are at neighbouring tiles, most of
// them of the same head, so that its keys and values come from L2.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "attention_epilogue.cuh"
#include "attention_products.cuh"
#include "attention_stream_load.cuh"
#include "attention_values.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

// This is the side of the rings that computes.
template <class Tile, KeyBias kBias>
class StreamedKeys {
 public:
  using Memory = StreamMemory<Tile, kBias>;

  __device__ __forceinline__ StreamedKeys(const Memory& memory, const WarpRole& role)
      : memory_(memory),
        role_(role),
        next_keys_(Operand::along_rows(memory.keys)),
        next_values_(Operand::across_rows(memory.values, memory.values + Tile::box_bytes(kTileKeys))) {}

  __device__ __forceinline__ void wait_keys() const {
    if (!are_keys_there_) next_.wait_full(memory_.key_ring);
  }
  __device__ __forceinline__ Operand next_keys() const { return next_keys_; }
  // It asks already whether the next copies have arrived, because the answer takes its time.
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
  // The keys have been read.
  __device__ __forceinline__ void release_keys() const {
    if (kBias == KeyBias::kAdded || role_.is_elected()) memory_.key_ring.empty(current_.stage).arrive();
  }
  // The values of the tile before have been read, if there was one.
  __device__ __forceinline__ void release_earlier_values(bool has_earlier) const {
    if (role_.is_elected() && has_earlier) memory_.value_ring.empty(earlier_stage_).arrive();
  }
  __device__ __forceinline__ void wait_values() const {
    if (!are_values_there_) current_.wait_full(memory_.value_ring);
  }
  __device__ __forceinline__ Operand values() const { return values_; }
  __device__ __forceinline__ void release_values() const {
    if (role_.is_elected()) memory_.value_ring.empty(current_.stage).arrive();
  }

 private:
  using Place = RingPlace<typename Memory::KeyRing>;

  const Memory& memory_;
  const WarpRole& role_;
  Place next_, current_;
  int earlier_stage_ = 0;
  Operand next_keys_, next_values_, values_{};
  bool are_keys_there_ = false, are_values_there_ = false;
};

template <class Tile, KeyBias kBias>
class StreamCompute {
 public:
  using Memory = StreamMemory<Tile, kBias>;

  __device__ __forceinline__ StreamCompute(const AttentionKernelParams& params, const Memory& memory,
                                           const WarpRole& role)
      : params_(params),
        memory_(memory),
        role_(role),
        group_offset_(Tile::box_bytes(role.group * kWarpGroupRows)),
        query_(Operand::along_rows(memory.query + group_offset_)),
        keys_(memory, role) {}

  template <class Softmax>
  __device__ __forceinline__ void run() {
    constexpr bool kHasRegistersAhead = Tile::kHeadDim == 128;
    constexpr bool kIsLazy = std::is_same_v<Softmax, LazySoftmax<Tile>>;
    constexpr int kBoxBytes = Tile::box_bytes(Tile::kRows);
#pragma unroll 1
    for (int index = 0;; ++index) {
      const int tile = wait_for_tile();
      if (tile == Memory::kNoTile) break;
      Outputs<Tile> outputs;
      if constexpr (kIsLazy && kHasRegistersAhead)
        compute_tile_ahead<Softmax>(tile, outputs);
      else
        compute_tile<Softmax>(tile, outputs);
      if constexpr (kIsLazy) {
        if (!has_accurate_rows<Tile>(outputs) && role_.is_elected()) memory_.tile_list.mark_inaccurate(index);
      }
      QueryTile place = params_.place_of(tile, Tile::kRows);
      place.row += role_.group * kWarpGroupRows;
      store_rows<Tile>(role_, params_.out, memory_.out + group_offset_, kBoxBytes, place, outputs);
    }
    release_query();
    advance_query();
    // What is stored anew comes after what was stored before.
    if (role_.is_elected()) wait_for_stores();
  }

 private:
  // There is at least one tile of keys, even if no key of it counts.
  template <class Softmax>
  __device__ __forceinline__ void compute_tile(int tile, Outputs<Tile>& outputs) {
    const int key_count = params_.key_count(params_.place_of(tile, Tile::kRows).batch);
    const bool has_padding = key_count < params_.args.key_length;
    int key = 0;
    Softmax softmax(params_);
    Scores<Tile> scores;
    Probabilities probabilities;
    Accumulators<Tile> accumulators;
    clear(accumulators);
#pragma unroll 1
    do {
      const bool is_first = key == 0;
      const int count = key_count - key;
      issue_next_scores(scores);
      wait_for_products();
      if constexpr (kBias == KeyBias::kAdded) add_bias(scores, params_.score_scale, keys_.bias(), role_.lane);
      keys_.release_earlier_values(!is_first);
      keys_.release_keys();
      finish_scores(scores, count, has_padding);
      softmax.take_tile(scores, is_first, accumulators, probabilities);
      keys_.wait_values();
      issue_outputs<Tile, Softmax>(probabilities, keys_.values(), true, accumulators);
      key += kTileKeys;
    } while (key < key_count);
    finish_tile(softmax, accumulators, outputs);
  }

  // Computes the same one step ahead: S = Q K^T of the next tile is issued before O += P V of this one, which
  // goes on during the exponentials of the next. This takes registers for both, and pays where products take
  // longer than exponentials (NOTES, "Peaked scores: rescaling where float16 would overflow").
  template <class Softmax>
  __device__ __forceinline__ void compute_tile_ahead(int tile, Outputs<Tile>& outputs) {
    const int key_count = params_.key_count(params_.place_of(tile, Tile::kRows).batch);
    const bool has_padding = key_count < params_.args.key_length;
    int key = 0;
    Softmax softmax(params_);
    Scores<Tile> scores;
    Accumulators<Tile> accumulators;
    clear(accumulators);
    issue_next_scores(scores);
    wait_for_products();
#pragma unroll 1
    for (;;) {
      Probabilities probabilities;
      float sum[2];
      keys_.release_keys();
      finish_scores(scores, key_count - key, has_padding);
      softmax.begin_tile(scores, key == 0, sum);
      // The wait for the values keeps the wait for the products behind the exponentials.
      compute_now(scores);
      compute_now(sum);
      keys_.wait_values();
      wait_for_products();
      compute_now(scores);
      keys_.release_earlier_values(key > 0);
      softmax.end_tile(scores, sum, accumulators, probabilities);
      const Operand values = keys_.values();
      key += kTileKeys;
      if (key >= key_count) {
        issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
        break;
      }
      issue_next_scores(scores);
      issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
      wait_for_products<1>();
    }
    finish_tile(softmax, accumulators, outputs);
  }

  __device__ __forceinline__ void issue_next_scores(Scores<Tile>& scores) {
    keys_.wait_keys();
    issue_scores<Tile>(query_, Tile::box_bytes(Tile::kRows), keys_.next_keys(), scores);
    keys_.advance();
  }

  // The scores of the next tile are there, of which `count` keys or all count; with the last tile the queries
  // have been read.
  __device__ __forceinline__ void finish_scores(Scores<Tile>& scores, int count, bool has_padding) const {
    if (count > kTileKeys) return;
    release_query();
    if (count < kTileKeys) mask_scores(scores, count, role_.lane);
    if (count < kTileKeys && has_padding) {
      keys_.wait_values();
      clear_rows<Tile>(role_, keys_.values().address(), count);
    }
  }

  // The last products of values have been issued.
  template <class Softmax>
  __device__ __forceinline__ void finish_tile(const Softmax& softmax, const Accumulators<Tile>& accumulators,
                                              Outputs<Tile>& outputs) {
    wait_for_products();
    keys_.release_values();
    advance_query();
    softmax.normalize(accumulators, Softmax::kValueScale, outputs);
  }

  __device__ __forceinline__ static void clear(Accumulators<Tile>& accumulators) {
#pragma unroll
    for (int i = 0; i < Tile::kAccumulators; ++i) accumulators[i] = 0;
  }

  // Waits until the next queries are there, and returns which tile they are.
  __device__ __forceinline__ int wait_for_tile() const {
    query_place_.wait_full(memory_.query_ring);
    // The lane that says that queries have been read reads it. The maximum is the same in all lanes, which
    // the compiler knows.
    const int tile =
        role_.is_elected() ? static_cast<int>(load_shared(memory_.tile_of(query_place_.stage))) : INT_MIN;
    return __reduce_max_sync(~0u, tile);
  }
  __device__ __forceinline__ void release_query() const {
    if (role_.is_elected()) memory_.query_ring.empty(query_place_.stage).arrive();
  }
  __device__ __forceinline__ void advance_query() {
    query_ = query_.plus(query_place_.advance() * static_cast<int>(Memory::kQueryBytes));
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  const WarpRole& role_;
  uint32_t group_offset_;
  Operand query_;  // The next tile has it in query_place_.
  RingPlace<typename Memory::QueryRing> query_place_;
  StreamedKeys<Tile, kBias> keys_;
};

template <class Tile, KeyBias kBias, Rescaling kRescaling, class... Loaders>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    stream_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = StreamMemory<Tile, kBias>;
  const Memory memory(shared_tiles());
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.query_ring.init((Loaders::kArrivals + ...), Tile::kComputeWarps);
    memory.key_ring.init((Loaders::kKeyArrivals + ...), Tile::template kKeyReaders<kBias>);
    memory.value_ring.init((Loaders::kArrivals + ...), Tile::kComputeWarps);
    memory.end_of_pass.init(Tile::kComputeWarps);
  }
  fence_barrier_init();
  __syncthreads();
  // With float16 values the kernel before this one is the conversion, which has waited for all that came
  // earlier. Only its own result has to be waited for, and the loader does so before the first values.
  if (kRescaling == Rescaling::kOnline) wait_for_earlier_kernels();
  if (role.loads()) {
    release_registers<Tile::kLoadRegisters>();
    const auto load = [&]<class Loader>(std::type_identity<Loader>) {
      if (!Loader::is_mine(role)) return;
      StreamLoad<Tile, kBias, Loader> stream(params, memory, role);
      if constexpr (kRescaling == Rescaling::kLazy) {
        stream.template run<Pass::kClaimed>();
        memory.end_of_pass.wait(0);
        stream.template run<Pass::kInaccurate>();
      } else {
        stream.template run<Pass::kShare>();
      }
    };
    (load(std::type_identity<Loaders>{}), ...);
  } else {
    take_registers<Tile::kComputeRegisters>();
    StreamCompute<Tile, kBias> stream(params, memory, role);
    if constexpr (kRescaling == Rescaling::kLazy) {
      stream.template run<LazySoftmax<Tile>>();
      if (role.is_elected()) memory.end_of_pass.arrive();
    }
    stream.template run<OnlineSoftmax<Tile, kBias>>();
  }
}

template <class Tile, KeyBias kBias, Rescaling kRescaling, class... Loaders>
void launch_stream_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                             Stream stream) {
  (Loaders::map(operation, params, Tile::kRows), ...);
  params.set_tiles(Tile::kRows);
  int blocks = std::min(multiprocessors, params.tiles);
  if constexpr (kRescaling == Rescaling::kLazy) {
    prepare_workspace<Tile>(operation, params, stream);
    params.reference_exponent = lazy_reference_exponent(params.args.key_length);
    blocks = std::max(blocks, static_cast<int>(ceil_divide(params.tiles, TileList::kCapacity)));
  }
  launch_kernel(operation, stream_attention_kernel<Tile, kBias, kRescaling, Loaders...>, dim3(blocks),
                Tile::kThreads, params, stream, StreamMemory<Tile, kBias>::kBytes);
}

}  // namespace h100_diffusers_kernels
