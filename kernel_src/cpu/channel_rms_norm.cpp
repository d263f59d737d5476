// RMS norm over channels, with or without modulation and SiLU.
//
// x is read twice: for the mean squares, and to be normalized. An item is a block of adjacent pixels or, with
// channels last, one pixel.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// Loads an operand's values for `count` channels of a sample.
void load_channels(const ChannelRmsNormParams& p, const Modulator& operand, int64_t sample, int64_t channel,
                   int64_t count, float fallback, float* values) {
  std::fill_n(values, count, fallback);
  if (operand.data != nullptr)
    load(operand.is_float32 ? DType::kFloat32 : p.dtype, operand.data, sample * operand.strides[0] + channel,
         count, values);
}

struct ChannelBlock {
  float weight[kBlock], bias[kBlock], scale[kBlock], shift[kBlock];

  ChannelBlock(const ChannelRmsNormParams& p, int64_t sample, int64_t channel, int64_t count) {
    load_channels(p, p.weight, 0, channel, count, 1.0f, weight);
    load_channels(p, p.bias, 0, channel, count, 0.0f, bias);
    load_channels(p, p.scale, sample, channel, count, 0.0f, scale);
    load_channels(p, p.shift, sample, channel, count, 0.0f, shift);
  }

  float normalized(float x, double rstd, int64_t i) const {
    return static_cast<float>((x * rstd * weight[i] + bias[i]) * (1.0 + scale[i]) + shift[i]);
  }
};

void store_activated(const ChannelRmsNormParams& p, int64_t offset, int64_t count, float* values) {
  if (p.silu)
    for (int64_t i = 0; i < count; ++i) values[i] = silu(values[i]);
  store(p.dtype, p.out, offset, count, values);
}

void normalize_pixels(const ChannelRmsNormParams& p, int64_t sample, int64_t frame, int64_t pixel,
                      int64_t count) {
  const int64_t in = sample * p.x_strides[0] + frame * p.x_strides[2] + pixel;
  const int64_t positions = p.frames * p.pixels;
  const int64_t out = sample * p.channels * positions + frame * p.pixels + pixel;
  float values[kBlock];
  double rstds[kBlock] = {};
  for (int64_t channel = 0; channel < p.channels; ++channel) {
    load(p.dtype, p.x, in + channel * p.x_strides[1], count, values);
    for (int64_t i = 0; i < count; ++i) rstds[i] += static_cast<double>(values[i]) * values[i];
  }
  for (int64_t i = 0; i < count; ++i)
    rstds[i] = 1.0 / std::sqrt(rstds[i] / static_cast<double>(p.channels) + p.eps);
  for (int64_t first = 0; first < p.channels; first += kBlock) {
    const int64_t channels = std::min(kBlock, p.channels - first);
    const ChannelBlock block(p, sample, first, channels);
    for (int64_t j = 0; j < channels; ++j) {
      load(p.dtype, p.x, in + (first + j) * p.x_strides[1], count, values);
      for (int64_t i = 0; i < count; ++i) values[i] = block.normalized(values[i], rstds[i], j);
      store_activated(p, out + (first + j) * positions, count, values);
    }
  }
}

void normalize_channels(const ChannelRmsNormParams& p, int64_t sample, int64_t frame, int64_t pixel) {
  const int64_t in = sample * p.x_strides[0] + frame * p.x_strides[2] + pixel * p.x_strides[3];
  const int64_t out = (sample * p.frames * p.pixels + frame * p.pixels + pixel) * p.channels;
  float values[kBlock];
  double squares = 0;
  for_blocks(p.channels, [&](int64_t channel, int64_t count) {
    load(p.dtype, p.x, in + channel, count, values);
    squares += sum_of_squares(values, count);
  });
  const double rstd = 1.0 / std::sqrt(squares / static_cast<double>(p.channels) + p.eps);
  for_blocks(p.channels, [&](int64_t channel, int64_t count) {
    const ChannelBlock block(p, sample, channel, count);
    load(p.dtype, p.x, in + channel, count, values);
    for (int64_t i = 0; i < count; ++i) values[i] = block.normalized(values[i], rstd, i);
    store_activated(p, out + channel, count, values);
  });
}

}  // namespace

void channel_rms_norm(const ChannelRmsNormParams& p, Stream stream) {
  const int64_t size = p.is_channels_last ? 1 : kBlock;  // pixels of an item
  const int64_t per_frame = (p.pixels + size - 1) / size;
  parallel_for(stream, p.batch * p.frames * per_frame, p.channels * std::min(size, p.pixels),
               [&](int64_t begin, int64_t end) {
                 for (int64_t item = begin; item < end; ++item) {
                   const int64_t frame = item / per_frame, pixel = item % per_frame * size;
                   const int64_t sample = frame / p.frames, in_sample = frame % p.frames;
                   if (p.is_channels_last)
                     normalize_channels(p, sample, in_sample, pixel);
                   else
                     normalize_pixels(p, sample, in_sample, pixel, std::min(size, p.pixels - pixel));
                 }
               });
}

}  // namespace h100_diffusers_kernels
