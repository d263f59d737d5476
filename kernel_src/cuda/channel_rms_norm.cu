// RMS norm over the channels of each position of an image or video, with an optional modulation and an
// optional SiLU after it. x is read and written once.
//
// If pixels have stride 1, a block has a tile of 128 bytes of adjacent pixels by all channels. A warp loads
// the tile's rows of four channels at a time, as four whole lines. A thread keeps 8 packs of 16 bytes in
// registers, so 16 warps hold 512 channels; with 384 channels a tile is 48 KiB in 384 threads. Shared memory
// would hold the same tile, and each pack would pass through it. Reading x again from the L2 cache would move
// three bytes through L2 for every two. Tensors with more channels, of which decoders have only small ones,
// do that: a block takes their channels in chunks, keeps the last one and reads the others again.
//
// With channels last, a few lanes of a warp share a position. They keep up to 1024 channels in registers, 512
// in float32, and take more of them in chunks, too.
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "channel_operands.cuh"
#include "fast_divisor.cuh"
#include "fast_math.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "statistics.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr const char* kOperation = "channel_rms_norm";

// Usually n * weight * (1 + scale) + (bias + shift) is the result, with one factor and one offset. With both
// a bias and a scale, where an infinite scale would make infinities cancel, scale and shift are the later
// ones.
struct ChannelRmsNormKernelParams : ChannelRmsNormParams {
  Modulator later_scale;
  Modulator later_shift;
  uint32_t packs;         // of a sample's pixels; with channels last, of a position's channels
  uint32_t chunks;        // of channels
  uint32_t positions;     // of all samples
  uint32_t lanes;         // of a position, with channels last: a power of 2
  FastDivisor by_sample;  // divides by the tiles of a sample or, with channels last, by its positions
  FastDivisor by_frame;   // divides by the packs of a frame or, with channels last, by its positions
  bool operands_are_aligned;
};

// One branch for all values, and an assembler instruction for the store: the compiler would split both.
template <typename T, int kSize>
__device__ __forceinline__ void store_activated(T* address, float (&values)[kSize], bool silu) {
  if (silu) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = Sigmoid<sizeof(T) == 2>::times(values[j], values[j]);
  }
  Pack<T, kSize> pack;
  pack.from_floats(values);
  pack.store_whole(address);
}

// ---------------------------------------------------------------------------------------------------------
// Pixels of stride 1

constexpr int kThreadPacks = 8;  // that a thread keeps, each of another channel
constexpr int kMaxWarps = 16;    // of a block, which then keeps 512 channels of 128 bytes

template <typename T, Access kAccess>
struct Tile {
  static constexpr int kSize = kPackSize<T, kAccess>;
  // Packs of a channel: 128 bytes, a line of the cache, if they are vectors.
  static constexpr int kColumns = kAccess == Access::kVector ? 8 : kWarpThreads;
  static constexpr int kPositions = kColumns * kSize;
  static constexpr int kRows = kWarpThreads / kColumns;       // channels that a warp loads at a time
  static constexpr int kWarpChannels = kThreadPacks * kRows;  // channels that a warp keeps
  static_assert(kWarpChannels <= kWarpThreads);
};

// Second argument of __launch_bounds__: others would spill with two of the largest blocks.
template <typename T, bool kHasLater>
constexpr int kMinBlocks = sizeof(T) == 4 || kHasLater ? 1 : 2;

template <typename T, Access kAccess, bool kHasLater>
__global__ void __launch_bounds__(kMaxWarps* kWarpThreads, (kMinBlocks<T, kHasLater>))
    channel_rms_norm_kernel(const __grid_constant__ ChannelRmsNormKernelParams params) {
  using Tile = Tile<T, kAccess>;
  constexpr int kSize = Tile::kSize, kColumns = Tile::kColumns, kRows = Tile::kRows;
  const uint32_t warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const uint32_t column = lane % kColumns, row = lane / kColumns;
  const uint32_t channels = static_cast<uint32_t>(params.channels);
  const uint32_t sample = params.by_sample.divide(blockIdx.x);
  const uint32_t pack = (blockIdx.x - sample * params.by_sample.divisor) * kColumns + column;
  const bool is_position = pack < params.packs;
  const uint32_t frame = params.by_frame.divide(pack);
  const T* in = static_cast<const T*>(params.x) + sample * params.x_strides[0] + frame * params.x_strides[2] +
                int64_t{pack - frame * params.by_frame.divisor} * kSize;
  const int64_t channel_size = int64_t{params.packs} * kSize;
  T* out = static_cast<T*>(params.out) + sample * params.channels * channel_size + int64_t{pack} * kSize;
  griddepcontrol_wait();

  // The thread's packs of a chunk, and factor and offset of the warp's channel number `lane`.
  Pack<T, kSize> packs[kThreadPacks];
  float factor, offset;
  const auto first_channel = [&](uint32_t chunk) {
    return (chunk * (blockDim.x / kWarpThreads) + warp) * Tile::kWarpChannels;
  };
  const auto count_of = [&](uint32_t first) {
    return is_position ? static_cast<int>(channels - first - row) : 0;
  };
  const auto load = [&](uint32_t chunk) {
    const uint32_t first = first_channel(chunk);
    const int count = count_of(first);
    const T* address = in + (first + row) * params.x_strides[1];
#pragma unroll
    for (int i = 0; i < kThreadPacks; ++i) {
      packs[i] = {};
      if (i * kRows < count) packs[i].load(address + i * kRows * params.x_strides[1]);
    }
    const int64_t channel = min(first + lane, channels - 1);
    factor = value_of<T>(params.weight, channel, 1.0f) *
             (1.0f + value_of<T>(params.scale, sample * params.scale.strides[0] + channel, 0.0f));
    offset = value_of<T>(params.bias, channel, 0.0f) +
             value_of<T>(params.shift, sample * params.shift.strides[0] + channel, 0.0f);
  };

  RowSum<T> squares[kSize] = {};
  for (uint32_t chunk = 0; chunk < params.chunks; ++chunk) {
    load(chunk);
    float values[kThreadPacks][kSize];
#pragma unroll
    for (int i = 0; i < kThreadPacks; ++i) packs[i].to_floats(values[i]);
#pragma unroll
    for (int j = 0; j < kSize; ++j)
      squares[j] += tree_sum<kThreadPacks>([&](int i) { return values[i][j] * values[i][j]; });
  }

  __shared__ __align__(16) RowSum<T> of_warps[kMaxWarps][Tile::kPositions];
  __shared__ __align__(16) float highs[Tile::kPositions], lows[Tile::kPositions];  // of the statistics
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
#pragma unroll
    for (int lanes = kColumns; lanes < kWarpThreads; lanes *= 2)
      squares[j] += __shfl_xor_sync(0xffffffffu, squares[j], lanes);
    if (row == 0) of_warps[warp][column * kSize + j] = squares[j];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < Tile::kPositions; i += blockDim.x) {
    RowSum<T> total = 0;
    for (uint32_t part = 0; part < blockDim.x / kWarpThreads; ++part) total += of_warps[part][i];
    const Statistic<T> scale = rms_scale_of<T>(total, params.channels, params.eps);
    highs[i] = scale.high;
    if constexpr (kHasExactStatistics<T>) lows[i] = scale.low;
  }
  __syncthreads();
  Statistic<T> scales[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    scales[j].high = highs[column * kSize + j];
    if constexpr (kHasExactStatistics<T>) scales[j].low = lows[column * kSize + j];
  }

  for (uint32_t chunk = params.chunks; chunk-- > 0;) {
    if (chunk + 1 < params.chunks) load(chunk);
    const uint32_t first = first_channel(chunk);
    const int count = count_of(first);
    T* address = out + (first + row) * channel_size;
#pragma unroll
    for (int i = 0; i < kThreadPacks; ++i) {
      const float own_factor = __shfl_sync(0xffffffffu, factor, i * kRows + row);
      const float own_offset = __shfl_sync(0xffffffffu, offset, i * kRows + row);
      float values[kSize];
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = fmaf(scales[j].times(values[j]), own_factor, own_offset);
      if (i * kRows < count) {
        if constexpr (kHasLater) {
          const int64_t channel = first + i * kRows + row;
          const float scale =
              value_of<T>(params.later_scale, sample * params.later_scale.strides[0] + channel, 0.0f);
          const float shift =
              value_of<T>(params.later_shift, sample * params.later_shift.strides[0] + channel, 0.0f);
#pragma unroll
          for (int j = 0; j < kSize; ++j) values[j] = fmaf(values[j], 1.0f + scale, shift);
        }
        store_activated(address, values, params.silu);
      }
      address += kRows * channel_size;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Channels last

constexpr int kChannelsLastThreads = 128;
constexpr int kLanePacks = 4;  // that a thread keeps of a position
static_assert(kMultiprocessorThreads % kChannelsLastThreads == 0);

template <typename T, Access kAccess>
__global__ void __launch_bounds__(kChannelsLastThreads)
    channel_rms_norm_channels_last_kernel(const __grid_constant__ ChannelRmsNormKernelParams params) {
  constexpr int kSize = kPackSize<T, kAccess>;
  // A lane adds one element at a time in the second case.
  using Total = std::conditional_t<kAccess == Access::kVector, RowSum<T>, double>;
  const uint32_t thread = threadIdx.x % params.lanes;
  const uint32_t position = blockIdx.x * (kChannelsLastThreads / params.lanes) + threadIdx.x / params.lanes;
  const uint32_t sample = params.by_sample.divide(position);
  const uint32_t in_sample = position - sample * params.by_sample.divisor;
  const uint32_t frame = params.by_frame.divide(in_sample);
  const uint32_t pixel = in_sample - frame * params.by_frame.divisor;
  const uint32_t count = position < params.positions ? params.packs : 0;
  const T* in = static_cast<const T*>(params.x) + sample * params.x_strides[0] + frame * params.x_strides[2] +
                pixel * params.x_strides[3];
  T* out = static_cast<T*>(params.out) + position * params.channels;
  griddepcontrol_wait();

  Pack<T, kSize> packs[kLanePacks];  // of a chunk
  const auto pack_at = [&](uint32_t chunk, int i) {
    return (chunk * kLanePacks + i) * params.lanes + thread;
  };
  const auto load = [&](uint32_t chunk) {
#pragma unroll
    for (int i = 0; i < kLanePacks; ++i) {
      packs[i] = {};
      if (const uint32_t pack = pack_at(chunk, i); pack < count) packs[i].load(in + int64_t{pack} * kSize);
    }
  };
  Total squares = 0;
  for (uint32_t chunk = 0; chunk < params.chunks; ++chunk) {
    load(chunk);
#pragma unroll
    for (int i = 0; i < kLanePacks; ++i) {
      float values[kSize];
      packs[i].to_floats(values);
      squares += tree_sum<kSize>([&](int j) { return values[j] * values[j]; });
    }
  }
  for (uint32_t lanes = params.lanes / 2; lanes > 0; lanes /= 2)
    squares += __shfl_xor_sync(0xffffffffu, squares, lanes);
  const Statistic<T> rms_scale =
      rms_scale_of<T>(static_cast<RowSum<T>>(squares), params.channels, params.eps);

  for (uint32_t chunk = params.chunks; chunk-- > 0;) {
    if (chunk + 1 < params.chunks) load(chunk);
#pragma unroll
    for (int i = 0; i < kLanePacks; ++i) {
      const uint32_t pack = pack_at(chunk, i);
      if (pack >= count) break;
      const int64_t channel = int64_t{pack} * kSize;
      float weight[kSize], bias[kSize], values[kSize];
      load_values<T>(params.weight, channel, params.operands_are_aligned, 1.0f, weight);
      load_values<T>(params.bias, channel, params.operands_are_aligned, 0.0f, bias);
      packs[i].to_floats(values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = fmaf(rms_scale.times(values[j]), weight[j], bias[j]);
      if (params.scale.data != nullptr || params.shift.data != nullptr) {
        float scale[kSize], shift[kSize];
        load_values<T>(params.scale, sample * params.scale.strides[0] + channel, params.operands_are_aligned,
                       0.0f, scale);
        load_values<T>(params.shift, sample * params.shift.strides[0] + channel, params.operands_are_aligned,
                       0.0f, shift);
#pragma unroll
        for (int j = 0; j < kSize; ++j) values[j] = fmaf(values[j], 1.0f + scale[j], shift[j]);
      }
      store_activated(out + channel, values, params.silu);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------
// Launch

bool has_aligned_operands(const ChannelRmsNormParams& args) {
  bool aligned = true;
  for (const Modulator* operand : {&args.weight, &args.bias, &args.scale, &args.shift})
    aligned = aligned && has_vector_rows(*operand, 1, operand->is_float32 ? 4 : bytes_of(args.dtype));
  return aligned;
}

// Returns whether all rows of pixels, or of channels, consist of packs.
bool has_vector_access(const ChannelRmsNormParams& args) {
  const int64_t element_bytes = bytes_of(args.dtype);
  const int unit = args.is_channels_last ? 1 : 3;  // the dimension of stride 1
  bool aligned = is_16_byte_aligned(args.x);
  aligned =
      aligned && (args.is_channels_last ? args.channels : args.pixels) * element_bytes % kVectorBytes == 0;
  for (int dim = 0; dim < 4; ++dim)
    aligned = aligned && (dim == unit || args.x_strides[dim] * element_bytes % kVectorBytes == 0);
  return aligned;
}

template <typename T, Access kAccess>
void launch_tiles(ChannelRmsNormKernelParams params, Stream stream) {
  using Tile = Tile<T, kAccess>;
  params.packs = static_cast<uint32_t>(params.frames * params.pixels / Tile::kSize);
  const int64_t tiles = ceil_divide(params.packs, Tile::kColumns);
  params.chunks = static_cast<uint32_t>(ceil_divide(params.channels, kMaxWarps * Tile::kWarpChannels));
  const int64_t warps = ceil_divide(params.channels, int64_t{params.chunks} * Tile::kWarpChannels);
  params.by_sample.set(static_cast<uint32_t>(tiles));
  params.by_frame.set(static_cast<uint32_t>(params.pixels / Tile::kSize));
  const auto launch = [&](auto has_later) {
    launch_kernel(kOperation, channel_rms_norm_kernel<T, kAccess, has_later>,
                  dim3(static_cast<uint32_t>(params.batch * tiles)), static_cast<int>(warps * kWarpThreads),
                  params, stream);
  };
  if (params.bias.data == nullptr || params.scale.data == nullptr) return launch(Constant<false>{});
  params.later_scale = std::exchange(params.scale, {});
  params.later_shift = std::exchange(params.shift, {});
  launch(Constant<true>{});
}

template <typename T, Access kAccess>
void launch_channels_last(ChannelRmsNormKernelParams params, Stream stream) {
  params.packs = static_cast<uint32_t>(params.channels / kPackSize<T, kAccess>);
  params.positions = static_cast<uint32_t>(params.batch * params.frames * params.pixels);
  params.lanes = 1;
  while (params.lanes < kWarpThreads && params.lanes * kLanePacks < params.packs) params.lanes *= 2;
  params.chunks = static_cast<uint32_t>(ceil_divide(params.packs, params.lanes * kLanePacks));
  params.by_sample.set(static_cast<uint32_t>(params.frames * params.pixels));
  params.by_frame.set(static_cast<uint32_t>(params.pixels));
  params.operands_are_aligned = has_aligned_operands(params);
  const int64_t blocks = ceil_divide(params.positions, kChannelsLastThreads / params.lanes);
  launch_kernel(kOperation, channel_rms_norm_channels_last_kernel<T, kAccess>,
                dim3(static_cast<uint32_t>(blocks)), kChannelsLastThreads, params, stream);
}

}  // namespace

void channel_rms_norm(const ChannelRmsNormParams& args, Stream stream) {
  ChannelRmsNormKernelParams params{};
  static_cast<ChannelRmsNormParams&>(params) = args;
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    const auto launch = [&](auto access) {
      if (args.is_channels_last) return launch_channels_last<T, access>(params, stream);
      launch_tiles<T, access>(params, stream);
    };
    if (has_vector_access(args)) return launch(Constant<Access::kVector>{});
    launch(Constant<Access::kScalar>{});
  });
}

}  // namespace h100_diffusers_kernels
