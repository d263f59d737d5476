// Softmax is taken over rows.
//
// A row is read from memory for its largest element and is in cache for the rest: the exponentials, which are
// kept in float32, and their division by their sum.
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "vector.h"
#include "vector_math.h"

namespace h100_diffusers_kernels {
namespace {

template <int n>
struct Largest {
  Floats<n> value = broadcast<n>(-std::numeric_limits<float>::infinity());
  Floats<n> magnitudes = {};  // Their sum is NaN if and only if one of the values is.

  ALWAYS_INLINE void add(const Floats<n>& v) {
    value = v > value ? v : value;
    magnitudes += abs<n>(v);
  }

  ALWAYS_INLINE void add(const Largest& other) {
    value = other.value > value ? other.value : value;
    magnitudes += other.magnitudes;
  }
};

// Loads the last kLanes elements, or all and -infinity behind them if they are fewer.
template <int kLanes, typename T>
ALWAYS_INLINE Floats<kLanes> load_last(const T* row, int64_t count) {
  if (count >= kLanes) return load<kLanes>(row + count - kLanes);
  Floats<kLanes> v = broadcast<kLanes>(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; ++i) v[i] = load<1>(row + i)[0];
  return v;
}

// Returns the largest element, or NaN if there is one.
template <int kLanes, typename T>
ALWAYS_INLINE float largest_of(const T* row, int64_t count) {
  Largest<kLanes> chains[4];  // The operations of each depend on each other.
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    chains[0].add(load<kLanes>(row + i));
    chains[1].add(load<kLanes>(row + i + kLanes));
    chains[2].add(load<kLanes>(row + i + 2 * kLanes));
    chains[3].add(load<kLanes>(row + i + 3 * kLanes));
  }
  for (; i + kLanes <= count; i += kLanes) chains[0].add(load<kLanes>(row + i));
  if (i < count) chains[1].add(load_last<kLanes>(row, count));
  chains[0].add(chains[1]);
  chains[2].add(chains[3]);
  chains[0].add(chains[2]);
  const float magnitudes = sum<kLanes>(chains[0].magnitudes);
  return std::isnan(magnitudes) ? magnitudes : max<kLanes>(chains[0].value);
}

// An item is a row.
template <typename T>
struct SoftmaxKernel {
  const SoftmaxParams& params;

  static constexpr bool kNeedsScratch = !std::is_same_v<T, float>;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    std::unique_ptr<float[]> scratch;
    if (kNeedsScratch) scratch = std::make_unique_for_overwrite<float[]>(params.hidden);
    RowCursor row(params.shape, begin);
    for (; begin < end; ++begin, row.advance()) {
      T* out = row.pointer<T>(params.out);
      float* exponentials;
      if constexpr (kNeedsScratch)
        exponentials = scratch.get();
      else
        exponentials = out;
      run_row<kLanes>(row.pointer<const T>(params.x), exponentials, out);
    }
  }

  template <int kLanes>
  ALWAYS_INLINE void run_row(const T* in, float* exponentials, T* out) const {
    const float largest = largest_of<kLanes>(in, params.hidden);
    if (!std::isfinite(largest)) {
      // The result is NaN, as infinity - infinity, or 0 / 0 where all elements are -infinity.
      for_columns<kLanes>(0, params.hidden, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
        store<n>(out + column, broadcast<n>(std::numeric_limits<float>::quiet_NaN()));
      });
      return;
    }
    const int64_t hidden = params.hidden, rest = hidden % kLanes;
    double total[1];
    sum_columns<kLanes>(hidden - rest, total,
                        [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                          const Floats<n> e = exponential<n>(load<n>(in + column) - largest);
                          store<n>(exponentials + column, e);
                          sums[0] += e;
                        });
    if (rest > 0) {
      const Floats<kLanes> e = exponential<kLanes>(load_last<kLanes>(in, hidden) - largest);
      if (hidden >= kLanes) {
        store<kLanes>(exponentials + hidden - kLanes, e);
        const int known = static_cast<int>(kLanes - rest);  // So many are in the sum already.
        total[0] += sum_in_double<kLanes>(lane_numbers<kLanes>() < known ? Floats<kLanes>{} : e);
      } else {
        for (int64_t i = 0; i < hidden; ++i) exponentials[i] = e[i];
        total[0] += sum_in_double<kLanes>(e);
      }
    }
    // Two floats hold the factor, so that the product is rounded once.
    const double factor = 1.0 / total[0];
    const float high = static_cast<float>(factor);
    const float low = static_cast<float>(factor - high);
    for_columns<kLanes>(0, params.hidden, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
      const Floats<n> e = load<n>(exponentials + column);
      store<n>(out + column, e * low + e * high);
    });
  }

  // Returns exp(x) for x <= 0, but 0 where it would be subnormal or nearly so.
  template <int n>
  ALWAYS_INLINE static Floats<n> exponential(const Floats<n>& x) {
    return x < -87.0f ? Floats<n>{} : exp<n, kExp2Degree<T>>(x);
  }
};

}  // namespace

void softmax(const SoftmaxParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    parallel_run(stream, params.shape.rows, params.hidden, SoftmaxKernel<T>{params});
  });
}

}  // namespace h100_diffusers_kernels
