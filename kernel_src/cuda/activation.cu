// gelu, silu, geglu, swiglu: a thread takes kPacks packs a block's width apart, all loaded before the first
// is used. Rows that follow each other without a gap are treated as one.
#include "activations.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "row_index.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr int kThreads = 256;

// Loads in flight a thread: four, of which a gated activation makes two for each pack of its result.
template <bool kIsGated>
constexpr int kPacksPerThread = kIsGated ? 2 : 4;

struct ActivationKernelParams {
  ActivationParams args;
  RowIndexer indexer;
  int64_t packs;
  int64_t packs_per_row;
  FastDivisor packs_per_row_divisor;
};

template <typename T, class Activation, bool kIsGated, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  constexpr int kPacks = kPacksPerThread<kIsGated>;
  const ActivationParams& args = params.args;
  const int64_t first = blockIdx.x * int64_t{kThreads * kPacks} + threadIdx.x;

  Pack<T, kSize> x[kPacks], gate[kPacks];
  T* out[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = first + i * kThreads;
    out[i] = nullptr;
    if (pack < params.packs) {
      int64_t row = 0, column = pack * kSize;
      if (args.shape.rows > 1) {
        row = params.packs < kFastDivisionRows
                  ? params.packs_per_row_divisor.divide(static_cast<uint32_t>(pack))
                  : pack / params.packs_per_row;
        column = (pack - row * params.packs_per_row) * kSize;
      }
      const RowIndex index = params.indexer(row);
      const T* in = static_cast<const T*>(args.x.data) + index.offset(args.x, args.shape.ndim) + column;
      out[i] = static_cast<T*>(args.out.data) + index.offset(args.out, args.shape.ndim) + column;
      x[i].load(in);
      if constexpr (kIsGated) gate[i].load(in + args.hidden);
    }
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (out[i] == nullptr) continue;
    constexpr bool kFast = sizeof(T) == 2;
    float values[kSize];
    x[i].to_floats(values);
    if constexpr (kIsGated) {
      float gates[kSize];
      gate[i].to_floats(gates);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] *= Activation::template apply<kFast>(gates[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = Activation::template apply<kFast>(values[j]);
    }
    store_floats(out[i], values);
  }
}

// One row where the rows of both operands follow each other without a gap.
ActivationParams flattened(ActivationParams args) {
  if (args.shape.ndim != 1 || args.x.strides[0] != args.hidden || args.out.strides[0] != args.hidden)
    return args;
  args.hidden *= args.shape.rows;
  args.shape.rows = args.shape.sizes[0] = 1;
  return args;
}

template <class Activation, bool kIsGated>
void launch(const char* operation, const ActivationParams& given, Stream stream) {
  const ActivationParams args = kIsGated ? given : flattened(given);
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_with = [&](auto kernel, int pack_size) {
      ActivationKernelParams params{args, RowIndexer(args.shape), 0, args.hidden / pack_size, {}};
      params.packs = args.shape.rows * params.packs_per_row;
      if (params.packs < kFastDivisionRows)
        params.packs_per_row_divisor.set(static_cast<uint32_t>(params.packs_per_row));
      const int64_t blocks = ceil_divide(params.packs, kThreads * kPacksPerThread<kIsGated>);
      launch_kernel<const ActivationKernelParams>(operation, kernel, dim3(blocks), kThreads, params, stream);
    };
    const bool vector = args.hidden * sizeof(T) % kVectorBytes == 0 &&
                        has_vector_rows(args.x, args.shape.ndim, sizeof(T)) &&
                        has_vector_rows(args.out, args.shape.ndim, sizeof(T));
    if (vector) {
      launch_with(activation_kernel<T, Activation, kIsGated, Access::kVector>, kPackSize<T, Access::kVector>);
    } else {
      launch_with(activation_kernel<T, Activation, kIsGated, Access::kScalar>, 1);
    }
  });
}

}  // namespace

void gelu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) return launch<GeluTanh, false>("gelu", params, stream);
  launch<GeluErf, false>("gelu", params, stream);
}

void silu(const ActivationParams& params, Stream stream) { launch<Silu, false>("silu", params, stream); }

void geglu(const ActivationParams& params, Stream stream) {
  if (params.tanh_approximation) return launch<GeluTanh, true>("geglu", params, stream);
  launch<GeluErf, true>("geglu", params, stream);
}

void swiglu(const ActivationParams& params, Stream stream) { launch<Silu, true>("swiglu", params, stream); }

}  // namespace h100_diffusers_kernels
