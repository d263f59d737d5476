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
constexpr int kSequenceParts = 8;
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

constexpr int kQuantizeThreads = 512, kQuantizeWarps = kQuantizeThreads / 32;
constexpr int kPieceColumns = 8, kRowPieces = kInt8Columns / kPieceColumns;  // A thread has a piece of a row.
constexpr int kBlockRows = kQuantizeThreads / kRowPieces;                    // at the same time

// Pieces of rows of query, key or value, from a column on.
template <typename T, Access kAccess>
struct OperandPieces {
  const T* first;  // of token 0
  int64_t stride;
  int columns;  // of the head, from the first one on

  __device__ __forceinline__ OperandPieces(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                           uint32_t batch, uint32_t head, int column)
      : first(static_cast<const T*>(x.data) + x.offset(batch, 0, head) + column),
        stride(x.strides[1]),
        columns(static_cast<int>(p.args.head_dim) - column) {}

  // The piece from this column on. Zeros beyond the head, and without a token.
  __device__ __forceinline__ Pack<T, kPieceColumns> load(int token, int column = 0,
                                                         bool has_token = true) const {
    Pack<T, kPieceColumns> pack{};
    if (column >= columns || !has_token) return pack;
    const T* address = first + token * stride + column;
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

template <typename T>
__device__ __forceinline__ const uint32_t* pairs_of(const Pack<T, kPieceColumns>& pack) {
  return reinterpret_cast<const uint32_t*>(pack.words);
}

// ---------------------------------------------------------------------------------------------------------
// Sums of keys and maxima of values, a block for each part of a sequence and key head

// A thread's part of the sum of the keys from `begin` to `end`, of each step-th.
template <typename T, Access kAccess>
__device__ __forceinline__ void add_keys(const OperandPieces<T, kAccess>& keys, int begin, int end, int step,
                                         float (&sums)[kPieceColumns]) {
  for (int index = begin; index < end; index += kBlockRows) {
    float values[kPieceColumns];
    keys.load(index * step).to_floats(values);
#pragma unroll
    for (int k = 0; k < kPieceColumns; ++k) sums[k] += values[k];
  }
}

// A thread's part of the maxima of the values' magnitudes. Bits of magnitudes are in their order, NaN last.
template <typename T, Access kAccess>
__device__ __forceinline__ void find_maxima(const OperandPieces<T, kAccess>& values, int begin, int end,
                                            float (&maxima)[kPieceColumns]) {
  constexpr int kUnroll = 8, kPairs = kPieceColumns / 2;
  constexpr uint32_t kMagnitudes = 0x7fff7fff;
  uint32_t largest[kPairs] = {};
#pragma unroll 1
  for (int first = begin; first < end; first += kBlockRows * kUnroll) {
    Pack<T, kPieceColumns> packs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) packs[i] = values.load(min(first + i * kBlockRows, end - 1));
#pragma unroll
    for (int i = 0; i < kUnroll; i += 2) {
      const uint32_t *one = pairs_of(packs[i]), *other = pairs_of(packs[i + 1]);
#pragma unroll
      for (int k = 0; k < kPairs; ++k)
        largest[k] = __vimax3_u16x2(largest[k], one[k] & kMagnitudes, other[k] & kMagnitudes);
    }
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const float2 pair = unpack_pair<T>(largest[k]);
    maxima[2 * k] = pair.x;
    maxima[2 * k + 1] = pair.y;
  }
}

template <typename T, Access kAccess, bool kIsKey>
__device__ __forceinline__ void reduce_part(const QuantizeAttentionParams& p, int key_head, int part,
                                            float* shared) {
  const uint32_t batch = p.key_heads.divide(static_cast<uint32_t>(key_head));
  const uint32_t head = static_cast<uint32_t>(key_head) - batch * p.key_heads.divisor;
  const int piece = static_cast<int>(threadIdx.x) % kRowPieces,
            row = static_cast<int>(threadIdx.x) / kRowPieces;
  const OperandPieces<T, kAccess> tensor(p, kIsKey ? p.args.k : p.args.v, batch, head, piece * kPieceColumns);
  const int step = kIsKey ? key_step(p.key_count(batch)) : 1, count = ceil_of(p.key_count(batch), step);
  const int length = ceil_of(count, kSequenceParts), begin = part * length, end = min(begin + length, count);
  float results[kPieceColumns] = {};
  if constexpr (kIsKey)
    add_keys(tensor, begin + row, end, step, results);
  else
    find_maxima(tensor, begin + row, end, results);
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
  if (kIsKey) result = __fdividef(result, static_cast<float>(max(count, 1)));
  float* out = kIsKey ? p.workspace.key_means : p.workspace.value_maxima;
  out[(key_head * kSequenceParts + part) * kInt8Columns + column] = result;
}

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kQuantizeThreads, 2)
    attention_key_statistics_kernel(const __grid_constant__ QuantizeAttentionParams p) {
  __shared__ float shared[kBlockRows * kInt8Columns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.workspace.claimed_tiles = 0;
  const int key_head = static_cast<int>(blockIdx.x) / kSequenceParts;
  const int part = static_cast<int>(blockIdx.x) % kSequenceParts;
  if (blockIdx.y == 0)
    reduce_part<T, kAccess, false>(p, key_head, part, shared);
  else
    reduce_part<T, kAccess, true>(p, key_head, part, shared);
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

// The mean of keys, rounded to T and times -1, in shared memory.
template <typename T>
struct NegativeMean {
  alignas(kVectorBytes) T values[kInt8Columns];

  // All threads call it.
  __device__ __forceinline__ void load(const QuantizeAttentionParams& p, uint32_t key_head) {
    if (const int column = static_cast<int>(threadIdx.x); column < kInt8Columns)
      values[column] = from_float<T>(-combine_parts<true>(p.workspace.key_means, key_head, column));
    __syncthreads();
  }
  __device__ __forceinline__ Pack<T, kPieceColumns> piece(int column) const {
    Pack<T, kPieceColumns> pack;
    pack.load(values + column);
    return pack;
  }
};

// Eight rows of query or key in a warp, multiplied by a Hadamard matrix times the square root of its size.
// A quad loads a row, each lane pieces that are a quad apart, so that the quad loads adjacent ones. The
// matrix is a product of one for 16 columns, by which the tensor cores multiply, and one for the 8 groups
// of 16. A group is four columns of each lane in the order of mma's b, whose columns are the rows. In the
// result a lane has two rows, of each 16 columns of all groups. Query and key have the same order of columns,
// so it does not change their product.
template <typename T, Access kAccess>
class RotatedRows {
 public:
  static constexpr int kRows = 8;

  // Loads the rows from `token` on, of which those beyond the last token are copies of it.
  __device__ __forceinline__ void load(const QuantizeAttentionParams& p, const AttentionOperand& x,
                                       uint32_t batch, uint32_t head, int token, int last_token) {
    const OperandPieces<T, kAccess> pieces(p, x, batch, head, column(0));
    const int own_token = min(token + lane() / kQuadLanes, last_token);
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) packs_[i] = pieces.load(own_token, column(i) - column(0));
  }
  // Returns the product of the row that this lane's quad has loaded and the mean.
  __device__ __forceinline__ float times(const NegativeMean<T>& mean) const {
    float product = 0;
#pragma unroll
    for (int i = 0; i < kLanePieces; ++i) {
      float values[kPieceColumns], means[kPieceColumns];
      packs_[i].to_floats(values);
      mean.piece(column(i)).to_floats(means);
#pragma unroll
      for (int k = 0; k < kPieceColumns; ++k) product = fmaf(values[k], -means[k], product);
    }
    return warp_reduce<Sum, kQuadLanes>(product);
  }
  template <bool kSubtractsMean>
  __device__ __forceinline__ void rotate(const NegativeMean<T>& mean) {
    constexpr uint32_t kSigns = 0x80008000;
    const uint32_t pair = matrix_pair(), matrix[4] = {pair, pair, pair, pair ^ kSigns};
#pragma unroll
    for (int piece = 0; piece < kLanePieces; ++piece) {
      const uint32_t* words = pairs_of(packs_[piece]);
      Pack<T, kPieceColumns> mean_piece{};
      if constexpr (kSubtractsMean) mean_piece = mean.piece(column(piece));
      const uint32_t* means = pairs_of(mean_piece);
#pragma unroll
      for (int word = 0; word < 4; word += 2) {
        float (&sums)[4] = values_[2 * piece + word / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0;
        multiply_16x8<T>(sums, matrix, words[word], words[word + 1]);
        if constexpr (kSubtractsMean) multiply_16x8<T>(sums, matrix, means[word], means[word + 1]);
      }
    }
#pragma unroll
    for (int step = 1; step < kGroups; step *= 2)
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (group & step) continue;
          float &a = values_[group][i], &b = values_[group + step][i];
          const float sum = a + b;
          b = a - b;
          a = sum;
        }
  }
  // Of this lane's part of its first or second row.
  __device__ __forceinline__ uint32_t largest_magnitude(int row) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) largest = larger_magnitude(largest, value(row, i));
    return __float_as_uint(largest);
  }
  __device__ __forceinline__ void store(uint8_t* tile, int row, float inverse) const {
    uint32_t words[kLaneColumns / 4];
#pragma unroll
    for (int i = 0; i < kLaneColumns / 4; ++i)
      words[i] = pack_int8(value(row, 4 * i) * inverse, value(row, 4 * i + 1) * inverse,
                           value(row, 4 * i + 2) * inverse, value(row, 4 * i + 3) * inverse);
    *reinterpret_cast<uint4*>(tile + swizzled_piece(row_of_tile(row), lane() / kQuadLanes)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }

  // The tile's row that is this lane's first or second one in the result.
  __device__ __forceinline__ static int row_of_tile(int row) {
    return warp_row() + lane() % kQuadLanes * 2 + row;
  }
  __device__ __forceinline__ static int warp_row() { return static_cast<int>(threadIdx.x) / 32 * kRows; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

 private:
  static constexpr int kGroups = 8, kLanePieces = kRowPieces / kQuadLanes;
  static constexpr int kLaneColumns = kInt8Columns / kRows;  // of each row in the result
  static_assert(kLaneColumns == kVectorBytes);

  // First column of a piece.
  __device__ __forceinline__ static int column(int i) {
    return (i * kQuadLanes + lane() % kQuadLanes) * kPieceColumns;
  }
  // Two elements of the matrix for 16 columns, 1 or -1: of the quad's row, and of columns 2 t and 2 t + 1,
  // where t is the lane in the quad. They are the same 8 rows further down, and 8 columns further to the
  // right, but both have the other sign.
  __device__ __forceinline__ static uint32_t matrix_pair() {
    const int row = lane() / kQuadLanes, column = lane() % kQuadLanes * 2;
    const auto element = [&](int of_column) { return __popc(row & of_column) % 2 == 0 ? 1.0f : -1.0f; };
    return pack_pair<T>(element(column), element(column + 1));
  }
  __device__ __forceinline__ float value(int row, int i) const { return values_[i / 2][i % 2 * 2 + row]; }

  Pack<T, kPieceColumns> packs_[kLanePieces];
  float values_[kGroups][4];  // mma's d
};
constexpr float kRotationScale = 1.0f / kInt8Columns;  // of a product of rotated rows

// Returns the largest value of the lanes at the same place of their quads.
__device__ __forceinline__ uint32_t reduce_over_quads(uint32_t value) {
#pragma unroll
  for (int mask = kQuadLanes; mask < 32; mask *= 2) value = max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

template <typename T, Access kAccess>
__device__ __forceinline__ void quantize_queries(const QuantizeAttentionParams& p, int block,
                                                 NegativeMean<T>& mean) {
  using Rows = RotatedRows<T, kAccess>;
  static_assert(kQuantizeWarps * Rows::kRows == kInt8Queries);
  const uint32_t head_of_all = p.query_tiles.divide(static_cast<uint32_t>(block));
  const uint32_t batch = p.heads.divide(head_of_all), head = head_of_all - batch * p.heads.divisor;
  const int first_row = (block - static_cast<int>(head_of_all * p.query_tiles.divisor)) * kInt8Queries;
  Rows rows;
  rows.load(p, p.args.q, batch, head, first_row + Rows::warp_row(),
            static_cast<int>(p.args.query_length) - 1);
  uint8_t* tile = p.workspace.queries + int64_t{block} * QueryTileBytes::kBytes;
  if (p.args.lse != nullptr) {
    mean.load(p, batch * p.key_heads.divisor + p.group_heads.divide(head));
    const float score = rows.times(mean) * p.score_scale;
    if (Rows::lane() % kQuadLanes == 0)
      reinterpret_cast<float*>(
          tile + QueryTileBytes::kMeanScores)[Rows::warp_row() + Rows::lane() / kQuadLanes] = score;
  }
  rows.template rotate<false>(mean);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t largest = reduce_over_quads(rows.largest_magnitude(row));
    const CodeScale codes(__uint_as_float(largest), kLargestInt8);
    rows.store(tile, row, codes.inverse);
    if (Rows::lane() < kQuadLanes)
      reinterpret_cast<float*>(tile + QueryTileBytes::kScales)[Rows::row_of_tile(row)] =
          codes.scale * (p.score_scale * kRotationScale);
  }
}

template <typename T, Access kAccess>
__device__ __forceinline__ void quantize_keys(const QuantizeAttentionParams& p, int block,
                                              NegativeMean<T>& mean) {
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
  // The lanes at the same place of their quads have the rows with the same row % 8 / 2.
  uint32_t largest_bits = reduce_over_quads(max(rows.largest_magnitude(0), rows.largest_magnitude(1)));
  const int warp = static_cast<int>(threadIdx.x) / 32, of_four = Rows::lane() % kQuadLanes;
  if (Rows::lane() < kQuadLanes) largest_of_warps[warp][of_four] = largest_bits;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuantizeWarps; ++i) largest_bits = max(largest_bits, largest_of_warps[i][of_four]);
  const CodeScale codes(__uint_as_float(largest_bits), kLargestInt8);
  uint8_t* tile = p.workspace.keys + int64_t{block} * KeyTileBytes::kStride;
#pragma unroll
  for (int row = 0; row < 2; ++row) rows.store(tile, row, codes.inverse);
  if (threadIdx.x < kQuadLanes) reinterpret_cast<float*>(tile + KeyTileBytes::kScales)[of_four] = codes.scale;
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
  const OperandPieces<T, kAccess> values(p, p.args.v, batch, head, first_piece * kPieceColumns);
#pragma unroll
  for (int i = 0; i < kThreadPieces; ++i) {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
      const int token = first_key + key / 2 * 8 + key % 2;
      packs[i][key] = values.load(token, (piece_of(i) - first_piece) * kPieceColumns, token < count);
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
  __shared__ NegativeMean<T> mean;
  __shared__ float inverses[kInt8Columns];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  // The values first: the L2 cache has those that were read last.
  const int block = static_cast<int>(blockIdx.x), key_block = block - p.key_blocks;
  if (block < p.key_blocks)
    quantize_values<T, kAccess>(p, block, inverses);
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
