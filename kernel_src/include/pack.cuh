// A pack: the elements that one thread loads or stores in one memory instruction. All kernels use packs to
// access memory and to convert between T and float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace h100_diffusers_kernels {

// Memory access 16 bytes at a time, or one element at a time for data that is not aligned to 16 bytes.
// tools/kernel_resources.py recognizes kernels for the latter by `Access::kScalar` or `scalar` in their
// names.
enum class Access { kVector = 0, kScalar = 1 };

constexpr int kVectorBytes = 16;

template <typename T, Access kAccess>
constexpr int kPackSize = kAccess == Access::kVector ? kVectorBytes / static_cast<int>(sizeof(T)) : 1;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two adjacent elements in one 32-bit register.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t bits);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t bits) {
  // A bfloat16 is the upper half of a float.
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// kSize elements of type T, as loaded. kSize is 1, or the pack is 8 bytes or a multiple of 16 bytes.
template <typename T, int kSize>
struct Pack {
  static constexpr int kBytes = kSize * static_cast<int>(sizeof(T));
  using Word = std::conditional_t<kBytes == kVectorBytes / 2, uint2, uint4>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(kWords * static_cast<int>(sizeof(Word)) == kBytes);
  Word words[kWords];

  __device__ __forceinline__ void load(const T* address) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(address)[i];
  }

  __device__ __forceinline__ void store(T* address) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(address)[i] = words[i];
  }

  // One instruction for each word. If a thread stores a single pack, the compiler sometimes splits an
  // assignment into four stores. If it stores several, assignments are 2 to 3% faster, because they can be
  // predicated (notes/row_kernels.md, "Work before the loads").
  __device__ __forceinline__ void store_whole(T* address) const {
    static_assert(std::is_same_v<Word, uint4>);
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint4*>(address) + i),
                   "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w)
                   : "memory");
  }

  __device__ __forceinline__ void to_floats(float (&values)[kSize]) const {
    const uint32_t* bits = reinterpret_cast<const uint32_t*>(words);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = __uint_as_float(bits[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) {
        const float2 pair = unpack_pair<T>(bits[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void from_floats(const float (&values)[kSize]) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(words);
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) bits[i] = __float_as_uint(values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) bits[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    }
  }
};

template <typename T>
struct Pack<T, 1> {
  T value;

  __device__ __forceinline__ void load(const T* address) { value = *address; }
  __device__ __forceinline__ void store(T* address) const { *address = value; }
  __device__ __forceinline__ void store_whole(T* address) const { *address = value; }
  __device__ __forceinline__ void to_floats(float (&values)[1]) const { values[0] = to_float(value); }
  __device__ __forceinline__ void from_floats(const float (&values)[1]) { value = from_float<T>(values[0]); }
};

template <typename T, int kSize>
__device__ __forceinline__ void load_floats(const T* address, float (&values)[kSize]) {
  Pack<T, kSize> pack;
  pack.load(address);
  pack.to_floats(values);
}

template <typename T, int kSize>
__device__ __forceinline__ void store_floats(T* address, const float (&values)[kSize]) {
  Pack<T, kSize> pack;
  pack.from_floats(values);
  pack.store(address);
}

template <typename T, int kSize>
__device__ __forceinline__ void multiply(float (&values)[kSize], const Pack<T, kSize>& weight) {
  float factors[kSize];
  weight.to_floats(factors);
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] *= factors[i];
}

template <typename T, int kSize>
__device__ __forceinline__ void add(float (&values)[kSize], const Pack<T, kSize>& bias) {
  float terms[kSize];
  bias.to_floats(terms);
#pragma unroll
  for (int i = 0; i < kSize; ++i) values[i] += terms[i];
}

}  // namespace h100_diffusers_kernels
