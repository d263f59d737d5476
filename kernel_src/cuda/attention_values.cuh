// The values of attention in float16, for weights in float16 (attention_softmax.cuh). What bfloat16 has of
// normal size float16 has exactly; of what is too large or too small beside it the launch is told head by
// head, and heads that have too much of it keep their bfloat16.
#pragma once

#include "attention_tiles.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace h100_diffusers_kernels {

// The largest absolute value of a key head, as the bits of a float.
struct ValueMaximum {
  // Of a head whose values reach 2^-10 those that lose bits, below 2^-17, are off by 2^-25 at most.
  static constexpr float kSmallest = 0x1p-10f, kLargest = 65504;

  __device__ __forceinline__ static bool is_safe(uint32_t bits) {
    const float maximum = __uint_as_float(bits);
    return maximum == 0 || (maximum >= kSmallest && maximum <= kLargest);
  }
};

struct ValueKernelParams {
  AttentionOperand values;
  __half* out;       // (batch, key_length, key_heads, head_dim), contiguous
  uint32_t* maxima;  // (batch, key_heads), 0 before
  int key_length, key_heads;
};

constexpr int kValueThreads = 256;
constexpr int kValueTokens = 4;  // of a block

// A thread has 8 columns of one head, of all tokens of its block.
template <int kHeadDim>
__global__ void __launch_bounds__(kValueThreads)
    attention_value_kernel(const __grid_constant__ ValueKernelParams params) {
  using Values = Pack<__nv_bfloat16, 8>;
  constexpr int kPieces = kHeadDim / 8;
  wait_for_earlier_kernels();
  const int piece = static_cast<int>(blockIdx.y * kValueThreads + threadIdx.x), head = piece / kPieces;
  const int batch = static_cast<int>(blockIdx.z), first = static_cast<int>(blockIdx.x) * kValueTokens;
  const int column = piece % kPieces * 8;
  const bool is_head = head < params.key_heads;
  float maximum = 0;
  if (is_head) {
    const __nv_bfloat16* in = static_cast<const __nv_bfloat16*>(params.values.data) +
                              batch * params.values.strides[0] + head * params.values.strides[2] + column;
    __half* out =
        params.out + (int64_t{batch} * params.key_length * params.key_heads + head) * kHeadDim + column;
    Values packs[kValueTokens];
#pragma unroll
    for (int i = 0; i < kValueTokens; ++i)
      if (first + i < params.key_length) packs[i].load(in + (first + i) * params.values.strides[1]);
#pragma unroll
    for (int i = 0; i < kValueTokens; ++i) {
      if (first + i >= params.key_length) break;
      float values[8];
      packs[i].to_floats(values);
#pragma unroll
      for (int k = 0; k < 8; ++k) maximum = fmaxf(maximum, fabsf(values[k]));
      store_floats(out + (first + i) * int64_t{params.key_heads} * kHeadDim, values);
    }
  }
#pragma unroll
  for (int lanes = kPieces / 2; lanes > 0; lanes /= 2)
    maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
  // Of floats that are not negative the order is that of their bits. Few blocks find a new maximum.
  if (is_head && column == 0) {
    uint32_t* target = params.maxima + batch * params.key_heads + head;
    if (__float_as_uint(maximum) > __ldcg(target)) atomicMax(target, __float_as_uint(maximum));
  }
}

// How the workspace is laid out.
struct ValueWorkspace {
  int64_t maxima_bytes, value_bytes;

  explicit ValueWorkspace(const AttentionParams& args)
      : maxima_bytes(ceil_divide(args.batch * args.key_heads * 4, 256) * 256),
        value_bytes(args.batch * args.key_length * args.key_heads * args.head_dim * 2) {}

  int64_t bytes() const { return maxima_bytes + value_bytes; }
};

// Fills the workspace; `params` knows its parts.
template <class Tile>
void launch_value_conversion(const char* operation, AttentionKernelParams& params, Stream stream) {
  const AttentionParams& args = params.args;
  const ValueWorkspace workspace(args);
  char* begin = static_cast<char*>(args.workspace);
  params.value_maxima = reinterpret_cast<uint32_t*>(begin);
  const int64_t row = args.key_heads * args.head_dim;
  params.half_values = map_tensor(operation,
                                  {begin + workspace.maxima_bytes,
                                   args.batch,
                                   args.key_length,
                                   args.key_heads,
                                   args.head_dim,
                                   {args.key_length * row, row, args.head_dim}},
                                  DType::kFloat16, kTileKeys);
  throw_on_error(operation, cudaMemsetAsync(begin, 0, static_cast<size_t>(workspace.maxima_bytes),
                                            static_cast<cudaStream_t>(stream.handle)));
  const ValueKernelParams conversion{args.v, reinterpret_cast<__half*>(begin + workspace.maxima_bytes),
                                     reinterpret_cast<uint32_t*>(begin), static_cast<int>(args.key_length),
                                     static_cast<int>(args.key_heads)};
  const dim3 grid(static_cast<unsigned>(ceil_divide(args.key_length, kValueTokens)),
                  static_cast<unsigned>(ceil_divide(row / 8, kValueThreads)),
                  static_cast<unsigned>(args.batch));
  launch_kernel(operation, attention_value_kernel<Tile::kHeadDim>, grid, kValueThreads, conversion, stream);
}

}  // namespace h100_diffusers_kernels
