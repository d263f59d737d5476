// GELU (exact and tanh) and SiLU, and their gated forms, take inputs with or without a bias.
//
// Each is x * F(x) where F rises from 0 to 1 and F(-x) = 1 - F(x).
//
// Values go through a block in the first-level cache in two steps. The instructions of each depend on each
// other, and a processor has more of the independent ones from other elements at hand where a loop is one
// short step than where it is the whole function.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "silu.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

// Returns x * F(x) from the tail F(-|x|), as max(x, 0) - |x| * tail: nothing cancels on either side. The
// product must be 0 for x = infinity; for -infinity it is NaN, which is the result in PyTorch too.
template <int n>
ALWAYS_INLINE Floats<n> times_distribution(const Floats<n>& x, const Floats<n>& tail) {
  return positive_part<n>(x) - abs<n>(limit_positive<n>(x, FLT_MAX)) * tail;
}

// F is the distribution function of the normal distribution: F(-a) = erfc(a / sqrt(2)) / 2.
template <typename T>
struct GeluErf {
  // Returns log2(2 * F(-|x|)), or -126 where that is less. The polynomials are fits of log2(erfc(a /
  // sqrt(2))) / a; the relative error of F(-a) is 2e-6 for a < 1, 1e-5 for a = 4, 5e-3 for a = 8 with the
  // first, 3e-8, 2e-7, 8e-5 with the second.
  template <int n>
  ALWAYS_INLINE static Floats<n> first_step(const Floats<n>& x) {
    const Floats<n> a = abs<n>(x);
    Floats<n> slope;
    if constexpr (sizeof(T) == 2) {
      slope = polynomial<n>(a, -2.69856475e-08f, -8.29682847e-07f, 4.87766993e-05f, -0.000853764534f,
                            0.00827150792f, -0.0535870492f, -0.458741397f, -1.15117264f);
    } else {
      slope = polynomial<n>(a, -8.23667384e-11f, 4.66212358e-09f, -1.1562156e-07f, 1.65379083e-06f,
                            -1.50252699e-05f, 8.8209963e-05f, -0.000297175109f, 6.47803699e-06f,
                            0.00696322881f, -0.0524634048f, -0.45921126f, -1.1511054f);
    }
    return limit_negative<n>(a * slope, -126.0f);
  }

  template <int n>
  ALWAYS_INLINE static Floats<n> second_step(const Floats<n>& x, const Floats<n>& exponent) {
    return times_distribution<n>(x, exp2<n, 1, kExp2Degree<T>>(exponent));
  }
};

// F is the logistic function of 2u = 2 * sqrt(2 / pi) * (x + 0.044715 x^3), which is (1 + tanh(u)) / 2.
template <typename T>
struct GeluTanh {
  // Returns -|2u| * log2(e), or -127 where that is less.
  template <int n>
  ALWAYS_INLINE static Floats<n> first_step(const Floats<n>& x) {
    constexpr float kScale = -2.30220819f;  // -2 * sqrt(2 / pi) * log2(e)
    return limit_negative<n>(abs<n>(x) * (x * x * (0.044715f * kScale) + kScale), -127.0f);
  }

  template <int n>
  ALWAYS_INLINE static Floats<n> second_step(const Floats<n>& x, const Floats<n>& exponent) {
    const Floats<n> exponential = exp2<n, 0, kExp2Degree<T>>(exponent);
    return times_distribution<n>(x, exponential / (1.0f + exponential));
  }
};

// The result is activation(x + bias), or (x + bias) * activation(gate + gate_bias). An item is a segment of a
// row.
template <typename T, template <typename> class Activation, bool kIsGated, bool kHasBias>
struct ActivationKernel {
  const ActivationParams& params;
  SegmentGrid grid;

  static constexpr int64_t kBlock = 512;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    grid.for_segments(
        begin, end, [&](const RowCursor& row, int64_t first, int64_t last) ALWAYS_INLINE_LAMBDA {
          const Input x = input(row.pointer<const T>(params.x), params.bias);
          const Input activated = kIsGated ? input(row.pointer<const T>(params.gate), params.gate_bias) : x;
          T* out = row.pointer<T>(params.out);
          for (int64_t column = first; column < last; column += kBlock)
            run_block<kLanes>(x.from(column), activated.from(column), out + column,
                              std::min(kBlock, last - column));
        });
  }

  // This reads inputs, and adds their biases.
  struct Input {
    const T* in;
    const T* bias;

    template <int n>
    ALWAYS_INLINE Floats<n> load_at(int64_t i) const {
      const Floats<n> v = load<n>(in + i);
      if constexpr (kHasBias) return v + load<n>(bias + i);
      return v;
    }
    ALWAYS_INLINE Input from(int64_t column) const {
      return {in + column, kHasBias ? bias + column : nullptr};
    }
  };

  ALWAYS_INLINE static Input input(const T* in, const void* bias) {
    return {in, static_cast<const T*>(bias)};
  }

  // `out` may be where `value` or `activated` is: each step is over the same elements of all of them.
  template <int kLanes>
  ALWAYS_INLINE void run_block(const Input& value, const Input& activated, T* out, int64_t count) const {
    alignas(64) float x_buffer[kBlock], step[kBlock], result_buffer[kBlock];
    const float* x = x_buffer;
    float* result = result_buffer;
    if constexpr (std::is_same_v<T, float> && !kIsGated) result = out;
    if constexpr (std::is_same_v<T, float> && !kHasBias) {
      x = activated.in;
    } else {
      for_columns<kLanes>(0, count, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
        store<n>(x_buffer + i, activated.template load_at<n>(i));
      });
    }
    for_columns<kLanes>(0, count, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
      store<n>(step + i, Activation<T>::template first_step<n>(load<n>(x + i)));
    });
    for_columns<kLanes>(0, count, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
      store<n>(result + i, Activation<T>::template second_step<n>(load<n>(x + i), load<n>(step + i)));
    });
    if constexpr (kIsGated) {
      for_columns<kLanes>(0, count, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
        store<n>(out + i, value.template load_at<n>(i) * load<n>(result + i));
      });
    } else if constexpr (!std::is_same_v<T, float>) {
      for_columns<kLanes>(0, count, [&]<int n>(Lanes<n>, int64_t i) ALWAYS_INLINE_LAMBDA {
        store<n>(out + i, load<n>(result + i));
      });
    }
  }
};

template <template <typename> class Activation, bool kIsGated>
void launch(const ActivationParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    const bool has_bias = params.bias != nullptr;
    const SegmentGrid grid(params.shape, params.hidden, {&params.x, &params.gate, &params.out}, has_bias);
    if (has_bias) {
      parallel_run(stream, grid.segments(), grid.segment_size(),
                   ActivationKernel<T, Activation, kIsGated, true>{params, grid});
    } else {
      parallel_run(stream, grid.segments(), grid.segment_size(),
                   ActivationKernel<T, Activation, kIsGated, false>{params, grid});
    }
  });
}

template <bool kIsGated>
void launch_gelu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation)
    launch<GeluTanh, kIsGated>(params, stream);
  else
    launch<GeluErf, kIsGated>(params, stream);
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) { launch_gelu<false>(params, stream); }

void silu(const ActivationParams& params, Stream stream) { launch<Silu, false>(params, stream); }

void gated_gelu(const ActivationParams& params, Stream stream) { launch_gelu<true>(params, stream); }

void gated_silu(const ActivationParams& params, Stream stream) { launch<Silu, true>(params, stream); }

void geglu(const ActivationParams& params, Stream stream) { gated_gelu(params, stream); }

void swiglu(const ActivationParams& params, Stream stream) { gated_silu(params, stream); }

}  // namespace h100_diffusers_kernels
