// The matrix products of a warp group for its 64 queries and one key tile: S = Q K^T, and O += P V with the
// probabilities P of the softmax of S. Both are asynchronous until wgmma_wait_group returns.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

// Issues S = Q K^T. query_box_bytes: the distance between boxes of queries.
template <class Tile>
__device__ __forceinline__ void issue_scores(MatrixDescriptor query, int query_box_bytes,
                                             MatrixDescriptor keys, Scores<Tile>& scores) {
  constexpr int kSteps = kBoxColumns / kWgmmaDepth;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / kWgmmaDepth; ++step) {
    const int box = step / kSteps, column_bytes = step % kSteps * kWgmmaDepth * 2;
    Wgmma<typename Tile::T, kTileKeys>::a_from_shared(
        scores, query.plus(box * query_box_bytes + column_bytes),
        keys.plus(box * Tile::box_bytes(kTileKeys) + column_bytes), step > 0);
  }
  wgmma_commit_group();
}

// Issues O += P V, or O = P V without `accumulate`.
template <class Tile, class Softmax>
__device__ __forceinline__ void issue_outputs(const Probabilities& probabilities, MatrixDescriptor values,
                                              bool accumulate, Accumulators<Tile>& accumulators) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kTileKeys / kWgmmaDepth; ++step)
    Wgmma<typename Softmax::Probability, Tile::kColumns>::a_from_registers(
        accumulators, probabilities[step], values_plus<Tile>(values, Tile::box_bytes(step * kWgmmaDepth)),
        accumulate || step > 0);
  wgmma_commit_group();
}

// Scores of one warp and key tile, computed again from global memory. A warp calls this without the other
// warps of its group, which wgmma would need, and after the tiles in shared memory may have been overwritten.

// Computes S = Q K^T of this warp's 16 queries and the keys from `key` on, in the layout of wgmma. All rows
// are aligned to 16 bytes.
//
// position: the position of the warp group's 64 queries
// key_of: returns the key of a row of the tile
//
// A lane loads 8 adjacent elements of a row, which count as two pairs of two products: products may take the
// columns in any order if both matrices have the same one.
template <class Tile, class KeyOf>
__device__ __forceinline__ void recompute_scores(const AttentionKernelParams& params, const WarpRole& role,
                                                 const QueryTile& position, const KeyOf& key_of,
                                                 Scores<Tile>& scores) {
  using T = typename Tile::T;
  constexpr int kPackColumns = 8, kLaneColumns = 4 * kPackColumns;
  constexpr int kSteps = (Tile::kHeadDim + kLaneColumns - 1) / kLaneColumns;
  const AttentionParams& args = params.args;
  const int lane_row = role.lane / 4, lane_column = role.lane % 4 * kPackColumns;
  // Rows beyond the last one have no effect.
  const auto row_of = [&](const AttentionOperand& x, int head, int64_t row, int64_t rows) {
    return static_cast<const T*>(x.data) + position.batch * x.strides[0] + min(row, rows - 1) * x.strides[1] +
           head * x.strides[2] + lane_column;
  };
  const auto load = [&](const T* row, int step) {
    const int column = step * kLaneColumns;
    return column + lane_column < args.head_dim ? *reinterpret_cast<const uint4*>(row + column)
                                                : make_uint4(0, 0, 0, 0);
  };
  const int key_head = params.key_head(position.head);
  const T* query[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    query[i] =
        row_of(args.q, position.head, position.row + role.warp * 16 + lane_row + 8 * i, args.query_length);
  uint4 queries[kSteps][2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 2; ++i) queries[step][i] = load(query[i], step);
  // In local memory, so that the loop can be short and needs few registers.
  float4 parts[Tile::kScores / 4];
#pragma unroll 4
  for (int i = 0; i < Tile::kScores / 4; ++i) {
    const T* keys = row_of(args.k, key_head, key_of(8 * i) + lane_row, args.key_length);
    float part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint4 upper = queries[step][0], lower = queries[step][1], pack = load(keys, step);
      multiply_16x8<T>(part, {upper.x, lower.x, upper.y, lower.y}, pack.x, pack.y);
      multiply_16x8<T>(part, {upper.z, lower.z, upper.w, lower.w}, pack.z, pack.w);
    }
    parts[i] = make_float4(part[0], part[1], part[2], part[3]);
  }
#pragma unroll
  for (int i = 0; i < Tile::kScores / 4; ++i) {
    scores[4 * i] = parts[i].x;
    scores[4 * i + 1] = parts[i].y;
    scores[4 * i + 2] = parts[i].z;
    scores[4 * i + 3] = parts[i].w;
  }
}

}  // namespace h100_diffusers_kernels
