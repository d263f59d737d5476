// Attention in 8 bits: S = Q K^T of INT8, O += P V of E4M3, for tiles of 128 queries. Two warp groups compute
// 64 queries each. While P V of a tile runs, its group finds the maxima of the next S. It waits for all its
// products before the exponentials, which the products of the other group overlap
// (notes/int8_attention.md, "Steps").
//
// The FP8 accumulator keeps about 14 bits, so P V of a tile is added to O in other registers.
#pragma once

#include "attention_epilogue.cuh"
#include "attention_int8_softmax.cuh"
#include "attention_stream_load.cuh"

namespace h100_diffusers_kernels {

struct Int8AttentionParams : AttentionKernelParams {
  const uint8_t* queries;  // tiles of Int8Workspace
  const uint8_t* keys;
  const float* value_scales;
  int key_tiles;  // of a head

  __device__ __forceinline__ int64_t key_head_of_all(const QueryTile& position) const {
    return position.batch * args.key_heads + key_head(position.head);
  }
  __device__ __forceinline__ int key_tile_count(int batch) const {
    return max(ceil_of(key_count(batch), kTileKeys), 1);
  }
};

constexpr int kInt8Groups = 2, kInt8Threads = (kInt8Groups + 1) * kWarpGroupThreads;
constexpr int kInt8ComputeRegisters = 240, kInt8LoadRegisters = 24;
static_assert((kInt8Groups * kInt8ComputeRegisters + kInt8LoadRegisters) * kWarpGroupThreads <=
              kMultiprocessorRegisters);

constexpr uint32_t swizzle_aligned(uint32_t bytes) {
  return (bytes + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes;
}

// Addresses in a block's shared memory.
struct Int8Memory {
  using QueryRing = Ring<2>;
  using KeyRing = Ring<4>;
  static constexpr uint32_t kQueryBytes = swizzle_aligned(QueryTileBytes::kBytes);
  static constexpr uint32_t kKeyBytes = swizzle_aligned(KeyTileBytes::kBytes);
  static constexpr uint32_t kOutBytes = 2 * kInt8Queries * kBoxRowBytes;
  static constexpr uint32_t kTilesBytes = QueryRing::kStages * 4;
  static constexpr int kNoTile = -1;

  uint32_t query, keys, out;
  uint32_t tiles;  // tile number of the queries of each stage, kNoTile after the last tile
  QueryRing query_ring;
  KeyRing key_ring;

  __device__ __forceinline__ explicit Int8Memory(uint32_t begin)
      : query(begin),
        keys(query + QueryRing::kStages * kQueryBytes),
        out(keys + KeyRing::kStages * kKeyBytes),
        tiles(out + kOutBytes),
        query_ring{tiles + kTilesBytes},
        key_ring{query_ring.address + QueryRing::kBytes} {}

  static constexpr uint32_t kBytes = kTileAlignment + QueryRing::kStages * kQueryBytes +
                                     KeyRing::kStages * kKeyBytes + kOutBytes + kTilesBytes +
                                     QueryRing::kBytes + KeyRing::kBytes;
};
static_assert(Int8Memory::kBytes <= kMaxSharedBytes);

// One thread loads.
__device__ __forceinline__ void load_int8_tiles(const Int8AttentionParams& params, const Int8Memory& memory) {
  RingState<Int8Memory::QueryRing> query_state;
  RingState<Int8Memory::KeyRing> key_state;
  const auto begin_query = [&](int tile) {
    query_state.wait_empty(memory.query_ring);
    store_shared(memory.tiles + static_cast<uint32_t>(query_state.stage * 4), static_cast<uint32_t>(tile));
    return memory.query_ring.full(query_state.stage);
  };
  const auto load = [&](uint32_t shared, const uint8_t* global, uint32_t bytes, Barrier full) {
    full.arrive_expect_tx(bytes);
    bulk_load(shared, global, bytes, full);
  };
  claim_each_tile(params, [&](int tile) {
    const QueryTile position = params.tile_position(tile, kInt8Queries);
    const Barrier full = begin_query(tile);
    load(memory.query + query_state.stage * Int8Memory::kQueryBytes,
         params.queries + int64_t{tile} * QueryTileBytes::kBytes, QueryTileBytes::kBytes, full);
    query_state.advance();
    const uint8_t* keys =
        params.keys + params.key_head_of_all(position) * params.key_tiles * KeyTileBytes::kStride;
    const int count = params.key_tile_count(position.batch);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      key_state.wait_empty(memory.key_ring);
      load(memory.keys + key_state.stage * Int8Memory::kKeyBytes, keys, KeyTileBytes::kBytes,
           memory.key_ring.full(key_state.stage));
      key_state.advance();
      keys += KeyTileBytes::kStride;
    }
    return true;
  });
  begin_query(Int8Memory::kNoTile).arrive();
}

template <typename T>
class Int8Compute {
  using Tile = AttentionTile<T, kInt8Columns>;  // of the output
  static_assert(Tile::kOutputs == kInt8Outputs);

 public:
  __device__ __forceinline__ Int8Compute(const Int8AttentionParams& params, const Int8Memory& memory,
                                         const WarpRole& role)
      : params_(params), memory_(memory), role_(role) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      const int tile = wait_for_tile();
      if (tile == Int8Memory::kNoTile) break;
      QueryTile position = params_.tile_position(tile, kInt8Queries);
      position.row += role_.group * kWarpGroupRows;
      Outputs<Tile> outputs;
      compute_tile(position, outputs);
      if (params_.args.gate.data != nullptr) apply_gate<Tile>(params_.args, role_, position, outputs);
      if (params_.args.addend.data != nullptr) add_addend<Tile>(params_.args, role_, position, outputs);
      store_rows<Tile>(role_, params_.out, memory_.out + Tile::box_bytes(role_.group * kWarpGroupRows),
                       Tile::box_bytes(kInt8Queries), position, outputs);
    }
    if (role_.is_elected()) tma_wait_group_read();
  }

 private:
  __device__ __forceinline__ void compute_tile(const QueryTile& position, Outputs<Tile>& outputs) {
    const uint32_t query = memory_.query + query_state_.stage * Int8Memory::kQueryBytes;
    const uint32_t own_query = query + Tile::box_bytes(role_.group * kWarpGroupRows);
    const float query_scale[2] = {load_query_value(query + QueryTileBytes::kScales, 0),
                                  load_query_value(query + QueryTileBytes::kScales, 1)};
    Int8Softmax softmax(query_scale);
    int remaining = params_.key_tile_count(position.batch);
    Int8Products products;
    float sums[kInt8Accumulators];
    clear(sums);
    key_state_.wait_full(memory_.key_ring);
    issue_scores(own_query, key_stage(key_state_.stage), products);
    wgmma_wait_group();
    compiler_fence(products);
    float factor[2];
    softmax.raise_reference(products, load_key_scale(key_stage(key_state_.stage)), factor);
#pragma unroll 1
    for (;;) {
      const int stage = key_state_.stage;
      const uint32_t keys = key_stage(stage);
      Int8Probabilities probabilities;
      softmax.exponentiate(products, load_key_scale(keys), probabilities);
      key_state_.advance();
      float part[kInt8Accumulators];
      if (--remaining == 0) {
        issue_outputs(probabilities, keys, part);
        wgmma_wait_group();
        compiler_fence(part);
        add_part(part, sums);
        release_keys(stage);
        break;
      }
      key_state_.wait_full(memory_.key_ring);
      const uint32_t next_keys = key_stage(key_state_.stage);
      issue_scores(own_query, next_keys, products);
      issue_outputs(probabilities, keys, part);
      wgmma_wait_group<1>();
      compiler_fence(products);
      const bool is_raised = softmax.raise_reference(products, load_key_scale(next_keys), factor);
      wgmma_wait_group();
      compiler_fence(part);
      add_part(part, sums);
      release_keys(stage);
      if (is_raised) scale_rows(sums, factor);
    }
    const float mean_score[2] = {load_query_value(query + QueryTileBytes::kMeanScores, 0),
                                 load_query_value(query + QueryTileBytes::kMeanScores, 1)};
    release_query();
    normalize(position, sums, outputs);
    if (params_.args.lse != nullptr) {
      float lse[2];
#pragma unroll
      for (int row = 0; row < 2; ++row)
        lse[row] = (softmax.reference(row) + __log2f(row_sum(sums, row)) + mean_score[row]) * kLn2;
      store_lse(params_.args, role_, position, lse);
    }
  }

  __device__ __forceinline__ static void issue_scores(uint32_t query, uint32_t keys, Int8Products& products) {
    const MatrixDescriptor a = MatrixDescriptor::along_rows(query), b = MatrixDescriptor::along_rows(keys);
    wgmma_fence();
#pragma unroll
    for (int byte = 0; byte < kInt8Columns; byte += kFp8Depth)
      Int8Wgmma::scores(products, a.plus(byte), b.plus(byte), byte > 0);
    wgmma_commit_group();
  }

  __device__ __forceinline__ static void issue_outputs(const Int8Probabilities& probabilities, uint32_t keys,
                                                       float (&part)[kInt8Accumulators]) {
    const MatrixDescriptor values = MatrixDescriptor::along_rows(keys + KeyTileBytes::kValues);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / kFp8Depth; ++step)
      Int8Wgmma::outputs(part, probabilities[step], values.plus(step * kFp8Depth), step > 0);
    wgmma_commit_group();
  }

  __device__ __forceinline__ static void clear(float (&values)[kInt8Accumulators]) {
#pragma unroll
    for (int i = 0; i < kInt8Accumulators; ++i) values[i] = 0;
  }
  __device__ __forceinline__ static void add_part(const float (&part)[kInt8Accumulators],
                                                  float (&sums)[kInt8Accumulators]) {
#pragma unroll
    for (int i = 0; i < kInt8Accumulators; ++i) sums[i] += part[i];
  }

  __device__ __forceinline__ static float row_sum(const float (&sums)[kInt8Accumulators], int row) {
    return sums[kInt8Outputs + 2 * row];
  }

  // Divides O by l, and multiplies by the scales of the values. A row without keys is 0.
  __device__ __forceinline__ void normalize(const QueryTile& position, const float (&sums)[kInt8Accumulators],
                                            Outputs<Tile>& outputs) const {
    float inverse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float sum = row_sum(sums, row);
      inverse[row] = sum == 0 ? 0.0f : fast_reciprocal(sum);
    }
    const float* scales =
        params_.value_scales + params_.key_head_of_all(position) * kInt8Columns + role_.lane % kQuadLanes * 2;
#pragma unroll
    for (int i = 0; i < kInt8Outputs; i += 4) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + i * 2);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        outputs[i + k] = sums[i + k] * inverse[k / 2] * (k % 2 == 0 ? scale.x : scale.y);
    }
  }

  __device__ __forceinline__ float load_query_value(uint32_t values, int i) const {
    return __uint_as_float(load_shared(
        values + static_cast<uint32_t>((role_.group * kWarpGroupRows + role_.output_row(i)) * 4)));
  }

  __device__ __forceinline__ float load_key_scale(uint32_t keys) const {
    uint32_t scale;
    asm volatile("ld.volatile.shared.u32 %0, [%1];"
                 : "=r"(scale)
                 : "r"(keys + KeyTileBytes::kScales + static_cast<uint32_t>(role_.lane % kQuadLanes * 4))
                 : "memory");
    return __uint_as_float(scale);
  }
  __device__ __forceinline__ uint32_t key_stage(int stage) const {
    return memory_.keys + stage * Int8Memory::kKeyBytes;
  }
  __device__ __forceinline__ void release_keys(int stage) const {
    if (role_.is_elected()) memory_.key_ring.empty(stage).arrive();
  }

  // Waits for the next queries and returns the number of their tile.
  __device__ __forceinline__ int wait_for_tile() const {
    query_state_.wait_full(memory_.query_ring);
    const int tile = static_cast<int>(load_shared(memory_.tiles + query_state_.stage * 4));
    return __shfl_sync(~0u, tile, 0);
  }
  // All lanes have read the scales.
  __device__ __forceinline__ void release_query() {
    __syncwarp();
    if (role_.is_elected()) memory_.query_ring.empty(query_state_.stage).arrive();
    query_state_.advance();
  }

  const Int8AttentionParams& params_;
  const Int8Memory& memory_;
  const WarpRole& role_;
  RingState<Int8Memory::QueryRing> query_state_;
  RingState<Int8Memory::KeyRing> key_state_;
};

template <typename T>
__global__ void __launch_bounds__(kInt8Threads, 1)
    attention_int8_kernel(const __grid_constant__ Int8AttentionParams params) {
  const Int8Memory memory(shared_tiles());
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.query_ring.init(1, kInt8Groups * kWarpGroupWarps);
    memory.key_ring.init(1, kInt8Groups * kWarpGroupWarps);
  }
  fence_mbarrier_init();
  __syncthreads();
  griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<kInt8LoadRegisters>();
    if (role.thread == 0) load_int8_tiles(params, memory);
  } else {
    setmaxnreg_inc<kInt8ComputeRegisters>();
    Int8Compute<T>(params, memory, role).run();
  }
}

}  // namespace h100_diffusers_kernels
