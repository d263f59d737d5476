// Quantization to FP8 of rows, or of blocks of rows; also of activations. Rows of up to 18432 elements, as in
// FLUX.2's feed-forward, are held in registers, and longer ones in parts if their blocks have scales of their
// own. Other and unaligned rows are read twice, one element at a time.
#include <type_traits>

#include "activations.cuh"
#include "fp8.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"

namespace h100_diffusers_kernels {
namespace {

// Elements that a thread stores at once: 16 bytes of a 16-bit input, two words of a float32 one.
constexpr int kQuantizedPack = 8;
constexpr int kBlockPacks = kFp8BlockSize / kQuantizedPack;
constexpr int kMostThreads = 768, kLongRowPacks = 3;
static_assert(kMostThreads * kLongRowPacks * kQuantizedPack >= 18432);  // FLUX.2's feed-forward
constexpr int kMostParts = 65535;  // of a row: the grid's second dimension

struct QuantizeKernelParams {
  RowIndexer::Operand x, out, scale;
  RowIndexer indexer;
  uint32_t rows;
  int64_t hidden;
  int64_t gate_distance;  // elements from x to the gate, and from the bias to the gate's bias
  const void* bias;

  template <class Params>
  QuantizeKernelParams(const Params& p, int64_t distance, const void* x_bias)
      : x(p.x, p.shape.ndim),
        out(p.out, p.shape.ndim),
        scale(p.scale, p.shape.ndim),
        indexer(p.shape),
        rows(static_cast<uint32_t>(p.shape.rows)),
        hidden(p.hidden),
        gate_distance(distance),
        bias(x_bias) {}
};

// The values of a row that are quantized: x itself.
template <typename T>
struct PlainValues {
  static constexpr bool kHoldsLongRows = true;  // in registers, without spilling
  static constexpr int kScalarUnroll = 4;       // of loops over single elements, likewise
  const T* x;

  __device__ __forceinline__ PlainValues(const QuantizeKernelParams& params, const RowIndexer::Index& index)
      : x(static_cast<const T*>(params.x.data) + index.offset(params.x)) {}

  template <int kSize>
  struct Loaded {
    Pack<T, kSize> x;
  };
  template <int kSize>
  __device__ __forceinline__ void load(int64_t column, Loaded<kSize>& loaded) const {
    loaded.x.load(x + column);
  }
  template <int kSize>
  __device__ __forceinline__ void to_floats(const Loaded<kSize>& loaded, float (&values)[kSize]) const {
    loaded.x.to_floats(values);
  }
};

// An activation of x and bias, or x times that of a gate.
template <typename T, class Activation, bool kIsGated>
struct ActivatedValues {
  static constexpr bool kHoldsLongRows = !kIsGated || sizeof(T) == 2;
  static constexpr int kScalarUnroll = kIsGated ? 2 : 4;
  const T *x, *bias;
  int64_t gate_distance;

  __device__ __forceinline__ ActivatedValues(const QuantizeKernelParams& params,
                                             const RowIndexer::Index& index)
      : x(static_cast<const T*>(params.x.data) + index.offset(params.x)),
        bias(static_cast<const T*>(params.bias)),
        gate_distance(params.gate_distance) {}

  template <int kSize>
  struct Loaded {
    BiasedPack<T, kSize> x, gate;
  };
  template <int kSize>
  __device__ __forceinline__ void load(int64_t column, Loaded<kSize>& loaded) const {
    const T* x_bias = bias ? bias + column : nullptr;
    loaded.x.load(x + column, x_bias);
    if constexpr (kIsGated)
      loaded.gate.load(x + column + gate_distance, bias ? x_bias + gate_distance : nullptr);
  }
  template <int kSize>
  __device__ __forceinline__ void to_floats(const Loaded<kSize>& loaded, float (&values)[kSize]) const {
    constexpr bool kFast = true;
    loaded.x.to_floats(values, bias != nullptr);
    if constexpr (kIsGated) {
      float gates[kSize];
      loaded.gate.to_floats(gates, bias != nullptr);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] *= Activation::template apply<kFast>(gates[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = Activation::template apply<kFast>(values[j]);
    }
  }
};

// The results of one row.
struct QuantizedRow {
  uint8_t* out;
  float* scale;

  __device__ __forceinline__ QuantizedRow(const QuantizeKernelParams& params, const RowIndexer::Index& index)
      : out(static_cast<uint8_t*>(params.out.data) + index.offset(params.out)),
        scale(static_cast<float*>(params.scale.data) + index.offset(params.scale)) {}
};

// kThreadsPerRow threads hold up to kPacks packs each in registers. With kIsBlocked each pack's scale is that
// of kBlockPacks adjacent threads, so blocks of the grid's second dimension may share a row.
template <class Values, int kThreadsPerRow, int kPacks, bool kIsBlocked>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  static_assert(!kIsBlocked || kThreadsPerRow % kBlockPacks == 0);
  const HeldRow<kThreadsPerRow, kQuantizedPack, kPacks> held(
      params, kIsBlocked ? static_cast<int>(blockIdx.y) * kThreadsPerRow * kPacks : 0);
  const Values row(params, held.index);
  const QuantizedRow result(params, held.index);
  griddepcontrol_wait();

  typename Values::template Loaded<kQuantizedPack> loaded[kPacks];
  float values[kPacks][kQuantizedPack] = {};
  held.for_each_pack([&](int i, int column) { row.load(column, loaded[i]); });
  constexpr int kScales = kIsBlocked ? kPacks : 1;
  uint32_t largest[kScales] = {};
  held.for_each_pack([&](int i, int) {
    row.to_floats(loaded[i], values[i]);
#pragma unroll
    for (int j = 0; j < kQuantizedPack; ++j)
      largest[i % kScales] = max(largest[i % kScales], magnitude_of(values[i][j]));
  });
  constexpr int kGroup = kIsBlocked ? kBlockPacks : kThreadsPerRow;
  GroupReduce<UnsignedMax, uint32_t, kGroup, kScales>{}(largest);

  if (!kIsBlocked && held.is_first_thread()) result.scale[0] = fp8_scale(largest[0]);
  held.for_each_pack([&](int i, int column) {
    const Fp8Quotient quotient(fp8_scale(largest[i % kScales]));
    store_fp8(result.out + column, values[i], quotient);
    const int pack = held.pack(i);
    if (kIsBlocked && pack % kBlockPacks == 0) result.scale[pack / kBlockPacks] = quotient.scale;
  });
}

// Quantizes elements first ... end - 1 of a row by kThreads threads, and returns their scale.
template <int kThreads, class Values, class Reduce>
__device__ __forceinline__ float quantize_scalars(const Values& row, const QuantizedRow& result,
                                                  int64_t first, int64_t end, int thread,
                                                  const Reduce& reduce) {
  const auto value_of = [&](int64_t column) {
    typename Values::template Loaded<1> loaded;
    float value[1];
    row.load(column, loaded);
    row.to_floats(loaded, value);
    return value[0];
  };
  uint32_t largest = 0;
#pragma unroll(Values::kScalarUnroll)
  for (int64_t i = first + thread; i < end; i += kThreads) largest = max(largest, magnitude_of(value_of(i)));
  const Fp8Quotient quotient(fp8_scale(reduce(largest)));
#pragma unroll(Values::kScalarUnroll)
  for (int64_t i = first + thread; i < end; i += kThreads)
    result.out[i] = static_cast<uint8_t>(pack_fp8(quotient(value_of(i)), 0, 0, 0));
  return quotient.scale;
}

// Rows of any length and alignment.
template <class Values, int kThreadsPerRow>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    scalar_quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  const ThreadRow<kThreadsPerRow> thread_row(params);
  const Values row(params, thread_row.index);
  const QuantizedRow result(params, thread_row.index);
  griddepcontrol_wait();
  const float scale =
      quantize_scalars<kThreadsPerRow>(row, result, 0, thread_row.is_present ? params.hidden : 0,
                                       thread_row.position.thread, [](uint32_t thread_largest) {
                                         uint32_t largest[1] = {thread_largest};
                                         GroupReduce<UnsignedMax, uint32_t, kThreadsPerRow>{}(largest);
                                         return largest[0];
                                       });
  if (thread_row.is_first_thread()) result.scale[0] = scale;
}

// A thread block has a row, and each of its warps a block of the row at a time.
template <class Values>
__global__ void __launch_bounds__(kAnyRowThreads)
    scalar_blocked_quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  const auto index = params.indexer(blockIdx.x);
  const Values row(params, index);
  const QuantizedRow result(params, index);
  const int lane = threadIdx.x % kWarpThreads;
  griddepcontrol_wait();
  for (int64_t block = threadIdx.x / kWarpThreads; block * kFp8BlockSize < params.hidden;
       block += kAnyRowThreads / kWarpThreads) {
    const int64_t first = block * kFp8BlockSize;
    const float scale = quantize_scalars<kWarpThreads>(
        row, result, first, min(first + kFp8BlockSize, params.hidden), lane,
        [](uint32_t largest) { return warp_reduce<UnsignedMax, kWarpThreads>(largest); });
    if (lane == 0) result.scale[block] = scale;
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launch

template <class Values, class ThreadsPerRow, bool kIsBlocked>
void launch(const char* operation, const QuantizeKernelParams& params, bool has_packs, Stream stream) {
  const auto launch_one = [&](auto kernel, auto threads, int64_t parts = 1) {
    const dim3 grid(static_cast<unsigned>(RowPosition<threads>::blocks(params.rows)),
                    static_cast<unsigned>(parts));
    launch_kernel(operation, kernel, grid, kBlockThreads<threads>, params, stream);
  };
  const int64_t packs = params.hidden / kQuantizedPack;
  if (has_packs && packs > 0 && params.hidden % kQuantizedPack == 0) {
    if (dispatch_row_threads(ThreadsPerRow{}, packs, [&](auto threads) {
          launch_one(quantize_fp8_kernel<Values, threads, kRowPacks, kIsBlocked>, threads);
        }))
      return;
    if constexpr (Values::kHoldsLongRows || kIsBlocked) {
      constexpr int kThreads = Values::kHoldsLongRows ? kMostThreads : kAnyRowThreads;
      constexpr int kPacks = Values::kHoldsLongRows ? kLongRowPacks : kRowPacks;
      const int64_t parts = ceil_divide(packs, kThreads * kPacks);
      if (parts == 1 || (kIsBlocked && parts <= kMostParts))
        return launch_one(quantize_fp8_kernel<Values, kThreads, kPacks, kIsBlocked>, Constant<kThreads>{},
                          parts);
    }
  }
  if constexpr (kIsBlocked)
    return launch_one(scalar_blocked_quantize_fp8_kernel<Values>, Constant<kAnyRowThreads>{});
  if (params.hidden <= kWarpRow)
    launch_one(scalar_quantize_fp8_kernel<Values, kWarpThreads>, Constant<kWarpThreads>{});
  else
    launch_one(scalar_quantize_fp8_kernel<Values, kAnyRowThreads>, Constant<kAnyRowThreads>{});
}

}  // namespace

void quantize_fp8(const QuantizeFp8Params& args, Stream stream) {
  // A row of 1536 or more takes the threads that fit it (row_config.cuh).
  using ThreadsPerRow = RowThreads<16, 32, 64, 96, 128, 192, 256, 320, 384, 512>;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const QuantizeKernelParams params(args, 0, nullptr);
    const bool has_packs = has_vector_rows(args.x, args.shape.ndim, sizeof(T)) &&
                           has_vector_rows(args.out, args.shape.ndim, 1, kQuantizedPack);
    if (args.is_blocked)
      return launch<PlainValues<T>, ThreadsPerRow, true>("quantize_fp8", params, has_packs, stream);
    launch<PlainValues<T>, ThreadsPerRow, false>("quantize_fp8", params, has_packs, stream);
  });
}

template <class Activation, bool kIsGated>
void launch_quantized_activation(const char* operation, const ActivationParams& args, Stream stream) {
  // Fewer than quantize_fp8 has, because there are seven kinds of kernels.
  using ThreadsPerRow = RowThreads<64, 128, 256, 512>;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const int64_t gate_bytes =
        kIsGated ? static_cast<const char*>(args.gate.data) - static_cast<const char*>(args.x.data) : 0;
    const QuantizeKernelParams params(args, gate_bytes / static_cast<int64_t>(sizeof(T)), args.bias);
    const bool has_packs = is_16_byte_aligned(args.bias) && is_16_byte_aligned(args.gate_bias) &&
                           has_vector_rows(args.x, args.shape.ndim, sizeof(T)) &&
                           has_vector_rows(args.gate, args.shape.ndim, sizeof(T)) &&
                           has_vector_rows(args.out, args.shape.ndim, 1, kQuantizedPack);
    using Values = ActivatedValues<T, Activation, kIsGated>;
    if constexpr (kIsGated && std::is_same_v<Activation, Silu>)
      if (args.is_blocked) return launch<Values, ThreadsPerRow, true>(operation, params, has_packs, stream);
    launch<Values, ThreadsPerRow, false>(operation, params, has_packs, stream);
  });
}

template void launch_quantized_activation<GeluErf, false>(const char*, const ActivationParams&, Stream);
template void launch_quantized_activation<GeluTanh, false>(const char*, const ActivationParams&, Stream);
template void launch_quantized_activation<Silu, false>(const char*, const ActivationParams&, Stream);
template void launch_quantized_activation<GeluErf, true>(const char*, const ActivationParams&, Stream);
template void launch_quantized_activation<GeluTanh, true>(const char*, const ActivationParams&, Stream);
template void launch_quantized_activation<Silu, true>(const char*, const ActivationParams&, Stream);

}  // namespace h100_diffusers_kernels
