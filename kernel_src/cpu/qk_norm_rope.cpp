// Query and key: RMS norm across the heads, per head or none, then rotary embedding, in one pass.
//
// An item is a token. Each group of elements is loaded, normalized, rotated and stored before the next one,
// and both elements of a pair are in the same group, so the output may be the input.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

// Cosine and sine of one token by element, for every head.
template <typename Table>
struct TokenTables {
  const Table* cosine;
  const Table* sine;
  int64_t cosine_stride;  // from head to head
  int64_t sine_stride;
};

// Largest magnitude; NaN if there is one.
float max_magnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (magnitude > largest || std::isnan(magnitude)) largest = magnitude;
  }
  return largest;
}

// The tables of one token, computed from its coordinates. They are kept while the coordinates stay the same,
// as they do from batch entry to batch entry if these share them.
class CoordinateTables {
 public:
  explicit CoordinateTables(const QkNormRopeParams& params)
      : params_(params),
        pairs_(std::max(params.q.heads, params.k.heads) * params.head_dim / 2),
        identity_pairs_(params.identity_pairs),
        frequencies_(std::make_unique<float[]>(pairs_)),
        coordinates_(std::make_unique<float[]>(pairs_)),
        cosine_(std::make_unique<float[]>(2 * pairs_)),
        sine_(std::make_unique<float[]>(2 * pairs_)) {
    for (int64_t pair = identity_pairs_; pair < pairs_; ++pair) {
      frequencies_[pair] = params.frequencies[(pair - identity_pairs_) / params.axes];
    }
    max_frequency_ = max_magnitude(frequencies_.get(), pairs_);
  }

  template <int kLanes>
  ALWAYS_INLINE TokenTables<float> at(const float* coordinates) {
    if (coordinates != current_) {
      current_ = coordinates;
      repeat_coordinates();
      if (max_magnitude(coordinates, params_.axes) * max_frequency_ <= kMaxAngle) {
        compute<kLanes>();
      } else {
        compute_any_angle();
      }
    }
    return {cosine_.get(), sine_.get(), params_.head_dim, params_.head_dim};
  }

 private:
  // The coordinate of each rotated pair: those of the axes over and over.
  void repeat_coordinates() {
    float* out = coordinates_.get() + identity_pairs_;
    const int64_t count = pairs_ - identity_pairs_;
    int64_t filled = std::min<int64_t>(params_.axes, count);
    std::memcpy(out, current_, filled * sizeof(float));
    for (; filled < count; filled *= 2) {
      std::memcpy(out + filled, out, std::min(filled, count - filled) * sizeof(float));
    }
  }

  // Pairs that are not rotated have the angle 0.
  template <int kLanes>
  ALWAYS_INLINE void compute() {
    const int64_t half = params_.head_dim / 2;
    for (int64_t first = 0; first < pairs_; first += half) {
      for_columns<kLanes>(first, first + half, [&]<int n>(Lanes<n>, int64_t pair) ALWAYS_INLINE_LAMBDA {
        const SineCosine<n> result = sincos<n>(load<n>(&frequencies_[pair]) * load<n>(&coordinates_[pair]));
        if (params_.layout == RopeLayout::kInterleaved) {
          store_twice<n>(&cosine_[2 * pair], result.cosine);
          store_twice<n>(&sine_[2 * pair], result.sine);
        } else {
          store<n>(&cosine_[first + pair], result.cosine);
          store<n>(&cosine_[first + pair + half], result.cosine);
          store<n>(&sine_[first + pair], result.sine);
          store<n>(&sine_[first + pair + half], result.sine);
        }
      });
    }
  }

  // Slower, also for huge angles, infinity and NaN.
  void compute_any_angle() {
    const int64_t half = params_.head_dim / 2;
    const bool interleaved = params_.layout == RopeLayout::kInterleaved;
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      const float angle = frequencies_[pair] * coordinates_[pair];
      const int64_t a = interleaved ? 2 * pair : pair / half * half + pair;
      const int64_t b = interleaved ? a + 1 : a + half;
      cosine_[a] = cosine_[b] = std::cos(angle);
      sine_[a] = sine_[b] = std::sin(angle);
    }
  }

  const QkNormRopeParams& params_;
  int64_t pairs_;
  int64_t identity_pairs_;
  std::unique_ptr<float[]> frequencies_;  // of each pair
  std::unique_ptr<float[]> coordinates_;
  std::unique_ptr<float[]> cosine_;
  std::unique_ptr<float[]> sine_;
  float max_frequency_;
  const float* current_ = nullptr;
};

// A head before the rotation.
template <typename T>
struct NormalizedHead {
  const T* in;
  const T* weight;
  float rstd;

  template <int n>
  ALWAYS_INLINE Floats<n> load_at(int64_t column) const {
    const Floats<n> v = load<n>(in + column) * rstd;
    return weight == nullptr ? v : v * load<n>(weight + column);
  }
};

// Rotations of one head.

struct NoRotation {
  template <int kLanes, typename T>
  ALWAYS_INLINE static void apply(const NormalizedHead<T>& head, int64_t head_dim, const float*, const float*,
                                  T* out) {
    for_columns<kLanes>(0, head_dim, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      store<n>(out + column, head.template load_at<n>(column));
    });
  }
};

// Pairs are neighbours: a group holds whole pairs.
struct InterleavedRotation {
  template <int kLanes, typename T, typename Table>
  ALWAYS_INLINE static void apply(const NormalizedHead<T>& head, int64_t head_dim, const Table* cosine,
                                  const Table* sine, T* out) {
    for_columns<kLanes, 2>(0, head_dim, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      const Floats<n> v = head.template load_at<n>(column);
      const Floats<n> signed_sine = negate_even<n>(load<n>(sine + column));
      store<n>(out + column, v * load<n>(cosine + column) + swap_pairs<n>(v) * signed_sine);
    });
  }
};

// Pairs are half a head apart: a group holds a part of each half.
struct HalfRotation {
  template <int kLanes, typename T, typename Table>
  ALWAYS_INLINE static void apply(const NormalizedHead<T>& head, int64_t head_dim, const Table* cosine,
                                  const Table* sine, T* out) {
    const int64_t half = head_dim / 2;
    for_columns<kLanes>(0, half, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      const int64_t other = column + half;
      const Floats<n> a = head.template load_at<n>(column);
      const Floats<n> b = head.template load_at<n>(other);
      store<n>(out + column, a * load<n>(cosine + column) - b * load<n>(sine + column));
      store<n>(out + other, b * load<n>(cosine + other) + a * load<n>(sine + other));
    });
  }
};

template <int kLanes, typename T>
ALWAYS_INLINE double sum_of_squares(const T* data, int64_t count) {
  double squares[1];
  sum_columns<kLanes>(count, squares,
                      [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                        const Floats<n> v = load<n>(data + column);
                        sums[0] += v * v;
                      });
  return squares[0];
}

// Table is the element type of the cosine and sine tables, float also where they come from coordinates. An
// item is a token; those of the same position in the sequence follow each other, as they may share their
// rotation.
template <typename T, typename Table, typename Rotation>
struct QkNormRopeKernel {
  const QkNormRopeParams& params;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    const auto rstd = std::make_unique<float[]>(std::max(params.q.heads, params.k.heads));
    std::optional<CoordinateTables> from_coordinates;
    if (params.coordinates != nullptr) from_coordinates.emplace(params);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token % params.batch, seq = token / params.batch;
      const auto at = [&](auto* data, const int64_t* strides) {
        return data + batch * strides[0] + seq * strides[1];
      };
      TokenTables<Table> tables{};
      if constexpr (std::is_same_v<Table, float>) {
        if (from_coordinates) {
          tables = from_coordinates->at<kLanes>(at(params.coordinates, params.coordinate_strides));
        }
      }
      if (params.cos != nullptr) {
        tables = {at(static_cast<const Table*>(params.cos), params.cos_strides),
                  at(static_cast<const Table*>(params.sin), params.sin_strides), params.cos_strides[2],
                  params.sin_strides[2]};
      }
      for (const HeadsOperand* operand : {&params.q, &params.k}) {
        const T* in = at(static_cast<const T*>(operand->in), operand->in_strides);
        T* out = at(static_cast<T*>(operand->out), operand->out_strides);
        measure<kLanes>(*operand, in, rstd.get());
        rotate<kLanes>(*operand, in, rstd.get(), tables, out);
      }
    }
  }

  // The factor of each head of a token.
  template <int kLanes>
  ALWAYS_INLINE void measure(const HeadsOperand& operand, const T* in, float* rstd) const {
    const int64_t heads = operand.heads, head_dim = params.head_dim, stride = operand.in_strides[2];
    if (params.norm == NormScope::kPerHead) {
      for (int64_t h = 0; h < heads; ++h) {
        const double squares = sum_of_squares<kLanes>(in + h * stride, head_dim);
        rstd[h] = reciprocal_deviation(squares / static_cast<double>(head_dim), params.eps);
      }
      return;
    }
    float factor = 1.0f;
    if (params.norm == NormScope::kAcrossHeads) {
      const bool is_contiguous = stride == head_dim;
      const int64_t parts = is_contiguous ? 1 : heads;
      double squares = 0;
      for (int64_t part = 0; part < parts; ++part) {
        squares += sum_of_squares<kLanes>(in + part * stride, is_contiguous ? heads * head_dim : head_dim);
      }
      factor = reciprocal_deviation(squares / static_cast<double>(heads * head_dim), params.eps);
    }
    std::fill_n(rstd, heads, factor);
  }

  template <int kLanes>
  ALWAYS_INLINE void rotate(const HeadsOperand& operand, const T* in, const float* rstd,
                            const TokenTables<Table>& tables, T* out) const {
    const T* weight = static_cast<const T*>(operand.weight);
    for (int64_t h = 0; h < operand.heads; ++h) {
      Rotation::template apply<kLanes>(NormalizedHead<T>{in, weight, rstd[h]}, params.head_dim,
                                       tables.cosine + h * tables.cosine_stride,
                                       tables.sine + h * tables.sine_stride, out);
      in += operand.in_strides[2];
      out += operand.out_strides[2];
      if (params.norm == NormScope::kAcrossHeads && weight != nullptr) weight += params.head_dim;
    }
  }
};

template <typename T, typename Table, typename Rotation>
void launch(const QkNormRopeParams& params, Stream stream) {
  const int64_t token_size = (params.q.heads + params.k.heads) * params.head_dim;
  parallel_run(stream, params.batch * params.seq, token_size, QkNormRopeKernel<T, Table, Rotation>{params});
}

template <typename T, typename Table>
void launch(const QkNormRopeParams& params, Stream stream) {
  if (params.layout == RopeLayout::kInterleaved) {
    launch<T, Table, InterleavedRotation>(params, stream);
  } else {
    launch<T, Table, HalfRotation>(params, stream);
  }
}

}  // namespace

void qk_norm_rope(const QkNormRopeParams& params, Stream stream) {
  with_type(params.dtype, [&]<typename T>(T) {
    if (params.cos == nullptr && params.coordinates == nullptr) {
      launch<T, float, NoRotation>(params, stream);
    } else if (params.coordinates != nullptr || params.table_is_float32) {
      launch<T, float>(params, stream);
    } else {
      launch<T, T>(params, stream);
    }
  });
}

}  // namespace h100_diffusers_kernels
