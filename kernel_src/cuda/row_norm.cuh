// Norm, modulation, residual and gate as one kernel with three policies, chosen at compile time:
//   input   what a row's values are: x, or residual + gate * x (stored once)
//   norm    RMS, layer, none
//   output  affine, modulated, or nothing (the input policy's store was all)
// A row is held in the registers of the threads that share it, so each element is read once and written
// once; rows too long for that, and data that 16-byte accesses cannot reach, take a loop that reads again.
#pragma once

#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_index.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {

// ---------------------------------------------------------------------------------------------------------
// Policies

struct RowNormKernelParams {
  RowNormParams args;
  RowIndexer indexer;
};

// The row's start in each operand; those that a policy does not use cost nothing.
template <typename T>
struct RowPointers {
  const RowNormParams& args;
  RowIndex index;

  __device__ __forceinline__ T* row_of(const RowOperand& operand) const {
    return static_cast<T*>(operand.data) + index.offset(operand, args.shape.ndim);
  }
};

// An input policy fetches in one step and computes in another, so that a thread's loads are all under way
// before the first is used.
struct PlainInput {
  template <typename T>
  struct Row {
    const T* x;
    __device__ __forceinline__ explicit Row(const RowPointers<T>& p) : x(p.row_of(p.args.x)) {}

    template <int kSize>
    struct Fetched {
      Pack<T, kSize> x;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Fetched<kSize>& raw) const {
      raw.x.load(x + column);
    }
    template <int kSize>
    __device__ __forceinline__ void compute(int64_t, const Fetched<kSize>& raw, float (&h)[kSize]) const {
      raw.x.to_floats(h);
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, const float (&)[kSize]) const {}
  };
};

struct GatedResidualInput {
  template <typename T>
  struct Row {
    const T* x;
    const T* residual;
    const T* gate;
    T* residual_out;
    __device__ __forceinline__ explicit Row(const RowPointers<T>& p)
        : x(p.row_of(p.args.x)),
          residual(p.row_of(p.args.residual)),
          gate(p.args.gate.data ? p.row_of(p.args.gate) : nullptr),
          residual_out(p.row_of(p.args.residual_out)) {}

    template <int kSize>
    struct Fetched {
      Pack<T, kSize> x, residual;
    };
    template <int kSize>
    __device__ __forceinline__ void fetch(int64_t column, Fetched<kSize>& raw) const {
      raw.residual.load(residual + column);
      raw.x.load(x + column);
    }
    template <int kSize>
    __device__ __forceinline__ void compute(int64_t column, const Fetched<kSize>& raw,
                                            float (&h)[kSize]) const {
      float branch[kSize];
      raw.residual.to_floats(h);
      raw.x.to_floats(branch);
      if (gate) {
        float g[kSize];
        load_floats(gate + column, g);
#pragma unroll
        for (int i = 0; i < kSize; ++i) h[i] = fmaf(g[i], branch[i], h[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) h[i] += branch[i];
      }
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, const float (&h)[kSize]) const {
      store_floats(residual_out + column, h);
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
  template <typename T>
  struct Row {
    __device__ __forceinline__ explicit Row(const RowPointers<T>&) {}
    template <int kSize>
    __device__ __forceinline__ void store(int64_t, float (&)[kSize]) const {}
  };
};

struct AffineOutput {
  template <typename T>
  struct Row {
    const T* weight;
    const T* bias;
    T* out;
    __device__ __forceinline__ explicit Row(const RowPointers<T>& p)
        : weight(static_cast<const T*>(p.args.weight)),
          bias(static_cast<const T*>(p.args.bias)),
          out(p.row_of(p.args.out)) {}

    template <int kSize>
    __device__ __forceinline__ void apply_affine(int64_t column, float (&n)[kSize]) const {
      float w[kSize], b[kSize];
      if (weight) load_floats(weight + column, w);
      if (bias) load_floats(bias + column, b);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (weight && bias) {
          n[i] = fmaf(n[i], w[i], b[i]);
        } else if (weight) {
          n[i] *= w[i];
        } else if (bias) {
          n[i] += b[i];
        }
      }
    }
    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, float (&n)[kSize]) const {
      apply_affine(column, n);
      store_floats(out + column, n);
    }
  };
};

struct ModulatedOutput {
  template <typename T>
  struct Row {
    AffineOutput::Row<T> affine;
    const T* scale;
    const T* shift;
    __device__ __forceinline__ explicit Row(const RowPointers<T>& p)
        : affine(p), scale(p.row_of(p.args.scale)), shift(p.row_of(p.args.shift)) {}

    template <int kSize>
    __device__ __forceinline__ void store(int64_t column, float (&n)[kSize]) const {
      affine.apply_affine(column, n);
      float factor[kSize], offset[kSize];
      load_floats(scale + column, factor);
      load_floats(shift + column, offset);
#pragma unroll
      for (int i = 0; i < kSize; ++i) n[i] = fmaf(n[i], 1.0f + factor[i], offset[i]);
      store_floats(affine.out + column, n);
    }
  };
};

// ---------------------------------------------------------------------------------------------------------
// Kernels

// kThreadsPerRow threads hold a row of up to kThreadsPerRow * kPacks packs. Rows narrower than a block share
// it.
template <typename T, class Input, class Norm, class Output, int kThreadsPerRow, int kPacks>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    row_norm_kernel(const __grid_constant__ RowNormKernelParams params) {
  constexpr int kBlock = kBlockThreads<kThreadsPerRow>;
  constexpr int kSize = kPackSize<T, Access::kVector>;
  const int64_t row = blockIdx.x * int64_t{kBlock / kThreadsPerRow} + threadIdx.x / kThreadsPerRow;
  const int lane = threadIdx.x % kThreadsPerRow;
  const bool is_row = row < params.args.shape.rows;
  const int64_t hidden = params.args.hidden;
  const RowPointers<T> pointers{params.args, params.indexer(is_row ? row : 0)};
  const typename Input::template Row<T> input(pointers);
  const typename Output::template Row<T> output(pointers);

  typename Input::template Row<T>::template Fetched<kSize> raw[kPacks];
  float h[kPacks][kSize];
  bool is_column[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * kThreadsPerRow + lane) * kSize;
    is_column[i] = is_row && column < hidden;
    if (is_column[i]) input.fetch(column, raw[i]);
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * kThreadsPerRow + lane) * kSize;
    if (is_column[i]) {
      input.compute(column, raw[i], h[i]);
      input.store(column, h[i]);
    }
  }

  const GroupSum<RowSum<T>, kThreadsPerRow, 1, 2> group_sum;
  if constexpr (Norm::kIsCentered) {
    RowSum<T> sum[1] = {0};
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (is_column[i]) sum[0] += tree_sum<kSize>([&](int j) { return h[i][j]; });
    group_sum(sum, 0);
    const Statistic<T> mean = mean_of<T>(sum[0], hidden);
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
#pragma unroll
      for (int j = 0; j < kSize; ++j) h[i][j] = mean.subtracted_from(h[i][j]);
  }
  if constexpr (Norm::kIsNorm) {
    RowSum<T> sum[1] = {0};
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      if (is_column[i]) sum[0] += tree_sum<kSize>([&](int j) { return h[i][j] * h[i][j]; });
    group_sum(sum, 1);
    const Statistic<T> scale = rms_scale_of<T>(sum[0], hidden, params.args.eps);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (is_column[i]) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) h[i][j] = scale.times(h[i][j]);
        output.store((i * kThreadsPerRow + lane) * kSize, h[i]);
      }
    }
  }
}

constexpr int kLongRowThreads = 512;

// Any row length and, with kScalar, any alignment: one block a row, which is read again for each step.
template <typename T, class Input, class Norm, class Output, Access kAccess>
__global__ void __launch_bounds__(kLongRowThreads)
    long_row_norm_kernel(const __grid_constant__ RowNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const int64_t hidden = params.args.hidden;
  const RowPointers<T> pointers{params.args, params.indexer(blockIdx.x)};
  const typename Input::template Row<T> input(pointers);
  const typename Output::template Row<T> output(pointers);
  const auto for_each_pack = [&](const auto& body) {
    for (int64_t column = int64_t{kSize} * threadIdx.x; column < hidden; column += kSize * kLongRowThreads) {
      typename Input::template Row<T>::template Fetched<kSize> raw;
      float h[kSize];
      input.fetch(column, raw);
      input.compute(column, raw, h);
      body(column, h);
    }
  };

  Statistic<T> mean, scale;
  const GroupSum<RowSum<T>, kLongRowThreads, 1, 2> group_sum;
  if constexpr (Norm::kIsCentered) {
    RowSum<T> sum[1] = {0};
    for_each_pack(
        [&](int64_t, float (&h)[kSize]) { sum[0] += tree_sum<kSize>([&](int j) { return h[j]; }); });
    group_sum(sum, 0);
    mean = mean_of<T>(sum[0], hidden);
  }
  const auto center = [&](float (&h)[kSize]) {
    if constexpr (Norm::kIsCentered) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) h[j] = mean.subtracted_from(h[j]);
    }
  };
  if constexpr (Norm::kIsNorm) {
    RowSum<T> sum[1] = {0};
    for_each_pack([&](int64_t, float (&h)[kSize]) {
      center(h);
      sum[0] += tree_sum<kSize>([&](int j) { return h[j] * h[j]; });
    });
    group_sum(sum, 1);
    scale = rms_scale_of<T>(sum[0], hidden, params.args.eps);
  }
  for_each_pack([&](int64_t column, float (&h)[kSize]) {
    input.store(column, h);
    if constexpr (Norm::kIsNorm) {
      center(h);
#pragma unroll
      for (int j = 0; j < kSize; ++j) h[j] = scale.times(h[j]);
      output.store(column, h);
    }
  });
}

// ---------------------------------------------------------------------------------------------------------
// Launch configuration: packs in a row -> threads a row, packs a thread. Two packs a thread was the fastest
// of one, two, four and eight at 256 packs: enough loads under way, and rows short-lived enough to fill the
// tail. Between powers of two stand the widths of SD3 (1536), FLUX (3072) and Wan (1536, 5120) in 16 bits.

template <int kThreads, int kPacks>
struct RowConfig {
  static constexpr int kThreadsPerRow = kThreads;
  static constexpr int kPacksPerThread = kPacks;
};

// Calls body with the configuration for rows of `packs` packs; false if no configuration holds such a row.
template <typename Body>
bool dispatch_row_config(int64_t packs, const Body& body) {
  const auto try_config = [&](auto config) {
    if (packs > config.kThreadsPerRow * config.kPacksPerThread) return false;
    body(config);
    return true;
  };
  return try_config(RowConfig<8, 1>{}) || try_config(RowConfig<32, 1>{}) || try_config(RowConfig<32, 2>{}) ||
         try_config(RowConfig<64, 2>{}) || try_config(RowConfig<96, 2>{}) ||
         try_config(RowConfig<128, 2>{}) || try_config(RowConfig<192, 2>{}) ||
         try_config(RowConfig<256, 2>{}) || try_config(RowConfig<320, 2>{}) ||
         try_config(RowConfig<512, 2>{}) || try_config(RowConfig<512, 4>{}) ||
         try_config(RowConfig<512, 8>{});
}

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
  const RowNormKernelParams params{args, RowIndexer(args.shape)};
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch_long = [&](auto kernel) {
      launch_kernel<const RowNormKernelParams>(operation, kernel, dim3(args.shape.rows), kLongRowThreads,
                                               params, stream);
    };
    if (!has_vector_access(args, sizeof(T)))
      return launch_long(long_row_norm_kernel<T, Input, Norm, Output, Access::kScalar>);
    const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
    const bool fits = dispatch_row_config(packs, [&](auto config) {
      constexpr int kThreadsPerRow = config.kThreadsPerRow;
      constexpr int kBlock = kBlockThreads<kThreadsPerRow>;
      launch_kernel<const RowNormKernelParams>(
          operation, row_norm_kernel<T, Input, Norm, Output, kThreadsPerRow, config.kPacksPerThread>,
          dim3(ceil_divide(args.shape.rows, kBlock / kThreadsPerRow)), kBlock, params, stream);
    });
    if (!fits) launch_long(long_row_norm_kernel<T, Input, Norm, Output, Access::kVector>);
  });
}

}  // namespace h100_diffusers_kernels
