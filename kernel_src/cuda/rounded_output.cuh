// The output of products (product.cuh) that rounds them to 16 bits.
#pragma once

#include "product.cuh"

namespace h100_diffusers_kernels {

template <typename T>
struct RoundedOutput {
  using Element = T;
  static constexpr CUtensorMapDataType kMapType = kProductMapType<T>;
  static constexpr bool kHasResidual = false;

  template <int kValues>
  __device__ __forceinline__ static void finish(const ProductParams&, const WarpRole&, const ProductPosition&,
                                                float (&)[kValues]) {}

  template <int kValues>
  __device__ __forceinline__ static void store_shared(uint32_t out, const WarpRole& role,
                                                      const float (&values)[kValues]) {
    constexpr int kRowBytes = kOutRowBytes<2 * kValues, sizeof(T)>;
    constexpr int kStores = kRowBytes / 32;  // of a row of a box
#pragma unroll
    for (int p = 0; p < kValues / 8; ++p) {
      const float* v = values + 8 * p;
      const uint32_t fragment[4] = {pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                                    pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])};
      stmatrix(out + p / kStores * (kWarpGroupRows * kRowBytes) +
                   swizzled_piece<kRowBytes>(role.fragment_row(), p % kStores * 2 + role.lane / 16),
               fragment);
    }
  }

  __device__ __forceinline__ static T round(float value) { return from_float<T>(value); }
};

}  // namespace h100_diffusers_kernels
