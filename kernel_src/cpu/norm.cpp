// Row norms have an optional gated residual in front and modulation behind; the gated residual is here alone,
// too.
//
// One kernel is composed of three policies: what a row's values are (Input), how they are normalized (Norm)
// and what becomes of the normalized values (Output). A row is read from memory once; it is small enough to
// be in cache when the norm reads it again.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "vector.h"

namespace h100_diffusers_kernels {
namespace {

// The input is x itself.
template <typename T>
class PlainInput {
 public:
  static constexpr bool kNeedsScratch = false;

  PlainInput(const RowNormParams& params, const RowCursor& row, float*)
      : x_(row.pointer<const T>(params.x)) {}

  template <int n>
  ALWAYS_INLINE Floats<n> first(int64_t column) const {
    return load<n>(x_ + column);
  }

  template <int n>
  ALWAYS_INLINE Floats<n> again(int64_t column) const {
    return load<n>(x_ + column);
  }

 private:
  const T* x_;
};

// A row of a modulator that is of the dtype of the rows. It may be absent.
template <typename T>
class SameDtypeRow {
 public:
  SameDtypeRow(const RowCursor& row, const Modulator& modulator) : values_(row.pointer<const T>(modulator)) {}
  bool is_given() const { return values_ != nullptr; }

  template <int n>
  ALWAYS_INLINE Floats<n> at(int64_t column) const {
    return load<n>(values_ + column);
  }

 private:
  const T* values_;
};

// The same, or float32.
template <typename T>
class GeneralRow {
 public:
  GeneralRow(const RowCursor& row, const Modulator& modulator)
      : values_(modulator.is_float32 ? nullptr : row.pointer<const T>(modulator)),
        floats_(modulator.is_float32 ? row.pointer<const float>(modulator) : nullptr) {}
  bool is_given() const { return values_ != nullptr || floats_ != nullptr; }

  template <int n>
  ALWAYS_INLINE Floats<n> at(int64_t column) const {
    return floats_ != nullptr ? load<n>(floats_ + column) : load<n>(values_ + column);
  }

 private:
  const T* values_;
  const float* floats_;
};

// The input is residual + gate * x, which the first read writes back. The norm goes on with the unrounded
// values.
template <typename T, typename Gate>
class GatedInput {
 public:
  static constexpr bool kNeedsScratch = true;

  GatedInput(const RowNormParams& params, const RowCursor& row, float* scratch)
      : x_(row.pointer<const T>(params.x)),
        residual_(row.pointer<const T>(params.residual)),
        gate_(row, params.gate),
        residual_out_(row.pointer<T>(params.residual_out)),
        scratch_(scratch) {}

  template <int n>
  ALWAYS_INLINE Floats<n> update(int64_t column) const {
    Floats<n> h = load<n>(x_ + column);
    if (gate_.is_given()) h *= gate_.template at<n>(column);
    h += load<n>(residual_ + column);
    store<n>(residual_out_ + column, h);
    return h;
  }

  template <int n>
  ALWAYS_INLINE Floats<n> first(int64_t column) const {
    const Floats<n> h = update<n>(column);
    store<n>(scratch_ + column, h);
    return h;
  }

  template <int n>
  ALWAYS_INLINE Floats<n> again(int64_t column) const {
    return load<n>(scratch_ + column);
  }

 private:
  const T* x_;
  const T* residual_;
  Gate gate_;
  T* residual_out_;
  float* scratch_;
};

template <typename T>
using GatedResidualInput = GatedInput<T, SameDtypeRow<T>>;
template <typename T>
using GeneralGatedResidualInput = GatedInput<T, GeneralRow<T>>;

struct RmsNorm {
  float rstd;

  template <int kLanes, typename Input>
  ALWAYS_INLINE RmsNorm(Lanes<kLanes>, const Input& input, int64_t hidden, float eps) {
    double squares[1];
    sum_columns<kLanes>(hidden, squares,
                        [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                          const Floats<n> h = input.template first<n>(column);
                          sums[0] += h * h;
                        });
    rstd = reciprocal_deviation(squares[0] / static_cast<double>(hidden), eps);
  }

  template <int n>
  ALWAYS_INLINE Floats<n> apply(const Floats<n>& h) const {
    return h * rstd;
  }
};

// The variance is the mean square of the differences from the mean, and the sum of these differences tells
// what the mean lost by rounding, so a mean far from zero costs no accuracy (corrected two-pass algorithm).
struct LayerNorm {
  float mean;
  float rstd;
  float offset;  // The normalized values are off by it.

  template <int kLanes, typename Input>
  ALWAYS_INLINE LayerNorm(Lanes<kLanes>, const Input& input, int64_t hidden, float eps) {
    const double count = static_cast<double>(hidden);
    double total[1];
    sum_columns<kLanes>(hidden, total,
                        [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums)
                            ALWAYS_INLINE_LAMBDA { sums[0] += input.template first<n>(column); });
    mean = static_cast<float>(total[0] / count);
    double differences[2];
    sum_columns<kLanes>(hidden, differences,
                        [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                          const Floats<n> difference = input.template again<n>(column) - mean;
                          sums[0] += difference;
                          sums[1] += difference * difference;
                        });
    const double correction = differences[0] / count;
    rstd = reciprocal_deviation(std::max(differences[1] / count - correction * correction, 0.0), eps);
    offset = static_cast<float>(-correction * rstd);
  }

  template <int n>
  ALWAYS_INLINE Floats<n> apply(const Floats<n>& h) const {
    return (h - mean) * rstd + offset;
  }
};

// The output is normalized * weight + bias, each optional.
template <typename T>
class AffineOutput {
 public:
  AffineOutput(const RowNormParams& params, const RowCursor& row)
      : out_(row.pointer<T>(params.out)),
        weight_(static_cast<const T*>(params.weight.data)),
        bias_(static_cast<const T*>(params.bias.data)) {}

  template <int n>
  ALWAYS_INLINE void write(int64_t column, const Floats<n>& normalized) const {
    store<n>(out_ + column, affine<n>(column, normalized));
  }

 protected:
  template <int n>
  ALWAYS_INLINE Floats<n> affine(int64_t column, const Floats<n>& normalized) const {
    Floats<n> v = normalized;
    if (weight_ != nullptr) v *= load<n>(weight_ + column);
    if (bias_ != nullptr) v += load<n>(bias_ + column);
    return v;
  }

  T* out_;

 private:
  const T* weight_;
  const T* bias_;
};

// The output is affine * (1 + scale) + shift.
template <typename T>
class ModulatedOutput : public AffineOutput<T> {
 public:
  ModulatedOutput(const RowNormParams& params, const RowCursor& row)
      : AffineOutput<T>(params, row),
        scale_(row.pointer<const T>(params.scale)),
        shift_(row.pointer<const T>(params.shift)) {}

  template <int n>
  ALWAYS_INLINE void write(int64_t column, const Floats<n>& normalized) const {
    const Floats<n> factor = load<n>(scale_ + column) + 1.0f;
    const Floats<n> affine = this->template affine<n>(column, normalized);
    store<n>(this->out_ + column, affine * factor + load<n>(shift_ + column));
  }

 private:
  const T* scale_;
  const T* shift_;
};

// The outputs are affine * (1 + scale) + shift, one or two, whose operands may be absent, or float32.
template <typename T>
class GeneralOutput {
 public:
  GeneralOutput(const RowNormParams& params, const RowCursor& row)
      : weight_(row, params.weight),
        bias_(row, params.bias),
        first_{row.pointer<T>(params.out), {row, params.scale}, {row, params.shift}},
        second_{row.pointer<T>(params.second_out), {row, params.second_scale}, {row, params.second_shift}} {}

  template <int n>
  ALWAYS_INLINE void write(int64_t column, const Floats<n>& normalized) const {
    Floats<n> v = normalized;
    if (weight_.is_given()) v *= weight_.template at<n>(column);
    if (bias_.is_given()) v += bias_.template at<n>(column);
    first_.template write<n>(column, v);
    if (second_.out != nullptr) second_.template write<n>(column, v);
  }

 private:
  struct Modulation {
    T* out;
    GeneralRow<T> scale, shift;

    template <int n>
    ALWAYS_INLINE void write(int64_t column, const Floats<n>& affine) const {
      Floats<n> v = affine;
      if (scale.is_given()) v *= scale.template at<n>(column) + 1.0f;
      if (shift.is_given()) v += shift.template at<n>(column);
      store<n>(out + column, v);
    }
  };

  GeneralRow<T> weight_, bias_;
  Modulation first_, second_;
};

// An item is a row.
template <typename Input, typename Norm, typename Output>
struct NormKernel {
  const RowNormParams& params;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    std::unique_ptr<float[]> scratch;
    if (Input::kNeedsScratch) scratch = std::make_unique_for_overwrite<float[]>(params.hidden);
    RowCursor row(params.shape, begin);
    for (; begin < end; ++begin, row.advance()) {
      const Input input(params, row, scratch.get());
      const Norm norm(Lanes<kLanes>{}, input, params.hidden, params.eps);
      const Output output(params, row);
      for_columns<kLanes>(0, params.hidden, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
        output.template write<n>(column, norm.template apply<n>(input.template again<n>(column)));
      });
    }
  }
};

// An item is a segment of a row.
template <typename T, typename Input>
struct GatedResidualKernel {
  const RowNormParams& params;
  SegmentGrid grid;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    grid.for_segments(
        begin, end, [&](const RowCursor& row, int64_t first, int64_t last) ALWAYS_INLINE_LAMBDA {
          const Input input(params, row, nullptr);
          for_columns<kLanes>(first, last, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
            input.template update<n>(column);
          });
        });
  }
};

template <template <typename> class Input, typename Norm, template <typename> class Output>
void launch(const RowNormParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    parallel_run(stream, params.shape.rows, params.hidden, NormKernel<Input<T>, Norm, Output<T>>{params});
  });
}

template <typename Norm>
void launch_affine(const RowNormParams& params, Stream stream) {
  if (has_mixed_dtypes(params)) return launch<PlainInput, Norm, GeneralOutput>(params, stream);
  launch<PlainInput, Norm, AffineOutput>(params, stream);
}

template <typename Norm>
void launch_modulated(const RowNormParams& params, Stream stream) {
  const bool is_general = params.scale.data == nullptr || params.shift.data == nullptr ||
                          params.second_out.data != nullptr || has_mixed_dtypes(params);
  if (params.residual.data != nullptr) {
    if (is_general) return launch<GeneralGatedResidualInput, Norm, GeneralOutput>(params, stream);
    return launch<GatedResidualInput, Norm, ModulatedOutput>(params, stream);
  }
  if (is_general) return launch<PlainInput, Norm, GeneralOutput>(params, stream);
  launch<PlainInput, Norm, ModulatedOutput>(params, stream);
}

}  // namespace

void rms_norm(const RowNormParams& params, Stream stream) { launch_affine<RmsNorm>(params, stream); }

void layer_norm(const RowNormParams& params, Stream stream) { launch_affine<LayerNorm>(params, stream); }

void rms_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<RmsNorm>(params, stream);
}

void layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<LayerNorm>(params, stream);
}

void rms_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_modulated<RmsNorm>(params, stream);
}

void layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_modulated<LayerNorm>(params, stream);
}

void gated_residual_rms_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<RmsNorm>(params, stream);
}

void gated_residual_layer_norm_modulate(const RowNormParams& params, Stream stream) {
  launch_modulated<LayerNorm>(params, stream);
}

void gated_residual_rms_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_modulated<RmsNorm>(params, stream);
}

void gated_residual_layer_norm_modulate_pair(const RowNormParams& params, Stream stream) {
  launch_modulated<LayerNorm>(params, stream);
}

void gated_residual(const RowNormParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    const SegmentGrid grid(params.shape, params.hidden,
                           {&params.x, &params.residual, &params.gate, &params.residual_out});
    const auto run = [&](const auto& kernel) {
      parallel_run(stream, grid.segments(), grid.segment_size(), kernel);
    };
    if (has_mixed_dtypes(params))
      run(GatedResidualKernel<T, GeneralGatedResidualInput<T>>{params, grid});
    else
      run(GatedResidualKernel<T, GatedResidualInput<T>>{params, grid});
  });
}

}  // namespace h100_diffusers_kernels
