// Group norm, with or without SiLU.
//
// An item is a group of a sample. It is read three times: for its mean, for its variance, and to be
// normalized.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// A block of a group is contiguous in memory. Its elements are pixels of one channel or, channels last,
// channels of one pixel.
struct Block {
  const GroupNormParams& p;
  int64_t sample, channel, pixel, count;

  int64_t offset(const int64_t* strides) const {
    return sample * strides[0] + channel * strides[1] + pixel * strides[2];
  }

  // Loads an operand's value for each element.
  void load_channels(const Modulator& operand, int64_t first, float fallback, float* values) const {
    const int64_t channels = p.is_channels_last ? count : 1;
    std::fill_n(values, channels, fallback);
    if (operand.data != nullptr)
      load(operand.is_float32 ? DType::kFloat32 : p.dtype, operand.data, first, channels, values);
    if (!p.is_channels_last) std::fill_n(values, count, values[0]);
  }

  // Loads x + channel_bias.
  void load_input(float* values) const {
    load(p.dtype, p.x, offset(p.x_strides), count, values);
    if (p.channel_bias.data == nullptr) return;
    float bias[kBlock];
    load_channels(p.channel_bias, sample * p.channel_bias.strides[0] + channel, 0.0f, bias);
    for (int64_t i = 0; i < count; ++i) values[i] += bias[i];
  }

  void normalize(double mean, double rstd) const {
    float values[kBlock], weight[kBlock], bias[kBlock];
    load_input(values);
    load_channels(p.weight, channel, 1.0f, weight);
    load_channels(p.bias, channel, 0.0f, bias);
    for (int64_t i = 0; i < count; ++i)
      values[i] = static_cast<float>((values[i] - mean) * rstd * weight[i] + bias[i]);
    if (p.silu)
      for (int64_t i = 0; i < count; ++i) values[i] = silu(values[i]);
    store(p.dtype, p.out, offset(p.out_strides), count, values);
  }
};

void normalize_group(const GroupNormParams& p, int64_t sample, int64_t group) {
  const int64_t per_group = p.channels / p.groups, first = group * per_group;
  const auto for_group = [&](const auto& body) {
    if (p.is_channels_last)
      for (int64_t pixel = 0; pixel < p.pixels; ++pixel)
        for_blocks(per_group, [&](int64_t channel, int64_t count) {
          body(Block{p, sample, first + channel, pixel, count});
        });
    else
      for (int64_t channel = first; channel < first + per_group; ++channel)
        for_blocks(p.pixels,
                   [&](int64_t pixel, int64_t count) { body(Block{p, sample, channel, pixel, count}); });
  };
  const double elements = static_cast<double>(per_group) * static_cast<double>(p.pixels);
  float values[kBlock];
  double total = 0, squares = 0;
  for_group([&](const Block& block) {
    block.load_input(values);
    total += sum(values, block.count);
  });
  const double mean = total / elements;
  for_group([&](const Block& block) {
    block.load_input(values);
    squares += sum_of_squares(values, block.count, mean);
  });
  const double rstd = 1.0 / std::sqrt(squares / elements + p.eps);
  for_group([&](const Block& block) { block.normalize(mean, rstd); });
}

}  // namespace

int64_t group_norm_workspace_bytes(const GroupNormParams&, Stream) { return 0; }

void group_norm(const GroupNormParams& params, Stream stream) {
  const int64_t group_size = params.channels / params.groups * params.pixels;
  parallel_for(stream, params.batch * params.groups, group_size, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item)
      normalize_group(params, item / params.groups, item % params.groups);
  });
}

}  // namespace h100_diffusers_kernels
