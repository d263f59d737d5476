// Tiles of attention: numbers of queries and keys, the warps that compute them, and their layout in shared
// memory.
#pragma once

#include "async_copy.cuh"
#include "barrier.cuh"
#include "fast_divisor.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "tensor_copy.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {

constexpr int kTileKeys = 128;  // A thread has 64 scores of a tile (kScores).
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

enum class KeyBias { kNone, kAdded };
// Which key tiles a query tile attends to: all in order, or those of a list (attention_key_lists.cuh).
enum class KeyOrder { kAll, kListed };
// Row sums of the probabilities: added by the threads, or multiplied by the tensor cores with an additional
// column of ones in the values, which then have one box.
enum class RowSums { kAdded, kMultiplied };

// kHeadDim is the largest head dim of the tile. Columns of smaller heads are followed by zeros, which TMA
// fills in.
//
// kGroups warp groups compute 64 queries each, and one loads. With 64 columns the exponentials take about as
// long as the matrix products, so there are three groups: one multiplies while two compute exponentials
// (notes/attention.md, "Instruction throughput beside wgmma"). With more O needs more registers, so there are
// two groups.
template <typename T_, int kHeadDim_, RowSums kRowSums = RowSums::kAdded,
          int kGroups_ = kHeadDim_ == 64 ? 3 : 2>
struct AttentionTile {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBoxes = (kHeadDim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kGroups = kGroups_;
  static constexpr int kRows = kGroups * kWarpGroupRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpGroupThreads;
  static constexpr int kComputeWarps = kGroups * kWarpGroupWarps;
  // Threads that arrive when keys have been read: one of each warp, or all if all have read biases.
  template <KeyBias kBias>
  static constexpr int kKeyReaders = kComputeWarps * (kBias == KeyBias::kAdded ? 32 : 1);
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : 232;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;
  // setmaxnreg takes multiples of 8.
  static_assert(kComputeRegisters % 8 == 0 && kLoadRegisters % 8 == 0);
  static_assert((kGroups * kComputeRegisters + kLoadRegisters) * kWarpGroupThreads <=
                kMultiprocessorRegisters);
  static constexpr bool kHasOnes = kRowSums == RowSums::kMultiplied;
  static_assert(!kHasOnes || kBoxes == 1);
  static constexpr int kColumns = kHeadDim + (kHasOnes ? 8 : 0);
  // As many rows of ones as the inner dimension of a product.
  static constexpr uint32_t kOnesBytes = kHasOnes ? kWgmmaDepth * kBoxRowBytes : 0;
  // Elements of a thread.
  static constexpr int kOutputs = kWarpGroupRows * kHeadDim / kWarpGroupThreads;
  static constexpr int kAccumulators = kWarpGroupRows * kColumns / kWarpGroupThreads;
  static constexpr int kScores = kWarpGroupRows * kTileKeys / kWarpGroupThreads;

  static constexpr uint32_t box_bytes(int rows) { return static_cast<uint32_t>(rows * kBoxRowBytes); }
  static constexpr uint32_t bytes(int rows) { return kBoxes * box_bytes(rows); }
};

// Descriptor of a value tile, including its column of ones if the Tile has one. ones: address of
// Tile::kOnesBytes.
template <class Tile>
__device__ __forceinline__ MatrixDescriptor values_at(uint32_t address, uint32_t ones) {
  return MatrixDescriptor::across_rows(address, Tile::kHasOnes ? ones : address + Tile::box_bytes(kTileKeys));
}
// bytes: offset in a box
template <class Tile>
__device__ __forceinline__ MatrixDescriptor values_plus(MatrixDescriptor values, int bytes) {
  return Tile::kHasOnes ? values.first_box_plus(bytes) : values.plus(bytes);
}

// All threads of the block call it, and a barrier must follow.
template <class Tile>
__device__ __forceinline__ void fill_ones(uint32_t address) {
  fill_shared(address, Tile::kOnesBytes, pack_pair<typename Tile::T>(1, 1));
  fence_proxy_async();
}

// Position of a query tile: 64 or more queries of one head.
struct QueryTile {
  int batch, head, row;
};

constexpr int kListedKeys = kTileKeys / 2;  // keys of a block

// Lists of key tiles (attention_key_lists.cuh), in pairs of words: for each query tile a header, followed by
// its key tiles.
struct KeyLists {
  uint2* data;
  int list_pairs;             // pairs from one list to the next
  int rows, query_tiles;      // queries of a tile, tiles of a head
  int batch_step, head_step;  // lists from one batch entry and head to the next; 0 broadcasts

  __device__ __forceinline__ const uint2* of(const QueryTile& position) const {
    const int list = position.batch * batch_step + position.head * head_step + position.row / rows;
    return data + static_cast<int64_t>(list) * list_pairs;
  }
};

inline int64_t query_tiles_of(const AttentionParams& args, int rows) {
  return args.batch * args.heads * ceil_divide(args.query_length, rows);
}

// Returns the number of keys of the sample that are not masked.
__device__ __forceinline__ int key_count_of(const AttentionParams& args, int64_t batch) {
  const int length = static_cast<int>(args.key_length);
  return args.key_lengths == nullptr ? length : min(max(args.key_lengths[batch], 0), length);
}

// Parameters of the kernels.
struct AttentionKernelParams {
  MappedTensor q, k, v, out;
  MappedTensor half_values;  // float16 values of attention_values.cuh
  int* claimed_tiles;        // number of claims of all blocks (attention_schedule.cuh)
  AttentionParams args;
  float score_scale;                     // converts products of query and key to logarithms to base 2
  int reference_exponent;                // of attention_lazy_softmax.cuh
  int tiles;                             // query tiles of all heads
  FastDivisor query_tiles, query_heads;  // tiles of a head, heads of a sample
  FastDivisor group_heads;               // query heads of a key head
  KeyLists lists;
  int64_t list_offset;  // in the workspace

  void set_tiles(int rows) {
    query_tiles.set(static_cast<uint32_t>(ceil_divide(args.query_length, rows)));
    query_heads.set(static_cast<uint32_t>(args.heads));
    group_heads.set(static_cast<uint32_t>(args.heads / args.key_heads));
    tiles = static_cast<int>(query_tiles_of(args, rows));
  }

  __device__ __forceinline__ QueryTile tile_position(int tile, int rows) const {
    const uint32_t head = query_tiles.divide(tile), batch = query_heads.divide(head);
    return {static_cast<int>(batch), static_cast<int>(head - batch * query_heads.divisor),
            (tile - static_cast<int>(head * query_tiles.divisor)) * rows};
  }

  __device__ __forceinline__ int key_head(int head) const {
    return static_cast<int>(group_heads.divide(static_cast<uint32_t>(head)));
  }

  __device__ __forceinline__ int key_count(int batch) const { return key_count_of(args, batch); }
};

// The tensors in the form of tensor_copy.cuh.
inline HeadsTensor q_of(const AttentionParams& p) {
  return {p.q.data, p.batch,    p.query_length,
          p.heads,  p.head_dim, {p.q.strides[0], p.q.strides[1], p.q.strides[2]}};
}
inline HeadsTensor key_tensor(const AttentionParams& p, const AttentionOperand& operand) {
  return {operand.data, p.batch,    p.key_length,
          p.key_heads,  p.head_dim, {operand.strides[0], operand.strides[1], operand.strides[2]}};
}
inline HeadsTensor k_of(const AttentionParams& p) { return key_tensor(p, p.k); }
inline HeadsTensor v_of(const AttentionParams& p) { return key_tensor(p, p.v); }
inline HeadsTensor contiguous_tensor(const void* data, int64_t batch, int64_t seq, int64_t heads,
                                     int64_t head_dim) {
  const int64_t row = heads * head_dim;
  return {data, batch, seq, heads, head_dim, {seq * row, row, head_dim}};
}
inline HeadsTensor out_of(const AttentionParams& p) {
  return {p.out.data, p.batch,    p.query_length,
          p.heads,    p.head_dim, {p.out.strides[0], p.out.strides[1], p.out.strides[2]}};
}

}  // namespace h100_diffusers_kernels
