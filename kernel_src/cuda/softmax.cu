// softmax over the last dimension. A row that fits into the registers of a block or a cluster is read once;
// a longer one is read in two sweeps, of which the first takes maximum and sum together (Milakov and
// Gimelshein, 2018), or in three for float32.
//
// In 16 bits the warps that share a row take their own maximum and the sum around it, and these are combined:
// they wait for each other once. For float32 results the few roundings of that combination would be the
// largest error; there the maximum of the whole row comes first.
#include "fast_math.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "row_config.cuh"
#include "row_index.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

// exp(difference), for difference <= 0.
template <typename T>
__device__ __forceinline__ float exponential(float difference) {
  if constexpr (kHasExactStatistics<T>) return expf(difference);
  return fast_exp2(difference * 1.44269504f);
}

// What exponents are taken relative to: the maximum, or, where all is -infinity so far, 0, so that such
// values count as 0.
__device__ __forceinline__ float pivot_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

// Maximum of a set of values, and the sum of their exponentials relative to it.
template <typename T>
struct MaximumAndSum {
  float maximum = -INFINITY;
  RowSum<T> sum = 0;

  // The sum, relative to another maximum that is not below this one.
  __device__ __forceinline__ RowSum<T> sum_around(float other) const {
    return sum * exponential<T>(maximum - pivot_of(other));
  }
};

// Over the group that shares a row; `sum_around(maximum)` adds up the thread's exponentials.
template <typename T, int kGroupThreads, int kClusterBlocks, class ThreadSum>
__device__ __forceinline__ MaximumAndSum<T> group_maximum_and_sum(float thread_maximum,
                                                                  const ThreadSum& sum_around) {
  MaximumAndSum<T> result;
  if constexpr (kHasExactStatistics<T> || kGroupThreads <= kWarpThreads) {
    float maximum[1] = {thread_maximum};
    GroupReduce<Max, float, kGroupThreads, 1, 1, kClusterBlocks>{}(maximum);
    RowSum<T> sum[1] = {sum_around(maximum[0])};
    GroupReduce<Sum, RowSum<T>, kGroupThreads, 1, 1, kClusterBlocks>{}(sum);
    result.maximum = maximum[0];
    result.sum = sum[0];
  } else {
    const float warp_maximum = warp_reduce<Max, kWarpThreads>(thread_maximum);
    const float warp_sum = warp_reduce<Sum, kWarpThreads>(sum_around(warp_maximum));
    using Warps = Exchange<float, kGroupThreads, 2, 1, kClusterBlocks>;
    const auto* parts = Warps{}({warp_maximum, warp_sum}, 0);
    result.maximum = Warps::template reduce<Max>([&](int part) { return parts[0][part]; });
    result.sum = Warps::template reduce<Sum>([&](int part) {
      return MaximumAndSum<T>{parts[0][part], parts[1][part]}.sum_around(result.maximum);
    });
  }
  return result;
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

// kThreadsPerRow threads, of each block of a cluster, hold a row of up to kPacks packs a thread.
template <typename T, int kThreadsPerRow, int kPacks, int kClusterBlocks>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    softmax_kernel(const __grid_constant__ SoftmaxKernelParams params) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  cluster_arrive<kClusterBlocks>();
  const RowPlace<kThreadsPerRow, kClusterBlocks> place;
  const int hidden = static_cast<int>(params.hidden);
  const bool is_row = place.kRowsPerBlock == 1 || place.row < params.rows;
  const auto index = params.indexer(is_row ? place.row : 0);
  const T* x = static_cast<const T*>(params.x.data) + index.offset(params.x);
  T* out = static_cast<T*>(params.out.data) + index.offset(params.out);
  wait_for_earlier_kernels();

  Pack<T, kSize> packs[kPacks];
  bool is_column[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    is_column[i] = is_row && place.pack(i) * kSize < hidden;
    if (is_column[i]) packs[i].load(x + place.pack(i) * kSize);
  }
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (is_column[i]) {
      float values[kSize];
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) maximum = fmaxf(maximum, values[j]);
    }
  }
  const auto exponentials = [&](int i, float pivot, float (&values)[kSize]) {
    packs[i].to_floats(values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = exponential<T>(values[j] - pivot);
  };
  cluster_wait<kClusterBlocks>();
  const auto row = group_maximum_and_sum<T, kThreadsPerRow, kClusterBlocks>(maximum, [&](float around) {
    RowSum<T> sum = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float values[kSize];
      exponentials(i, pivot_of(around), values);
      if (is_column[i]) sum += tree_sum<kSize>([&](int j) { return values[j]; });
    }
    return sum;
  });
  const Statistic<T> scale = Statistic<T>::from(divide<T>(1, row.sum));
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (is_column[i]) {
      float values[kSize];
      exponentials(i, pivot_of(row.maximum), values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = scale.times(values[j]);
      store_floats(out + place.pack(i) * kSize, values);
    }
  }
}

// Any row length and, with kScalar, any alignment.
template <typename T, int kThreadsPerRow, Access kAccess>
__global__ void __launch_bounds__(kBlockThreads<kThreadsPerRow>)
    any_row_softmax_kernel(const __grid_constant__ SoftmaxKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const RowPlace<kThreadsPerRow, 1> place;
  const bool is_row = place.kRowsPerBlock == 1 || place.row < params.rows;
  const auto index = params.indexer(is_row ? place.row : 0);
  const T* x = static_cast<const T*>(params.x.data) + index.offset(params.x);
  T* out = static_cast<T*>(params.out.data) + index.offset(params.out);
  wait_for_earlier_kernels();

  const auto for_each_pack = [&](const auto& body) {
    if (!is_row) return;
    for (int64_t column = int64_t{kSize} * place.thread; column < params.hidden;
         column += kSize * kThreadsPerRow) {
      float values[kSize];
      load_floats(x + column, values);
      body(column, values);
    }
  };
  const auto sum_around = [](const float (&values)[kSize], float pivot) {
    return tree_sum<kSize>([&](int j) { return exponential<T>(values[j] - pivot); });
  };
  MaximumAndSum<T> own;
  for_each_pack([&](int64_t, float (&values)[kSize]) {
    float maximum = own.maximum;
#pragma unroll
    for (int j = 0; j < kSize; ++j) maximum = fmaxf(maximum, values[j]);
    if constexpr (!kHasExactStatistics<T>)
      own.sum = own.sum_around(maximum) + sum_around(values, pivot_of(maximum));
    own.maximum = maximum;
  });
  const auto row = group_maximum_and_sum<T, kThreadsPerRow, 1>(own.maximum, [&](float around) {
    if constexpr (!kHasExactStatistics<T>) return own.sum_around(around);
    RowSum<T> sum = 0;
    for_each_pack([&](int64_t, float (&values)[kSize]) { sum += sum_around(values, pivot_of(around)); });
    return sum;
  });
  const Statistic<T> scale = Statistic<T>::from(divide<T>(1, row.sum));
  for_each_pack([&](int64_t column, float (&values)[kSize]) {
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      values[j] = scale.times(exponential<T>(values[j] - pivot_of(row.maximum)));
    store_floats(out + column, values);
  });
}

}  // namespace

void softmax(const SoftmaxParams& args, Stream stream) {
  constexpr const char* kOperation = "softmax";
  dispatch_dtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool has_vectors = args.hidden * sizeof(T) % kVectorBytes == 0 &&
                             has_vector_rows(args.x, args.shape.ndim, sizeof(T)) &&
                             has_vector_rows(args.out, args.shape.ndim, sizeof(T));
    const SoftmaxKernelParams params(args);
    const int64_t packs = args.hidden / kPackSize<T, Access::kVector>;
    const auto launch_rows = [&](auto config) {
      constexpr int kThreadsPerRow = config.kThreadsPerRow;
      constexpr int kClusterBlocks = config.kClusterBlocks;
      launch_kernel<kClusterBlocks>(kOperation,
                                    softmax_kernel<T, kThreadsPerRow, config.kPacksPerThread, kClusterBlocks>,
                                    RowPlace<kThreadsPerRow, kClusterBlocks>::blocks(args.shape.rows),
                                    kBlockThreads<kThreadsPerRow>, params, stream);
    };
    if (has_vectors && dispatch_row_config(packs, launch_rows)) return;
    const auto launch_any = [&]<int kThreadsPerRow, Access kAccess>() {
      launch_kernel(kOperation, any_row_softmax_kernel<T, kThreadsPerRow, kAccess>,
                    RowPlace<kThreadsPerRow, 1>::blocks(args.shape.rows), kBlockThreads<kThreadsPerRow>,
                    params, stream);
    };
    if (has_vectors) return launch_any.template operator()<kLongRowThreads, Access::kVector>();
    if (args.hidden <= kShortRow) return launch_any.template operator()<kWarpThreads, Access::kScalar>();
    launch_any.template operator()<kLongRowThreads, Access::kScalar>();
  });
}

}  // namespace h100_diffusers_kernels
