// Attention to any number of keys. Key tiles stream through rings in shared memory
// (attention_stream_load.cuh), and a block computes one query tile after the other. Blocks that run at the
// same time have adjacent tiles, most of them of the same head, so that keys and values are read from L2.
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

// The computing side of the key and value rings.
template <class Tile, KeyBias kBias>
class StreamedKeys {
 public:
  using Memory = StreamMemory<Tile, kBias>;

  __device__ __forceinline__ StreamedKeys(const Memory& memory, const WarpRole& role)
      : memory_(memory),
        role_(role),
        next_keys_(MatrixDescriptor::along_rows(memory.keys)),
        next_values_(
            MatrixDescriptor::across_rows(memory.values, memory.values + Tile::box_bytes(kTileKeys))) {}

  __device__ __forceinline__ void wait_keys() const {
    if (!keys_arrived_) next_.wait_full(memory_.key_ring);
  }
  __device__ __forceinline__ MatrixDescriptor next_keys() const { return next_keys_; }
  // Also tests whether the next copies have arrived, because the test has a latency.
  __device__ __forceinline__ void advance() {
    earlier_stage_ = current_.stage;
    current_ = next_;
    values_ = next_values_;
    const int bytes = next_.advance() * static_cast<int>(Memory::kKeyBytes);
    next_keys_ = next_keys_.plus(bytes);
    next_values_ = next_values_.plus(bytes);
    if constexpr (Memory::KeyRing::kStages > 2) {
      values_arrived_ = current_.is_full(memory_.value_ring);
      keys_arrived_ = next_.is_full(memory_.key_ring);
    }
  }
  __device__ __forceinline__ uint32_t bias() const {
    return memory_.bias + current_.stage * Memory::kBiasBytes;
  }
  // The keys have been read.
  __device__ __forceinline__ void release_keys() const {
    if (kBias == KeyBias::kAdded || role_.is_elected()) memory_.key_ring.empty(current_.stage).arrive();
  }
  // The values of the previous tile have been read, if there was one.
  __device__ __forceinline__ void release_earlier_values(bool has_earlier) const {
    if (role_.is_elected() && has_earlier) memory_.value_ring.empty(earlier_stage_).arrive();
  }
  __device__ __forceinline__ void wait_values() const {
    if (!values_arrived_) current_.wait_full(memory_.value_ring);
  }
  __device__ __forceinline__ MatrixDescriptor values() const { return values_; }
  __device__ __forceinline__ void release_values() const {
    if (role_.is_elected()) memory_.value_ring.empty(current_.stage).arrive();
  }

 private:
  using Place = RingState<typename Memory::KeyRing>;

  const Memory& memory_;
  const WarpRole& role_;
  Place next_, current_;
  int earlier_stage_ = 0;
  MatrixDescriptor next_keys_, next_values_, values_{};
  bool keys_arrived_ = false, values_arrived_ = false;
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
        query_(MatrixDescriptor::along_rows(memory.query + group_offset_)),
        keys_(memory, role) {}

  template <class Softmax>
  __device__ __forceinline__ void run() {
    constexpr bool kIsPipelined = Tile::kGroups == 2;
    constexpr bool kIsLazy = std::is_same_v<Softmax, LazySoftmax<Tile>>;
    constexpr int kBoxBytes = Tile::box_bytes(Tile::kRows);
#pragma unroll 1
    for (int index = 0;; ++index) {
      const int tile = wait_for_tile();
      if (tile == Memory::kNoTile) break;
      Outputs<Tile> outputs;
      if constexpr (kIsLazy && kIsPipelined)
        compute_tile_pipelined<Softmax>(tile, outputs);
      else
        compute_tile<Softmax>(tile, outputs);
      if constexpr (kIsLazy) {
        if (!has_accurate_rows<Tile>(outputs) && role_.is_elected()) memory_.tile_list.mark_inaccurate(index);
      }
      const QueryTile position = group_position(tile);
      if (params_.args.gate.data != nullptr) apply_gate<Tile>(params_.args, role_, position, outputs);
      if (params_.args.addend.data != nullptr) add_addend<Tile>(params_.args, role_, position, outputs);
      store_rows<Tile>(role_, params_.out, memory_.out + group_offset_, kBoxBytes, position, outputs);
    }
    release_query();
    advance_query();
    // A recomputed tile must be stored after its first result.
    if (role_.is_elected()) tma_wait_group();
  }

 private:
  // There is at least one key tile, even if all its keys are masked.
  template <class Softmax>
  __device__ __forceinline__ void compute_tile(int tile, Outputs<Tile>& outputs) {
    const int key_count = params_.key_count(params_.tile_position(tile, Tile::kRows).batch);
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
      wgmma_wait_group();
      if constexpr (kBias == KeyBias::kAdded) add_bias(scores, params_.score_scale, keys_.bias(), role_.lane);
      keys_.release_earlier_values(!is_first);
      keys_.release_keys();
      finish_scores(scores, count, has_padding);
      softmax.process_tile(scores, is_first, accumulators, probabilities, recompute_of(tile, key, count));
      keys_.wait_values();
      issue_outputs<Tile, Softmax>(probabilities, keys_.values(), true, accumulators);
      key += kTileKeys;
    } while (key < key_count);
    finish_tile(softmax, tile, accumulators, outputs);
  }

  // The same, pipelined: S = Q K^T of the next tile is issued before O += P V of this one, which overlaps the
  // exponentials of the next. This needs registers for both, and pays off if products take longer than
  // exponentials (notes/attention.md, "128 columns: S before P V").
  template <class Softmax>
  __device__ __forceinline__ void compute_tile_pipelined(int tile, Outputs<Tile>& outputs) {
    const int key_count = params_.key_count(params_.tile_position(tile, Tile::kRows).batch);
    const bool has_padding = key_count < params_.args.key_length;
    int key = 0;
    Softmax softmax(params_);
    Scores<Tile> scores;
    Accumulators<Tile> accumulators;
    clear(accumulators);
    issue_next_scores(scores);
    wgmma_wait_group();
#pragma unroll 1
    for (;;) {
      Probabilities probabilities;
      float factor[2], sum[2];
      keys_.release_keys();
      finish_scores(scores, key_count - key, has_padding);
      softmax.start_tile(scores, key == 0, factor, sum);
      // Waiting for the values first keeps the wait for the products after the exponentials.
      compiler_fence(scores);
      compiler_fence(sum);
      keys_.wait_values();
      wgmma_wait_group();
      compiler_fence(scores);
      keys_.release_earlier_values(key > 0);
      softmax.finish_tile(scores, factor, sum, accumulators, probabilities,
                          recompute_of(tile, key, key_count - key));
      const MatrixDescriptor values = keys_.values();
      key += kTileKeys;
      if (key >= key_count) {
        issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
        break;
      }
      issue_next_scores(scores);
      issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
      wgmma_wait_group<1>();
    }
    finish_tile(softmax, tile, accumulators, outputs);
  }

  __device__ __forceinline__ void issue_next_scores(Scores<Tile>& scores) {
    keys_.wait_keys();
    issue_scores<Tile>(query_, Tile::box_bytes(Tile::kRows), keys_.next_keys(), scores);
    keys_.advance();
  }

  // Returns a function that computes the scores of a tile again, of which the first `count` keys count.
  __device__ __forceinline__ auto recompute_of(int tile, int key, int count) const {
    return [this, tile, key, count](auto& scores) {
      recompute_scores<Tile>(params_, WarpRole(), group_position(tile), key, scores);
      if (count < kTileKeys) mask_scores(scores, count, role_.lane);
    };
  }

  // Masks the scores of a tile, of which the first `count` keys count. After the last tile releases the
  // queries.
  __device__ __forceinline__ void finish_scores(Scores<Tile>& scores, int count, bool has_padding) const {
    if (count > kTileKeys) return;
    release_query();
    if (count < kTileKeys) mask_scores(scores, count, role_.lane);
    if (count < kTileKeys && has_padding) {
      keys_.wait_values();
      clear_rows<Tile>(keys_.values().address(), count);
    }
  }

  // The last products of values have been issued.
  template <class Softmax>
  __device__ __forceinline__ void finish_tile(const Softmax& softmax, int tile,
                                              const Accumulators<Tile>& accumulators,
                                              Outputs<Tile>& outputs) {
    wgmma_wait_group();
    keys_.release_values();
    advance_query();
    softmax.normalize(accumulators, Softmax::kValueScale, outputs);
    if (params_.args.lse != nullptr) {
      float lse[2];
      softmax.log_sum_exp(lse);
      store_lse(params_.args, role_, group_position(tile), lse);
    }
  }

  __device__ __forceinline__ QueryTile group_position(int tile) const {
    QueryTile position = params_.tile_position(tile, Tile::kRows);
    position.row += role_.group * kWarpGroupRows;
    return position;
  }

  __device__ __forceinline__ static void clear(Accumulators<Tile>& accumulators) {
#pragma unroll
    for (int i = 0; i < Tile::kAccumulators; ++i) accumulators[i] = 0;
  }

  // Waits for the next queries and returns the number of their tile.
  __device__ __forceinline__ int wait_for_tile() const {
    query_state_.wait_full(memory_.query_ring);
    // Read by the lane that later releases the queries. The reduction makes the value uniform for the
    // compiler.
    const int tile =
        role_.is_elected() ? static_cast<int>(load_shared(memory_.tile_of(query_state_.stage))) : INT_MIN;
    return __reduce_max_sync(~0u, tile);
  }
  __device__ __forceinline__ void release_query() const {
    if (role_.is_elected()) memory_.query_ring.empty(query_state_.stage).arrive();
  }
  __device__ __forceinline__ void advance_query() {
    query_ = query_.plus(query_state_.advance() * static_cast<int>(Memory::kQueryBytes));
  }

  const AttentionKernelParams& params_;
  const Memory& memory_;
  const WarpRole& role_;
  uint32_t group_offset_;
  MatrixDescriptor query_;  // the stage of query_state_
  RingState<typename Memory::QueryRing> query_state_;
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
  fence_mbarrier_init();
  __syncthreads();
  // With float16 values the previous kernel is the conversion, which has waited for all earlier kernels. The
  // loader waits for its results before it loads the first values.
  if (kRescaling == Rescaling::kOnline) griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<Tile::kLoadRegisters>();
    const auto load = [&]<class Loader>(std::type_identity<Loader>) {
      if (!Loader::is_loader_thread(role)) return;
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
    setmaxnreg_inc<Tile::kComputeRegisters>();
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
    prepare_workspace(operation, params, stream);
    params.reference_exponent = lazy_reference_exponent(params.args.key_length);
    blocks = std::max(blocks, static_cast<int>(ceil_divide(params.tiles, TileList::kCapacity)));
  }
  launch_kernel_with_shared_memory<stream_attention_kernel<Tile, kBias, kRescaling, Loaders...>>(
      operation, dim3(blocks), Tile::kThreads, params, stream, StreamMemory<Tile, kBias>::kBytes);
}

}  // namespace h100_diffusers_kernels
