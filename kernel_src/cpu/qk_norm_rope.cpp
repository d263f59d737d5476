// Query and key are normalized (RMS norm across the heads, per head or none) and rotated in one pass.
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
#include "rotation.h"
#include "rows.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

// Returns the largest magnitude, or NaN if there is one.
float max_magnitude(const float* values, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (magnitude > largest || std::isnan(magnitude)) largest = magnitude;
  }
  return largest;
}

// The tables of one token are computed from its coordinates. They are kept while the coordinates stay the
// same, as they do from batch entry to batch entry if these share them.
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
    for (int64_t pair = identity_pairs_; pair < pairs_; ++pair)
      frequencies_[pair] = params.frequencies[(pair - identity_pairs_) / params.axes];
    max_frequency_ = max_magnitude(frequencies_.get(), pairs_);
  }

  template <int kLanes>
  ALWAYS_INLINE TokenTables<float> at(const float* coordinates) {
    if (coordinates != current_) {
      current_ = coordinates;
      repeat_coordinates();
      if (max_magnitude(coordinates, params_.axes) * max_frequency_ <= kMaxAngle)
        compute<kLanes>();
      else
        compute_any_angle();
    }
    return {cosine_.get(), sine_.get(), params_.head_dim, params_.head_dim};
  }

 private:
  // Gives each rotated pair its coordinate: those of the axes follow each other over and over.
  void repeat_coordinates() {
    float* out = coordinates_.get() + identity_pairs_;
    const int64_t count = pairs_ - identity_pairs_;
    int64_t filled = std::min<int64_t>(params_.axes, count);
    std::memcpy(out, current_, filled * sizeof(float));
    for (; filled < count; filled *= 2)
      std::memcpy(out + filled, out, std::min(filled, count - filled) * sizeof(float));
  }

  // Pairs that are not rotated have the angle 0.
  template <int kLanes>
  ALWAYS_INLINE void compute() {
    const int64_t half = params_.head_dim / 2;
    for (int64_t first = 0; first < pairs_; first += half) {
      for_columns<kLanes>(first, first + half, [&]<int n>(Lanes<n>, int64_t pair) ALWAYS_INLINE_LAMBDA {
        const SineCosine<n> result = sincos<n>(load<n>(&frequencies_[pair]) * load<n>(&coordinates_[pair]));
        store_pairs<n>(params_.layout, half, &cosine_[2 * first], pair - first, result.cosine);
        store_pairs<n>(params_.layout, half, &sine_[2 * first], pair - first, result.sine);
      });
    }
  }

  // This is slower, and takes huge angles, infinity and NaN, too.
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
  std::unique_ptr<float[]> frequencies_;  // Each pair has one, as of the coordinates.
  std::unique_ptr<float[]> coordinates_;
  std::unique_ptr<float[]> cosine_;
  std::unique_ptr<float[]> sine_;
  float max_frequency_;
  const float* current_ = nullptr;
};

// This reads a head, and normalizes it.
template <typename T, typename Weight>
struct NormalizedHead {
  const T* in;
  const Weight* weight;
  float rstd;

  template <int n>
  ALWAYS_INLINE Floats<n> load_at(int64_t column) const {
    const Floats<n> v = load<n>(in + column) * rstd;
    return weight == nullptr ? v : v * load<n>(weight + column);
  }
};

struct NoRotation {
  template <int kLanes, typename Head, typename T>
  ALWAYS_INLINE static void apply(const Head& head, int64_t head_dim, const float*, const float*, T* out) {
    for_columns<kLanes>(0, head_dim, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      store<n>(out + column, head.template load_at<n>(column));
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

// Table is the element type of the cosine and sine tables that the rotation reads, float also where they come
// from coordinates. An item is a token; those of the same position in the sequence follow each other, as they
// may share their rotation.
template <typename T, typename Table, typename Rotation>
struct QkNormRopeKernel {
  const QkvNormRopeParams& params;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    const auto rstd = std::make_unique<float[]>(std::max(params.q.heads, params.k.heads));
    std::optional<CoordinateTables> from_coordinates;
    if (params.coordinates != nullptr) from_coordinates.emplace(params);
    std::optional<CallTables<T, Table>> from_tables;
    if (params.tables.cos != nullptr)
      from_tables.emplace(params.tables, params.layout, params.head_dim, params.q.heads);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token % params.batch, seq = token / params.batch;
      const auto at = [&](auto* data, const int64_t* strides) {
        return data + batch * strides[0] + seq * strides[1];
      };
      TokenTables<Table> tables{};
      if constexpr (std::is_same_v<Table, float>) {
        if (from_coordinates)
          tables = from_coordinates->at<kLanes>(at(params.coordinates, params.coordinate_strides));
      }
      if (from_tables) tables = from_tables->template at<kLanes>(batch, seq);
      for (const bool is_key : {false, true}) {
        const HeadsOperand& operand = is_key ? params.k : params.q;
        if (operand.in == nullptr) continue;
        const T* in = at(static_cast<const T*>(operand.in), operand.in_strides);
        T* out = at(static_cast<T*>(operand.out), operand.out_strides);
        measure<kLanes>(operand, in, rstd.get());
        if constexpr (!std::is_same_v<T, float>) {
          if (is_key ? params.k_weight_is_float32 : params.q_weight_is_float32) {
            rotate<kLanes, float>(operand, in, rstd.get(), tables, out);
            continue;
          }
        }
        rotate<kLanes, T>(operand, in, rstd.get(), tables, out);
      }
      if (params.v.in != nullptr)
        copy(at(static_cast<const T*>(params.v.in), params.v.in_strides),
             at(static_cast<T*>(params.v.out), params.v.out_strides));
    }
  }

  void copy(const T* in, T* out) const {
    for (int64_t h = 0; h < params.v.heads; ++h)
      std::memmove(out + h * params.v.out_strides[2], in + h * params.v.in_strides[2],
                   params.head_dim * sizeof(T));
  }

  // Computes the factor by which the norm multiplies each head of a token.
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
      for (int64_t part = 0; part < parts; ++part)
        squares += sum_of_squares<kLanes>(in + part * stride, is_contiguous ? heads * head_dim : head_dim);
      factor = reciprocal_deviation(squares / static_cast<double>(heads * head_dim), params.eps);
    }
    std::fill_n(rstd, heads, factor);
  }

  template <int kLanes, typename Weight>
  ALWAYS_INLINE void rotate(const HeadsOperand& operand, const T* in, const float* rstd,
                            const TokenTables<Table>& tables, T* out) const {
    const Weight* weight = static_cast<const Weight*>(operand.weight);
    for (int64_t h = 0; h < operand.heads; ++h) {
      Rotation::template apply<kLanes>(NormalizedHead<T, Weight>{in, weight, rstd[h]}, params.head_dim,
                                       tables.cosine + h * tables.cosine_stride,
                                       tables.sine + h * tables.sine_stride, out);
      in += operand.in_strides[2];
      out += operand.out_strides[2];
      if (params.norm == NormScope::kAcrossHeads && weight != nullptr) weight += params.head_dim;
    }
  }
};

template <typename T, typename Table, typename Rotation>
void launch(const QkvNormRopeParams& params, Stream stream) {
  const int64_t token_size = (params.q.heads + params.k.heads + params.v.heads) * params.head_dim;
  parallel_run(stream, params.batch * params.seq, token_size, QkNormRopeKernel<T, Table, Rotation>{params});
}

template <typename T, typename Table>
void launch(const QkvNormRopeParams& params, Stream stream) {
  dispatch_layout(params.layout, [&]<typename Rotation>(std::type_identity<Rotation>) {
    launch<T, Table, Rotation>(params, stream);
  });
}

}  // namespace

void qk_norm_rope(const QkvNormRopeParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    if (params.tables.cos == nullptr && params.coordinates == nullptr)
      launch<T, float, NoRotation>(params, stream);
    else if (params.coordinates != nullptr || are_read_as_float(params.tables))
      launch<T, float>(params, stream);
    else
      launch<T, T>(params, stream);
  });
}

}  // namespace h100_diffusers_kernels
