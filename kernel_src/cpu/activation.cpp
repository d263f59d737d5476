// GELU (exact and tanh), SiLU and their gated forms.
//
// Each is x * F(x) where F rises from 0 to 1 and F(-x) = 1 - F(x). A policy computes the lower tail F(-a) of
// a = |x| to float accuracy, so nothing cancels on either side: x * F(-a) below zero, x - a * F(-a) above.
#include <cstdint>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

// F is the distribution function of the normal distribution: F(-a) = erfc(a / sqrt(2)) / 2.
struct GeluErf {
  static constexpr float kMaxArgument = 14.5f;  // from here on, F(-a) is 0 in float

  // erfc(a / sqrt(2)) / 2 = exp(-a^2 / 2) * g(1 / (1 + 0.4 a)) with a polynomial g. Its error is 7e-8.
  template <int n>
  ALWAYS_INLINE static Floats<n> lower_tail(const Floats<n>& a) {
    // The rounding error of a^2 / 2 would be that of the exponential, so the square is taken in two parts.
    const Floats<n> high = as_floats<n>(as_ints<n>(a) & 0x7ffff000);
    const Floats<n> rest = (a - high) * (a + high) * 0.5f;
    const Floats<n> exponential = exp_scaled<n>(high * high * 0.5f, rest);
    const Floats<n> s = 1.0f / (a * 0.4f + 1.0f);
    Floats<n> g = -0.0400005281f * s + 0.202325612f;
    g = g * s + -0.376811653f;
    g = g * s + 0.254077971f;
    g = g * s + -0.0142221078f;
    g = g * s + 0.159077153f;
    g = g * s + 0.155645907f;
    g = g * s + 0.15992038f;
    g = g * s + -1.27576404e-05f;
    return exponential * (g * (1 / kExpScale));
  }
};

// F(-a) of the logistic distribution, given exp_scaled(a).
template <int n>
ALWAYS_INLINE Floats<n> logistic_tail(const Floats<n>& scaled) {
  const Floats<n> exponential = scaled * (1 / kExpScale);
  return exponential / (1.0f + exponential);
}

struct Silu {
  static constexpr float kMaxArgument = 110.0f;

  template <int n>
  ALWAYS_INLINE static Floats<n> lower_tail(const Floats<n>& a) {
    return logistic_tail<n>(exp_scaled<n>(a));
  }
};

// (1 + tanh(u)) / 2 is the logistic function of 2u; u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float kMaxArgument = 11.0f;

  template <int n>
  ALWAYS_INLINE static Floats<n> lower_tail(const Floats<n>& a) {
    constexpr float kTwiceRoot = 1.59576912f;
    return logistic_tail<n>(exp_scaled<n>(a * (kTwiceRoot + kTwiceRoot * 0.044715f * (a * a))));
  }
};

template <typename Activation, int n>
ALWAYS_INLINE Floats<n> activate(const Floats<n>& x) {
  const Floats<n> a = at_most<n>(abs<n>(x), Activation::kMaxArgument);
  const Floats<n> tail = Activation::template lower_tail<n>(a);
  return x > 0.0f ? x - a * tail : x * tail;
}

// An item is a segment of a row.
template <typename T, typename Activation>
struct PlainKernel {
  const ActivationParams& params;
  SegmentGrid grid;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    grid.for_segments(
        begin, end, [&](const RowCursor& row, int64_t first, int64_t last) ALWAYS_INLINE_LAMBDA {
          const T* x = row.pointer<const T>(params.x);
          T* out = row.pointer<T>(params.out);
          for_columns<kLanes>(first, last, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
            store<n>(out + column, activate<Activation, n>(load<n>(x + column)));
          });
        });
  }
};

// The row's first half times its activated second half.
template <typename T, typename Activation>
struct GatedKernel {
  const ActivationParams& params;
  SegmentGrid grid;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    grid.for_segments(
        begin, end, [&](const RowCursor& row, int64_t first, int64_t last) ALWAYS_INLINE_LAMBDA {
          const T* value = row.pointer<const T>(params.x);
          const T* gate = value + params.hidden;
          T* out = row.pointer<T>(params.out);
          for_columns<kLanes>(first, last, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
            const Floats<n> activated = activate<Activation, n>(load<n>(gate + column));
            store<n>(out + column, load<n>(value + column) * activated);
          });
        });
  }
};

template <template <typename, typename> class Kernel, typename Activation>
void launch(const ActivationParams& params, Stream stream) {
  with_type(params.dtype, [&]<typename T>(T) {
    const SegmentGrid grid(params.shape, params.hidden);
    parallel_run(stream, grid.segments(), grid.segment_size(), Kernel<T, Activation>{params, grid});
  });
}

template <template <typename, typename> class Kernel>
void launch_gelu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) {
    launch<Kernel, GeluTanh>(params, stream);
  } else {
    launch<Kernel, GeluErf>(params, stream);
  }
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) { launch_gelu<PlainKernel>(params, stream); }

void silu(const ActivationParams& params, Stream stream) { launch<PlainKernel, Silu>(params, stream); }

void geglu(const ActivationParams& params, Stream stream) { launch_gelu<GatedKernel>(params, stream); }

void swiglu(const ActivationParams& params, Stream stream) { launch<GatedKernel, Silu>(params, stream); }

}  // namespace h100_diffusers_kernels
