// Masks of keys: the end of the sequence, the length of a sample, and a bias for each key.
#pragma once

#include "attention_key_lists.cuh"
#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

// Sets the scores of keys from `count` on to -infinity.
template <int kScores>
__device__ __forceinline__ void mask_scores(float (&scores)[kScores], int count, int lane) {
  const int own = count - lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    if (i / 4 * 8 + i % 2 >= own) scores[i] = -INFINITY;
}

// Sets the scores of keys that a warp group does not attend to to -infinity.
//
// position: the position of the warp group's queries
// key_count: number of keys of the sample that are not masked
template <int kScores>
__device__ __forceinline__ void mask_listed_scores(float (&scores)[kScores], const AttentionParams& args,
                                                   const WarpRole& role, const QueryTile& position,
                                                   const ListedTile& tile, int key_count) {
  constexpr int kHalf = kScores / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const ListedBlock block = tile.blocks[half];
    const int key = block.key() + role.lane % 4 * 2;
    int first[2] = {0, 0}, end[2];
    end[0] = end[1] = block.is_attended(role.group) ? key_count - key : 0;
    if (block.is_bounded(role.group)) {
      const int2* bounds = reinterpret_cast<const int2*>(args.blocks.bounds) +
                           position.batch * args.blocks.bounds_strides[0] +
                           position.head * args.blocks.bounds_strides[1];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int query = min(position.row + role.output_row(row), static_cast<int>(args.query_length) - 1);
        const int2 bound = bounds[query];
        // Bounds may be any int.
        first[row] = max(bound.x, key) - key;
        end[row] = min(max(bound.y, key) - key, end[row]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int column = i / 4 * 8 + i % 2, row = i / 2 % 2;
      if (column < first[row] || column >= end[row]) scores[half * kHalf + i] = -INFINITY;
    }
  }
}

// Sets scores to score * scale + bias. The biases of the tile are floats in shared memory. Like the resulting
// scores they are logarithms to base 2.
template <int kScores>
__device__ __forceinline__ void add_bias(float (&scores)[kScores], float scale, uint32_t bias, int lane) {
#pragma unroll
  for (int i = 0; i < kScores; i += 4) {
    float pair[2];
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair[0]), "=f"(pair[1])
                 : "r"(bias + static_cast<uint32_t>(lane % 4 * 8 + i * 8)));
#pragma unroll
    for (int k = 0; k < 4; ++k) scores[i + k] = __fmaf_rn(scores[i + k], scale, pair[k % 2]);
  }
}

// Finite biases stay finite, because the softmax of a row with equal lowest scores is uniform.
constexpr float kLargestBias = 3.3e38f;

// Writes the biases of a key tile to shared memory, as thread `thread` of `threads`.
template <typename T>
__device__ __forceinline__ void store_bias(const AttentionParams& args, int batch, int key, uint32_t bias,
                                           int thread, int threads, int keys = kTileKeys) {
  const int count =
      args.key_bias == nullptr ? 0 : static_cast<int>(min(args.key_length - key, static_cast<int64_t>(keys)));
  const int64_t offset = batch * args.key_bias_stride + key;
#pragma unroll 1
  for (int i = thread; i < keys; i += threads) {
    float value = 0;
    if (i < count)
      value = args.key_bias_is_float32 ? static_cast<const float*>(args.key_bias)[offset + i]
                                       : to_float(static_cast<const T*>(args.key_bias)[offset + i]);
    if (isfinite(value)) value = fminf(fmaxf(value * kLog2E, -kLargestBias), kLargestBias);
    store_shared(bias + static_cast<uint32_t>(i * 4), __float_as_uint(value));
  }
}

// Sets the rows of a value tile from `count` on, and before `end`, to 0. Values beyond a sample's length may
// be NaN, which a probability of 0 would not mask. All computing threads call it, before any product reads
// the tile.
template <class Tile>
__device__ __forceinline__ void clear_rows(uint32_t tile, int count, int end = kTileKeys) {
  constexpr uint32_t kThreads = Tile::kGroups * kWarpGroupThreads, kBox = kTileKeys * kBoxRowBytes;
  const uint32_t begin = count * kBoxRowBytes + (threadIdx.x - kWarpGroupThreads) * 16;
#pragma unroll 1
  for (uint32_t piece = begin; piece < end * kBoxRowBytes; piece += kThreads * 16)
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + box * kBox + piece), "r"(0)
                   : "memory");
  fence_proxy_async();
  bar_sync(1, kThreads);
}

}  // namespace h100_diffusers_kernels
