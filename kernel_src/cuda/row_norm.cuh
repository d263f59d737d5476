// Norm, modulation, residual and gate as one kernel with three policies, chosen at compile time:
//   input   what a row's values are: x, or residual + gate * x (stored once)
//   norm    RMS, layer, none
//   output  affine, modulated, or nothing (the input policy's store was all)
// A row is held in the registers of the threads that share it, so each element is read once and written
// once; rows too long for that, and data that 16-byte accesses cannot reach, take a loop that reads again.
//
// Blocks are short: a row of 2048 16-bit elements is 128 threads with two packs each, gone after a
// microsecond. What a block does before its loads are under way, and between their arrival and its stores, is
// what keeps it from the rate of a plain copy; hence the plane of rows (no division but one multiplication),
// and weight, scale and shift that are on their way while the row is being reduced.
#pragma once

#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {

// ---------------------------------------------------------------------------------------------------------
// Policies. Each has Operands, the part of a kernel's parameters that it needs; a Row, which knows where the
// row is in them; and steps that a kernel calls for each pack of the row: `fetch` starts loads, the others
// use what they brought.

template <typename T>
__device__ __forceinline__ T* row_of(const RowIndexer::Operand& operand, const RowIndexer::Index& index) {
  return static_cast<T*>(operand.data) + index.offset(operand);
}

struct PlainInput {
  struct Operands {
    RowIndexer::Operand x;
    explicit Operands(const RowNormParams& p) : x(p.x, p.shape.ndim) {}
  };

  template <typename T>
  struct Row {
    const T* x;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : x(row_of<const T>(operands.x, index)) {}

    // Held as it was loaded: in 16 bits half the registers that the values would take.
    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> x;
      __device__ __forceinline__ void values(float (&h)[kSize]) const { x.to_floats(h); }
      // Else the compiler keeps the values of the first conversion for the second.
      __device__ __forceinline__ void forget_values() {
#pragma unroll
        for (uint4& word : x.words) asm("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
      }
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.x.load(x + column);
    }
    template <int kSize>
    __device__ __forceinline__ void finish(int64_t, Pack<kSize>&) const {}
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, const Pack<kSize>&) const {}
  };
};

struct GatedResidualInput {
  struct Operands {
    RowIndexer::Operand x, residual, gate, residual_out;
    explicit Operands(const RowNormParams& p)
        : x(p.x, p.shape.ndim),
          residual(p.residual, p.shape.ndim),
          gate(p.gate, p.shape.ndim),
          residual_out(p.residual_out, p.shape.ndim) {}
  };

  template <typename T>
  struct Row {
    const T* x;
    const T* residual;
    const T* gate;
    T* residual_out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : x(row_of<const T>(operands.x, index)),
          residual(row_of<const T>(operands.residual, index)),
          gate(operands.gate.data ? row_of<const T>(operands.gate, index) : nullptr),
          residual_out(row_of<T>(operands.residual_out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> x, residual, gate;
      float h[kSize];
      __device__ __forceinline__ void forget_values() {}
      __device__ __forceinline__ void values(float (&copy)[kSize]) const {
#pragma unroll
        for (int i = 0; i < kSize; ++i) copy[i] = h[i];
      }
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.residual.load(residual + column);
      pack.x.load(x + column);
      if (gate) pack.gate.load(gate + column);
    }
    template <int kSize>
    __device__ __forceinline__ void finish(int64_t column, Pack<kSize>& pack) const {
      float branch[kSize];
      pack.residual.to_floats(pack.h);
      pack.x.to_floats(branch);
      if (gate) {
        float g[kSize];
        pack.gate.to_floats(g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) pack.h[i] = fmaf(g[i], branch[i], pack.h[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) pack.h[i] += branch[i];
      }
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack) const {
      store_floats(residual_out + column, pack.h);
    }
  };
};

// A norm maps h to (h - mean) / sqrt(mean((h - mean)^2) + eps); the mean is 0 unless it is centered.
struct NoNorm {
  static constexpr bool kIsNorm = false;
  static constexpr bool kIsCentered = false;
};
struct RmsNorm {
  static constexpr bool kIsNorm = true;
  static constexpr bool kIsCentered = false;
};
struct LayerNorm {
  static constexpr bool kIsNorm = true;
  static constexpr bool kIsCentered = true;
};

struct NoOutput {
  struct Operands {
    explicit Operands(const RowNormParams&) {}
  };

  template <typename T>
  struct Row {
    __device__ __forceinline__ Row(const Operands&, const RowIndexer::Index&) {}
    template <int kSize>
    struct Pack {};
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t, Pack<kSize>&) const {}
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, const Pack<kSize>&, float (&)[kSize]) const {}
  };
};

template <bool kHasWeight, bool kHasBias>
struct AffineOutput {
  struct Operands {
    RowIndexer::Operand out;
    const void* weight;
    const void* bias;
    explicit Operands(const RowNormParams& p) : out(p.out, p.shape.ndim), weight(p.weight), bias(p.bias) {}
  };

  template <typename T>
  struct Row {
    const T* weight;
    const T* bias;
    T* out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : weight(static_cast<const T*>(operands.weight)),
          bias(static_cast<const T*>(operands.bias)),
          out(row_of<T>(operands.out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> weight, bias;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      if constexpr (kHasWeight) pack.weight.load(weight + column);
      if constexpr (kHasBias) pack.bias.load(bias + column);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack, float (&n)[kSize]) const {
      float term[kSize];
      if constexpr (kHasWeight) {
        pack.weight.to_floats(term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) n[i] *= term[i];
      }
      if constexpr (kHasBias) {
        pack.bias.to_floats(term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) n[i] += term[i];
      }
      store_floats(out + column, n);
    }
  };
};

// kHasAffine: whether there is a weight or a bias, which is rare here: told apart at run time, and not
// fetched ahead, which would cost registers.
template <bool kHasAffine>
struct ModulatedOutput {
  struct Operands {
    RowIndexer::Operand out, scale, shift;
    const void* weight;
    const void* bias;
    explicit Operands(const RowNormParams& p)
        : out(p.out, p.shape.ndim),
          scale(p.scale, p.shape.ndim),
          shift(p.shift, p.shape.ndim),
          weight(p.weight),
          bias(p.bias) {}
  };

  template <typename T>
  struct Row {
    const T* scale;
    const T* shift;
    const T* weight;
    const T* bias;
    T* out;
    __device__ __forceinline__ Row(const Operands& operands, const RowIndexer::Index& index)
        : scale(row_of<const T>(operands.scale, index)),
          shift(row_of<const T>(operands.shift, index)),
          weight(static_cast<const T*>(operands.weight)),
          bias(static_cast<const T*>(operands.bias)),
          out(row_of<T>(operands.out, index)) {}

    template <int kSize>
    struct Pack {
      h100_diffusers_kernels::Pack<T, kSize> scale, shift;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Pack<kSize>& pack) const {
      pack.scale.load(scale + column);
      pack.shift.load(shift + column);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const Pack<kSize>& pack, float (&n)[kSize]) const {
      float term[kSize], offset[kSize];
      if (kHasAffine && weight) {
        load_floats(weight + column, term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) n[i] *= term[i];
      }
      if (kHasAffine && bias) {
        load_floats(bias + column, term);
#pragma unroll
        for (int i = 0; i < kSize; ++i) n[i] += term[i];
      }
      pack.scale.to_floats(term);
      pack.shift.to_floats(offset);
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] = fmaf(n[i], 1.0f + term[i], offset[i]);
      store_floats(out + column, n);
    }
  };
};

// ---------------------------------------------------------------------------------------------------------
// Kernels

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

template <typename T>
struct RowStatistics {
  Statistic<T> mean;   // 0 unless the norm is centered
  Statistic<T> scale;  // 1 / sqrt(mean of the squares around the mean + eps)
};

// For 16-bit results mean and variance come from sums around a pivot, in one step, with the threads of a row
// waiting for each other once. The pivot is the mean of the row's first eight values. The variance takes on
// (pivot - mean)^2 / variance times the rounding errors of the sums, which is about 1/8 for most rows; where
// it is more than kMaxCancellation, the step is taken again around the mean that came out.
constexpr int kPivotValues = 8;
constexpr float kMaxCancellation = 16.0f;
template <typename T, class Norm>
constexpr bool kHasPivot = Norm::kIsCentered && !kHasExactStatistics<T>;

// Of a row that is shared by a group (see GroupReduce). for_each_pack(body) calls body(h) for each of the
// thread's packs.
template <typename T, class Norm, bool kIsAroundPivot, int kSize, int kThreadsPerRow, int kClusterBlocks,
          class ForEachPack>
__device__ __forceinline__ RowStatistics<T> row_statistics(const ForEachPack& for_each_pack, float pivot,
                                                           int64_t hidden, float eps) {
  const RowSum<T> count = static_cast<RowSum<T>>(hidden);
  RowStatistics<T> row;
  if constexpr (kIsAroundPivot) {
    const GroupReduce<Sum, float, kThreadsPerRow, 2, 2, kClusterBlocks> reduce;
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
    constexpr int kRounds = Norm::kIsCentered ? 2 : 1;
    const GroupReduce<Sum, RowSum<T>, kThreadsPerRow, 1, kRounds, kClusterBlocks> reduce;
    if constexpr (Norm::kIsCentered) {
      RowSum<T> sum[1] = {0};
      for_each_pack([&](const float (&h)[kSize]) { sum[0] += tree_sum<kSize>([&](int j) { return h[j]; }); });
      reduce(sum, 0);
      row.mean = Statistic<T>::from(divide<T>(sum[0], count));
    }
    RowSum<T> squares[1] = {0};
    for_each_pack([&](const float (&h)[kSize]) {
      squares[0] += tree_sum<kSize>([&](int j) {
        const float difference = Norm::kIsCentered ? row.mean.subtracted_from(h[j]) : h[j];
        return difference * difference;
      });
    });
    reduce(squares, kRounds - 1);
    row.scale = rms_scale_of<T>(squares[0], hidden, eps);
  }
  return row;
}

template <class Norm, typename T, int kSize>
__device__ __forceinline__ void normalize(const RowStatistics<T>& row, float (&h)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if constexpr (Norm::kIsCentered) h[j] = row.mean.subtracted_from(h[j]);
    h[j] = row.scale.times(h[j]);
  }
}

// With 1 the compiler takes the registers that it wants. Left alone (0) it saves some in the hope of more
// blocks at a time, which is right for 16 bits, and for float32 now and then spills.
template <typename T>
constexpr int kMinBlocks = sizeof(T) == 4 ? 1 : 0;

// kThreadsPerRow threads, of each block of a cluster, hold a row of up to kPacks packs a thread. Rows
// narrower than a block share it.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow, int kPacks,
          int kClusterBlocks>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>, kMinBlocks<T>)
    row_norm_kernel(const __grid_constant__ RowKernelParams<Input, Output> params) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  constexpr bool kIsAroundPivot = kHasPivot<T, Norm>;
  // Factors that wait for the reduction in registers; with more packs these are worth more as more threads.
  constexpr bool kFetchesAhead = kPacks <= 2;
  using InputRow = typename Input::template Row<T>;
  using OutputRow = typename Output::template Row<T>;
  if constexpr (Norm::kIsNorm) cluster_arrive<kClusterBlocks>();
  const RowPlace<kThreadsPerRow, kClusterBlocks> place;
  const int hidden = static_cast<int>(params.hidden);
  const bool is_row = place.kRowsPerBlock == 1 || place.row < params.rows;
  const auto index = params.indexer(is_row ? place.row : 0);
  const InputRow input(params.input, index);
  const OutputRow output(params.output, index);
  wait_for_earlier_kernels();

  typename InputRow::template Pack<kSize> in[kPacks], first;
  typename OutputRow::template Pack<kSize> factors[kPacks];
  bool is_column[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    is_column[i] = is_row && place.pack(i) * kSize < hidden;
    if (is_column[i]) input.fetch(place.pack(i) * kSize, in[i]);
  }
  if constexpr (kIsAroundPivot) input.fetch(0, first);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (is_column[i]) {
      input.finish(place.pack(i) * kSize, in[i]);
      if constexpr (kFetchesAhead) output.fetch(place.pack(i) * kSize, factors[i]);
      input.store(place.pack(i) * kSize, in[i]);
    }
  }

  if constexpr (Norm::kIsNorm) {
    float pivot = 0;
    if constexpr (kIsAroundPivot) {
      static_assert(kSize == kPivotValues);
      input.finish(0, first);
      float h[kSize];
      first.values(h);
      pivot = tree_sum<kSize>([&](int j) { return h[j] * (1.0f / kPivotValues); });
    }
    const auto for_each_pack = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float h[kSize];
        in[i].values(h);
        if (is_column[i]) body(h);
      }
    };
    cluster_wait<kClusterBlocks>();
    const auto row = row_statistics<T, Norm, kIsAroundPivot, kSize, kThreadsPerRow, kClusterBlocks>(
        for_each_pack, pivot, hidden, params.eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) in[i].forget_values();
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (is_column[i]) {
        if constexpr (!kFetchesAhead) output.fetch(place.pack(i) * kSize, factors[i]);
        float n[kSize];
        in[i].values(n);
        normalize<Norm>(row, n);
        output.store(place.pack(i) * kSize, factors[i], n);
      }
    }
  }
}

// Any row length and any alignment: an element at a time, and a row is read again for each step.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow, Access kAccess>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>, 1)
    any_row_norm_kernel(const __grid_constant__ RowKernelParams<Input, Output> params) {
  static_assert(kAccess == Access::kScalar);
  constexpr int kSize = 1;
  using InputRow = typename Input::template Row<T>;
  using OutputRow = typename Output::template Row<T>;
  using InputPack = typename InputRow::template Pack<kSize>;
  const RowPlace<kThreadsPerRow, 1> place;
  const bool is_row = place.kRowsPerBlock == 1 || place.row < params.rows;
  const int64_t hidden = params.hidden;
  const auto index = params.indexer(is_row ? place.row : 0);
  const InputRow input(params.input, index);
  const OutputRow output(params.output, index);
  wait_for_earlier_kernels();

  const auto load = [&](int64_t column, InputPack& pack, float (&h)[kSize]) {
    input.fetch(column, pack);
    input.finish(column, pack);
    pack.values(h);
  };
  const auto for_each_column = [&](const auto& body) {
    if (!is_row) return;
    for (int64_t column = int64_t{kSize} * place.thread; column < hidden; column += kSize * kThreadsPerRow) {
      InputPack pack;
      float h[kSize];
      load(column, pack, h);
      body(column, pack, h);
    }
  };

  RowStatistics<T> row;
  if constexpr (Norm::kIsNorm) {
    const auto for_each_pack = [&](const auto& body) {
      for_each_column([&](int64_t, const InputPack&, const float (&h)[kSize]) { body(h); });
    };
    row = row_statistics<T, Norm, false, kSize, kThreadsPerRow, 1>(for_each_pack, 0.0f, hidden, params.eps);
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

inline bool has_vector_access(const RowNormParams& args, int element_bytes) {
  bool vector = args.hidden * element_bytes % kVectorBytes == 0 && is_16_byte_aligned(args.weight) &&
                is_16_byte_aligned(args.bias);
  for (const RowOperand* operand :
       {&args.x, &args.residual, &args.gate, &args.residual_out, &args.out, &args.scale, &args.shift})
    vector = vector && has_vector_rows(*operand, args.shape.ndim, element_bytes);
  return vector;
}

template <class Input, class Norm, class Output>
void launch_row_norm(const char* operation, const RowNormParams& args, Stream stream) {
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
    const RowKernelParams<Input, Output> params(args);
    const auto launch_rows = [&](auto config) {
      constexpr int kThreadsPerRow = config.kThreadsPerRow;
      constexpr int kClusterBlocks = config.kClusterBlocks;
      launch_kernel<kClusterBlocks>(
          operation,
          row_norm_kernel<T, Input, Norm, Output, kThreadsPerRow, config.kPacksPerThread, kClusterBlocks>,
          RowPlace<kThreadsPerRow, kClusterBlocks>::blocks(args.shape.rows), kBlockThreads<kThreadsPerRow>,
          params, stream);
    };
    if (has_vector_access(args, sizeof(T)) && dispatch_row_config(packs, launch_rows)) return;
    const auto launch_any = [&]<int kThreadsPerRow>() {
      launch_kernel(operation, any_row_norm_kernel<T, Input, Norm, Output, kThreadsPerRow, Access::kScalar>,
                    RowPlace<kThreadsPerRow, 1>::blocks(args.shape.rows), kBlockThreads<kThreadsPerRow>,
                    params, stream);
    };
    if (args.hidden <= kShortRow) return launch_any.template operator()<kWarpThreads>();
    launch_any.template operator()<kLongRowThreads>();
  });
}

template <class Input, class Norm>
void launch_modulated(const char* operation, const RowNormParams& args, Stream stream) {
  if (args.weight || args.bias)
    return launch_row_norm<Input, Norm, ModulatedOutput<true>>(operation, args, stream);
  launch_row_norm<Input, Norm, ModulatedOutput<false>>(operation, args, stream);
}

}  // namespace h100_diffusers_kernels
