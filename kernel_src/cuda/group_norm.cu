// Group norm, with a bias of the channels before it and SiLU after it, in two kernels: the first adds up
// values and squares of parts of the groups, the second adds the parts up and normalizes. What the first
// reads the second mostly finds in the L2 cache.
//
// A thread of the kernels for channels last has the same pack of channels in all of its pixels, so groups may
// begin and end within a pack. Those of the other layout, or of no alignment, go through one group each.
//
// Sums are of double: a mean may be far from zero, and there are hundreds of thousands of values. Of 16 bits
// a few differences from a thread's first value, and their squares, are added in float before: a conversion
// to double takes as long as eight additions.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "fast_divisor.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "sigmoid.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr int kThreads = 512;  // of a block, at most
constexpr int kUnroll = 4;     // So many packs are on their way to a thread at a time.
constexpr int kMultiprocessors = 132;

template <typename T>
constexpr int kVectorSize = kPackSize<T, Access::kVector>;

// The sums of some values, and of their squares.
struct alignas(16) Moments {
  double sum;
  double squares;

  __device__ __forceinline__ void add(double value) {
    sum += value;
    squares = fma(value, value, squares);
  }

  // term(0) to term(kSize - 1).
  template <int kSize, typename Term>
  __device__ __forceinline__ void add_few(const Term& term) {
    sum += tree_sum<kSize>(term);
    squares += tree_sum<kSize>([&](int i) { return term(i) * term(i); });
  }

  __device__ __forceinline__ void add(const Moments& other) {
    sum += other.sum;
    squares += other.squares;
  }

  // As though each of the `count` values had been larger by so much.
  __device__ __forceinline__ void shift(double by, double count) {
    squares += by * (2.0 * sum + by * count);
    sum += by * count;
  }

  __device__ __forceinline__ void add_up_warp() {
    sum = warp_reduce<Sum, kWarpThreads>(sum);
    squares = warp_reduce<Sum, kWarpThreads>(squares);
  }
};

struct GroupNormKernelParams : GroupNormParams {
  int32_t chunks;        // of pixels, or of the packs of a group
  int64_t chunk_size;    // The last one may be smaller.
  int64_t outer_stride;  // Of a group's rows: channels, or with channels last pixels. Elements of a row are
  int64_t inner_stride;  // in packs.
  int64_t outer_out_stride;
  int64_t inner_out_stride;
  int64_t group_packs;
  int64_t per_group;     // channels
  FastDivisor by_row;    // packs
  FastDivisor by_group;  // channels
  bool are_operands_aligned;

  __device__ __forceinline__ Moments* partial(int64_t group) const {
    return static_cast<Moments*>(workspace) + group * chunks;
  }
};

template <typename T>
__device__ __forceinline__ float value_of(const Modulator& operand, int64_t index, float otherwise) {
  if (operand.data == nullptr) return otherwise;
  if (operand.is_float32) return static_cast<const float*>(operand.data)[index];
  return to_float(static_cast<const T*>(operand.data)[index]);
}

// A group's mean and the reciprocal of its deviation. All lanes of a warp call it and get them.
struct GroupStatistics {
  double mean, rstd;

  __device__ __forceinline__ GroupStatistics(const GroupNormKernelParams& params, int64_t group) {
    const Moments* partial = params.partial(group);
    Moments moments{};
    for (int chunk = threadIdx.x % kWarpThreads; chunk < params.chunks; chunk += kWarpThreads)
      moments.add(partial[chunk]);
    moments.add_up_warp();
    const double count = static_cast<double>(params.per_group) * static_cast<double>(params.pixels);
    mean = moments.sum / count;
    // fmax would turn NaN into 0.
    const double variance = moments.squares / count - mean * mean;
    rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + params.eps);
  }
};

// The same of neighbouring indices, each type in as few instructions as there can be: loads between branches
// would wait for each other.
template <typename T, int kSize>
__device__ __forceinline__ void load_values(const Modulator& operand, int64_t index, bool is_aligned,
                                            float otherwise, float (&values)[kSize]) {
  if (operand.data != nullptr && is_aligned) {
    if (operand.is_float32)
      load_floats(static_cast<const float*>(operand.data) + index, values);
    else
      load_floats(static_cast<const T*>(operand.data) + index, values);
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = value_of<T>(operand, index + j, otherwise);
  }
}

// What a channel's values are normalized with: (x - pivot) * factor + offset, where offset is rounded once.
struct alignas(16) Channel {
  float pivot, factor, offset;

  // `added` is the channel's bias before the norm.
  __device__ __forceinline__ static Channel of(double group_mean, double rstd, float added, float weight,
                                               float bias) {
    const double mean = group_mean - added;
    const float factor = static_cast<float>(rstd * weight);
    // Far from zero x and the mean cancel each other, and do so exactly in a subtraction of their own. Near
    // it that would round once more. What is infinite is left to the sign of the difference.
    const bool is_infinite = isinf(factor);
    const float pivot = fabs(mean) * rstd > 1.0 || is_infinite ? static_cast<float>(mean) : 0.0f;
    const double offset = is_infinite ? bias : bias - (mean - pivot) * factor;
    return {pivot, factor, static_cast<float>(offset)};
  }

  __device__ __forceinline__ float normalized(float x) const { return fmaf(x - pivot, factor, offset); }
};

template <typename T>
__device__ __forceinline__ float activated(float x, bool silu) {
  return silu ? Sigmoid<sizeof(T) == 2>::times(x, x) : x;
}

// ---------------------------------------------------------------------------------------------------------
// Channels last

// The packs of channels that a block's threads have, and the pixels: so many at a time.
template <typename T>
struct PixelPlace {
  int packs, rows, column, row;
  int64_t sample, begin, end;

  __device__ __forceinline__ explicit PixelPlace(const GroupNormKernelParams& params) {
    packs = static_cast<int>(params.channels) / kVectorSize<T>;
    rows = blockDim.x / packs;
    column = threadIdx.x % packs;
    row = threadIdx.x / packs;
    sample = blockIdx.x / params.chunks;
    begin = blockIdx.x % params.chunks * params.chunk_size;
    end = min(begin + params.chunk_size, params.pixels);
  }
};

// The packs of a thread in kUnroll pixels from `first` on.
template <typename T>
__device__ __forceinline__ void load_pixels(const GroupNormKernelParams& params, const PixelPlace<T>& place,
                                            const T* in, int64_t first,
                                            Pack<T, kVectorSize<T>> (&packs)[kUnroll]) {
#pragma unroll
  for (int i = 0; i < kUnroll; ++i)
    if (first + i * place.rows < place.end)
      packs[i].load(in + (first + i * place.rows) * params.x_strides[2]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_moments_channels_last_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kVectorSize<T>;
  const PixelPlace<T> place(params);
  const T* in = static_cast<const T*>(params.x) + place.sample * params.x_strides[0] + place.column * kSize;
  Moments moments[kSize] = {};
  float pivots[kSize] = {};  // of 16 bits
  wait_for_earlier_kernels();
  if constexpr (!kHasExactStatistics<T>) {
    if (place.begin + place.row < place.end)
      load_floats(in + (place.begin + place.row) * params.x_strides[2], pivots);
  }
  for (int64_t first = place.begin + place.row; first < place.end; first += kUnroll * place.rows) {
    Pack<T, kSize> packs[kUnroll];
    load_pixels(params, place, in, first, packs);
    float values[kUnroll][kSize];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool is_there = first + i * place.rows < place.end;
      packs[i].to_floats(values[i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[i][j] = is_there ? values[i][j] - pivots[j] : 0.0f;
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
  let_later_kernels_begin();

  extern __shared__ __align__(16) char shared[];
  Moments* of_threads = reinterpret_cast<Moments*>(shared);  // [row][channel]
  const int64_t pixels = max(place.end - place.begin - place.row, int64_t{0});
  const double count = static_cast<double>((pixels + place.rows - 1) / place.rows);
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const int64_t channel = place.column * kSize + j;
    const int64_t at = place.sample * params.channel_bias.strides[0] + channel;
    moments[j].shift(static_cast<double>(pivots[j]) + value_of<T>(params.channel_bias, at, 0.0f), count);
    of_threads[place.row * params.channels + channel] = moments[j];
  }
  __syncthreads();
  const int warps = blockDim.x / kWarpThreads, warp = threadIdx.x / kWarpThreads;
  if (warp >= warps) return;
  const uint32_t per_group = params.by_group.divisor;
  for (int64_t group = warp; group < params.groups; group += warps) {
    Moments total{};
    for (uint32_t i = threadIdx.x % kWarpThreads; i < place.rows * per_group; i += kWarpThreads) {
      const uint32_t row = params.by_group.divide(i);
      total.add(of_threads[row * params.channels + group * per_group + (i - row * per_group)]);
    }
    total.add_up_warp();
    if (threadIdx.x % kWarpThreads == 0)
      params.partial(place.sample * params.groups + group)[blockIdx.x % params.chunks] = total;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_channels_last_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kVectorSize<T>;
  const PixelPlace<T> place(params);
  const T* in = static_cast<const T*>(params.x) + place.sample * params.x_strides[0] + place.column * kSize;
  T* out = static_cast<T*>(params.out) + place.sample * params.out_strides[0] + place.column * kSize;
  extern __shared__ __align__(16) char shared[];
  double* means = reinterpret_cast<double*>(shared);
  double* rstds = means + params.groups;
  wait_for_earlier_kernels();
  // All that is read here is on its way before anything waits for it.
  const int first_channel = place.column * kSize;
  int64_t first = place.begin + place.row;
  Pack<T, kSize> packs[kUnroll];
  load_pixels(params, place, in, first, packs);
  float weights[kSize], biases[kSize], added[kSize];
  const bool is_aligned = params.are_operands_aligned;
  load_values<T>(params.weight, first_channel, is_aligned, 1.0f, weights);
  load_values<T>(params.bias, first_channel, is_aligned, 0.0f, biases);
  load_values<T>(params.channel_bias, place.sample * params.channel_bias.strides[0] + first_channel,
                 is_aligned, 0.0f, added);
  const int warps = blockDim.x / kWarpThreads, warp = threadIdx.x / kWarpThreads;
  if (warp < warps) {
    for (int64_t group = warp; group < params.groups; group += warps) {
      const GroupStatistics statistics(params, place.sample * params.groups + group);
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
  for (; first < place.end; first += kUnroll * place.rows) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t pixel = first + i * place.rows;
      if (pixel >= place.end) break;
      float values[kSize];
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        values[j] = activated<T>(channels[j].normalized(values[j]), params.silu);
      packs[i].from_floats(values);
      packs[i].store_whole(out + pixel * params.out_strides[2]);
    }
    load_pixels(params, place, in, first + kUnroll * place.rows, packs);
  }
}

// ---------------------------------------------------------------------------------------------------------
// Group by group

// A group's packs are numbered row by row.
struct GroupPlace {
  int64_t sample, first_channel;
  uint32_t begin, end;

  __device__ __forceinline__ explicit GroupPlace(const GroupNormKernelParams& params) {
    sample = blockIdx.x / params.groups;
    first_channel = blockIdx.x % params.groups * params.per_group;
    const int64_t first = blockIdx.y * params.chunk_size;
    begin = static_cast<uint32_t>(first);
    end = static_cast<uint32_t>(min(first + params.chunk_size, params.group_packs));
  }
};

// A pack by its number.
struct PackPlace {
  uint32_t outer, inner;
  uint32_t channel;  // of the group

  __device__ __forceinline__ PackPlace(const GroupNormKernelParams& params, uint32_t number) {
    outer = params.by_row.divide(number);
    inner = number - outer * params.by_row.divisor;
    channel = params.is_channels_last ? inner : outer;
  }
};

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    group_moments_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const GroupPlace place(params);
  const T* in = static_cast<const T*>(params.x) + place.sample * params.x_strides[0] +
                place.first_channel * params.x_strides[1];
  Moments moments{};
  float pivot = 0.0f;  // of packs
  uint32_t packs_seen = 0;
  wait_for_earlier_kernels();
  for (uint32_t first = place.begin + threadIdx.x; first < place.end; first += kUnroll * kThreads) {
    Pack<T, kSize> packs[kUnroll];
    float added[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= place.end) break;
      const PackPlace pack(params, number);
      packs[i].load(in + pack.outer * params.outer_stride + pack.inner * params.inner_stride);
      const int64_t at = place.sample * params.channel_bias.strides[0] + place.first_channel + pack.channel;
      added[i] = value_of<T>(params.channel_bias, at, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads >= place.end) break;
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
  let_later_kernels_begin();
  moments.shift(pivot, static_cast<double>(packs_seen) * kSize);

  __shared__ Moments of_warps[kThreads / kWarpThreads];
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  moments.add_up_warp();
  if (lane == 0) of_warps[warp] = moments;
  __syncthreads();
  if (warp > 0) return;
  Moments total{};
  if (lane < kThreads / kWarpThreads) total = of_warps[lane];
  total.add_up_warp();
  if (lane == 0) params.partial(blockIdx.x)[blockIdx.y] = total;
}

// The channels of a group, where there are packs of a channel.
constexpr int kSharedChannels = 2048;
template <typename T, Access kAccess>
__global__ void __launch_bounds__(kThreads)
    group_norm_kernel(const __grid_constant__ GroupNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  const GroupPlace place(params);
  const T* in = static_cast<const T*>(params.x) + place.sample * params.x_strides[0] +
                place.first_channel * params.x_strides[1];
  T* out = static_cast<T*>(params.out) + place.sample * params.out_strides[0] +
           place.first_channel * params.out_strides[1];
  wait_for_earlier_kernels();
  uint32_t first = place.begin + threadIdx.x;
  Pack<T, kSize> packs[kUnroll];
  const auto load_packs = [&](uint32_t first) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= place.end) break;
      const PackPlace pack(params, number);
      packs[i].load(in + pack.outer * params.outer_stride + pack.inner * params.inner_stride);
    }
  };
  load_packs(first);
  const GroupStatistics statistics(params, blockIdx.x);
  const auto channel_of = [&](int64_t channel) {
    channel += place.first_channel;
    const float added =
        value_of<T>(params.channel_bias, place.sample * params.channel_bias.strides[0] + channel, 0.0f);
    return Channel::of(statistics.mean, statistics.rstd, added, value_of<T>(params.weight, channel, 1.0f),
                       value_of<T>(params.bias, channel, 0.0f));
  };
  __shared__ Channel channels[kAccess == Access::kVector ? kSharedChannels : 1];
  if constexpr (kAccess == Access::kVector) {
    for (int64_t i = threadIdx.x; i < params.per_group; i += kThreads) channels[i] = channel_of(i);
    __syncthreads();
  }
  for (; first < place.end; first += kUnroll * kThreads) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t number = first + i * kThreads;
      if (number >= place.end) break;
      const PackPlace pack(params, number);
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

enum class Way { kChannelsLast, kVectors, kElements };

// Tells whether packs begin at aligned addresses in every sample and row.
bool is_aligned(const void* data, const int64_t (&strides)[3], int row_dim, int64_t element_bytes) {
  return is_16_byte_aligned(data) && strides[0] * element_bytes % kVectorBytes == 0 &&
         strides[row_dim] * element_bytes % kVectorBytes == 0;
}

Way way_of(const GroupNormParams& args) {
  const int64_t element_bytes = bytes_of(args.dtype), size = kVectorBytes / element_bytes;
  const int row_dim = args.is_channels_last ? 2 : 1;
  const int64_t row = args.is_channels_last ? args.channels : args.pixels;
  if (row % size != 0 || !is_aligned(args.x, args.x_strides, row_dim, element_bytes)) return Way::kElements;
  if (!args.is_channels_last)
    return args.channels / args.groups <= kSharedChannels ? Way::kVectors : Way::kElements;
  return args.channels / size <= kThreads ? Way::kChannelsLast : Way::kElements;
}

// The chunks that a sample, or a group, is cut into, so that all multiprocessors have a part: of packs, or of
// pixels. It is the same for the workspace and for the launch.
GroupNormKernelParams kernel_params(const GroupNormParams& args, Way way) {
  GroupNormKernelParams params{};
  static_cast<GroupNormParams&>(params) = args;
  const int64_t size = way == Way::kElements ? 1 : kVectorBytes / bytes_of(args.dtype);
  params.per_group = args.channels / args.groups;
  int64_t items, parts, least;  // to be cut, into at most so many, of at least so many
  if (way == Way::kChannelsLast) {
    const int64_t rows = kThreads / (args.channels / size);
    items = args.pixels;
    parts = ceil_divide(kMultiprocessors, args.batch);
    least = kUnroll * rows;
  } else {
    params.group_packs = params.per_group * args.pixels / size;
    items = params.group_packs;
    parts = ceil_divide(4 * kMultiprocessors, args.batch * args.groups);
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
  params.are_operands_aligned = true;
  for (const Modulator* operand : {&args.weight, &args.bias, &args.channel_bias}) {
    const int64_t element_bytes = operand->is_float32 ? 4 : bytes_of(args.dtype);
    params.are_operands_aligned = params.are_operands_aligned && is_16_byte_aligned(operand->data) &&
                                  operand->strides[0] * element_bytes % kVectorBytes == 0;
  }
  return params;
}

}  // namespace

int64_t group_norm_workspace_bytes(const GroupNormParams& params) {
  const int64_t chunks = kernel_params(params, way_of(params)).chunks;
  return params.batch * params.groups * chunks * static_cast<int64_t>(sizeof(Moments));
}

void group_norm(const GroupNormParams& args, Stream stream) {
  constexpr const char* kOperation = "group_norm";
  const Way way = way_of(args);
  const GroupNormKernelParams params = kernel_params(args, way);
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if (way == Way::kChannelsLast) {
      const int64_t packs = args.channels / kVectorSize<T>;
      const int threads = static_cast<int>(kThreads / packs * packs);
      const dim3 grid(static_cast<uint32_t>(args.batch * params.chunks));
      launch_kernel(kOperation, group_moments_channels_last_kernel<T>, grid, threads, params, stream,
                    threads * kVectorSize<T> * static_cast<int64_t>(sizeof(Moments)));
      launch_kernel(kOperation, group_norm_channels_last_kernel<T>, grid, threads, params, stream,
                    2 * args.groups * static_cast<int64_t>(sizeof(double)));
      return;
    }
    const auto launch = [&](auto access) {
      const dim3 grid(static_cast<uint32_t>(args.batch * args.groups), params.chunks);
      launch_kernel(kOperation, group_moments_kernel<T, access>, grid, kThreads, params, stream);
      launch_kernel(kOperation, group_norm_kernel<T, access>, grid, kThreads, params, stream);
    };
    if (way == Way::kVectors) return launch(Constant<Access::kVector>{});
    launch(Constant<Access::kScalar>{});
  });
}

}  // namespace h100_diffusers_kernels
