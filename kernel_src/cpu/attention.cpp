// Attention goes along the keys once: the softmax's largest score and sum are kept for each query, and what
// has been added up is rescaled when a larger score comes (online softmax).
//
// An item is a block of queries of one head. Both matrix products are of floats and broadcast one operand's
// values to the lanes of the other: the queries are the lanes of the scores, so that the softmax is the same
// arithmetic in every lane, and the columns of v are the lanes of the output.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kBlockQueries = 64;
constexpr int64_t kBlockKeys = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A tile of a product is kept in registers, of which it takes as many as the instruction set has.
constexpr int kTileRows = 4;
template <int kLanes>
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;

// One operand's values are at scalars[row * row_stride + i * stride], the other's rows at vectors + i *
// vector_stride; i is summed over.
struct ProductOperands {
  const float* scalars;
  int64_t row_stride;
  int64_t stride;
  const float* vectors;
  int64_t vector_stride;
};

// Calls finish(row, column, sum) for each vector of a tile of kTileRows rows and kVectors vectors. Sums begin
// with begin(row, column).
template <int kLanes, int kVectors, typename Begin, typename Finish>
ALWAYS_INLINE void multiply_tile(const ProductOperands& operands, int64_t count, int64_t row, int64_t column,
                                 const Begin& begin, const Finish& finish) {
  Floats<kLanes> sums[kTileRows][kVectors];
  for (int r = 0; r < kTileRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = begin(row + r, column + v * kLanes);
  const float* scalars = operands.scalars + row * operands.row_stride;
  const float* vectors = operands.vectors + column;
  for (int64_t i = 0; i < count; ++i) {
    Floats<kLanes> vector[kVectors];
    for (int v = 0; v < kVectors; ++v) vector[v] = load<kLanes>(vectors + v * kLanes);
    for (int r = 0; r < kTileRows; ++r) {
      const float scalar = scalars[r * operands.row_stride];
      for (int v = 0; v < kVectors; ++v) sums[r][v] += vector[v] * scalar;
    }
    scalars += operands.stride;
    vectors += operands.vector_stride;
  }
  for (int r = 0; r < kTileRows; ++r)
    for (int v = 0; v < kVectors; ++v) finish(row + r, column + v * kLanes, sums[r][v]);
}

// Multiplies all tiles of rows, rounded up to a multiple of kTileRows, and of columns, a multiple of kLanes.
template <int kLanes, typename Begin, typename Finish>
ALWAYS_INLINE void multiply(const ProductOperands& operands, int64_t count, int64_t rows, int64_t columns,
                            const Begin& begin, const Finish& finish) {
  constexpr int kVectors = kTileVectors<kLanes>;
  int64_t column = 0;
  for (; column + kVectors * kLanes <= columns; column += kVectors * kLanes)
    for (int64_t row = 0; row < rows; row += kTileRows)
      multiply_tile<kLanes, kVectors>(operands, count, row, column, begin, finish);
  for (; column < columns; column += kLanes)
    for (int64_t row = 0; row < rows; row += kTileRows)
      multiply_tile<kLanes, 1>(operands, count, row, column, begin, finish);
}

// Returns exp(x) for x <= 0, but 0 where it would be subnormal or nearly so, and NaN for NaN.
template <int kLanes, typename T>
ALWAYS_INLINE Floats<kLanes> exponential(const Floats<kLanes>& x) {
  const Floats<kLanes> e = x < -87.0f ? Floats<kLanes>{} : exp<kLanes, kExp2Degree<T>>(x);
  return x == x ? e : x;
}

// One thread works on these blocks, in float32.
struct Scratch {
  explicit Scratch(int64_t head_dim)
      : memory(std::make_unique_for_overwrite<float[]>((2 * kBlockQueries + 2 * kBlockKeys) * head_dim +
                                                       kBlockKeys * kBlockQueries + kBlockKeys +
                                                       3 * kBlockQueries)) {
    float* next = memory.get();
    const auto take = [&](int64_t size) { return std::exchange(next, next + size); };
    q = take(head_dim * kBlockQueries);
    out = take(kBlockQueries * head_dim);
    k = take(kBlockKeys * head_dim);
    v = take(kBlockKeys * head_dim);
    scores = take(kBlockKeys * kBlockQueries);
    key_bias = take(kBlockKeys);
    largest = take(kBlockQueries);
    total = take(kBlockQueries);
    factor = take(kBlockQueries);
  }

  std::unique_ptr<float[]> memory;
  float* q;         // (head_dim, kBlockQueries)
  float* out;       // (kBlockQueries, head_dim), to be divided by `total`
  float* k;         // (kBlockKeys, head_dim)
  float* v;         // (kBlockKeys, head_dim)
  float* scores;    // (kBlockKeys, kBlockQueries), which become their exponentials
  float* key_bias;  // (kBlockKeys,)
  float* largest;   // (kBlockQueries,), as the next two: the largest score so far
  float* total;     // the sum of the exponentials so far
  float* factor;    // what the output so far is rescaled by
};

template <typename T>
struct AttentionKernel {
  const AttentionParams& params;

  int64_t query_blocks() const { return (params.query_length + kBlockQueries - 1) / kBlockQueries; }

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    const Scratch scratch(params.head_dim);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t blocks = query_blocks();
      const int64_t block = item % blocks, head = item / blocks % params.heads;
      run_block<kLanes>(scratch, item / blocks / params.heads, head, block * kBlockQueries);
    }
  }

  static const T* at(const AttentionOperand& operand, int64_t batch, int64_t seq, int64_t head) {
    return static_cast<const T*>(operand.data) + batch * operand.strides[0] + seq * operand.strides[1] +
           head * operand.strides[2];
  }

  template <int kLanes>
  ALWAYS_INLINE void run_block(const Scratch& scratch, int64_t batch, int64_t head, int64_t query) const {
    const int64_t queries = std::min(kBlockQueries, params.query_length - query);
    const int64_t key_head = head / (params.heads / params.key_heads);
    int64_t keys = params.key_length;
    if (params.key_lengths != nullptr)
      keys = std::clamp<int64_t>(params.key_lengths[batch], 0, params.key_length);

    // Lanes without a query are computed as if it were zeros.
    const int64_t lanes = (queries + kLanes - 1) / kLanes * kLanes;
    load_queries<kLanes>(scratch, at(params.q, batch, query, head), queries, lanes);
    std::fill_n(scratch.out, lanes * params.head_dim, 0.0f);
    std::fill_n(scratch.largest, lanes, -kInfinity);
    std::fill_n(scratch.total, lanes, 0.0f);
    for (int64_t key = 0; key < keys; key += kBlockKeys) {
      const int64_t count = std::min(kBlockKeys, keys - key);
      load_keys<kLanes>(scratch.k, at(params.k, batch, key, key_head), params.k.strides[1], count);
      load_keys<kLanes>(scratch.v, at(params.v, batch, key, key_head), params.v.strides[1], count);
      load_key_bias(scratch, batch, key, count);
      add_keys<kLanes>(scratch, queries, lanes, count);
    }
    store_queries<kLanes>(scratch, batch, head, query, queries);
  }

  // Transposes the queries, so that they are the lanes.
  template <int kLanes>
  ALWAYS_INLINE void load_queries(const Scratch& scratch, const T* data, int64_t queries,
                                  int64_t lanes) const {
    for (int64_t row = 0; row < lanes; ++row) {
      for (int64_t column = 0; column < params.head_dim; column += kLanes) {
        Floats<kLanes> values{};
        if (row < queries) values = load<kLanes>(data + row * params.q.strides[1] + column);
        for (int i = 0; i < kLanes; ++i) scratch.q[(column + i) * kBlockQueries + row] = values[i];
      }
    }
  }

  // Loads keys or values. Rows of zeros follow, up to a multiple of kTileRows.
  template <int kLanes>
  ALWAYS_INLINE void load_keys(float* block, const T* data, int64_t stride, int64_t count) const {
    const int64_t head_dim = params.head_dim;
    for (int64_t row = 0; row < count; ++row)
      for (int64_t column = 0; column < head_dim; column += kLanes)
        store<kLanes>(block + row * head_dim + column, load<kLanes>(data + row * stride + column));
    const int64_t rows = (count + kTileRows - 1) / kTileRows * kTileRows;
    std::fill(block + count * head_dim, block + rows * head_dim, 0.0f);
  }

  ALWAYS_INLINE void load_key_bias(const Scratch& scratch, int64_t batch, int64_t key, int64_t count) const {
    std::fill_n(scratch.key_bias, kBlockKeys, 0.0f);
    if (params.key_bias == nullptr) return;
    const int64_t first = batch * params.key_bias_stride + key;
    for (int64_t i = 0; i < count; ++i) {
      scratch.key_bias[i] = params.key_bias_is_float32
                                ? static_cast<const float*>(params.key_bias)[first + i]
                                : load<1>(static_cast<const T*>(params.key_bias) + first + i)[0];
    }
  }

  template <int kLanes>
  ALWAYS_INLINE void add_keys(const Scratch& scratch, int64_t queries, int64_t lanes, int64_t count) const {
    const int64_t head_dim = params.head_dim;
    multiply<kLanes>(
        {scratch.k, head_dim, 1, scratch.q, kBlockQueries}, head_dim, count, lanes,
        [](int64_t, int64_t) ALWAYS_INLINE_LAMBDA { return Floats<kLanes>{}; },
        [&](int64_t key, int64_t query, const Floats<kLanes>& product) ALWAYS_INLINE_LAMBDA {
          store<kLanes>(scratch.scores + key * kBlockQueries + query,
                        product * params.scale + scratch.key_bias[key]);
        });
    for (int64_t query = 0; query < lanes; query += kLanes) take_exponentials<kLanes>(scratch, query, count);
    multiply<kLanes>(
        {scratch.scores, 1, kBlockQueries, scratch.v, head_dim}, count, queries, head_dim,
        [&](int64_t query, int64_t column) ALWAYS_INLINE_LAMBDA {
          return load<kLanes>(scratch.out + query * head_dim + column) * scratch.factor[query];
        },
        [&](int64_t query, int64_t column, const Floats<kLanes>& sum)
            ALWAYS_INLINE_LAMBDA { store<kLanes>(scratch.out + query * head_dim + column, sum); });
  }

  // Makes exponentials of the scores of kLanes queries. A comparison with NaN is false, so that the largest
  // score is one of the others.
  template <int kLanes>
  ALWAYS_INLINE void take_exponentials(const Scratch& scratch, int64_t query, int64_t count) const {
    float* scores = scratch.scores + query;
    const Floats<kLanes> before = load<kLanes>(scratch.largest + query);
    Floats<kLanes> largest = before;
    for (int64_t key = 0; key < count; ++key) {
      const Floats<kLanes> score = load<kLanes>(scores + key * kBlockQueries);
      largest = score > largest ? score : largest;
    }
    store<kLanes>(scratch.largest + query, largest);
    // -infinity - -infinity would be NaN.
    const Floats<kLanes> subtrahend = largest == -kInfinity ? Floats<kLanes>{} : largest;
    Floats<kLanes> total{};
    for (int64_t key = 0; key < count; ++key) {
      float* score = scores + key * kBlockQueries;
      const Floats<kLanes> e = exponential<kLanes, T>(load<kLanes>(score) - subtrahend);
      store<kLanes>(score, e);
      total += e;
    }
    const Floats<kLanes> factor = exponential<kLanes, T>(before - subtrahend);
    store<kLanes>(scratch.factor + query, factor);
    store<kLanes>(scratch.total + query, load<kLanes>(scratch.total + query) * factor + total);
  }

  template <int kLanes>
  ALWAYS_INLINE void store_queries(const Scratch& scratch, int64_t batch, int64_t head, int64_t query,
                                   int64_t queries) const {
    const int64_t head_dim = params.head_dim, stride = params.out.strides[1];
    T* out = static_cast<T*>(params.out.data) + batch * params.out.strides[0] + query * stride +
             head * params.out.strides[2];
    for (int64_t row = 0; row < queries; ++row) {
      const float total = scratch.total[row];
      const float factor = total == 0 ? 0 : 1 / total;
      for (int64_t column = 0; column < head_dim; column += kLanes) {
        const Floats<kLanes> sum = load<kLanes>(scratch.out + row * head_dim + column);
        store<kLanes>(out + row * stride + column, sum * factor);
      }
    }
  }
};

template <typename T>
void launch(const AttentionParams& params, Stream stream) {
  const AttentionKernel<T> kernel{params};
  const int64_t items = params.batch * params.heads * kernel.query_blocks();
  const int64_t queries = std::min(kBlockQueries, params.query_length);
  parallel_run(stream, items, queries * (params.key_length + 1), kernel);
}

}  // namespace

int64_t attention_workspace_bytes(const AttentionParams&) { return 0; }

void attention(const AttentionParams& params, Stream stream) {
  if (params.dtype == DType::kFloat16)
    launch<Float16>(params, stream);
  else
    launch<BFloat16>(params, stream);
}

}  // namespace h100_diffusers_kernels
