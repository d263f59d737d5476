// Group norm with an optional channel bias before it and an optional SiLU after it, in two kernels: the first
// computes sums of parts of the groups, the second combines them and normalizes. The second mostly reads x
// from the L2 cache.
//
// With channels last, a thread has the same pack of channels in all its pixels, so a group may start or end
// within a pack. With the other layout, or without alignment, a block works on one group.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fast_math.cuh"
#include "group_statistics.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "group_norm";
constexpr int kThreads = 512;  // maximum of a block
static_assert(kMultiprocessorThreads % kThreads == 0);
constexpr int kUnroll = 4;  // packs that a thread loads at a time: 32 KiB in flight for a block

template <typename T>
constexpr int kVectorSize = kPackSize<T, Access::kVector>;

template <typename T>
__device__ __forceinline__ float activated(float x, bool silu) {
  return silu ? Sigmoid<sizeof(T) == 2>::times(x, x) : x;
}

// ---------------------------------------------------------------------------------------------------------
// Channels last

// A thread's pack of channels, and the pixels of its block: `rows` at a time.
template <typename T>
struct PixelPosition {
  int packs, rows, column, row;
  int64_t sample, begin, end;

  __device__ __forceinline__ explicit PixelPosition(const GroupNormKernelParams& params) {
    packs = static_cast<int>(params.channels) / kVectorSize<T>;
    rows = blockDim.x / packs;
    column = threadIdx.x % packs;
    row = threadIdx.x / packs;
    sample = blockIdx.x / params.chunks;
    begin = blockIdx.x % params.chunks * params.chunk_size;
    end = min(begin + params.chunk_size, params.pixels);
  }
};

// Loads the thread's pack of kUnroll pixels, starting at `first`.
template <typename T>
__device__ __forceinline__ void load_pixels(const GroupNormKernelParams& params,
                                            const PixelPosition<T>& position, const T* in, int64_t first,
                                            Pack<T, kVectorSize<T>> (&packs)[kUnroll]) {
#pragma unroll
  for (int i = 0; i < kUnroll; ++i)
    if (first + i * position.rows < position.end)
      packs[i].load(in + (first + i * position.rows) * params.x_strides[2]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_moments_channels_last_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kVectorSize<T>;
  const PixelPosition<T> position(params);
  const T* in =
      static_cast<const T*>(params.x) + position.sample * params.x_strides[0] + position.column * kSize;
  Moments moments[kSize] = {};
  float pivots[kSize] = {};  // for 16-bit values
  griddepcontrol_wait();
  if constexpr (!kHasExactStatistics<T>) {
    if (position.begin + position.row < position.end)
      load_floats(in + (position.begin + position.row) * params.x_strides[2], pivots);
  }
  for (int64_t first = position.begin + position.row; first < position.end;
       first += kUnroll * position.rows) {
    Pack<T, kSize> packs[kUnroll];
    load_pixels(params, position, in, first, packs);
    float values[kUnroll][kSize];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool is_valid = first + i * position.rows < position.end;
      packs[i].to_floats(values[i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[i][j] = is_valid ? values[i][j] - pivots[j] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if constexpr (kHasExactStatistics<T>) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) moments[j].add(values[i][j]);
      } else {
        moments[j].template add_few<kUnroll>([&](int i) { return values[i][j]; });
      }
    }
  }
  griddepcontrol_launch_dependents();

  extern __shared__ __align__(16) char shared[];
  Moments* of_threads = reinterpret_cast<Moments*>(shared);  // [row][channel]
  const int64_t pixels = max(position.end - position.begin - position.row, int64_t{0});
  const double count = static_cast<double>((pixels + position.rows - 1) / position.rows);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const int64_t channel = position.column * kSize + j;
    const int64_t at = position.sample * params.channel_bias.strides[0] + channel;
    moments[j].shift(static_cast<double>(pivots[j]) + value_of<T>(params.channel_bias, at, 0.0f), count);
    of_threads[position.row * params.channels + channel] = moments[j];
  }
  __syncthreads();
  const int warps = blockDim.x / kWarpThreads, warp = threadIdx.x / kWarpThreads;
  if (warp >= warps) return;
  const uint32_t per_group = params.by_group.divisor;
  for (int64_t group = warp; group < params.groups; group += warps) {
    Moments total{};
    for (uint32_t i = threadIdx.x % kWarpThreads; i < position.rows * per_group; i += kWarpThreads) {
      const uint32_t row = params.by_group.divide(i);
      total.add(of_threads[row * params.channels + group * per_group + (i - row * per_group)]);
    }
    total.reduce_warp();
    if (threadIdx.x % kWarpThreads == 0)
      params.partial(position.sample * params.groups + group)[blockIdx.x % params.chunks] = total;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_channels_last_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kVectorSize<T>;
  const PixelPosition<T> position(params);
  const T* in =
      static_cast<const T*>(params.x) + position.sample * params.x_strides[0] + position.column * kSize;
  T* out = static_cast<T*>(params.out) + position.sample * params.out_strides[0] + position.column * kSize;
  extern __shared__ __align__(16) char shared[];
  double* means = reinterpret_cast<double*>(shared);
  double* rstds = means + params.groups;
  griddepcontrol_wait();
  // All loads are issued before the first use of a loaded value.
  const int first_channel = position.column * kSize;
  int64_t first = position.begin + position.row;
  Pack<T, kSize> packs[kUnroll];
  load_pixels(params, position, in, first, packs);
  float weights[kSize], biases[kSize], added[kSize];
  const bool is_aligned = params.operands_are_aligned;
  load_values<T>(params.weight, first_channel, is_aligned, 1.0f, weights);
  load_values<T>(params.bias, first_channel, is_aligned, 0.0f, biases);
  load_values<T>(params.channel_bias, position.sample * params.channel_bias.strides[0] + first_channel,
                 is_aligned, 0.0f, added);
  const int warps = blockDim.x / kWarpThreads, warp = threadIdx.x / kWarpThreads;
  if (warp < warps) {
    for (int64_t group = warp; group < params.groups; group += warps) {
      const GroupStatistics statistics(params, position.sample * params.groups + group);
      if (threadIdx.x % kWarpThreads == 0) {
        means[group] = statistics.mean;
        rstds[group] = statistics.rstd;
      }
    }
  }
  __syncthreads();
  Channel channels[kSize];
  uint32_t group = params.by_group.divide(first_channel);
  uint32_t in_group = first_channel - group * params.by_group.divisor;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    channels[j] = Channel::of(means[group], rstds[group], added[j], weights[j], biases[j]);
    if (++in_group == params.by_group.divisor) {
      in_group = 0;
      ++group;
    }
  }
  for (; first < position.end; first += kUnroll * position.rows) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t pixel = first + i * position.rows;
      if (pixel >= position.end) break;
      float values[kSize];
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        values[j] = activated<T>(channels[j].normalized(values[j]), params.silu);
      packs[i].from_floats(values);
      packs[i].store_whole(out + pixel * params.out_strides[2]);
    }
    load_pixels(params, position, in, first + kUnroll * position.rows, packs);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Group by group

// A block's group and its chunk of the group's packs, which are numbered row by row.
struct GroupPosition {
  int64_t sample, first_channel;
  uint32_t begin, end;

  __device__ __forceinline__ explicit GroupPosition(const GroupNormKernelParams& params) {
    sample = blockIdx.x / params.groups;
    first_channel = blockIdx.x % params.groups * params.per_group;
    const int64_t first = blockIdx.y * params.chunk_size;
    begin = static_cast<uint32_t>(first);
    end = static_cast<uint32_t>(min(first + params.chunk_size, params.group_packs));
  }
};

// Row and column of a pack in its group.
struct PackPosition {
  uint32_t outer, inner;
  uint32_t channel;  // of the group

  __device__ __forceinline__ PackPosition(const GroupNormKernelParams& params, uint32_t number) {
    outer = params.by_row.divide(number);
    inner = number - outer * params.by_row.divisor;
    channel = params.is_channels_last ? inner : outer;
  }
};

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    group_moments_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const GroupPosition position(params);
  const T* in = static_cast<const T*>(params.x) + position.sample * params.x_strides[0] +
                position.first_channel * params.x_strides[1];
  Moments moments{};
  float pivot = 0.0f;  // of packs
  uint32_t packs_seen = 0;
  griddepcontrol_wait();
  for (uint32_t first = position.begin + threadIdx.x; first < position.end; first += kUnroll * kThreads) {
    Pack<T, kSize> packs[kUnroll];
    float added[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= position.end) break;
      const PackPosition pack(params, number);
      packs[i].load(in + pack.outer * params.outer_stride + pack.inner * params.inner_stride);
      const int64_t at =
          position.sample * params.channel_bias.strides[0] + position.first_channel + pack.channel;
      added[i] = value_of<T>(params.channel_bias, at, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads >= position.end) break;
      float values[kSize];
      packs[i].to_floats(values);
      if constexpr (kHasExactStatistics<T> || kSize == 1) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) moments.add(static_cast<double>(values[j]) + added[i]);
      } else {
        if (packs_seen++ == 0) pivot = values[0] + added[i];
        moments.template add_few<kSize>([&](int j) { return (values[j] + added[i]) - pivot; });
      }
    }
  }
  griddepcontrol_launch_dependents();
  moments.shift(pivot, static_cast<double>(packs_seen) * kSize);

  __shared__ Moments of_warps[kThreads / kWarpThreads];
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  moments.reduce_warp();
  if (lane == 0) of_warps[warp] = moments;
  __syncthreads();
  if (warp > 0) return;
  Moments total{};
  if (lane < kThreads / kWarpThreads) total = of_warps[lane];
  total.reduce_warp();
  if (lane == 0) params.partial(blockIdx.x)[blockIdx.y] = total;
}

// Channels of a group that fit in shared memory.
constexpr int kSharedChannels = 2048;
static_assert(kSharedChannels * sizeof(Channel) <= kMaxStaticSharedBytes);

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    group_norm_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const GroupPosition position(params);
  const T* in = static_cast<const T*>(params.x) + position.sample * params.x_strides[0] +
                position.first_channel * params.x_strides[1];
  T* out = static_cast<T*>(params.out) + position.sample * params.out_strides[0] +
           position.first_channel * params.out_strides[1];
  griddepcontrol_wait();
  uint32_t first = position.begin + threadIdx.x;
  Pack<T, kSize> packs[kUnroll];
  const auto load_packs = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= position.end) break;
      const PackPosition pack(params, number);
      packs[i].load(in + pack.outer * params.outer_stride + pack.inner * params.inner_stride);
    }
  };
  load_packs(first);
  const GroupStatistics statistics(params, blockIdx.x);
  const auto channel_of = [&](int64_t channel) {
    channel += position.first_channel;
    const float added =
        value_of<T>(params.channel_bias, position.sample * params.channel_bias.strides[0] + channel, 0.0f);
    return Channel::of(statistics.mean, statistics.rstd, added, value_of<T>(params.weight, channel, 1.0f),
                       value_of<T>(params.bias, channel, 0.0f));
  };
  __shared__ Channel channels[kAccess == Access::kVector ? kSharedChannels : 1];
  if constexpr (kAccess == Access::kVector) {
    for (int64_t i = threadIdx.x; i < params.per_group; i += kThreads) channels[i] = channel_of(i);
    __syncthreads();
  }
  for (; first < position.end; first += kUnroll * kThreads) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= position.end) break;
      const PackPosition pack(params, number);
      const Channel channel = kAccess == Access::kVector ? channels[pack.channel] : channel_of(pack.channel);
      float values[kSize];
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = activated<T>(channel.normalized(values[j]), params.silu);
      packs[i].from_floats(values);
      packs[i].store_whole(out + pack.outer * params.outer_out_stride + pack.inner * params.inner_out_stride);
    }
    load_packs(first + kUnroll * kThreads);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launch

enum class KernelPath { kChannelsLast, kVectors, kElements };

// Returns whether the rows of all samples are aligned to 16 bytes.
bool is_aligned(const void* data, const int64_t (&strides)[3], int row_dim, int64_t element_bytes) {
  return is_16_byte_aligned(data) && strides[0] * element_bytes % kVectorBytes == 0 &&
         strides[row_dim] * element_bytes % kVectorBytes == 0;
}

KernelPath path_of(const GroupNormParams& args) {
  const int64_t element_bytes = bytes_of(args.dtype), size = kVectorBytes / element_bytes;
  const int row_dim = args.is_channels_last ? 2 : 1;
  const int64_t row = args.is_channels_last ? args.channels : args.pixels;
  if (row % size != 0 || !is_aligned(args.x, args.x_strides, row_dim, element_bytes))
    return KernelPath::kElements;
  if (!args.is_channels_last)
    return args.channels / args.groups <= kSharedChannels ? KernelPath::kVectors : KernelPath::kElements;
  return args.channels / size <= kThreads ? KernelPath::kChannelsLast : KernelPath::kElements;
}

// Splits samples into chunks of pixels, or groups into chunks of packs, so that every multiprocessor has
// work.
GroupNormKernelParams kernel_params(const GroupNormParams& args, KernelPath path, Stream stream) {
  const int multiprocessors = multiprocessor_count(kOperation, stream.device);
  GroupNormKernelParams params{};
  static_cast<GroupNormParams&>(params) = args;
  const int64_t size = path == KernelPath::kElements ? 1 : kVectorBytes / bytes_of(args.dtype);
  params.per_group = args.channels / args.groups;
  int64_t items, parts, least;  // to split, maximum number of chunks, minimum items of a chunk
  if (path == KernelPath::kChannelsLast) {
    const int64_t rows = kThreads / (args.channels / size);
    items = args.pixels;
    parts = ceil_divide(multiprocessors, args.batch);
    least = kUnroll * rows;
  } else {
    params.group_packs = params.per_group * args.pixels / size;
    items = params.group_packs;
    parts = ceil_divide(4 * multiprocessors, args.batch * args.groups);
    least = kUnroll * kThreads;
  }
  params.chunk_size = std::max(ceil_divide(items, parts), std::min(items, least));
  params.chunks = static_cast<int32_t>(ceil_divide(items, params.chunk_size));
  const int outer = args.is_channels_last ? 2 : 1, inner = 3 - outer;
  params.outer_stride = args.x_strides[outer];
  params.inner_stride = args.x_strides[inner] * size;
  params.outer_out_stride = args.out_strides[outer];
  params.inner_out_stride = args.out_strides[inner] * size;
  params.by_row.set(static_cast<uint32_t>(args.is_channels_last ? params.per_group : args.pixels / size));
  params.by_group.set(static_cast<uint32_t>(params.per_group));
  params.operands_are_aligned = true;
  for (const Modulator* operand : {&args.weight, &args.bias, &args.channel_bias}) {
    const int64_t element_bytes = operand->is_float32 ? 4 : bytes_of(args.dtype);
    params.operands_are_aligned = params.operands_are_aligned && is_16_byte_aligned(operand->data) &&
                                  operand->strides[0] * element_bytes % kVectorBytes == 0;
  }
  return params;
}

}  // namespace

int64_t group_norm_workspace_bytes(const GroupNormParams& params, Stream stream) {
  const int64_t chunks = kernel_params(params, path_of(params), stream).chunks;
  return params.batch * params.groups * chunks * static_cast<int64_t>(sizeof(Moments));
}

void group_norm(const GroupNormParams& args, Stream stream) {
  const KernelPath path = path_of(args);
  const GroupNormKernelParams params = kernel_params(args, path, stream);
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if (path == KernelPath::kChannelsLast) {
      const int64_t packs = args.channels / kVectorSize<T>;
      const int threads = static_cast<int>(kThreads / packs * packs);
      const dim3 grid(static_cast<uint32_t>(args.batch * params.chunks));
      launch_kernel_with_shared_memory<group_moments_channels_last_kernel<T>>(
          kOperation, grid, threads, params, stream,
          threads * kVectorSize<T> * static_cast<int64_t>(sizeof(Moments)));
      launch_kernel_with_shared_memory<group_norm_channels_last_kernel<T>>(
          kOperation, grid, threads, params, stream, 2 * args.groups * static_cast<int64_t>(sizeof(double)));
      return;
    }
    const auto launch = [&](auto access) {
      const dim3 grid(static_cast<uint32_t>(args.batch * args.groups), params.chunks);
      launch_kernel(kOperation, group_moments_kernel<T, access>, grid, kThreads, params, stream);
      launch_kernel(kOperation, group_norm_kernel<T, access>, grid, kThreads, params, stream);
    };
    if (path == KernelPath::kVectors) return launch(Constant<Access::kVector>{});
    launch(Constant<Access::kScalar>{});
  });
}

}  // namespace h100_diffusers_kernels
