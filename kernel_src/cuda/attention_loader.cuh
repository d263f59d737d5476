// Loaders fill shared memory: the copy engine does, told by one thread, or, from tensors that it does not
// take, a warp group does element by element. A kernel has a list of loaders, each with threads of its own.
#pragma once

#include "attention_mask.cuh"
#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

template <class Tile>
class TensorLoader {
 public:
  // So many threads arrive at the barrier of a tile of queries or values, and at that of keys.
  static constexpr int kArrivals = 1, kKeyArrivals = 1;

  __device__ __forceinline__ static bool is_mine(const WarpRole& role) { return role.thread == 0; }

  static void map(const char* operation, AttentionKernelParams& params, int query_rows) {
    params.q = map_tensor(operation, q_of(params.args), params.args.dtype, query_rows);
    params.k = map_tensor(operation, k_of(params.args), params.args.dtype, kTileKeys);
    params.v = map_tensor(operation, v_of(params.args), params.args.dtype, kTileKeys);
  }

  __device__ __forceinline__ TensorLoader(const AttentionKernelParams& params, const WarpRole&)
      : params_(params), values_(&params.v) {}

  // Tells whether this is the first of the loader's threads.
  __device__ __forceinline__ bool is_first() const { return true; }

  __device__ __forceinline__ void take_half_values(bool is_half) {
    values_ = is_half ? &params_.half_values : &params_.v;
  }

  __device__ __forceinline__ void load_query(uint32_t tile, int rows, Barrier full,
                                             const QueryTile& place) const {
    copy(params_.q, tile, rows, full, place.head, place.row, place.batch);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t, Barrier full, const QueryTile& place,
                                            int key) const {
    copy(params_.k, tile, kTileKeys, full, params_.key_head(place.head), key, place.batch);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& place,
                                              int key) const {
    copy(*values_, tile, kTileKeys, full, params_.key_head(place.head), key, place.batch);
  }

 private:
  // Rows beyond the tensor become 0.
  __device__ __forceinline__ static void copy(const MappedTensor& tensor, uint32_t tile, int rows,
                                              Barrier full, int head, int row, int batch) {
    full.arrive_and_expect(Tile::bytes(rows));
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      tensor_load(tile + box * Tile::box_bytes(rows), tensor.map, full,
                  tensor.box(box * kBoxColumns, head, row, batch));
  }

  const AttentionKernelParams& params_;
  const MappedTensor* values_;
};

// A warp loads the biases of the keys.
template <class Tile>
class BiasLoader {
 public:
  static constexpr int kArrivals = 0, kKeyArrivals = 32;

  __device__ __forceinline__ static bool is_mine(const WarpRole& role) { return role.warp == 1; }

  static void map(const char*, AttentionKernelParams&, int) {}

  __device__ __forceinline__ BiasLoader(const AttentionKernelParams& params, const WarpRole& role)
      : params_(params), lane_(role.lane) {}

  __device__ __forceinline__ void load_keys(uint32_t, uint32_t bias, Barrier full, const QueryTile& place,
                                            int key) const {
    store_bias<typename Tile::T>(params_.args, place.batch, key, bias, lane_, 32);
    full.arrive();
  }
  __device__ __forceinline__ void load_values(uint32_t, Barrier, const QueryTile&, int) const {}

 private:
  const AttentionKernelParams& params_;
  int lane_;
};

// All threads of the group load all of it.
template <class Tile, Access kAccess>
class ElementLoader {
  static_assert(kAccess == Access::kScalar);

 public:
  static constexpr int kArrivals = kWarpGroupThreads, kKeyArrivals = kWarpGroupThreads;

  __device__ __forceinline__ static bool is_mine(const WarpRole&) { return true; }

  static void map(const char*, AttentionKernelParams&, int) {}

  __device__ __forceinline__ ElementLoader(const AttentionKernelParams& params, const WarpRole& role)
      : params_(params), thread_(role.thread) {}

  __device__ __forceinline__ bool is_first() const { return thread_ == 0; }

  __device__ __forceinline__ void load_query(uint32_t tile, int rows, Barrier full,
                                             const QueryTile& place) const {
    read(params_.args.q, params_.args.query_length, tile, rows, place.head, place.row, place.batch);
    arrive(full);
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, uint32_t bias, Barrier full,
                                            const QueryTile& place, int key) const {
    read(params_.args.k, params_.args.key_length, tile, kTileKeys, params_.key_head(place.head), key,
         place.batch);
    store_bias<T>(params_.args, place.batch, key, bias, thread_, kWarpGroupThreads);
    arrive(full);
  }
  __device__ __forceinline__ void load_values(uint32_t tile, Barrier full, const QueryTile& place,
                                              int key) const {
    read(params_.args.v, params_.args.key_length, tile, kTileKeys, params_.key_head(place.head), key,
         place.batch);
    arrive(full);
  }

 private:
  using T = typename Tile::T;

  __device__ __forceinline__ static void arrive(Barrier full) {
    fence_shared_stores();
    full.arrive();
  }

  // Reads two columns at a time; rows from `length` on become 0.
  __device__ __forceinline__ void read(const AttentionOperand& tensor, int64_t length, uint32_t tile,
                                       int rows, int head, int first_row, int batch) const {
    constexpr int kPairs = Tile::kHeadDim / 2;
    const uint16_t* data = static_cast<const uint16_t*>(tensor.data) + batch * tensor.strides[0] +
                           first_row * tensor.strides[1] + head * tensor.strides[2];
#pragma unroll 1
    for (int i = thread_; i < rows * kPairs; i += kWarpGroupThreads) {
      const int row = i / kPairs, column = i % kPairs * 2;
      uint32_t pair = 0;
      if (first_row + row < length) {
        const uint16_t* source = data + row * tensor.strides[1] + column;
        pair = source[0] | uint32_t{source[1]} << 16;
      }
      const uint32_t target = tile + column / kBoxColumns * Tile::box_bytes(rows) +
                              swizzled_piece(row, column % kBoxColumns / 8) +
                              static_cast<uint32_t>(column % 8 * 2);
      store_shared(target, pair);
    }
  }

  const AttentionKernelParams& params_;
  int thread_;
};

}  // namespace h100_diffusers_kernels
