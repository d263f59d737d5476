// softmax over the last dimension. A short row is held in registers, a long one in the shared memory of a
// block or of a cluster of blocks; both are read once. Longer rows are read twice in 16 bits, with maximum
// and sum computed in the same pass (online softmax: Milakov and Gimelshein, 2018), and three times in
// float32.
//
// In 16 bits each warp of a row computes its own maximum and the sum relative to it, and these are combined,
// so that the warps synchronize once. For float32 results the roundings of that combination would be the
// largest error, so the maximum of the whole row is computed first (notes/row_kernels.md,
// "Softmax").
#include <type_traits>

#include "fast_math.cuh"
#include "launch.cuh"
#include "long_row.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

// Returns exp(difference) for difference <= 0.
template <typename T>
__device__ __forceinline__ float exponential(float difference) {
  if constexpr (kHasExactStatistics<T>) return expf(difference);
  return fast_exp2(difference * 1.44269504f);
}

// Returns the value that is subtracted from exponents: the maximum, or 0 if all values so far are -infinity,
// so that their exponentials are 0.
__device__ __forceinline__ float pivot_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// The softmax of a thread's value is exponential(value - pivot) * factor.
template <typename T>
struct RowScale {
  float pivot;
  Statistic<T> factor;
};

// Reduces over a row that is shared by kGroupThreads threads of each block of a cluster.
template <typename T, int kGroupThreads, int kClusterBlocks = 1>
struct SoftmaxReduce {
  static constexpr bool kCombinesWarps = !kHasExactStatistics<T> && kGroupThreads > kWarpThreads;
  using Maximum = GroupReduce<Max, float, kGroupThreads, 1, 1, kClusterBlocks>;
  using Total = GroupReduce<Sum, RowSum<T>, kGroupThreads, 1, 1, kClusterBlocks>;
  using Warps = Exchange<float, kGroupThreads, 2, 1, kClusterBlocks>;

  __device__ __forceinline__ static void cluster_arrive() {
    if constexpr (kCombinesWarps) {
      h100_diffusers_kernels::cluster_arrive<kClusterBlocks, Warps>();
    } else {
      static_assert(!std::is_same_v<typename Maximum::Warps, typename Total::Warps>);
      h100_diffusers_kernels::cluster_arrive<kClusterBlocks, Maximum, Total>();
    }
  }

  // sum_around(pivot) returns the sum of exponential(value - pivot) of the thread's values.
  template <class SumAround>
  __device__ __forceinline__ RowScale<T> operator()(float thread_maximum, const SumAround& sum_around) const {
    if constexpr (kCombinesWarps) {
      const float warp_maximum = warp_reduce<Max, kWarpThreads>(thread_maximum);
      const float pivot = pivot_of(warp_maximum);
      const float warp_sum = warp_reduce<Sum, kWarpThreads>(sum_around(pivot));
      cluster_wait<kClusterBlocks>();
      const auto* parts = Warps{}({warp_maximum, warp_sum}, 0);
      const float row_pivot = pivot_of(Warps::template reduce<Max>([&](int part) { return parts[0][part]; }));
      const float sum = Warps::template reduce<Sum>(
          [&](int part) { return parts[1][part] * exponential<T>(parts[0][part] - row_pivot); });
      return {pivot, Statistic<T>::from(exponential<T>(warp_maximum - row_pivot) * divide<T>(1, sum))};
    } else {
      cluster_wait<kClusterBlocks>();
      float maximum[1] = {thread_maximum};
      Maximum{}(maximum);
      const float pivot = pivot_of(maximum[0]);
      RowSum<T> sum[1] = {sum_around(pivot)};
      Total{}(sum);
      return {pivot, Statistic<T>::from(divide<T>(1, sum[0]))};
    }
  }
};

template <int kSize>
__device__ __forceinline__ float maximum_of(const float (&values)[kSize], float maximum) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) maximum = fmaxf(maximum, values[j]);
  return maximum;
}

template <typename T, int kSize>
__device__ __forceinline__ void take_exponentials(float (&values)[kSize], float pivot) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) values[j] = exponential<T>(values[j] - pivot);
}

template <int kSize>
__device__ __forceinline__ float sum_of(const float (&values)[kSize]) {
  return tree_sum<kSize>([&](int j) { return values[j]; });
}

template <typename T, int kSize>
__device__ __forceinline__ void store_scaled(T* out, float (&exponentials)[kSize],
                                             const Statistic<T>& factor) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) exponentials[j] = factor.times(exponentials[j]);
  store_floats(out, exponentials);
}

struct SoftmaxKernelParams {
  RowIndexer::Operand x, out;
  RowIndexer indexer;
  uint32_t rows;
  int64_t hidden;

  explicit SoftmaxKernelParams(const SoftmaxParams& p)
      : x(p.x, p.shape.ndim),
        out(p.out, p.shape.ndim),
        indexer(p.shape),
        rows(static_cast<uint32_t>(p.shape.rows)),
        hidden(p.hidden) {}
};

// Short rows: kThreadsPerRow threads hold up to kRowPacks packs each in registers.
template <typename T, int kThreadsPerRow>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    softmax_kernel(const __grid_constant__ SoftmaxKernelParams params) {
  constexpr int kSize = kPackSize<T, Access::kVector>, kPacks = kRowPacks;
  const HeldRow<kThreadsPerRow, kSize> held(params);
  const T* x = static_cast<const T*>(params.x.data) + held.index.offset(params.x);
  T* out = static_cast<T*>(params.out.data) + held.index.offset(params.out);
  griddepcontrol_wait();

  Pack<T, kSize> packs[kPacks];
  held.for_each_pack([&](int i, int column) { packs[i].load(x + column); });
  float values[kPacks][kSize];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    packs[i].to_floats(values[i]);
    if (held.has_pack(i)) maximum = maximum_of(values[i], maximum);
  }
  const SoftmaxReduce<T, kThreadsPerRow> reduce;
  const RowScale<T> scale = reduce(maximum, [&](float pivot) {
    RowSum<T> sum = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      take_exponentials<T>(values[i], pivot);
      if (held.has_pack(i)) sum += sum_of(values[i]);
    }
    return sum;
  });
  held.for_each_pack([&](int i, int column) { store_scaled(out + column, values[i], scale.factor); });
}

// Long rows: kClusterBlocks blocks hold a row in shared memory. Exponentials are computed twice, because
// there is time for that and no memory to store them (notes/row_kernels.md, "Long rows").
template <typename T, int kThreads>
constexpr int kMinLongRowBlocks = sizeof(T) == 2 ? 6 * kLongRowThreads / kThreads : 1;

template <typename T, int kThreads, int kClusterBlocks>
__global__ void __launch_bounds__(kThreads, (kMinLongRowBlocks<T, kThreads>))
    long_softmax_kernel(const __grid_constant__ SoftmaxKernelParams params) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  const SoftmaxReduce<T, kThreads, kClusterBlocks> reduce;
  reduce.cluster_arrive();
  const LongRow<kSize, 1, kClusterBlocks, kThreads> memory(params.hidden);
  const auto index = params.indexer(memory.position.row);
  const T* x = static_cast<const T*>(params.x.data) + index.offset(params.x);
  T* out = static_cast<T*>(params.out.data) + index.offset(params.out);
  griddepcontrol_wait();

  const auto for_each_pack = [&](const auto& body) {
    memory.for_each_pack([&](int column, const uint4* slot) {
      float values[kSize];
      load_floats(reinterpret_cast<const T*>(slot), values);
      body(column, values);
    });
  };
  memory.fetch([&](int64_t column, uint4* slot) { cp_async(slot, x + column); });
  cp_async_wait_all();

  float maximum = -INFINITY;
  for_each_pack([&](int, const float (&values)[kSize]) { maximum = maximum_of(values, maximum); });
  const RowScale<T> scale = reduce(maximum, [&](float pivot) {
    RowSum<T> sum = 0;
    for_each_pack([&](int, float (&values)[kSize]) {
      take_exponentials<T>(values, pivot);
      sum += sum_of(values);
    });
    return sum;
  });
  for_each_pack([&](int column, float (&values)[kSize]) {
    take_exponentials<T>(values, scale.pivot);
    store_scaled(out + column, values, scale.factor);
  });
}

// Rows of any length, and with kScalar of any alignment: read again in each step.
template <typename T, int kThreadsPerRow, Access kAccess>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    any_row_softmax_kernel(const __grid_constant__ SoftmaxKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const ThreadRow<kThreadsPerRow> row(params);
  const T* x = static_cast<const T*>(params.x.data) + row.index.offset(params.x);
  T* out = static_cast<T*>(params.out.data) + row.index.offset(params.out);
  griddepcontrol_wait();

  const auto for_each_pack = [&](const auto& body) {
    row.template for_each_column<kSize>(params.hidden, [&](int64_t column) {
      float values[kSize];
      load_floats(x + column, values);
      body(column, values);
    });
  };
  // online_sum is the sum of the exponentials so far, relative to the maximum so far.
  float maximum = -INFINITY, online_sum = 0;
  const auto sum_so_far_around = [&](float pivot) { return online_sum * exponential<T>(maximum - pivot); };
  for_each_pack([&](int64_t, float (&values)[kSize]) {
    const float new_maximum = maximum_of(values, maximum);
    if constexpr (!kHasExactStatistics<T>) {
      const float pivot = pivot_of(new_maximum);
      take_exponentials<T>(values, pivot);
      online_sum = sum_so_far_around(pivot) + sum_of(values);
    }
    maximum = new_maximum;
  });
  const SoftmaxReduce<T, kThreadsPerRow> reduce;
  const RowScale<T> scale = reduce(maximum, [&](float pivot) {
    RowSum<T> sum = 0;
    if constexpr (kHasExactStatistics<T>) {
      for_each_pack([&](int64_t, float (&values)[kSize]) {
        take_exponentials<T>(values, pivot);
        sum += sum_of(values);
      });
    } else {
      sum = sum_so_far_around(pivot);
    }
    return sum;
  });
  for_each_pack([&](int64_t column, float (&values)[kSize]) {
    take_exponentials<T>(values, scale.pivot);
    store_scaled(out + column, values, scale.factor);
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// Launch

void softmax(const SoftmaxParams& args, Stream stream) {
  constexpr const char* kOperation = "softmax";
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const bool has_vectors = args.hidden * sizeof(T) % kVectorBytes == 0 &&
                             has_vector_rows(args.x, args.shape.ndim, sizeof(T)) &&
                             has_vector_rows(args.out, args.shape.ndim, sizeof(T));
    const SoftmaxKernelParams params(args);
    const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
    const auto launch_short = [&](auto threads) {
      launch_kernel(kOperation, softmax_kernel<T, threads>, RowPosition<threads>::blocks(args.shape.rows),
                    kBlockThreads<threads>, params, stream);
    };
    const auto launch_long = [&](auto threads, auto blocks) {
      launch_kernel_with_shared_memory<long_softmax_kernel<T, threads, blocks>, blocks>(
          kOperation, RowPosition<threads, blocks>::blocks(args.shape.rows), threads, params, stream,
          long_row_shared_bytes(packs, 1, blocks, threads));
    };
    if (has_vectors) {
      // In 16 bits rows of 5121 to 8192 values are 1% faster in shared memory, with eight packs a thread,
      // than in registers with two (notes/row_kernels.md, "Long rows").
      constexpr bool kUsesSharedMemory = sizeof(T) == 2;
      if (dispatch_row_threads<kUsesSharedMemory ? 320 : 512>(NormRowThreads{}, packs, launch_short)) return;
      if constexpr (kUsesSharedMemory) {
        if (packs <= kLongRowPacks / 2) return launch_long(Constant<kLongRowThreads / 2>{}, Constant<1>{});
      }
      const auto launch_blocks = [&](auto blocks) { launch_long(Constant<kLongRowThreads>{}, blocks); };
      if (dispatch_long_row(packs, launch_blocks)) return;
    }
    const auto launch_any = [&](auto threads, auto access) {
      launch_kernel(kOperation, any_row_softmax_kernel<T, threads, access>,
                    RowPosition<threads>::blocks(args.shape.rows), kBlockThreads<threads>, params, stream);
    };
    if (has_vectors) return launch_any(Constant<kAnyRowThreads>{}, Constant<Access::kVector>{});
    if (args.hidden <= kWarpRow) return launch_any(Constant<kWarpThreads>{}, Constant<Access::kScalar>{});
    launch_any(Constant<kAnyRowThreads>{}, Constant<Access::kScalar>{});
  });
}

}  // namespace h100_diffusers_kernels
