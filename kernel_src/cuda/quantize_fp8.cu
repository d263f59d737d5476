// Quantization to FP8 of rows, or of blocks of rows. Rows of up to 16384 elements are held in registers.
// Longer and unaligned ones are read twice, one element at a time.
#include <type_traits>

#include "fp8.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr int kQuantizedPack = 8;  // elements that a thread stores at once
constexpr int kBlockPacks = kFp8BlockSize / kQuantizedPack;

struct QuantizeKernelParams {
  RowIndexer::Operand x, out, scale;
  RowIndexer indexer;
  uint32_t rows;
  int64_t hidden;

  explicit QuantizeKernelParams(const QuantizeFp8Params& p)
      : x(p.x, p.shape.ndim),
        out(p.out, p.shape.ndim),
        scale(p.scale, p.shape.ndim),
        indexer(p.shape),
        rows(static_cast<uint32_t>(p.shape.rows)),
        hidden(p.hidden) {}
};

// The operands of one row.
template <typename T>
struct QuantizedRow {
  const T* x;
  uint8_t* out;
  float* scale;

  __device__ __forceinline__ QuantizedRow(const QuantizeKernelParams& params, uint32_t row) {
    const auto index = params.indexer(row);
    x = static_cast<const T*>(params.x.data) + index.offset(params.x);
    out = static_cast<uint8_t*>(params.out.data) + index.offset(params.out);
    scale = static_cast<float*>(params.scale.data) + index.offset(params.scale);
  }
};

// kThreadsPerRow threads hold up to kPacks packs each in registers. With kIsBlocked each pack's scale is that
// of kBlockPacks adjacent threads.
template <typename T, int kThreadsPerRow, int kPacks, bool kIsBlocked>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  static_assert(!kIsBlocked || kThreadsPerRow % kBlockPacks == 0);
  const RowPosition<kThreadsPerRow> position;
  const int hidden = static_cast<int>(params.hidden);
  const bool is_row = position.kRowsPerBlock == 1 || position.row < params.rows;
  const QuantizedRow<T> row(params, is_row ? position.row : 0);
  griddepcontrol_wait();

  Pack<T, kQuantizedPack> packs[kPacks];
  bool is_column[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = position.pack(i) * kQuantizedPack;
    is_column[i] = is_row && column < hidden;
    if (is_column[i]) packs[i].load(row.x + column);
  }
  constexpr int kScales = kIsBlocked ? kPacks : 1;
  uint32_t largest[kScales] = {};
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float values[kQuantizedPack];
    packs[i].to_floats(values);
    if (!is_column[i]) continue;
#pragma unroll
    for (int j = 0; j < kQuantizedPack; ++j)
      largest[i % kScales] = max(largest[i % kScales], magnitude_of(values[j]));
  }
  constexpr int kGroup = kIsBlocked ? kBlockPacks : kThreadsPerRow;
  GroupReduce<UnsignedMax, uint32_t, kGroup, kScales>{}(largest);

  if (!kIsBlocked && is_row && position.thread == 0) row.scale[0] = fp8_scale(largest[0]);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (!is_column[i]) continue;
    const Fp8Quotient quotient(fp8_scale(largest[i % kScales]));
    float q[kQuantizedPack];
    packs[i].to_floats(q);
#pragma unroll
    for (int j = 0; j < kQuantizedPack; ++j) q[j] = quotient(q[j]);
    const int pack = position.pack(i);
    *reinterpret_cast<uint2*>(row.out + pack * kQuantizedPack) =
        make_uint2(pack_fp8(q[0], q[1], q[2], q[3]), pack_fp8(q[4], q[5], q[6], q[7]));
    if (kIsBlocked && pack % kBlockPacks == 0) row.scale[pack / kBlockPacks] = quotient.scale;
  }
}

// Quantizes elements first ... end - 1 of a row by kThreads threads.
template <int kThreads, typename T, class Reduce>
__device__ __forceinline__ float quantize_scalars(const QuantizedRow<T>& row, int64_t first, int64_t end,
                                                  int thread, const Reduce& reduce) {
  uint32_t largest = 0;
  for (int64_t i = first + thread; i < end; i += kThreads)
    largest = max(largest, magnitude_of(to_float(row.x[i])));
  const Fp8Quotient quotient(fp8_scale(reduce(largest)));
  for (int64_t i = first + thread; i < end; i += kThreads)
    row.out[i] = static_cast<uint8_t>(pack_fp8(quotient(to_float(row.x[i])), 0, 0, 0));
  return quotient.scale;
}

// Rows of any length and alignment.
template <typename T, int kThreadsPerRow>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    scalar_quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  const RowPosition<kThreadsPerRow> position;
  const bool is_row = position.kRowsPerBlock == 1 || position.row < params.rows;
  const QuantizedRow<T> row(params, is_row ? position.row : 0);
  griddepcontrol_wait();
  const float scale = quantize_scalars<kThreadsPerRow>(
      row, 0, is_row ? params.hidden : 0, position.thread, [](uint32_t thread_largest) {
        uint32_t largest[1] = {thread_largest};
        GroupReduce<UnsignedMax, uint32_t, kThreadsPerRow>{}(largest);
        return largest[0];
      });
  if (is_row && position.thread == 0) row.scale[0] = scale;
}

// A thread block has a row, and each of its warps a block of the row at a time.
template <typename T>
__global__ void __launch_bounds__(kAnyRowThreads)
    scalar_blocked_quantize_fp8_kernel(const __grid_constant__ QuantizeKernelParams params) {
  const QuantizedRow<T> row(params, blockIdx.x);
  const int lane = threadIdx.x % kWarpThreads;
  griddepcontrol_wait();
  for (int64_t block = threadIdx.x / kWarpThreads; block * kFp8BlockSize < params.hidden;
       block += kAnyRowThreads / kWarpThreads) {
    const int64_t first = block * kFp8BlockSize;
    const float scale = quantize_scalars<kWarpThreads>(
        row, first, min(first + kFp8BlockSize, params.hidden), lane,
        [](uint32_t largest) { return warp_reduce<UnsignedMax, kWarpThreads>(largest); });
    if (lane == 0) row.scale[block] = scale;
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launch

void quantize_fp8(const QuantizeFp8Params& args, Stream stream) {
  constexpr const char* kOperation = "quantize_fp8";
  // Packs of 8 elements. A row of 1536 or more takes the threads that fit it (row_config.cuh).
  using ThreadsPerRow = RowThreads<16, 32, 64, 96, 128, 192, 256, 320, 384, 512>;
  constexpr int kMostThreads = 512, kLongRowPacks = 4;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const QuantizeKernelParams params(args);
    const auto launch = [&](auto kernel, auto threads) {
      launch_kernel(kOperation, kernel, RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>,
                    params, stream);
    };
    const bool has_packs = args.hidden > 0 && args.hidden % kQuantizedPack == 0 &&
                           has_vector_rows(args.x, args.shape.ndim, sizeof(T));
    const auto launch_packs = [&](auto is_blocked) {
      const int64_t packs = args.hidden / kQuantizedPack;
      if (dispatch_row_threads(ThreadsPerRow{}, packs, [&](auto threads) {
            launch(quantize_fp8_kernel<T, threads, kRowPacks, is_blocked>, threads);
          }))
        return true;
      if (packs > kMostThreads * kLongRowPacks) return false;
      launch(quantize_fp8_kernel<T, kMostThreads, kLongRowPacks, is_blocked>, Constant<kMostThreads>{});
      return true;
    };
    if (args.is_blocked) {
      if (has_packs && launch_packs(std::true_type{})) return;
      launch(scalar_blocked_quantize_fp8_kernel<T>, Constant<kAnyRowThreads>{});
    } else {
      if (has_packs && launch_packs(std::false_type{})) return;
      if (args.hidden <= kWarpRow)
        launch(scalar_quantize_fp8_kernel<T, kWarpThreads>, Constant<kWarpThreads>{});
      else
        launch(scalar_quantize_fp8_kernel<T, kAnyRowThreads>, Constant<kAnyRowThreads>{});
    }
  });
}

}  // namespace h100_diffusers_kernels
