// Vectors of kLanes floats are converted from and to memory in float32, float16 and bfloat16.
//
// They are the compiler's vector extension, so the same source serves every instruction set: a kernel is
// written for any number of lanes and compiled for the native number of each set (multiversion.h). All of it
// must be inlined into the function that carries the instruction set, hence ALWAYS_INLINE throughout.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ALWAYS_INLINE_LAMBDA __attribute__((always_inline))

// Vectors passed by value would change the calling convention; here no call remains.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace h100_diffusers_kernels {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <int kLanes>
struct VectorTypes {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Uints __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  typedef double Doubles __attribute__((vector_size(8 * kLanes)));
#if defined(__aarch64__)
  typedef __fp16 Float16s __attribute__((vector_size(2 * kLanes)));
#elif defined(__clang__) && defined(__x86_64__)
  typedef _Float16 Float16s __attribute__((vector_size(2 * kLanes)));
#endif
};
template <int kLanes>
using Floats = typename VectorTypes<kLanes>::Floats;
template <int kLanes>
using Ints = typename VectorTypes<kLanes>::Ints;
template <int kLanes>
using Uints = typename VectorTypes<kLanes>::Uints;
template <int kLanes>
using Halves = typename VectorTypes<kLanes>::Halves;
template <int kLanes>
using Doubles = typename VectorTypes<kLanes>::Doubles;

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> as_floats(const Ints<kLanes>& v) {
  return __builtin_bit_cast(Floats<kLanes>, v);
}

template <int kLanes>
ALWAYS_INLINE Ints<kLanes> as_ints(const Floats<kLanes>& v) {
  return __builtin_bit_cast(Ints<kLanes>, v);
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> broadcast(float v) {
  return Floats<kLanes>{} + v;
}

template <int kLanes, int... i>
ALWAYS_INLINE Ints<kLanes> lane_numbers(std::integer_sequence<int, i...>) {
  return Ints<kLanes>{i...};
}

// Returns (0, 1, 2, ...).
template <int kLanes>
ALWAYS_INLINE Ints<kLanes> lane_numbers() {
  return lane_numbers<kLanes>(std::make_integer_sequence<int, kLanes>{});
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> abs(const Floats<kLanes>& v) {
  return as_floats<kLanes>(as_ints<kLanes>(v) & 0x7fffffff);
}

// Floats of one sign are ordered by magnitude as their bits are, and all positive ones come before all
// negative ones if the bits are taken as unsigned, after them if signed. NaN is beyond infinity.

// Returns v, but 0 where v is negative.
template <int kLanes>
ALWAYS_INLINE Floats<kLanes> positive_part(const Floats<kLanes>& v) {
  const Ints<kLanes> bits = as_ints<kLanes>(v);
  return as_floats<kLanes>(bits > 0 ? bits : Ints<kLanes>{});
}

// Returns v, but limit where v is greater or a positive NaN. The limit is positive.
template <int kLanes>
ALWAYS_INLINE Floats<kLanes> limit_positive(const Floats<kLanes>& v, float limit) {
  const Ints<kLanes> bits = as_ints<kLanes>(v);
  const Ints<kLanes> limit_bits = as_ints<kLanes>(broadcast<kLanes>(limit));
  return as_floats<kLanes>(bits < limit_bits ? bits : limit_bits);
}

// Returns v, but limit where v is less or a negative NaN. The limit is negative.
template <int kLanes>
ALWAYS_INLINE Floats<kLanes> limit_negative(const Floats<kLanes>& v, float limit) {
  const Uints<kLanes> bits = __builtin_bit_cast(Uints<kLanes>, v);
  const Uints<kLanes> limit_bits = __builtin_bit_cast(Uints<kLanes>, broadcast<kLanes>(limit));
  return __builtin_bit_cast(Floats<kLanes>, bits < limit_bits ? bits : limit_bits);
}

// A bfloat16 is the upper half of a float: the odd one of two on a little-endian machine.
template <int kLanes, size_t... i>
ALWAYS_INLINE Floats<kLanes> from_upper_halves(const Halves<kLanes>& upper, std::index_sequence<i...>) {
  return __builtin_bit_cast(
      Floats<kLanes>, __builtin_shufflevector(Halves<kLanes>{}, upper, (i % 2 == 0 ? 0 : kLanes + i / 2)...));
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> bfloat16_to_float(const Halves<kLanes>& halves) {
  return from_upper_halves<kLanes>(halves, std::make_index_sequence<2 * kLanes>{});
}

template <int kLanes, size_t... i>
ALWAYS_INLINE Halves<kLanes> upper_halves(const Uints<kLanes>& bits, std::index_sequence<i...>) {
  const Halves<2 * kLanes> halves = __builtin_bit_cast(Halves<2 * kLanes>, bits);
  return __builtin_shufflevector(halves, halves, (2 * i + 1)...);
}

// Rounds to nearest even; NaN becomes the quiet NaN.
template <int kLanes>
ALWAYS_INLINE Halves<kLanes> float_to_bfloat16(const Floats<kLanes>& v) {
  const Uints<kLanes> bits = __builtin_bit_cast(Uints<kLanes>, v);
  const Uints<kLanes> rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return upper_halves<kLanes>(v == v ? rounded : Uints<kLanes>{} + 0x7fc00000,
                              std::make_index_sequence<kLanes>{});
}

// All processors of aarch64 convert float16; of x86-64 those do that have 8 lanes or more.
#if defined(__aarch64__)
template <int kLanes>
constexpr bool kHasFloat16 = true;
#elif defined(__x86_64__)
template <int kLanes>
constexpr bool kHasFloat16 = kLanes >= 8;
#else
template <int kLanes>
constexpr bool kHasFloat16 = false;
#endif

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> float16_to_float(const Halves<kLanes>& halves) {
  if constexpr (kHasFloat16<kLanes>) {
#if defined(__aarch64__) || defined(__clang__)
    using Float16s = typename VectorTypes<kLanes>::Float16s;
    return __builtin_convertvector(__builtin_bit_cast(Float16s, halves), Floats<kLanes>);
#elif defined(__x86_64__)  // GCC would convert lane by lane
    Floats<kLanes> v;
    asm("vcvtph2ps %1, %0" : "=v"(v) : "vm"(halves));
    return v;
#endif
  } else {
    const Ints<kLanes> bits = __builtin_convertvector(halves, Ints<kLanes>);
    const Ints<kLanes> sign = (bits & 0x8000) << 16;
    const Ints<kLanes> magnitude = (bits & 0x7fff) << 13;
    // The exponent bias differs by 112; the product also normalizes subnormal numbers.
    const Ints<kLanes> finite = as_ints<kLanes>(as_floats<kLanes>(magnitude) * 0x1p112f);
    return as_floats<kLanes>((magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite) | sign);
  }
}

// Rounds to nearest even; NaN becomes a quiet NaN.
template <int kLanes>
ALWAYS_INLINE Halves<kLanes> float_to_float16(const Floats<kLanes>& v) {
  if constexpr (kHasFloat16<kLanes>) {
#if defined(__aarch64__) || defined(__clang__)
    using Float16s = typename VectorTypes<kLanes>::Float16s;
    return __builtin_bit_cast(Halves<kLanes>, __builtin_convertvector(v, Float16s));
#elif defined(__x86_64__)
    Halves<kLanes> halves;
    asm("vcvtps2ph $0, %1, %0" : "=vm"(halves) : "v"(v));
    return halves;
#endif
  } else {
    const Ints<kLanes> bits = as_ints<kLanes>(v);
    const Ints<kLanes> magnitude = bits & 0x7fffffff;
    const Ints<kLanes> sign = (bits >> 16) & 0x8000;
    const Ints<kLanes> normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 leaves the subnormal number, rounded, in the lowest bits.
    const Ints<kLanes> subnormal = as_ints<kLanes>(as_floats<kLanes>(magnitude) + 0.5f) - 0x3f000000;
    Ints<kLanes> rounded = magnitude < (113 << 23) ? subnormal : normal;
    rounded = magnitude >= (143 << 23) ? Ints<kLanes>{} + 0x7c00 : rounded;
    rounded = magnitude > 0x7f800000 ? Ints<kLanes>{} + 0x7e00 : rounded;
    return __builtin_convertvector(rounded | sign, Halves<kLanes>);
  }
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> load(const float* data) {
  Floats<kLanes> v;
  std::memcpy(&v, data, sizeof(v));
  return v;
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> load(const Float16* data) {
  Halves<kLanes> halves;
  std::memcpy(&halves, data, sizeof(halves));
  return float16_to_float<kLanes>(halves);
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> load(const BFloat16* data) {
  Halves<kLanes> halves;
  std::memcpy(&halves, data, sizeof(halves));
  return bfloat16_to_float<kLanes>(halves);
}

template <int kLanes>
ALWAYS_INLINE void store(float* data, const Floats<kLanes>& v) {
  std::memcpy(data, &v, sizeof(v));
}

template <int kLanes>
ALWAYS_INLINE void store(Float16* data, const Floats<kLanes>& v) {
  const Halves<kLanes> halves = float_to_float16<kLanes>(v);
  std::memcpy(data, &halves, sizeof(halves));
}

template <int kLanes>
ALWAYS_INLINE void store(BFloat16* data, const Floats<kLanes>& v) {
  const Halves<kLanes> halves = float_to_bfloat16<kLanes>(v);
  std::memcpy(data, &halves, sizeof(halves));
}

template <int kLanes, size_t... i>
ALWAYS_INLINE Floats<kLanes> swap_pairs(const Floats<kLanes>& v, std::index_sequence<i...>) {
  return __builtin_shufflevector(v, v, (i ^ 1)...);
}

// Returns (v1, v0, v3, v2, ...).
template <int kLanes>
ALWAYS_INLINE Floats<kLanes> swap_pairs(const Floats<kLanes>& v) {
  return swap_pairs<kLanes>(v, std::make_index_sequence<kLanes>{});
}

// Returns (-v0, v1, -v2, v3, ...).
template <int kLanes, size_t... i>
ALWAYS_INLINE Floats<kLanes> negate_even(const Floats<kLanes>& v, std::index_sequence<i...>) {
  return as_floats<kLanes>(as_ints<kLanes>(v) ^ Ints<kLanes>{(i % 2 == 0 ? INT32_MIN : 0)...});
}

template <int kLanes>
ALWAYS_INLINE Floats<kLanes> negate_even(const Floats<kLanes>& v) {
  return negate_even<kLanes>(v, std::make_index_sequence<kLanes>{});
}

template <int kLanes, size_t... i>
ALWAYS_INLINE void store_twice(float* data, const Floats<kLanes>& v, std::index_sequence<i...>) {
  store<kLanes>(data, __builtin_shufflevector(v, v, (i / 2)...));
  store<kLanes>(data + kLanes, __builtin_shufflevector(v, v, ((i + kLanes) / 2)...));
}

// Stores v0, v0, v1, v1, ...
template <int kLanes>
ALWAYS_INLINE void store_twice(float* data, const Floats<kLanes>& v) {
  store_twice<kLanes>(data, v, std::make_index_sequence<kLanes>{});
}

template <int kLanes, size_t... i>
ALWAYS_INLINE float sum(const Floats<kLanes>& v, std::index_sequence<i...>) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    const Floats<kLanes / 2> low = __builtin_shufflevector(v, v, i...);
    const Floats<kLanes / 2> high = __builtin_shufflevector(v, v, (i + kLanes / 2)...);
    return sum<kLanes / 2>(low + high, std::make_index_sequence<kLanes / 4>{});
  }
}

// Returns the sum of the lanes, added up pairwise.
template <int kLanes>
ALWAYS_INLINE float sum(const Floats<kLanes>& v) {
  return sum<kLanes>(v, std::make_index_sequence<kLanes / 2>{});
}

template <int kLanes, size_t... i>
ALWAYS_INLINE double sum_in_double(const Doubles<kLanes>& v, std::index_sequence<i...>) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    const Doubles<kLanes / 2> low = __builtin_shufflevector(v, v, i...);
    const Doubles<kLanes / 2> high = __builtin_shufflevector(v, v, (i + kLanes / 2)...);
    return sum_in_double<kLanes / 2>(low + high, std::make_index_sequence<kLanes / 4>{});
  }
}

// Returns the sum of the lanes, not rounded to float on the way.
template <int kLanes>
ALWAYS_INLINE double sum_in_double(const Floats<kLanes>& v) {
  return sum_in_double<kLanes>(__builtin_convertvector(v, Doubles<kLanes>),
                               std::make_index_sequence<kLanes / 2>{});
}

template <int kLanes, size_t... i>
ALWAYS_INLINE float max(const Floats<kLanes>& v, std::index_sequence<i...>) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    const Floats<kLanes / 2> low = __builtin_shufflevector(v, v, i...);
    const Floats<kLanes / 2> high = __builtin_shufflevector(v, v, (i + kLanes / 2)...);
    return max<kLanes / 2>(low > high ? low : high, std::make_index_sequence<kLanes / 4>{});
  }
}

// Returns the largest of the lanes, none of which is NaN.
template <int kLanes>
ALWAYS_INLINE float max(const Floats<kLanes>& v) {
  return max<kLanes>(v, std::make_index_sequence<kLanes / 2>{});
}

}  // namespace h100_diffusers_kernels
