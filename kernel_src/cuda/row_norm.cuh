// Norm, modulation, residual and gate: one kernel with three compile-time policies (row_policies.cuh). Each
// element is read and written once. A short row is held in registers, a long one in the shared memory of a
// block: no model has rows that would need several blocks. Longer rows, and rows that are not aligned to 16
// bytes, are read again in each step.
//
// Blocks are short: a row of 2048 16-bit elements has 128 threads with two packs each, which run for a
// microsecond. The time before a block's loads are issued, and between their arrival and its stores, is what
// it loses to a plain copy. So indexing a row takes one multiplication and no division, and weight, scale and
// shift are loaded while the row is reduced (notes/row_kernels.md, "Work before the loads" and "Order of
// loads").
#pragma once

#include <type_traits>

#include "fp8.cuh"
#include "launch.cuh"
#include "long_row.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"
#include "row_policies.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {

template <bool kHasExtra>
struct GeneralOutput;

template <class Input, class Output>
struct RowKernelParams {
  typename Input::Operands input;
  typename Output::Operands output;
  RowIndexer indexer;
  uint32_t rows;
  float eps;
  int64_t hidden;

  explicit RowKernelParams(const RowNormParams& p)
      : input(p),
        output(p),
        indexer(p.shape),
        rows(static_cast<uint32_t>(p.shape.rows)),
        eps(p.eps),
        hidden(p.hidden) {}
};

// For 16-bit results mean and variance come from sums of differences from a pivot, so that the threads of a
// row exchange sums once. Two exchanges, and Chan's combination of the warps' statistics, were slower
// (notes/row_kernels.md, "Layer norm"). The pivot is the mean of the row's first eight values. It multiplies
// the rounding errors of the sums by (pivot - mean)^2 / variance, about 1/8 for most rows. Above
// kMaxCancellation the sums are computed again, with the resulting mean as the pivot.
constexpr int kPivotValues = 8;
constexpr float kMaxCancellation = 16.0f;
template <typename T, class Norm>
constexpr bool kUsesPivotFor = Norm::kIsCentered && !kHasExactStatistics<T>;

template <int kSize, class InputRow, class InputPack>
__device__ __forceinline__ float pivot_of(const InputRow& input, InputPack& first) {
  static_assert(kSize == kPivotValues);
  input.finish(first);
  float h[kSize];
  first.values(h);
  return tree_sum<kSize>([&](int j) { return h[j] * (1.0f / kPivotValues); });
}

// Returns the statistics of a row that a group of threads shares (see GroupReduce). for_each_pack(body) calls
// body(h) for each pack of the thread.
//
// Args:
//   Total: type of the sums without a pivot
template <typename T, class Norm, bool kUsesPivot, int kSize, int kThreadsPerRow, typename Total = RowSum<T>,
          class ForEachPack>
__device__ __forceinline__ RowStatistics<T> row_statistics(const ForEachPack& for_each_pack, float pivot,
                                                           int64_t hidden, float eps) {
  const RowSum<T> count = static_cast<RowSum<T>>(hidden);
  using PivotReduce = GroupReduce<Sum, float, kThreadsPerRow, 2, 2>;
  using PlainReduce = GroupReduce<Sum, Total, kThreadsPerRow, 1, Norm::kIsCentered ? 2 : 1>;
  const std::conditional_t<kUsesPivot, PivotReduce, PlainReduce> reduce;
  RowStatistics<T> row;
  if constexpr (kUsesPivot) {
    float offset, squares;
    const auto take_step = [&](int round) {
      float sums[2] = {0, 0};
      for_each_pack([&](const float (&h)[kSize]) {
        sums[0] += tree_sum<kSize>([&](int j) { return h[j] - pivot; });
        sums[1] += tree_sum<kSize>([&](int j) { return (h[j] - pivot) * (h[j] - pivot); });
      });
      reduce(sums, round);
      offset = divide<T>(sums[0], count);
      squares = fmaf(-offset, sums[0], sums[1]);
    };
    take_step(0);
    bool is_inexact = offset * offset * count > kMaxCancellation * squares;
    if constexpr (kThreadsPerRow < kWarpThreads) is_inexact = __any_sync(0xffffffffu, is_inexact);
    if (is_inexact) {  // the same in all threads of a row
      pivot += offset;
      take_step(1);
    }
    row.mean.high = pivot + offset;
    row.scale = rms_scale_of<T>(squares < 0 ? 0 : squares, hidden, eps);
  } else {
    if constexpr (Norm::kIsCentered) {
      Total sum[1] = {0};
      for_each_pack([&](const float (&h)[kSize]) { sum[0] += tree_sum<kSize>([&](int j) { return h[j]; }); });
      reduce(sum, 0);
      row.mean = Statistic<T>::from(divide<T>(static_cast<RowSum<T>>(sum[0]), count));
    }
    Total squares[1] = {0};
    for_each_pack([&](const float (&h)[kSize]) {
      squares[0] += tree_sum<kSize>([&](int j) {
        const float difference = Norm::kIsCentered ? row.mean.subtracted_from(h[j]) : h[j];
        return difference * difference;
      });
    });
    reduce(squares, Norm::kIsCentered ? 1 : 0);
    row.scale = rms_scale_of<T>(static_cast<RowSum<T>>(squares[0]), hidden, eps);
  }
  return row;
}

template <class Norm, typename T, int kSize>
__device__ __forceinline__ void center(const RowStatistics<T>& row, float (&h)[kSize]) {
  if constexpr (Norm::kIsCentered)
#pragma unroll
    for (int j = 0; j < kSize; ++j) h[j] = row.mean.subtracted_from(h[j]);
}

template <class Norm, typename T, int kSize>
__device__ __forceinline__ void normalize(const RowStatistics<T>& row, float (&h)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if constexpr (Norm::kIsCentered) h[j] = row.mean.subtracted_from(h[j]);
    h[j] = row.scale.times(h[j]);
  }
}

// Quantizes the results of a row, with one more exchange, and stores them. set_results(i, column) sets
// values[i]. All threads call it.
template <int kThreadsPerRow, int kSize, int kPacks, class OutputRow, class SetResults>
__device__ __forceinline__ void store_quantized(const HeldRow<kThreadsPerRow, kSize, kPacks>& held,
                                                const OutputRow& output, float (&values)[kPacks][kSize],
                                                const SetResults& set_results) {
  uint32_t largest[1] = {0};
  held.for_each_pack([&](int i, int column) {
    set_results(i, column);
    largest[0] = max(largest[0], largest_magnitude(values[i]));
  });
  GroupReduce<UnsignedMax, uint32_t, kThreadsPerRow>{}(largest);
  const Fp8Quotient quotient(fp8_scale(largest[0]));
  held.for_each_pack([&](int i, int column) { output.store(column, values[i], quotient); });
  if (held.is_first_thread()) output.store_scale(quotient.scale);
}

// Second argument of __launch_bounds__. With 0 the compiler limits registers for more resident blocks, which
// is right for 16 bits; for float32 some kernels would spill. With 1 it does not.
template <typename T>
constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : 0;

// For short rows. Some quantized layer norms in bfloat16 would take up to 61 registers. With 48, 40 warps fit
// on a multiprocessor. In float16 they would spill.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow>
constexpr int min_short_row_blocks() {
  if constexpr (Output::kIsQuantized && Norm::kIsCentered && Input::kOperands == 1 &&
                std::is_same_v<T, __nv_bfloat16>) {
    constexpr int kWarps = kBlockThreads<kThreadsPerRow> / kWarpThreads;
    if (kThreadsPerRow == 320 || (Output::kIsGeneral && 40 % kWarps == 0)) return 40 / kWarps;
  }
  return kMinBlocks<T>;
}

// Short rows: kThreadsPerRow threads hold up to kRowPacks packs each in registers. A block has several rows
// if they are narrow.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>,
                                  (min_short_row_blocks<T, Input, Norm, Output, kThreadsPerRow>()))
    row_norm_kernel(const __grid_constant__ RowKernelParams<Input, Output> params) {
  constexpr int kSize = kPackSize<T, Access::kVector>, kPacks = kRowPacks;
  constexpr bool kUsesPivot = kUsesPivotFor<T, Norm>;
  using InputRow = typename Input::template Row<T>;
  using OutputRow = typename Output::template Row<T>;
  const HeldRow<kThreadsPerRow, kSize> held(params);
  const InputRow input(params.input, held.index);
  const OutputRow output(params.output, held.index);
  griddepcontrol_wait();

  typename InputRow::template Pack<kSize> in[kPacks], first;
  typename OutputRow::template Pack<kSize> factors[kPacks];
  held.for_each_pack([&](int i, int column) { input.fetch(column, in[i]); });
  if constexpr (kUsesPivot) input.fetch(0, first);
  held.for_each_pack([&](int i, int column) { output.fetch(column, factors[i]); });
  // Keeps the compiler from moving the last load below the reduction to save registers. A layer norm keeps
  // its order without it, and would need more registers with it (notes/row_kernels.md, "Order of loads").
  if constexpr (!Norm::kIsCentered) __syncwarp();
  held.for_each_pack([&](int i, int column) {
    input.finish(in[i]);
    input.store(column, in[i]);
  });

  if constexpr (Norm::kIsNorm) {
    float pivot = 0;
    if constexpr (kUsesPivot) pivot = pivot_of<kSize>(input, first);
    const auto for_each_pack = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float h[kSize];
        in[i].values(h);
        if (held.has_pack(i)) body(h);
      }
    };
    const auto row = row_statistics<T, Norm, kUsesPivot, kSize, kThreadsPerRow>(for_each_pack, pivot,
                                                                                held.hidden, params.eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) in[i].hide_from_compiler();
    if constexpr (Output::kIsQuantized) {
      float n[kPacks][kSize];
      store_quantized(held, output, n, [&](int i, int column) {
        in[i].values(n[i]);
        center<Norm>(row, n[i]);
        output.modulate(column, factors[i], row.scale.high, n[i]);
      });
    } else {
      held.for_each_pack([&](int i, int column) {
        float n[kSize];
        in[i].values(n);
        normalize<Norm>(row, n);
        output.store(column, factors[i], n);
      });
    }
  }
}

// Long rows: a block holds a row in shared memory. With five blocks on a multiprocessor an output with extra
// operands would spill.
template <typename T, class Input, class Output>
constexpr int kMinLongRowBlocks =
    sizeof(T) == 2 && Input::kOperands == 1 ? (std::is_same_v<Output, GeneralOutput<true>> ? 3 : 5) : 1;

template <typename T, class Input, class Norm, class Output>
__global__ void __launch_bounds__(kLongRowThreads, (kMinLongRowBlocks<T, Input, Output>))
    long_row_norm_kernel(const __grid_constant__ RowKernelParams<Input, Output> params) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  constexpr bool kUsesPivot = kUsesPivotFor<T, Norm>;
  using InputRow = typename Input::template Row<T>;
  using OutputRow = typename Output::template Row<T>;
  using InputPack = typename InputRow::template Pack<kSize>;
  const LongRow<kSize, Input::kOperands> memory(params.hidden);
  const auto index = params.indexer(memory.position.row);
  const InputRow input(params.input, index);
  const OutputRow output(params.output, index);
  griddepcontrol_wait();

  const auto read = [&](const uint4* slots, InputPack& pack, float (&h)[kSize]) {
    input.read(slots, pack);
    input.finish(pack);
    pack.values(h);
  };
  InputPack first;
  memory.fetch([&](int64_t column, uint4* slots) { input.fetch_async(column, slots); });
  if constexpr (kUsesPivot) input.fetch(0, first);
  cp_async_wait_all();

  RowStatistics<T> row;
  if constexpr (Norm::kIsNorm) {
    float pivot = 0;
    if constexpr (kUsesPivot) pivot = pivot_of<kSize>(input, first);
    const auto for_each_pack = [&](const auto& body) {
      memory.for_each_pack([&](int, const uint4* slots) {
        InputPack pack;
        float h[kSize];
        read(slots, pack, h);
        body(h);
      });
    };
    row = row_statistics<T, Norm, kUsesPivot, kSize, kLongRowThreads>(for_each_pack, pivot, params.hidden,
                                                                      params.eps);
  }
  memory.template for_each_pack<4>([&](int column, const uint4* slots) {
    typename OutputRow::template Pack<kSize> factors;
    if constexpr (Norm::kIsNorm) output.fetch(column, factors);
    InputPack pack;
    float n[kSize];
    read(slots, pack, n);
    input.store(column, pack);
    if constexpr (Norm::kIsNorm) {
      normalize<Norm>(row, n);
      output.store(column, factors, n);
    }
  });
}

// Rows of any length and alignment: read one element at a time, and again in each step.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>, 1)
    scalar_row_norm_kernel(const __grid_constant__ RowKernelParams<Input, Output> params) {
  constexpr int kSize = 1;
  using InputRow = typename Input::template Row<T>;
  using OutputRow = typename Output::template Row<T>;
  using InputPack = typename InputRow::template Pack<kSize>;
  const ThreadRow<kThreadsPerRow> thread_row(params);
  const InputRow input(params.input, thread_row.index);
  const OutputRow output(params.output, thread_row.index);
  griddepcontrol_wait();

  const auto for_each_column = [&](const auto& body) {
    thread_row.template for_each_column<kSize>(params.hidden, [&](int64_t column) {
      InputPack pack;
      float h[kSize];
      input.fetch(column, pack);
      input.finish(pack);
      pack.values(h);
      body(column, pack, h);
    });
  };
  RowStatistics<T> row;
  if constexpr (Norm::kIsNorm) {
    const auto for_each_pack = [&](const auto& body) {
      for_each_column([&](int64_t, const InputPack&, const float (&h)[kSize]) { body(h); });
    };
    // Sums are double because a thread may add thousands of elements one by one (notes/row_kernels.md, "Long
    // rows").
    row = row_statistics<T, Norm, false, kSize, kThreadsPerRow, double>(for_each_pack, 0.0f, params.hidden,
                                                                        params.eps);
  }
  for_each_column([&](int64_t column, const InputPack& pack, float (&n)[kSize]) {
    input.store(column, pack);
    if constexpr (Norm::kIsNorm) {
      typename OutputRow::template Pack<kSize> factors;
      output.fetch(column, factors);
      normalize<Norm>(row, n);
      output.store(column, factors, n);
    }
  });
}

// ---------------------------------------------------------------------------------------------------------
// Launch

// Returns whether each pack of E4M3 values, one for each 16 bytes of input, can be stored at once.
inline bool has_fp8_packs(const RowOperand& out, int ndim, int element_bytes) {
  const int pack_bytes = kVectorBytes / element_bytes;
  bool aligned = reinterpret_cast<uintptr_t>(out.data) % pack_bytes == 0;
  for (int dim = 0; dim < ndim; ++dim) aligned = aligned && out.strides[dim] % pack_bytes == 0;
  return aligned;
}

inline bool has_vector_access(const RowNormParams& args, int element_bytes) {
  bool vector = args.hidden * element_bytes % kVectorBytes == 0;
  vector = vector && (args.row_scale.data ? has_fp8_packs(args.out, args.shape.ndim, element_bytes)
                                          : has_vector_rows(args.out, args.shape.ndim, element_bytes));
  for (const RowOperand* operand : {&args.x, &args.second_out})
    vector = vector && has_vector_rows(*operand, args.shape.ndim, element_bytes);
  for (const RowOperand* operand : {&args.residual, &args.residual_out})
    vector =
        vector && has_vector_rows(*operand, args.shape.ndim, args.has_float32_residual ? 4 : element_bytes);
  for (const Modulator* modulator : {&args.gate, &args.scale, &args.shift, &args.second_scale,
                                     &args.second_shift, &args.weight, &args.bias})
    vector =
        vector && has_vector_rows(*modulator, args.shape.ndim, modulator->is_float32 ? 4 : element_bytes);
  return vector;
}

// A layer norm needs more registers, so that too few larger blocks would fit on a multiprocessor
// (notes/row_kernels.md, "Long rows").
template <class Norm>
constexpr int kMaxShortRowThreads = Norm::kIsCentered ? 384 : 512;

// Without a norm bfloat16, the dtype of most models, keeps all configurations.
template <typename T, class Norm>
using ShortRowThreads = std::conditional_t<Norm::kIsNorm || std::is_same_v<T, __nv_bfloat16>, NormRowThreads,
                                           ElementwiseRowThreads>;

template <typename T, class Input, class Norm, class Output, class Threads = ShortRowThreads<T, Norm>>
void launch_rows(const char* operation, const RowNormParams& args, Stream stream) {
  const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
  const RowKernelParams<Input, Output> params(args);
  const auto launch_short = [&](auto threads) {
    launch_kernel(operation, row_norm_kernel<T, Input, Norm, Output, threads>,
                  RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>, params, stream);
  };
  if (has_vector_access(args, sizeof(T))) {
    if (dispatch_row_threads<kMaxShortRowThreads<Norm>>(Threads{}, packs, launch_short)) return;
    const int64_t shared_bytes = long_row_shared_bytes(packs, Input::kOperands);
    if (shared_bytes <= kMaxSharedBytes)
      return launch_kernel_with_shared_memory<long_row_norm_kernel<T, Input, Norm, Output>>(
          operation, RowPosition<kLongRowThreads>::blocks(args.shape.rows), kLongRowThreads, params, stream,
          shared_bytes);
  }
  const auto launch_scalar = [&](auto threads) {
    launch_kernel(operation, scalar_row_norm_kernel<T, Input, Norm, Output, threads>,
                  RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>, params, stream);
  };
  if (args.hidden <= kWarpRow) return launch_scalar(Constant<kWarpThreads>{});
  launch_scalar(Constant<kAnyRowThreads>{});
}

template <class Input, class Norm, class Output>
void launch_row_norm(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    launch_rows<T, Input, Norm, Output>(operation, args, stream);
  });
}

// Defined in general_norm.cuh: PlainInput or GatedResidualInput with GeneralOutput.
template <class Input, class Norm>
void launch_general(const char* operation, const RowNormParams& args, Stream stream);

// Defined in general_gated_norm.cu: a gated residual without a norm whose gate is float32.
void launch_general_gate(const char* operation, const RowNormParams& args, Stream stream);

// Defined in float32_residual.cu: a float32 residual with 16-bit rows.
template <class Norm>
void launch_float32_residual(const char* operation, const RowNormParams& args, Stream stream);

// Defined in branch_norm.cuh.
template <class Norm>
void launch_branch_norm(const char* operation, const RowNormParams& args, Stream stream);

// Defined in quantized_norm.cu.
template <class Input, class Norm>
void launch_quantized(const char* operation, const RowNormParams& args, Stream stream);

template <class Input, class Norm>
void launch_modulated(const char* operation, const RowNormParams& args, Stream stream) {
  if (args.row_scale.data) return launch_quantized<Input, Norm>(operation, args, stream);
  if (has_branch(args)) return launch_branch_norm<Norm>(operation, args, stream);
  if (!args.scale.data || !args.shift.data || args.second_out.data || has_mixed_dtypes(args))
    return launch_general<Input, Norm>(operation, args, stream);
  if (args.weight.data || args.bias.data)
    return launch_row_norm<Input, Norm, ModulatedOutput<true>>(operation, args, stream);
  launch_row_norm<Input, Norm, ModulatedOutput<false>>(operation, args, stream);
}

}  // namespace h100_diffusers_kernels
