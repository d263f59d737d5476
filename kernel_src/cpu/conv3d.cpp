// Convolutions of videos with channels last.
#include <algorithm>
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// The row or column that is read in place of one that may be outside; -1 for zeros.
int64_t inside(Border border, int64_t place, int64_t size) {
  if (place >= 0 && place < size) return place;
  if (border == Border::kZeros) return -1;
  if (border == Border::kReplicate) return std::clamp<int64_t>(place, 0, size - 1);
  return place < 0 ? -place : 2 * (size - 1) - place;
}

int64_t taps_of(const Conv3dParams& p) { return p.taps[0] * p.taps[1] * p.taps[2]; }

// From (out_channels, channels, taps) to (taps, channels, out_channels), in float32.
void arrange_weight(const Conv3dParams& p, float* arranged, Stream stream) {
  const int64_t row = p.channels * taps_of(p);
  parallel_for(stream, p.out_channels, row, [&](int64_t begin, int64_t end) {
    const auto weight = std::make_unique_for_overwrite<float[]>(row);
    for (int64_t out = begin; out < end; ++out) {
      load(p.dtype, p.weight, out * row, row, weight.get());
      for (int64_t channel = 0; channel < p.channels; ++channel)
        for (int64_t tap = 0; tap < taps_of(p); ++tap)
          arranged[(tap * p.channels + channel) * p.out_channels + out] = weight[channel * taps_of(p) + tap];
    }
  });
}

// Adds the products of a row of x and a row of taps to a row of sums.
void add_row(const Conv3dParams& p, const float* x, const float* weight, float* sums) {
  for (int64_t column = 0; column < p.out_width; ++column) {
    float* out = sums + column * p.out_channels;
    for (int64_t tap = 0; tap < p.taps[2]; ++tap) {
      const int64_t from = inside(p.border, column + tap - p.padding[1], p.width);
      if (from < 0) continue;
      const float* values = x + from * p.channels;
      const float* rows = weight + tap * p.channels * p.out_channels;
      for (int64_t channel = 0; channel < p.channels; ++channel) {
        const float value = values[channel];
        const float* row = rows + channel * p.out_channels;
        for (int64_t i = 0; i < p.out_channels; ++i) out[i] += value * row[i];
      }
    }
  }
}

// Computes a row of the result. `x` has room for a row of x, `sums` for one of the result.
void convolve_row(const Conv3dParams& p, const float* arranged, const float* bias, int64_t row, float* x,
                  float* sums) {
  const int64_t y = row % p.out_height, frame = row / p.out_height % p.out_frames;
  const int64_t sample = row / p.out_height / p.out_frames;
  for (int64_t column = 0; column < p.out_width; ++column)
    std::copy_n(bias, p.out_channels, sums + column * p.out_channels);
  for (int64_t frame_tap = 0; frame_tap < p.taps[0]; ++frame_tap) {
    const int64_t source = p.source_frame(frame, frame_tap);
    if (source < 0) continue;
    const bool is_previous = source < p.previous_frames;
    const int64_t* strides = is_previous ? p.previous_strides : p.x_strides;
    const void* data = is_previous ? p.previous : p.x;
    const int64_t at = is_previous ? source : source - p.previous_frames;
    for (int64_t row_tap = 0; row_tap < p.taps[1]; ++row_tap) {
      const int64_t from = inside(p.border, y + row_tap - p.padding[0], p.height);
      if (from < 0) continue;
      const int64_t first = sample * strides[0] + at * strides[1] + from * strides[2];
      for (int64_t column = 0; column < p.width; ++column)
        load(p.dtype, data, first + column * strides[3], p.channels, x + column * p.channels);
      const int64_t tap = (frame_tap * p.taps[1] + row_tap) * p.taps[2];
      add_row(p, x, arranged + tap * p.channels * p.out_channels, sums);
    }
  }
}

}  // namespace

int64_t conv3d_workspace_bytes(const Conv3dParams& p) { return 4 * p.out_channels * p.channels * taps_of(p); }

// An item is a row of the result.
void conv3d(const Conv3dParams& params, Stream stream) {
  auto* arranged = static_cast<float*>(params.workspace);
  arrange_weight(params, arranged, stream);
  const int64_t rows = params.batch * params.out_frames * params.out_height;
  const int64_t row_size = params.out_width * params.out_channels;
  const auto bias = std::make_unique<float[]>(params.out_channels);
  if (params.bias != nullptr) load(params.dtype, params.bias, 0, params.out_channels, bias.get());
  parallel_for(stream, rows, row_size * params.channels * taps_of(params), [&](int64_t begin, int64_t end) {
    const auto x = std::make_unique_for_overwrite<float[]>(params.width * params.channels);
    const auto sums = std::make_unique_for_overwrite<float[]>(row_size);
    for (int64_t row = begin; row < end; ++row) {
      convolve_row(params, arranged, bias.get(), row, x.get(), sums.get());
      store(params.dtype, params.out, row * row_size, row_size, sums.get());
    }
  });
}

}  // namespace h100_diffusers_kernels
