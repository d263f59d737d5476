// Attention to any number of keys: their tiles stream through rings of shared memory, and a block computes
// tile after tile of queries. Blocks that run at the same time are at neighbouring tiles, most of them of the
// same head, so that its keys and values come from L2.
#pragma once

#include <algorithm>
#include <climits>

#include "attention_epilogue.cuh"
#include "attention_loader.cuh"
#include "attention_products.cuh"
#include "attention_schedule.cuh"
#include "attention_values.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {

// A block's shared memory is known by addresses.
template <class Tile, KeyBias kBias>
struct StreamMemory {
  using KeyRing = Ring<Tile::kHeadDim == 64 ? 4 : 2>;
  // With two stages the next tile's queries are there when a warp group comes to it.
  using QueryRing = Ring<Tile::kHeadDim == 64 ? 2 : 1>;
  static constexpr uint32_t kKeyBytes = Tile::bytes(kTileKeys), kQueryBytes = Tile::bytes(Tile::kRows);
  static constexpr uint32_t kBiasBytes = kBias == KeyBias::kAdded ? kTileKeys * 4 : 0;
  static constexpr uint32_t kTilesBytes = 8;
  static_assert(QueryRing::kStages * 4 <= kTilesBytes);
  static constexpr int kNoTile = -1;

  uint32_t query, out, keys, values, bias;
  uint32_t tiles;  // It says which tile the queries of a stage are, or kNoTile after the last of a pass.
  QueryRing query_ring;
  KeyRing key_ring, value_ring;
  Barrier end_of_pass;
  TileList tile_list;

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
        tile_list{end_of_pass.address + Barrier::kBytes} {}

  __device__ __forceinline__ uint32_t tile_of(int stage) const {
    return tiles + static_cast<uint32_t>(stage * 4);
  }

  static constexpr uint32_t kBytes = kTileAlignment + (QueryRing::kStages + 1) * kQueryBytes +
                                     KeyRing::kStages * (2 * kKeyBytes + kBiasBytes) + kTilesBytes +
                                     QueryRing::kBytes + 2 * KeyRing::kBytes + Barrier::kBytes +
                                     TileList::kBytes;
};

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

template <class Tile, KeyBias kBias, class Loader>
class StreamLoad {
 public:
  using Memory = StreamMemory<Tile, kBias>;

  __device__ __forceinline__ StreamLoad(const AttentionKernelParams& params, const Memory& memory,
                                        const WarpRole& role)
      : params_(params), memory_(memory), loader_(params, role) {}

  template <Pass kPass>
  __device__ __forceinline__ void run() {
    const auto load = [&](int tile) { load_tile<kPass>(tile); };
    if constexpr (kPass == Pass::kShare) {
      for_each_own_tile(params_, load);
    } else if constexpr (kPass == Pass::kClaimed) {
      loader_.take_half_values(true);
      memory_.tile_list.claim_each(params_, load);
    } else {
      loader_.take_half_values(false);
      memory_.tile_list.for_each_inaccurate(load);
    }
    if constexpr (Loader::kArrivals > 0) {
      begin_query(Memory::kNoTile);
      memory_.query_ring.full(query_place_.stage).arrive();
      query_place_.advance();
    }
  }

 private:
  template <Pass kPass>
  __device__ __forceinline__ void load_tile(int tile) {
    const QueryTile place = params_.place_of(tile, Tile::kRows);
    const int key_count = params_.key_count(place.batch);
    if constexpr (Loader::kArrivals > 0) {
      begin_query(tile);
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
      if constexpr (kPass == Pass::kClaimed) wait_for_half_values();
      loader_.load_values(memory_.values + stage * Memory::kKeyBytes, memory_.value_ring.full(stage), place,
                          key);
      key_place_.advance();
      key += kTileKeys;
    } while (key < key_count);
  }

  __device__ __forceinline__ void wait_for_half_values() {
    if (!has_half_values_) wait_for_earlier_kernels();
    has_half_values_ = true;
  }

  __device__ __forceinline__ void begin_query(int tile) const {
    query_place_.wait_empty(memory_.query_ring);
    if (loader_.is_first()) store_shared(memory_.tile_of(query_place_.stage), static_cast<uint32_t>(tile));
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  Loader loader_;
  RingPlace<typename Memory::QueryRing> query_place_;
  RingPlace<typename Memory::KeyRing> key_place_;
  bool has_half_values_ = false;
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

  // The same, one step ahead: S = Q K^T of the next tile is issued before O += P V of this one, which goes on
  // during the exponentials of the next. This takes registers for both, and pays where products take longer
  // than exponentials.
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
    const auto load = [&]<class Loader>() {
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
    (load.template operator()<Loaders>(), ...);
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
