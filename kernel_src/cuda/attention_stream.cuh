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
template <class Tile, KeyBias kBias, KeyOrder kOrder>
class StreamedKeys {
 public:
  using Memory = StreamMemory<Tile, kBias, kOrder>;

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
  // The list's next tile, whose keys have arrived.
  __device__ __forceinline__ ListedTile next_tile() const {
    return {{{load_word(memory_.listed_tile_of(next_.stage))},
             {load_word(memory_.listed_tile_of(next_.stage) + 4)}}};
  }
  // Leaves out the next tile, whose keys have arrived. All earlier ones are released.
  __device__ __forceinline__ void skip(const ListedTile& tile, int key_count, bool has_padding) {
    if (kBias == KeyBias::kAdded || role_.is_elected()) memory_.key_ring.empty(next_.stage).arrive();
    next_.wait_full(memory_.value_ring);
    clear_padding(tile, next_values_, key_count, has_padding);
    if (role_.is_elected()) memory_.value_ring.empty(next_.stage).arrive();
    const int bytes = next_.advance() * static_cast<int>(Memory::kKeyBytes);
    next_keys_ = next_keys_.plus(bytes);
    next_values_ = next_values_.plus(bytes);
    keys_arrived_ = false;
  }
  // Clears the values of a listed tile, which have arrived, beyond the sample's keys. All groups call it.
  __device__ __forceinline__ static void clear_padding(const ListedTile& tile, MatrixDescriptor values,
                                                       int key_count, bool has_padding) {
    if (!has_padding) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int count = key_count - tile.blocks[half].key(), first = half * kListedKeys;
      if (count > 0 && count < kListedKeys)
        clear_rows<Tile>(values.address(), first + count, first + kListedKeys);
    }
  }
  // A word that the loader has stored in shared memory. The lane that later releases its stage reads it; the
  // reduction makes it uniform for the compiler.
  __device__ __forceinline__ uint32_t load_word(uint32_t address) const {
    return __reduce_or_sync(~0u, role_.is_elected() ? load_shared(address) : 0);
  }

  __device__ __forceinline__ int group() const { return role_.group; }
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

// The order of a query tile's key tiles. A tile becomes the current one by begin(), advance() or
// find_later().

// All keys. There is at least one tile, even if all its keys are masked.
struct AllKeys {
  int key_count;
  bool has_padding;
  int key = 0;  // the first one of the current tile

  template <class Streamed>
  __device__ __forceinline__ AllKeys(const AttentionKernelParams& params, int batch, const Streamed&,
                                     uint32_t)
      : key_count(params.key_count(batch)), has_padding(key_count < params.args.key_length) {}

  __device__ __forceinline__ constexpr bool begin() const { return true; }
  // Returns whether the next tile directly follows.
  __device__ __forceinline__ bool advance() {
    key += kTileKeys;
    return key < key_count;
  }
  // Returns whether there is a later one. All products have been issued.
  __device__ __forceinline__ constexpr bool find_later() const { return false; }
  __device__ __forceinline__ bool is_first() const { return key == 0; }
  // Whether the values of the tile before are still in use.
  __device__ __forceinline__ bool has_earlier() const { return key > 0; }
};

// The tiles of a list that a warp group attends to.
template <class Streamed>
class ListedKeys {
 public:
  int key_count;

  // header: address in shared memory
  __device__ __forceinline__ ListedKeys(const AttentionKernelParams& params, int batch, Streamed& streamed,
                                        uint32_t header)
      : key_count(params.key_count(batch)),
        params_(params),
        streamed_(streamed),
        remaining_(static_cast<int>(streamed.load_word(header))),
        plain_(static_cast<int>(streamed.load_word(header + 4))) {}

  __device__ __forceinline__ bool begin() {
    is_first_ = true;
    return find();
  }
  __device__ __forceinline__ bool advance() {
    is_first_ = false;
    if (!is_next_attended()) return false;
    has_earlier_ = true;
    take();
    return true;
  }
  __device__ __forceinline__ bool find_later() {
    wgmma_wait_group();
    streamed_.release_values();
    has_earlier_ = false;
    return find();
  }
  __device__ __forceinline__ bool is_first() const { return is_first_; }
  __device__ __forceinline__ bool has_earlier() const { return has_earlier_; }
  __device__ __forceinline__ bool has_padding() const { return key_count < params_.args.key_length; }

  __device__ __forceinline__ bool is_last() const { return remaining_ == 0; }
  __device__ __forceinline__ bool is_plain() const { return plain_ >= 0; }
  // The current tile, which is not plain.
  __device__ __forceinline__ const ListedTile& tile() const { return tile_; }
  // The current tile, from its list in global memory.
  __device__ __forceinline__ ListedTile read_tile(const uint2* list) const {
    return listed_tile(list, list_header(list).tiles - 1 - remaining_);
  }

 private:
  __device__ __forceinline__ void take() {
    --remaining_;
    --plain_;
  }
  // Waits for the next keys.
  __device__ __forceinline__ bool is_next_attended() {
    if (plain_ > 0) return true;
    if (remaining_ == 0) return false;
    streamed_.wait_keys();
    tile_ = streamed_.next_tile();
    return tile_.is_attended(streamed_.group());
  }
  __device__ __forceinline__ bool find() {
#pragma unroll 1
    for (; !is_next_attended(); take()) {
      if (remaining_ == 0) return false;
      streamed_.skip(tile_, key_count, has_padding());
    }
    take();
    return true;
  }

  const AttentionKernelParams& params_;
  Streamed& streamed_;
  int remaining_, plain_;  // tiles after the current one; plain ones too, below 0 if the current one is not
  bool is_first_ = true, has_earlier_ = false;
  ListedTile tile_;
};

template <class Tile, KeyBias kBias, KeyOrder kOrder>
class StreamCompute {
 public:
  using Memory = StreamMemory<Tile, kBias, kOrder>;

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
        if (!has_accurate_rows<Tile>(outputs, has_keys_) && role_.is_elected())
          memory_.tile_list.mark_inaccurate(index);
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
  static constexpr bool kIsListed = kOrder == KeyOrder::kListed;
  // With lists and one stage, the queries are released before the end of a tile. The other stage makes up for
  // a later release, which needs fewer registers.
  static constexpr bool kReleasesEarly = Memory::QueryRing::kStages == 1;
  using Streamed = StreamedKeys<Tile, kBias, kOrder>;
  using Order = std::conditional_t<kIsListed, ListedKeys<Streamed>, AllKeys>;

  template <class Softmax>
  __device__ __forceinline__ void compute_tile(int tile, Outputs<Tile>& outputs) {
    Order order = order_of(tile);
    Softmax softmax(params_);
    Scores<Tile> scores;
    Probabilities probabilities;
    Accumulators<Tile> accumulators;
    clear(accumulators);
    if (order.begin()) {
#pragma unroll 1
      do {
        issue_next_scores(scores);
        wgmma_wait_group();
        if constexpr (kBias == KeyBias::kAdded)
          add_bias(scores, params_.score_scale, keys_.bias(), role_.lane);
        keys_.release_earlier_values(order.has_earlier());
        keys_.release_keys();
        finish_scores(scores, tile, order);
        if constexpr (kIsListed)
          if (order.is_first() && !order.is_plain()) softmax.expect_masked_rows();
        softmax.process_tile(scores, order.is_first(), accumulators, probabilities,
                             recompute_of(tile, order));
        keys_.wait_values();
        issue_outputs<Tile, Softmax>(probabilities, keys_.values(), true, accumulators);
      } while (order.advance() || order.find_later());
    }
    finish_tile(softmax, tile, order, accumulators, outputs);
  }

  // The same, pipelined: S = Q K^T of the next tile is issued before O += P V of this one, which overlaps the
  // exponentials of the next. This needs registers for both, and pays off if products take longer than
  // exponentials (notes/attention.md, "128 columns: S before P V").
  template <class Softmax>
  __device__ __forceinline__ void compute_tile_pipelined(int tile, Outputs<Tile>& outputs) {
    Order order = order_of(tile);
    Softmax softmax(params_);
    Scores<Tile> scores;
    Accumulators<Tile> accumulators;
    clear(accumulators);
    if (order.begin()) {
      issue_next_scores(scores);
      wgmma_wait_group();
#pragma unroll 1
      for (;;) {
        Probabilities probabilities;
        float factor[2], sum[2];
        keys_.release_keys();
        finish_scores(scores, tile, order);
        if constexpr (kIsListed)
          if (order.is_first() && !order.is_plain()) softmax.expect_masked_rows();
        softmax.start_tile(scores, order.is_first(), factor, sum);
        // Waiting for the values first keeps the wait for the products after the exponentials.
        compiler_fence(scores);
        compiler_fence(sum);
        keys_.wait_values();
        wgmma_wait_group();
        compiler_fence(scores);
        keys_.release_earlier_values(order.has_earlier());
        softmax.finish_tile(scores, factor, sum, accumulators, probabilities, recompute_of(tile, order));
        const MatrixDescriptor values = keys_.values();
        if (!order.advance()) {
          issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
          if (!order.find_later()) break;
          issue_next_scores(scores);
          wgmma_wait_group();
          continue;
        }
        issue_next_scores(scores);
        issue_outputs<Tile, Softmax>(probabilities, values, true, accumulators);
        wgmma_wait_group<1>();
      }
    }
    finish_tile(softmax, tile, order, accumulators, outputs);
  }

  __device__ __forceinline__ Order order_of(int tile) {
    const int batch = params_.tile_position(tile, Tile::kRows).batch;
    holds_query_ = true;
    return Order(params_, batch, keys_, kIsListed ? memory_.header_of(query_state_.stage) : 0);
  }

  __device__ __forceinline__ void issue_next_scores(Scores<Tile>& scores) {
    keys_.wait_keys();
    issue_scores<Tile>(query_, Tile::box_bytes(Tile::kRows), keys_.next_keys(), scores);
    keys_.advance();
  }

  // Returns a function that computes the scores of the current tile again.
  __device__ __forceinline__ auto recompute_of(int tile, const AllKeys& order) const {
    const int key = order.key, count = order.key_count - key;
    return [this, tile, key, count](auto& scores) {
      recompute_scores<Tile>(
          params_, WarpRole(), group_position(tile), [key](int row) { return key + row; }, scores);
      if (count < kTileKeys) mask_scores(scores, count, role_.lane);
    };
  }
  __device__ __forceinline__ auto recompute_of(int tile, const ListedKeys<Streamed>& order) const {
    return [this, tile, &order](auto& scores) {
      const QueryTile position = group_position(tile);
      const ListedTile listed = order.read_tile(params_.lists.of(position));
      recompute_scores<Tile>(
          params_, WarpRole(), position, [listed](int row) { return listed.key_of(row); }, scores);
      if (!order.is_plain())
        mask_listed_scores(scores, params_.args, role_, position, listed, order.key_count);
    };
  }

  // Masks the scores of the current tile. After the last tile releases the queries.
  __device__ __forceinline__ void finish_scores(Scores<Tile>& scores, int, const AllKeys& order) const {
    const int count = order.key_count - order.key;
    if (count > kTileKeys) return;
    release_query();
    if (count < kTileKeys) mask_scores(scores, count, role_.lane);
    if (count < kTileKeys && order.has_padding) {
      keys_.wait_values();
      clear_rows<Tile>(keys_.values().address(), count);
    }
  }
  __device__ __forceinline__ void finish_scores(Scores<Tile>& scores, int tile,
                                                const ListedKeys<Streamed>& order) {
    if (kReleasesEarly && order.is_last()) {
      release_query();
      holds_query_ = false;
    }
    if (order.is_plain()) return;
    mask_listed_scores(scores, params_.args, role_, group_position(tile), order.tile(), order.key_count);
    if (order.has_padding()) {
      keys_.wait_values();
      Streamed::clear_padding(order.tile(), keys_.values(), order.key_count, true);
    }
  }

  // The last products of values have been issued.
  template <class Softmax>
  __device__ __forceinline__ void finish_tile(const Softmax& softmax, int tile, const Order&,
                                              const Accumulators<Tile>& accumulators,
                                              Outputs<Tile>& outputs) {
    if constexpr (kIsListed) {  // The values have been released.
      if (!kReleasesEarly || holds_query_) release_query();
      softmax.find_rows_with_keys(has_keys_);
    } else {
      wgmma_wait_group();
      keys_.release_values();
    }
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
  Streamed keys_;
  bool holds_query_ = true;          // with lists: whether the queries are still to be released
  bool has_keys_[2] = {true, true};  // with lists: whether the rows of the last tile have keys
};

template <class Tile, KeyBias kBias, Rescaling kRescaling, KeyOrder kOrder, class... Loaders>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    stream_attention_kernel(const __grid_constant__ AttentionKernelParams params) {
  using Memory = StreamMemory<Tile, kBias, kOrder>;
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
  // loader waits for its results before it loads the first values. With lists it is the kernel that makes
  // them.
  if (kRescaling == Rescaling::kOnline || kOrder == KeyOrder::kListed) griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<Tile::kLoadRegisters>();
    const auto load = [&]<class Loader>(std::type_identity<Loader>) {
      if (!Loader::is_loader_thread(role)) return;
      StreamLoad<Tile, kBias, kOrder, Loader> stream(params, memory, role);
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
    StreamCompute<Tile, kBias, kOrder> stream(params, memory, role);
    if constexpr (kRescaling == Rescaling::kLazy) {
      stream.template run<LazySoftmax<Tile>>();
      if (role.is_elected()) memory.end_of_pass.arrive();
    }
    stream.template run<OnlineSoftmax<Tile, kBias>>();
  }
}

template <class Tile, KeyBias kBias, Rescaling kRescaling, KeyOrder kOrder, class... Loaders>
void launch_stream_attention(const char* operation, AttentionKernelParams& params, int multiprocessors,
                             Stream stream) {
  constexpr int kBlockKeys = kOrder == KeyOrder::kListed ? kListedKeys : kTileKeys;
  (Loaders::map(operation, params, Tile::kRows, kBlockKeys), ...);
  params.set_tiles(Tile::kRows);
  int blocks = std::min(multiprocessors, params.tiles);
  if constexpr (kRescaling == Rescaling::kLazy) {
    prepare_workspace(operation, params, kBlockKeys, stream);
    params.reference_exponent = lazy_reference_exponent(params.args.key_length);
    blocks = std::max(blocks, static_cast<int>(ceil_divide(params.tiles, TileList::kCapacity)));
  }
  if constexpr (kOrder == KeyOrder::kListed)
    params.lists = make_key_lists(operation, params.args, Tile::kGroups, params.list_offset, stream);
  launch_kernel_with_shared_memory<stream_attention_kernel<Tile, kBias, kRescaling, kOrder, Loaders...>>(
      operation, dim3(blocks), Tile::kThreads, params, stream, StreamMemory<Tile, kBias, kOrder>::kBytes);
}

}  // namespace h100_diffusers_kernels
