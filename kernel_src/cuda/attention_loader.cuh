// Loaders fill shared memory: one thread with TMA, or a warp group element by element if TMA cannot read the
// tensors. A kernel has a list of loaders, each with its own threads.
#pragma once

#include "attention_mask.cuh"
#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

template <class Tile>
class TensorLoader {
 public:
  // Threads that arrive at the barrier of a query or value tile, and at the barrier of a key tile.
  static constexpr int kArrivals = 1, kKeyArrivals = 1;

  __device__ __forceinline__ static bool is_loader_thread(const WarpRole& role) { return role.thread == 0; }

  // key_rows: of a box
  static void map(const char* operation, AttentionKernelParams& params, int query_rows, int key_rows) {
    params.q = map_tensor(operation, q_of(params.args), params.args.dtype, query_rows);
    params.k = map_tensor(operation, k_of(params.args), params.args.dtype, key_rows);
    params.v = map_tensor(operation, v_of(params.args), params.args.dtype, key_rows);
  }

  __device__ __forceinline__ TensorLoader(const AttentionKernelParams& params, const WarpRole&)
      : params_(params), values_(&params.v) {}

  // Returns whether this is the first of the loader's threads.
  __device__ __forceinline__ bool is_first() const { return true; }

  __device__ __forceinline__ void use_half_values(bool is_half) {
    values_ = is_half ? &params_.half_values : &params_.v;
  }

  __device__ __forceinline__ void load_query(uint32_t tile, int rows, Barrier full,
                                             const QueryTile& position) const {
    copy(params_.q, tile, rows, full, position.head, position.row, position.batch);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t, Barrier full, const QueryTile& position,
                                            int key) const {
    copy(params_.k, tile, kTileKeys, full, params_.key_head(position.head), key, position.batch);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& position,
                                              int key) const {
    copy(*values_, tile, kTileKeys, full, params_.key_head(position.head), key, position.batch);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t, Barrier full, const QueryTile& position,
                                            const ListedTile& listed) const {
    copy(params_.k, tile, full, params_.key_head(position.head), position.batch, listed);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& position,
                                              const ListedTile& listed) const {
    copy(*values_, tile, full, params_.key_head(position.head), position.batch, listed);
  }

 private:
  // Both blocks of a listed tile.
  __device__ __forceinline__ static void copy(const MappedTensor& tensor, uint32_t tile, Barrier full,
                                              int head, int batch, const ListedTile& listed) {
    full.arrive_expect_tx(Tile::bytes(kTileKeys));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The reduction makes the key uniform for the compiler, as that of claim_each_tile.
      const int key = __reduce_max_sync(1u, listed.blocks[half].key());
#pragma unroll
      for (int box = 0; box < Tile::kBoxes; ++box)
        tma_load(tile + box * Tile::box_bytes(kTileKeys) + half * Tile::box_bytes(kListedKeys), tensor.map,
                 full, tensor.box(box * kBoxColumns, head, key, batch));
    }
  }

  // Rows beyond the tensor are 0.
  __device__ __forceinline__ static void copy(const MappedTensor& tensor, uint32_t tile, int rows,
                                              Barrier full, int head, int row, int batch) {
    full.arrive_expect_tx(Tile::bytes(rows));
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      tma_load(tile + box * Tile::box_bytes(rows), tensor.map, full,
               tensor.box(box * kBoxColumns, head, row, batch));
  }

  const AttentionKernelParams& params_;
  const MappedTensor* values_;
};

// One warp loads the biases of the keys.
template <class Tile>
class BiasLoader {
 public:
  static constexpr int kArrivals = 0, kKeyArrivals = 32;

  __device__ __forceinline__ static bool is_loader_thread(const WarpRole& role) { return role.warp == 1; }

  static void map(const char*, AttentionKernelParams&, int, int) {}

  __device__ __forceinline__ BiasLoader(const AttentionKernelParams& params, const WarpRole& role)
      : params_(params), lane_(role.lane) {}

  __device__ __forceinline__ void load_keys(uint32_t, uint32_t bias, Barrier full, const QueryTile& position,
                                            int key) const {
    store_bias<typename Tile::T>(params_.args, position.batch, key, bias, lane_, 32);
    full.arrive();
  }
  __device__ __forceinline__ void load_keys(uint32_t, uint32_t bias, Barrier full, const QueryTile& position,
                                            const ListedTile& listed) const {
    for (int half = 0; half < 2; ++half)
      store_bias<typename Tile::T>(params_.args, position.batch, listed.blocks[half].key(),
                                   bias + half * kListedKeys * 4, lane_, 32, kListedKeys);
    full.arrive();
  }
  template <class Keys>
  __device__ __forceinline__ void load_values(uint32_t, Barrier, const QueryTile&, const Keys&) const {}
  __device__ __forceinline__ bool is_first() const { return false; }

 private:
  const AttentionKernelParams& params_;
  int lane_;
};

// All threads of the warp group load tensors that TMA cannot read.
template <class Tile>
class ScalarLoader {
 public:
  static constexpr int kArrivals = kWarpGroupThreads, kKeyArrivals = kWarpGroupThreads;

  __device__ __forceinline__ static bool is_loader_thread(const WarpRole&) { return true; }

  static void map(const char*, AttentionKernelParams&, int, int) {}

  __device__ __forceinline__ ScalarLoader(const AttentionKernelParams& params, const WarpRole& role)
      : params_(params), thread_(role.thread) {}

  __device__ __forceinline__ bool is_first() const { return thread_ == 0; }

  __device__ __forceinline__ void load_query(uint32_t tile, int rows, Barrier full,
                                             const QueryTile& position) const {
    read(params_.args.q, params_.args.query_length, tile, rows, position.head, position.row, position.batch);
    arrive(full);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t bias, Barrier full,
                                            const QueryTile& position, int key) const {
    read(params_.args.k, params_.args.key_length, tile, kTileKeys, params_.key_head(position.head), key,
         position.batch);
    store_bias<T>(params_.args, position.batch, key, bias, thread_, kWarpGroupThreads);
    arrive(full);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& position,
                                              int key) const {
    read(params_.args.v, params_.args.key_length, tile, kTileKeys, params_.key_head(position.head), key,
         position.batch);
    arrive(full);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t bias, Barrier full,
                                            const QueryTile& position, const ListedTile& listed) const {
    read(params_.args.k, tile, position, listed);
    for (int half = 0; half < 2; ++half)
      store_bias<T>(params_.args, position.batch, listed.blocks[half].key(), bias + half * kListedKeys * 4,
                    thread_, kWarpGroupThreads, kListedKeys);
    arrive(full);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& position,
                                              const ListedTile& listed) const {
    read(params_.args.v, tile, position, listed);
    arrive(full);
  }

 private:
  using T = typename Tile::T;

  __device__ __forceinline__ static void arrive(Barrier full) {
    fence_proxy_async();
    full.arrive();
  }

  // Both blocks of a listed tile.
  __device__ __forceinline__ void read(const AttentionOperand& tensor, uint32_t tile,
                                       const QueryTile& position, const ListedTile& listed) const {
    for (int half = 0; half < 2; ++half)
      read(tensor, params_.args.key_length, tile + half * Tile::box_bytes(kListedKeys), kListedKeys,
           params_.key_head(position.head), listed.blocks[half].key(), position.batch,
           Tile::box_bytes(kTileKeys));
  }

  // Reads two columns at a time. Rows from `length` on and columns beyond the head are 0.
  __device__ __forceinline__ void read(const AttentionOperand& tensor, int64_t length, uint32_t tile,
                                       int rows, int head, int first_row, int batch) const {
    read(tensor, length, tile, rows, head, first_row, batch, Tile::box_bytes(rows));
  }
  // box_bytes: the distance between boxes
  __device__ __forceinline__ void read(const AttentionOperand& tensor, int64_t length, uint32_t tile,
                                       int rows, int head, int first_row, int batch,
                                       uint32_t box_bytes) const {
    constexpr int kPairs = Tile::kHeadDim / 2;
    const uint16_t* data = static_cast<const uint16_t*>(tensor.data) + batch * tensor.strides[0] +
                           first_row * tensor.strides[1] + head * tensor.strides[2];
#pragma unroll 1
    for (int i = thread_; i < rows * kPairs; i += kWarpGroupThreads) {
      const int row = i / kPairs, column = i % kPairs * 2;
      uint32_t pair = 0;
      if (first_row + row < length && column < params_.args.head_dim) {
        const uint16_t* source = data + row * tensor.strides[1] + column;
        pair = source[0] | uint32_t{source[1]} << 16;
      }
      const uint32_t target = tile + column / kBoxColumns * box_bytes +
                              swizzled_piece(row, column % kBoxColumns / 8) +
                              static_cast<uint32_t>(column % 8 * 2);
      store_shared(target, pair);
    }
  }

  const AttentionKernelParams& params_;
  int thread_;
};

}  // namespace h100_diffusers_kernels
