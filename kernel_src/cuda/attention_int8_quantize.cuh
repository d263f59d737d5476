// The operands of attention in 8 bits, in the workspace. They are stored as tiles, each a contiguous copy of
// shared memory in the 128-byte swizzle of wgmma, so that one bulk copy loads a tile with its scales:
//
//   query tile   128 queries of one head: INT8, a scale for each, and its product with the keys' mean
//   key tile     128 keys of one head: INT8 and four scales; the values, transposed, E4M3, and rows of ones
//
// The mean of the keys is subtracted, which changes all scores of a query by the same amount (SageAttention,
// arXiv 2410.02367). Query and key are multiplied by a Hadamard matrix, which leaves their product and
// spreads channels that are larger than others (QuaRot, arXiv 2404.00456). Sums of keys and maxima of values
// are computed without atomics: a first kernel reduces parts of the sequence, the second one the parts.
//
// A scale of four is that of the keys whose scores a thread of a quad has: those with equal (key % 8) / 2.
// Keys beyond the last one are copies of it. Their values and ones are 0, so attention needs no mask.
#pragma once

#include <algorithm>

#include "attention_tiles.cuh"
#include "fp8.cuh"
#include "pack.cuh"
#include "reduce.cuh"

namespace h100_diffusers_kernels {

constexpr int kInt8Columns = kBoxRowBytes;  // of a tile; those beyond the head are 0
constexpr int kInt8Queries = 128, kQuadLanes = 4;
static_assert(kInt8Columns == kMaxAttentionHeadDim);

// Offsets of the parts of a tile.
struct QueryTileBytes {
  static constexpr uint32_t kScales = kInt8Queries * kBoxRowBytes;
  static constexpr uint32_t kMeanScores = kScales + kInt8Queries * 4;  // logarithms to base 2
  static constexpr uint32_t kBytes = kMeanScores + kInt8Queries * 4;
};
struct KeyTileBytes {
  static constexpr int kOnes = kSwizzleRows;  // rows of ones
  static constexpr uint32_t kValues = kTileKeys * kBoxRowBytes;
  static constexpr uint32_t kScales = kValues + (kInt8Columns + kOnes) * kBoxRowBytes;
  static constexpr uint32_t kBytes = kScales + kQuadLanes * 4;
  static constexpr uint32_t kStride = (kBytes + 127) / 128 * 128;
};

__device__ __forceinline__ int ceil_of(int a, int b) { return (a + b - 1) / b; }
// Parts of the sequence, each of which has a sum of keys and a maximum of values in each column.
constexpr int kSequenceParts = 16;
__device__ __forceinline__ int part_length(int count) { return ceil_of(count, kSequenceParts); }
// The mean is that of every key_step-th key, of at least this many. The result is right with any vector.
constexpr int kMeanKeys = 2048;
__device__ __forceinline__ int key_step(int count) { return max(count / kMeanKeys, 1); }

// Global memory of a launch.
struct Int8Workspace {
  int64_t heads, key_heads, query_tiles, key_tiles;  // heads of all samples, tiles of a head
  uint8_t* queries;
  uint8_t* keys;
  float* value_scales;  // (key_heads, kInt8Columns)
  float* key_sums;      // (key_heads, kSequenceParts, kInt8Columns)
  float* value_maxima;  // likewise
  int* claimed_tiles;

  explicit Int8Workspace(const AttentionParams& args)
      : heads(args.batch * args.heads),
        key_heads(args.batch * args.key_heads),
        query_tiles(ceil_divide(args.query_length, kInt8Queries)),
        key_tiles(std::max<int64_t>(ceil_divide(args.key_length, kTileKeys), 1)),
        queries(static_cast<uint8_t*>(args.workspace)),
        keys(queries + heads * query_tiles * QueryTileBytes::kBytes),
        value_scales(reinterpret_cast<float*>(keys + key_heads * key_tiles * KeyTileBytes::kStride)),
        key_sums(value_scales + key_heads * kInt8Columns),
        value_maxima(key_sums + key_heads * kSequenceParts * kInt8Columns),
        claimed_tiles(reinterpret_cast<int*>(value_maxima + key_heads * kSequenceParts * kInt8Columns)) {}

  // A multiple of the alignment that TMA needs for the output that may follow.
  int64_t bytes() const { return reinterpret_cast<uint8_t*>(claimed_tiles) + kVectorBytes - queries; }
};

struct QuantizeAttentionParams {
  AttentionParams args;
  Int8Workspace workspace;
  FastDivisor heads, key_heads, query_tiles, key_tiles;  // heads of a sample, tiles of a head
  FastDivisor group_heads;                               // query heads of a key head
  float score_scale;
  int query_blocks, key_blocks;  // of the second kernel, one for each tile
  bool has_vectors;              // whether the operands are aligned to 16 bytes

  __device__ __forceinline__ int key_count(uint32_t batch) const { return key_count_of(args, batch); }
};

constexpr int kQuantizeThreads = 512;
constexpr int kPieceColumns = 8, kRowPieces = kInt8Columns / kPieceColumns;  // A thread has a piece of a row.
constexpr int kBlockRows = kQuantizeThreads / kRowPieces;                    // at the same time

// A piece of a row of query, key or value.
template <typename T>
struct OperandPiece {
  const T* first;  // of token 0
  int64_t stride;
  bool is_within, has_vectors;

  __device__ __forceinline__ OperandPiece(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                          uint32_t batch, uint32_t head, int column)
      : first(static_cast<const T*>(x.data) + x.offset(batch, 0, head) + column),
        stride(x.strides[1]),
        is_within(column < p.args.head_dim),
        has_vectors(p.has_vectors) {}

  __device__ __forceinline__ Pack<T, kPieceColumns> load(int token) const {
    Pack<T, kPieceColumns> pack{};
    if (!is_within) return pack;
    const T* address = first + token * stride;
    if (has_vectors) {
      pack.load(address);
    } else {
      T elements[kPieceColumns];
#pragma unroll
      for (int i = 0; i < kPieceColumns; ++i) elements[i] = address[i];
      pack.words[0] = *reinterpret_cast<const uint4*>(elements);
    }
    return pack;
  }
};

// ---------------------------------------------------------------------------------------------------------
// Sums of keys and maxima of values, a block for each part of a sequence and key head

constexpr int kPartsUnroll = 4;

template <typename T, bool kIsKey>
__device__ __forceinline__ void reduce_part(const QuantizeAttentionParams& p, int key_head, int part,
                                            float* shared) {
  const uint32_t batch = p.key_heads.divide(static_cast<uint32_t>(key_head));
  const uint32_t head = static_cast<uint32_t>(key_head) - batch * p.key_heads.divisor;
  const int piece = static_cast<int>(threadIdx.x) % kRowPieces,
            row = static_cast<int>(threadIdx.x) / kRowPieces;
  const OperandPiece<T> tensor(p, kIsKey ? p.args.k : p.args.v, batch, head, piece * kPieceColumns);
  const int count = p.key_count(batch);
  const int begin = part * part_length(count), end = min(begin + part_length(count), count);
  const int step = kIsKey ? key_step(count) : 1;
  float results[kPieceColumns] = {};
#pragma unroll 1
  for (int first = begin + row * step; first < end; first += kBlockRows * step * kPartsUnroll) {
    Pack<T, kPieceColumns> packs[kPartsUnroll];
#pragma unroll
    for (int i = 0; i < kPartsUnroll; ++i) {
      const int token = first + i * kBlockRows * step;
      packs[i] = token < end ? tensor.load(token) : Pack<T, kPieceColumns>{};
    }
#pragma unroll
    for (int i = 0; i < kPartsUnroll; ++i) {
      float values[kPieceColumns];
      packs[i].to_floats(values);
#pragma unroll
      for (int k = 0; k < kPieceColumns; ++k)
        results[k] = kIsKey ? results[k] + values[k] : larger_magnitude(results[k], values[k]);
    }
  }
#pragma unroll
  for (int k = 0; k < kPieceColumns; ++k) shared[row * kInt8Columns + piece * kPieceColumns + k] = results[k];
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= kInt8Columns) return;
  float result = shared[column];
#pragma unroll
  for (int i = 1; i < kBlockRows; ++i) {
    const float other = shared[i * kInt8Columns + column];
    result = kIsKey ? result + other : larger_magnitude(result, other);
  }
  float* out = kIsKey ? p.workspace.key_sums : p.workspace.value_maxima;
  out[(key_head * kSequenceParts + part) * kInt8Columns + column] = result;
}

template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads)
    attention_key_statistics_kernel(const __grid_constant__ QuantizeAttentionParams p) {
  __shared__ float shared[kBlockRows * kInt8Columns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.workspace.claimed_tiles = 0;
  const int key_head = static_cast<int>(blockIdx.x) / kSequenceParts;
  const int part = static_cast<int>(blockIdx.x) % kSequenceParts;
  if (blockIdx.y == 0)
    reduce_part<T, true>(p, key_head, part, shared);
  else
    reduce_part<T, false>(p, key_head, part, shared);
}

// ---------------------------------------------------------------------------------------------------------
// Quantization, a block for each tile

// The low bytes are the values, rounded to nearest even.
__device__ __forceinline__ uint32_t pack_int8(float a, float b, float c, float d) {
  constexpr float kRound = 0x1.8p23f;
  const uint32_t low = __byte_perm(__float_as_uint(a + kRound), __float_as_uint(b + kRound), 0x0040);
  const uint32_t high = __byte_perm(__float_as_uint(c + kRound), __float_as_uint(d + kRound), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Returns the scale of values of which this is the largest magnitude, NaN if it is not finite, and what the
// values are multiplied by.
__device__ __forceinline__ float scale_of(float largest, float largest_code) {
  return largest < INFINITY ? largest * (1 / largest_code) : NAN;
}
__device__ __forceinline__ float inverse_of(float largest, float largest_code) {
  return largest > 0 && largest < INFINITY ? largest_code / largest : 0.0f;
}

// A quad has a row of query or key, each of its lanes kRotatedColumns of them: pieces that are a quad apart,
// so that the quad loads adjacent ones.
constexpr int kLanePieces = kRowPieces / kQuadLanes, kRotatedColumns = kLanePieces * kPieceColumns;
constexpr int kRotatedRows = kQuantizeThreads / kQuadLanes;  // of a block at the same time

// Multiplies a row by a Hadamard matrix times the square root of its size, in the order of the lanes'
// columns.
__device__ __forceinline__ void rotate_row(float (&values)[kRotatedColumns]) {
#pragma unroll
  for (int step = 1; step < kRotatedColumns; step *= 2) {
#pragma unroll
    for (int i = 0; i < kRotatedColumns; ++i) {
      if (i & step) continue;
      const float a = values[i], b = values[i + step];
      values[i] = a + b;
      values[i + step] = a - b;
    }
  }
#pragma unroll
  for (int mask = 1; mask < kQuadLanes; mask *= 2) {
    const float sign = threadIdx.x & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kRotatedColumns; ++i)
      values[i] = fmaf(values[i], sign, __shfl_xor_sync(~0u, values[i], mask));
  }
}
constexpr float kRotationScale = 1.0f / kInt8Columns;  // of a product of rotated rows

// Stores a lane's part of a row, in the same order for query and key.
__device__ __forceinline__ void store_int8(uint8_t* tile, int row, const float (&values)[kRotatedColumns],
                                           float inverse) {
#pragma unroll
  for (int piece = 0; piece < 2; ++piece) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* four = values + 16 * piece + 4 * i;
      words[i] = pack_int8(four[0] * inverse, four[1] * inverse, four[2] * inverse, four[3] * inverse);
    }
    const int lane_piece = static_cast<int>(threadIdx.x) % kQuadLanes * 2 + piece;
    *reinterpret_cast<uint4*>(tile + swizzled_piece(row, lane_piece)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// A lane's part of a row of query or key, before the rotation.
template <typename T>
struct RowPart {
  Pack<T, kPieceColumns> packs[kLanePieces];

  __device__ __forceinline__ void load(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                       uint32_t batch, uint32_t head, int token) {
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i)
      packs[i] = OperandPiece<T>(p, x, batch, head, column(i)).load(token);
  }
  // First column of a piece.
  __device__ __forceinline__ static int column(int i) {
    return (i * kQuadLanes + static_cast<int>(threadIdx.x) % kQuadLanes) * kPieceColumns;
  }
  // Calls body(i, value, column).
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int piece = 0; piece < kLanePieces; ++piece) {
      float values[kPieceColumns];
      packs[piece].to_floats(values);
#pragma unroll
      for (int k = 0; k < kPieceColumns; ++k) body(piece * kPieceColumns + k, values[k], column(piece) + k);
    }
  }
};

// Sets `result` to the sums, or maxima, of all parts. All threads call it.
template <bool kIsSum>
__device__ __forceinline__ void combine_parts(const float* parts, int key_head, float factor,
                                              float (&result)[kInt8Columns]) {
  const int column = static_cast<int>(threadIdx.x);
  if (column < kInt8Columns) {
    const float* first = parts + key_head * kSequenceParts * kInt8Columns + column;
    float combined = first[0];
#pragma unroll
    for (int i = 1; i < kSequenceParts; ++i)
      combined =
          kIsSum ? combined + first[i * kInt8Columns] : larger_magnitude(combined, first[i * kInt8Columns]);
    result[column] = combined * factor;
  }
  __syncthreads();
}

// Sets `mean` to that of the keys which reduce_part has added.
__device__ __forceinline__ void load_mean(const QuantizeAttentionParams& p, uint32_t key_head, int count,
                                          float (&mean)[kInt8Columns]) {
  const int length = max(part_length(count), 1), step = key_step(count);
  const int added = count / length * ceil_of(length, step) + ceil_of(count % length, step);
  combine_parts<true>(p.workspace.key_sums, static_cast<int>(key_head),
                      1.0f / static_cast<float>(max(added, 1)), mean);
}

template <typename T>
__device__ __forceinline__ void quantize_queries(const QuantizeAttentionParams& p, int block,
                                                 float (&mean)[kInt8Columns]) {
  static_assert(kRotatedRows == kInt8Queries);
  const uint32_t head_of_all = p.query_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.heads.divide(head_of_all), head = head_of_all - batch * p.heads.divisor;
  const int first_row = (block - static_cast<int>(head_of_all * p.query_tiles.divisor)) * kInt8Queries;
  const int row = static_cast<int>(threadIdx.x) / kQuadLanes;
  RowPart<T> part;
  part.load(p, p.args.q, batch, head, min(first_row + row, static_cast<int>(p.args.query_length) - 1));
  load_mean(p, batch * p.key_heads.divisor + p.group_heads.divide(head), p.key_count(batch), mean);
  float values[kRotatedColumns], mean_score = 0;
  part.for_each([&](int k, float value, int column) {
    values[k] = value;
    mean_score = fmaf(value, mean[column], mean_score);
  });
  mean_score = warp_reduce<Sum, kQuadLanes>(mean_score);
  rotate_row(values);
  const float largest = __uint_as_float(warp_reduce<UnsignedMax, kQuadLanes>(largest_magnitude(values)));
  uint8_t* tile = p.workspace.queries + int64_t{block} * QueryTileBytes::kBytes;
  store_int8(tile, row, values, inverse_of(largest, kLargestInt8));
  if (threadIdx.x % kQuadLanes == 0) {
    reinterpret_cast<float*>(tile + QueryTileBytes::kScales)[row] =
        scale_of(largest, kLargestInt8) * (p.score_scale * kRotationScale);
    reinterpret_cast<float*>(tile + QueryTileBytes::kMeanScores)[row] = mean_score * p.score_scale;
  }
}

template <typename T>
__device__ __forceinline__ void quantize_keys(const QuantizeAttentionParams& p, int block,
                                              float (&mean)[kInt8Columns]) {
  static_assert(kRotatedRows == kTileKeys);
  constexpr int kWarps = kQuantizeThreads / 32;
  __shared__ uint32_t largest_of_warps[kWarps][kQuadLanes];
  const uint32_t key_head = p.key_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.key_heads.divide(key_head), head = key_head - batch * p.key_heads.divisor;
  const int first_row = (block - static_cast<int>(key_head * p.key_tiles.divisor)) * kTileKeys;
  const int count = p.key_count(batch);
  if (first_row >= max(count, 1)) return;
  const int row = static_cast<int>(threadIdx.x) / kQuadLanes;
  RowPart<T> part{};
  if (count > 0) part.load(p, p.args.k, batch, head, min(first_row + row, count - 1));
  load_mean(p, key_head, count, mean);
  float values[kRotatedColumns];
  part.for_each([&](int k, float value, int column) { values[k] = value - mean[column]; });
  rotate_row(values);
  // Eight adjacent lanes have two rows with the same row % 8 / 2.
  uint32_t largest_bits = warp_reduce<UnsignedMax, 2 * kQuadLanes>(largest_magnitude(values));
  const int warp = static_cast<int>(threadIdx.x) / 32,
            of_four = static_cast<int>(threadIdx.x) / 8 % kQuadLanes;
  if (threadIdx.x % 8 == 0) largest_of_warps[warp][of_four] = largest_bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest_bits = max(largest_bits, largest_of_warps[i][of_four]);
  const float largest = __uint_as_float(largest_bits);
  uint8_t* tile = p.workspace.keys + int64_t{block} * KeyTileBytes::kStride;
  store_int8(tile, row, values, inverse_of(largest, kLargestInt8));
  if (warp == 0 && threadIdx.x % 8 == 0)
    reinterpret_cast<float*>(tile + KeyTileBytes::kScales)[of_four] = scale_of(largest, kLargestInt8);
}

// A thread has the four keys of a 32-bit word in 8 columns. wgmma's order of keys is that in which a thread
// has their probabilities: columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, where t = lane % 4.
template <typename T>
__device__ __forceinline__ void quantize_values(const QuantizeAttentionParams& p, int block,
                                                float (&largest)[kInt8Columns]) {
  constexpr int kKeys = 4;
  constexpr uint32_t kOne = 0x38;  // E4M3
  static_assert(kQuantizeThreads / 32 == kRowPieces && kRowPieces >= KeyTileBytes::kOnes);
  const uint32_t key_head = p.key_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.key_heads.divide(key_head), head = key_head - batch * p.key_heads.divisor;
  const int tile_index = block - static_cast<int>(key_head * p.key_tiles.divisor);
  const int first_row = tile_index * kTileKeys, count = p.key_count(batch);
  if (first_row >= max(count, 1)) return;
  const int piece = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_key = first_row + lane / kQuadLanes * 16 + lane % kQuadLanes * 2;
  const OperandPiece<T> values(p, p.args.v, batch, head, piece * kPieceColumns);
  uint32_t ones = 0;
  Pack<T, kPieceColumns> packs[kKeys] = {};
#pragma unroll
  for (int key = 0; key < kKeys; ++key) {
    const int token = first_key + key / 2 * 8 + key % 2;
    if (token >= count) continue;
    packs[key] = values.load(token);
    ones |= kOne << (8 * key);
  }
  combine_parts<false>(p.workspace.value_maxima, static_cast<int>(key_head), 1, largest);
  if (tile_index == 0 && threadIdx.x < kInt8Columns)
    p.workspace.value_scales[key_head * kInt8Columns + threadIdx.x] =
        scale_of(largest[threadIdx.x], kLargestFp8);
  uint8_t* tile = p.workspace.keys + int64_t{block} * KeyTileBytes::kStride + KeyTileBytes::kValues;
  const auto store = [&](int row, uint32_t word) {
    *reinterpret_cast<uint32_t*>(tile + swizzled_piece(row, lane / kQuadLanes) + lane % kQuadLanes * 4) =
        word;
  };
  float of_keys[kKeys][kPieceColumns];
#pragma unroll
  for (int key = 0; key < kKeys; ++key) packs[key].to_floats(of_keys[key]);
#pragma unroll
  for (int k = 0; k < kPieceColumns; ++k) {
    const int column = piece * kPieceColumns + k;
    const float inverse = inverse_of(largest[column], kLargestFp8);
    store(column, pack_fp8(of_keys[0][k] * inverse, of_keys[1][k] * inverse, of_keys[2][k] * inverse,
                           of_keys[3][k] * inverse));
  }
  if (piece < KeyTileBytes::kOnes) store(kInt8Columns + piece, ones);
}

template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    attention_quantize_kernel(const __grid_constant__ QuantizeAttentionParams p) {
  __shared__ float of_columns[kInt8Columns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int block = static_cast<int>(blockIdx.x), keys_end = p.query_blocks + p.key_blocks;
  if (block < p.query_blocks)
    quantize_queries<T>(p, block, of_columns);
  else if (block < keys_end)
    quantize_keys<T>(p, block - p.query_blocks, of_columns);
  else
    quantize_values<T>(p, block - keys_end, of_columns);
}

// ---------------------------------------------------------------------------------------------------------

template <typename T>
void quantize_attention(const char* operation, const AttentionParams& args, const Int8Workspace& workspace,
                        Stream stream) {
  QuantizeAttentionParams params{args, workspace, {}, {}, {}, {}, {}, args.scale * kLog2E, 0, 0, false};
  params.heads.set(static_cast<uint32_t>(args.heads));
  params.key_heads.set(static_cast<uint32_t>(args.key_heads));
  params.query_tiles.set(static_cast<uint32_t>(workspace.query_tiles));
  params.key_tiles.set(static_cast<uint32_t>(workspace.key_tiles));
  params.group_heads.set(static_cast<uint32_t>(args.heads / args.key_heads));
  params.query_blocks = static_cast<int>(workspace.heads * workspace.query_tiles);
  params.key_blocks = static_cast<int>(workspace.key_heads * workspace.key_tiles);
  params.has_vectors = true;
  for (const AttentionOperand* x : {&args.q, &args.k, &args.v}) {
    params.has_vectors = params.has_vectors && is_16_byte_aligned(x->data);
    for (const int64_t stride : x->strides)
      params.has_vectors = params.has_vectors && stride * 2 % kVectorBytes == 0;
  }
  const dim3 parts(static_cast<unsigned>(workspace.key_heads * kSequenceParts), 2);
  launch_kernel(operation, attention_key_statistics_kernel<T>, parts, kQuantizeThreads, params, stream);
  launch_kernel(operation, attention_quantize_kernel<T>, dim3(params.query_blocks + 2 * params.key_blocks),
                kQuantizeThreads, params, stream);
}

}  // namespace h100_diffusers_kernels
