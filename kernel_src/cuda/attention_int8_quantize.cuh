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
// Parts of the sequence, each of which has a part of the keys' mean and a maximum of the values in each
// column.
constexpr int kSequenceParts = 16;
// The mean is that of every key_step-th key, of at least this many. The result is right with any vector.
constexpr int kMeanKeys = 512;
__device__ __forceinline__ int key_step(int count) { return max(count / kMeanKeys, 1); }

// Global memory of a launch.
struct Int8Workspace {
  int64_t heads, key_heads, query_tiles, key_tiles;  // heads of all samples, tiles of a head
  uint8_t* queries;
  uint8_t* keys;
  float* value_scales;  // (key_heads, kInt8Columns)
  float* key_means;     // (key_heads, kSequenceParts, kInt8Columns), the parts of a sum
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
        key_means(value_scales + key_heads * kInt8Columns),
        value_maxima(key_means + key_heads * kSequenceParts * kInt8Columns),
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

  __device__ __forceinline__ int key_count(uint32_t batch) const { return key_count_of(args, batch); }
};

constexpr int kQuantizeThreads = 256, kQuantizeWarps = kQuantizeThreads / 32;
constexpr int kPieceColumns = 8, kRowPieces = kInt8Columns / kPieceColumns;  // A thread has a piece of a row.
constexpr int kBlockRows = kQuantizeThreads / kRowPieces;                    // at the same time

// A piece of a row of query, key or value.
template <typename T, Access kAccess>
struct OperandPiece {
  const T* first;  // of token 0
  int64_t stride;
  bool is_within;

  __device__ __forceinline__ OperandPiece(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                          uint32_t batch, uint32_t head, int column)
      : first(static_cast<const T*>(x.data) + x.offset(batch, 0, head) + column),
        stride(x.strides[1]),
        is_within(column < p.args.head_dim) {}

  // Zeros beyond the head, and without a token.
  __device__ __forceinline__ Pack<T, kPieceColumns> load(int token, bool has_token = true) const {
    Pack<T, kPieceColumns> pack{};
    if (!is_within || !has_token) return pack;
    const T* address = first + token * stride;
    if constexpr (kAccess == Access::kVector) {
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

template <typename T, Access kAccess, bool kIsKey>
__device__ __forceinline__ void reduce_part(const QuantizeAttentionParams& p, int key_head, int part,
                                            float* shared) {
  const uint32_t batch = p.key_heads.divide(static_cast<uint32_t>(key_head));
  const uint32_t head = static_cast<uint32_t>(key_head) - batch * p.key_heads.divisor;
  const int piece = static_cast<int>(threadIdx.x) % kRowPieces,
            row = static_cast<int>(threadIdx.x) / kRowPieces;
  const OperandPiece<T, kAccess> tensor(p, kIsKey ? p.args.k : p.args.v, batch, head, piece * kPieceColumns);
  const int step = kIsKey ? key_step(p.key_count(batch)) : 1, count = ceil_of(p.key_count(batch), step);
  const int length = ceil_of(count, kSequenceParts), begin = part * length, end = min(begin + length, count);
  float results[kPieceColumns] = {};
#pragma unroll 1
  for (int first = begin + row; first < end; first += kBlockRows * kPartsUnroll) {
    Pack<T, kPieceColumns> packs[kPartsUnroll];
#pragma unroll
    for (int i = 0; i < kPartsUnroll; ++i) {
      const int index = first + i * kBlockRows;
      packs[i] = tensor.load(index * step, index < end);
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
  if (kIsKey) result /= static_cast<float>(max(count, 1));
  float* out = kIsKey ? p.workspace.key_means : p.workspace.value_maxima;
  out[(key_head * kSequenceParts + part) * kInt8Columns + column] = result;
}

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kQuantizeThreads)
    attention_key_statistics_kernel(const __grid_constant__ QuantizeAttentionParams p) {
  __shared__ float shared[kBlockRows * kInt8Columns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.workspace.claimed_tiles = 0;
  const int key_head = static_cast<int>(blockIdx.x) / kSequenceParts;
  const int part = static_cast<int>(blockIdx.x) % kSequenceParts;
  if (blockIdx.y == 0)
    reduce_part<T, kAccess, true>(p, key_head, part, shared);
  else
    reduce_part<T, kAccess, false>(p, key_head, part, shared);
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

// What values are multiplied by to become codes, and codes to become values: 0 if it would be subnormal, NaN
// if the largest magnitude is not finite.
struct CodeScale {
  float scale, inverse;

  __device__ __forceinline__ CodeScale(float largest_magnitude, float largest_code) {
    scale = largest_magnitude < INFINITY ? largest_magnitude * (1 / largest_code) : NAN;
    if (scale < 0x1p-126f) scale = 0;
    inverse = scale > 0 ? fast_reciprocal(scale) : 0.0f;
  }
};

// Returns the sum, or the maximum, of all parts of a column.
template <bool kIsSum>
__device__ __forceinline__ float combine_parts(const float* parts, uint32_t key_head, int column) {
  const float* first = parts + key_head * (kSequenceParts * kInt8Columns) + column;
  float of_parts[kSequenceParts], result;
#pragma unroll
  for (int i = 0; i < kSequenceParts; ++i) of_parts[i] = first[i * kInt8Columns];
  result = of_parts[0];
#pragma unroll
  for (int i = 1; i < kSequenceParts; ++i)
    result = kIsSum ? result + of_parts[i] : larger_magnitude(result, of_parts[i]);
  return result;
}

// The mean of keys, in shared memory. It is used rounded to T.
template <typename T>
struct KeyMean {
  float values[kInt8Columns];

  // All threads call it.
  __device__ __forceinline__ void load(const QuantizeAttentionParams& p, uint32_t key_head) {
    if (const int column = static_cast<int>(threadIdx.x); column < kInt8Columns)
      values[column] = combine_parts<true>(p.workspace.key_means, key_head, column);
    __syncthreads();
  }
  // Two adjacent columns, times -1.
  __device__ __forceinline__ uint32_t negative_pair(int column) const {
    return pack_pair<T>(-values[column], -values[column + 1]);
  }
};

// Adds a b of 16 x 16 and 16 x 8 elements.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&sums)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&sums)[4], const uint32_t (&a)[4],
                                                            const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Sixteen rows of query or key in a warp, multiplied by a Hadamard matrix times the square root of its size.
// A quad has two of the rows, each lane a quarter of their columns: pieces that are a quad apart, so that the
// quad loads adjacent ones. The matrix is a product of one for 16 columns, which the tensor cores multiply
// by, and one for the 8 groups of 16, whose results a thread has. A group is four columns of each lane in the
// order of mma's a. Query and key have the same order of columns, so it does not change their product.
template <typename T, Access kAccess>
class RotatedRows {
 public:
  static constexpr int kRows = 16, kGroups = 8, kLaneColumns = kInt8Columns / kQuadLanes;

  // Loads the rows from `token` on, of which those beyond the last token are copies of it.
  __device__ __forceinline__ void load(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                       uint32_t batch, uint32_t head, int token, int last_token) {
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      const OperandPiece<T, kAccess> piece(p, x, batch, head, column(i));
#pragma unroll
      for (int row = 0; row < 2; ++row) packs_[row][i] = piece.load(min(token + row_of(row), last_token));
    }
  }
  // The products of both rows with the mean.
  __device__ __forceinline__ void multiply_by(const KeyMean<T>& mean, float (&products)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(packs_[row][i].words);
#pragma unroll
        for (int k = 0; k < kPieceColumns / 2; ++k) {
          const float2 x = unpack_pair<T>(words[k]);
          const float2 m = unpack_pair<T>(mean.negative_pair(column(i) + 2 * k));
          sum = fmaf(x.x, -m.x, fmaf(x.y, -m.y, sum));
        }
      }
      products[row] = warp_reduce<Sum, kQuadLanes>(sum);
    }
  }
  template <bool kSubtractsMean>
  __device__ __forceinline__ void rotate(const KeyMean<T>& mean) {
    uint32_t signs[2][2];
    make_signs(signs);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int piece = group / 2, word = group % 2 * 2;
      const uint32_t *first = reinterpret_cast<const uint32_t*>(packs_[0][piece].words) + word,
                     *second = reinterpret_cast<const uint32_t*>(packs_[1][piece].words) + word;
      const uint32_t a[4] = {first[0], second[0], first[1], second[1]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&sums)[4] = values_[group][half];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0;
        multiply_add<T>(sums, a, signs[half]);
      }
      if constexpr (kSubtractsMean) {
        const uint32_t low = mean.negative_pair(column(piece) + 2 * word);
        const uint32_t high = mean.negative_pair(column(piece) + 2 * word + 2);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          multiply_add<T>(values_[group][half], {low, low, high, high}, signs[half]);
      }
    }
#pragma unroll
    for (int step = 1; step < kGroups; step *= 2)
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (group & step) continue;
          float &a = values_[group][i / 4][i % 4], &b = values_[group + step][i / 4][i % 4];
          const float sum = a + b;
          b = a - b;
          a = sum;
        }
  }
  // Of this lane's part of a row.
  __device__ __forceinline__ uint32_t largest_magnitude(int row) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) largest = larger_magnitude(largest, value(row, i));
    return __float_as_uint(largest);
  }
  __device__ __forceinline__ void store(uint8_t* tile, int row, float inverse) const {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 16 * piece + 4 * i;
        words[i] = pack_int8(value(row, first) * inverse, value(row, first + 1) * inverse,
                             value(row, first + 2) * inverse, value(row, first + 3) * inverse);
      }
      *reinterpret_cast<uint4*>(tile + swizzled_piece(warp_row() + row_of(row), quad_lane() * 2 + piece)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Row of the block's first row of this warp, and of the thread's first or second row from there.
  __device__ __forceinline__ static int warp_row() { return static_cast<int>(threadIdx.x) / 32 * kRows; }
  __device__ __forceinline__ static int row_of(int row) {
    return static_cast<int>(threadIdx.x) % 32 / kQuadLanes + row * (kRows / 2);
  }
  __device__ __forceinline__ static int quad_lane() { return static_cast<int>(threadIdx.x) % kQuadLanes; }

 private:
  static constexpr int kLanePieces = kRowPieces / kQuadLanes;

  // First column of a piece.
  __device__ __forceinline__ static int column(int i) {
    return (i * kQuadLanes + quad_lane()) * kPieceColumns;
  }
  // The matrix for 16 columns as mma's b, for the first and the last 8 columns of the result: 1 or -1.
  __device__ __forceinline__ static void make_signs(uint32_t (&signs)[2][2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = quad_lane() * 2 + i * 8, result = lane / kQuadLanes + half * 8;
        const auto sign = [&](int of_row) { return __popc(of_row & result) % 2 == 0 ? 1.0f : -1.0f; };
        signs[half][i] = pack_pair<T>(sign(row), sign(row + 1));
      }
  }
  __device__ __forceinline__ float value(int row, int i) const {
    return values_[i / 4][i / 2 % 2][row * 2 + i % 2];
  }

  Pack<T, kPieceColumns> packs_[2][kLanePieces];
  float values_[kGroups][2][4];  // mma's d, for the first and the last 8 columns of a group's result
};
constexpr float kRotationScale = 1.0f / kInt8Columns;  // of a product of rotated rows

template <typename T, Access kAccess>
__device__ __forceinline__ void quantize_queries(const QuantizeAttentionParams& p, int block,
                                                 KeyMean<T>& mean) {
  using Rows = RotatedRows<T, kAccess>;
  static_assert(kQuantizeWarps * Rows::kRows == kInt8Queries);
  const uint32_t head_of_all = p.query_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.heads.divide(head_of_all), head = head_of_all - batch * p.heads.divisor;
  const int first_row = (block - static_cast<int>(head_of_all * p.query_tiles.divisor)) * kInt8Queries;
  Rows rows;
  rows.load(p, p.args.q, batch, head, first_row + Rows::warp_row(),
            static_cast<int>(p.args.query_length) - 1);
  float mean_scores[2] = {};
  if (p.args.lse != nullptr) {
    mean.load(p, batch * p.key_heads.divisor + p.group_heads.divide(head));
    rows.multiply_by(mean, mean_scores);
  }
  rows.template rotate<false>(mean);
  uint8_t* tile = p.workspace.queries + int64_t{block} * QueryTileBytes::kBytes;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t largest = warp_reduce<UnsignedMax, kQuadLanes>(rows.largest_magnitude(row));
    const CodeScale codes(__uint_as_float(largest), kLargestInt8);
    rows.store(tile, row, codes.inverse);
    if (Rows::quad_lane() > 0) continue;
    const int index = Rows::warp_row() + Rows::row_of(row);
    reinterpret_cast<float*>(tile + QueryTileBytes::kScales)[index] =
        codes.scale * (p.score_scale * kRotationScale);
    reinterpret_cast<float*>(tile + QueryTileBytes::kMeanScores)[index] = mean_scores[row] * p.score_scale;
  }
}

template <typename T, Access kAccess>
__device__ __forceinline__ void quantize_keys(const QuantizeAttentionParams& p, int block, KeyMean<T>& mean) {
  using Rows = RotatedRows<T, kAccess>;
  static_assert(kQuantizeWarps * Rows::kRows == kTileKeys);
  __shared__ uint32_t largest_of_warps[kQuantizeWarps][kQuadLanes];
  const uint32_t key_head = p.key_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.key_heads.divide(key_head), head = key_head - batch * p.key_heads.divisor;
  const int first_row = (block - static_cast<int>(key_head * p.key_tiles.divisor)) * kTileKeys;
  const int count = p.key_count(batch);
  if (first_row >= max(count, 1)) return;
  Rows rows{};
  if (count > 0) rows.load(p, p.args.k, batch, head, first_row + Rows::warp_row(), count - 1);
  mean.load(p, key_head);
  rows.template rotate<true>(mean);
  // Eight adjacent lanes have the rows with the same row % 8 / 2.
  uint32_t largest_bits = max(rows.largest_magnitude(0), rows.largest_magnitude(1));
  largest_bits = warp_reduce<UnsignedMax, 2 * kQuadLanes>(largest_bits);
  const int warp = static_cast<int>(threadIdx.x) / 32,
            of_four = static_cast<int>(threadIdx.x) / 8 % kQuadLanes;
  if (threadIdx.x % 8 == 0) largest_of_warps[warp][of_four] = largest_bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuantizeWarps; ++i) largest_bits = max(largest_bits, largest_of_warps[i][of_four]);
  const CodeScale codes(__uint_as_float(largest_bits), kLargestInt8);
  uint8_t* tile = p.workspace.keys + int64_t{block} * KeyTileBytes::kStride;
#pragma unroll
  for (int row = 0; row < 2; ++row) rows.store(tile, row, codes.inverse);
  if (warp == 0 && threadIdx.x % 8 == 0)
    reinterpret_cast<float*>(tile + KeyTileBytes::kScales)[of_four] = codes.scale;
}

// A thread has the four keys of a 32-bit word in pieces of 8 columns. wgmma's order of keys is that in which
// a thread has their probabilities: columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, where t = lane % 4.
template <typename T, Access kAccess>
__device__ __forceinline__ void quantize_values(const QuantizeAttentionParams& p, int block,
                                                float (&inverses)[kInt8Columns]) {
  constexpr int kKeys = 4, kWords = kTileKeys / kKeys, kThreadPieces = kRowPieces * kWords / kQuantizeThreads;
  constexpr uint32_t kOne = 0x38;  // E4M3
  static_assert(kRowPieces >= KeyTileBytes::kOnes);
  const uint32_t key_head = p.key_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.key_heads.divide(key_head), head = key_head - batch * p.key_heads.divisor;
  const int tile_index = block - static_cast<int>(key_head * p.key_tiles.divisor);
  const int first_row = tile_index * kTileKeys, count = p.key_count(batch);
  if (first_row >= max(count, 1)) return;
  // A quad loads adjacent pieces, and stores 32 adjacent bytes with the other quads.
  const int quad = static_cast<int>(threadIdx.x) / kQuadLanes, word = quad % kWords;
  const int first_piece = quad / kWords * kQuadLanes + static_cast<int>(threadIdx.x) % kQuadLanes;
  const auto piece_of = [&](int i) { return first_piece + i * (kRowPieces / kThreadPieces); };
  const int first_key = first_row + word / 4 * 16 + word % 4 * 2;
  uint32_t ones = 0;
  Pack<T, kPieceColumns> packs[kThreadPieces][kKeys];
#pragma unroll
  for (int i = 0; i < kThreadPieces; ++i) {
    const OperandPiece<T, kAccess> values(p, p.args.v, batch, head, piece_of(i) * kPieceColumns);
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const int token = first_key + key / 2 * 8 + key % 2;
      packs[i][key] = values.load(token, token < count);
      if (i == 0 && token < count) ones |= kOne << (8 * key);
    }
  }
  if (const int column = static_cast<int>(threadIdx.x); column < kInt8Columns) {
    const float largest = combine_parts<false>(p.workspace.value_maxima, key_head, column);
    const CodeScale codes(largest, kLargestFp8);
    inverses[column] = codes.inverse;
    if (tile_index == 0) p.workspace.value_scales[key_head * kInt8Columns + column] = codes.scale;
  }
  __syncthreads();
  uint8_t* tile = p.workspace.keys + int64_t{block} * KeyTileBytes::kStride + KeyTileBytes::kValues;
  const auto store = [&](int row, uint32_t codes) {
    *reinterpret_cast<uint32_t*>(tile + swizzled_piece(row, word / 4) + word % 4 * 4) = codes;
  };
#pragma unroll
  for (int i = 0; i < kThreadPieces; ++i) {
    const int piece = piece_of(i);
    float of_keys[kKeys][kPieceColumns];
#pragma unroll
    for (int key = 0; key < kKeys; ++key) packs[i][key].to_floats(of_keys[key]);
#pragma unroll
    for (int k = 0; k < kPieceColumns; ++k) {
      const int column = piece * kPieceColumns + k;
      const float inverse = inverses[column];
      store(column, pack_fp8(of_keys[0][k] * inverse, of_keys[1][k] * inverse, of_keys[2][k] * inverse,
                             of_keys[3][k] * inverse));
    }
    if (piece < KeyTileBytes::kOnes) store(kInt8Columns + piece, ones);
  }
}

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    attention_quantize_kernel(const __grid_constant__ QuantizeAttentionParams p) {
  __shared__ KeyMean<T> mean;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  // The values first: the L2 cache has those that were read last.
  const int block = static_cast<int>(blockIdx.x), key_block = block - p.key_blocks;
  if (block < p.key_blocks)
    quantize_values<T, kAccess>(p, block, mean.values);
  else if (key_block < p.key_blocks)
    quantize_keys<T, kAccess>(p, key_block, mean);
  else
    quantize_queries<T, kAccess>(p, key_block - p.key_blocks, mean);
}

// ---------------------------------------------------------------------------------------------------------

template <typename T>
void quantize_attention(const char* operation, const AttentionParams& args, const Int8Workspace& workspace,
                        Stream stream) {
  QuantizeAttentionParams params{args, workspace, {}, {}, {}, {}, {}, args.scale * kLog2E, 0, 0};
  params.heads.set(static_cast<uint32_t>(args.heads));
  params.key_heads.set(static_cast<uint32_t>(args.key_heads));
  params.query_tiles.set(static_cast<uint32_t>(workspace.query_tiles));
  params.key_tiles.set(static_cast<uint32_t>(workspace.key_tiles));
  params.group_heads.set(static_cast<uint32_t>(args.heads / args.key_heads));
  params.query_blocks = static_cast<int>(workspace.heads * workspace.query_tiles);
  params.key_blocks = static_cast<int>(workspace.key_heads * workspace.key_tiles);
  bool has_vectors = true;
  for (const AttentionOperand* x : {&args.q, &args.k, &args.v}) {
    has_vectors = has_vectors && is_16_byte_aligned(x->data);
    for (const int64_t stride : x->strides) has_vectors = has_vectors && stride * 2 % kVectorBytes == 0;
  }
  const dim3 parts(static_cast<unsigned>(workspace.key_heads * kSequenceParts), 2);
  const dim3 tiles(params.query_blocks + 2 * params.key_blocks);
  const auto launch = [&](auto access) {
    launch_kernel(operation, attention_key_statistics_kernel<T, access>, parts, kQuantizeThreads, params,
                  stream);
    launch_kernel(operation, attention_quantize_kernel<T, access>, tiles, kQuantizeThreads, params, stream);
  };
  if (has_vectors)
    launch(Constant<Access::kVector>{});
  else
    launch(Constant<Access::kScalar>{});
}

}  // namespace h100_diffusers_kernels
