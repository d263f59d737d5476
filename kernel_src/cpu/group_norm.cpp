// Group norm, with SiLU or without.
//
// A group is read three times: for its mean, for the squares of the differences from it, and to be
// normalized. Its rows are its channels or, channels last, its pixels; along a row memory is contiguous.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rows.h"
#include "silu.h"
#include "vector.h"

namespace h100_diffusers_kernels {
namespace {

// What a channel's values are normalized with: ((x + added) - pivot) * rstd + offset, times weight, plus
// bias.
struct Channel {
  float added, pivot, rstd, offset, weight, bias;
};

// The channels' constants, each as an array.
class Channels {
 public:
  explicit Channels(int64_t count) : count_(count), values_(new float[6 * count]) {}
  float* added() const { return values_.get(); }
  float* pivot() const { return values_.get() + count_; }
  float* rstd() const { return values_.get() + 2 * count_; }
  float* offset() const { return values_.get() + 3 * count_; }
  float* weight() const { return values_.get() + 4 * count_; }
  float* bias() const { return values_.get() + 5 * count_; }

 private:
  int64_t count_;
  std::unique_ptr<float[]> values_;
};

// An item is so many groups of a sample.
template <typename T>
class GroupNormKernel {
 public:
  explicit GroupNormKernel(const GroupNormParams& params) : params_(params) {
    const int64_t per_group = params.channels / params.groups;
    if (params.is_channels_last && per_group < kRowElements) {
      const int64_t unit = kMaxLanes / std::gcd(per_group, kMaxLanes);  // So many groups are whole vectors.
      groups_ = std::min(((kRowElements - 1) / (unit * per_group) + 1) * unit, params.groups);
    }
    items_per_sample_ = (params.groups - 1) / groups_ + 1;
  }

  int64_t items() const { return params_.batch * items_per_sample_; }
  int64_t item_size() const { return 3 * groups_ * (params_.channels / params_.groups) * params_.pixels; }

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    const int64_t per_group = params_.channels / params_.groups;
    const Channels channels(groups_ * per_group);
    const auto totals = std::make_unique<double[]>(2 * groups_ * per_group);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t sample = item / items_per_sample_, first = item % items_per_sample_ * groups_;
      const int64_t groups = std::min(groups_, params_.groups - first);
      Tile tile{sample, first * per_group, groups * per_group, per_group};
      read_operands(tile, channels);
      if (params_.is_channels_last)
        normalize_rows_of_channels<kLanes>(tile, channels, totals.get());
      else
        normalize_rows_of_pixels<kLanes>(tile, channels);
    }
  }

 private:
  static constexpr int64_t kRowElements = 64;  // A row of channels last has at least so many, if there are.
  static constexpr int64_t kMaxLanes = 16;
  static constexpr int64_t kBlock = 32;  // So many rows stay in the cache, and are added up in float.

  struct Tile {
    int64_t sample, first_channel, channels, per_group;
  };

  static float value(const Modulator& operand, int64_t index, float otherwise) {
    if (operand.data == nullptr) return otherwise;
    if (operand.is_float32) return static_cast<const float*>(operand.data)[index];
    return load<1>(static_cast<const T*>(operand.data) + index)[0];
  }

  void read_operands(const Tile& tile, const Channels& channels) const {
    for (int64_t i = 0; i < tile.channels; ++i) {
      const int64_t channel = tile.first_channel + i;
      channels.weight()[i] = value(params_.weight, channel, 1.0f);
      channels.bias()[i] = value(params_.bias, channel, 0.0f);
      channels.added()[i] =
          value(params_.channel_bias, tile.sample * params_.channel_bias.strides[0] + channel, 0.0f);
    }
  }

  const T* input(const Tile& tile) const {
    return static_cast<const T*>(params_.x) + tile.sample * params_.x_strides[0] +
           tile.first_channel * params_.x_strides[1];
  }
  T* output(const Tile& tile) const {
    return static_cast<T*>(params_.out) + tile.sample * params_.out_strides[0] +
           tile.first_channel * params_.out_strides[1];
  }

  // From the sums of the differences from the pivot, which is the group's mean up to rounding, and of their
  // squares.
  void set_deviation(const Channels& channels, int64_t first, int64_t count, double sum,
                     double squares) const {
    const double elements = static_cast<double>(count) * static_cast<double>(params_.pixels);
    const double correction = sum / elements;
    const double variance = std::max(squares / elements - correction * correction, 0.0);
    const auto rstd = static_cast<float>(1.0 / std::sqrt(variance + params_.eps));
    double offset = -correction * rstd;
    // Of values around zero the difference from their mean would be rounded, and the offset alone is not.
    if (const double pivot = channels.pivot()[first]; std::abs(pivot) * rstd <= 1) {
      offset -= pivot * rstd;
      std::fill_n(channels.pivot() + first, count, 0.0f);
    }
    std::fill_n(channels.rstd() + first, count, rstd);
    std::fill_n(channels.offset() + first, count, static_cast<float>(offset));
  }

  template <int n>
  ALWAYS_INLINE void write(T* out, const Floats<n>& difference, const Floats<n>& rstd,
                           const Floats<n>& offset, const Floats<n>& weight, const Floats<n>& bias) const {
    const Floats<n> normalized = (difference * rstd + offset) * weight + bias;
    if (params_.silu)
      store<n>(out,
               Silu<T>::template second_step<n>(normalized, Silu<T>::template first_step<n>(normalized)));
    else
      store<n>(out, normalized);
  }

  template <int kLanes>
  ALWAYS_INLINE void normalize_rows_of_pixels(const Tile& tile, const Channels& channels) const {
    const int64_t pixels = params_.pixels, stride = params_.x_strides[1];
    const T* in = input(tile);
    double sum = 0;
    for (int64_t i = 0; i < tile.channels; ++i) {
      double total[1];
      sum_columns<kLanes>(pixels, total,
                          [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                            sums[0] += load<n>(in + i * stride + column) + channels.added()[i];
                          });
      sum += total[0];
    }
    const float mean = static_cast<float>(sum / (static_cast<double>(tile.channels) * pixels));
    std::fill_n(channels.pivot(), tile.channels, mean);
    sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < tile.channels; ++i) {
      double totals[2];
      sum_columns<kLanes>(pixels, totals,
                          [&]<int n>(Lanes<n>, int64_t column, Floats<n>* sums) ALWAYS_INLINE_LAMBDA {
                            const Floats<n> h = load<n>(in + i * stride + column) + channels.added()[i];
                            sums[0] += h - mean;
                            sums[1] += (h - mean) * (h - mean);
                          });
      sum += totals[0];
      squares += totals[1];
    }
    set_deviation(channels, 0, tile.channels, sum, squares);
    T* out = output(tile);
    for (int64_t i = 0; i < tile.channels; ++i) {
      const Channel c{channels.added()[i],  channels.pivot()[i],  channels.rstd()[i],
                      channels.offset()[i], channels.weight()[i], channels.bias()[i]};
      T* row = out + i * params_.out_strides[1];
      for_columns<kLanes>(0, pixels, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
        const Floats<n> h = load<n>(in + i * stride + column) + c.added;
        write<n>(row + column, h - c.pivot, broadcast<n>(c.rstd), broadcast<n>(c.offset),
                 broadcast<n>(c.weight), broadcast<n>(c.bias));
      });
    }
  }

  // Adds term(pointer, added, pivot, sums) up over all rows, for each column of the tile: `kSums` totals, one
  // array after the other. A block of rows stays in the cache while its columns are taken one after the
  // other.
  template <int kLanes, int kSums, typename Term>
  ALWAYS_INLINE void sum_rows(const Tile& tile, const Channels& channels, double* totals,
                              const Term& term) const {
    const int64_t stride = params_.x_strides[2];
    const T* in = input(tile);
    std::fill_n(totals, kSums * tile.channels, 0.0);
    for (int64_t block = 0; block < params_.pixels; block += kBlock) {
      const int64_t end = std::min(block + kBlock, params_.pixels);
      for_columns<kLanes>(0, tile.channels, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
        const Floats<n> added = load<n>(channels.added() + column),
                        pivot = load<n>(channels.pivot() + column);
        Floats<n> sums[4][kSums] = {};  // Each is a chain of dependent additions.
        const T* pixel = in + block * stride + column;
        int64_t row = block;
        for (; row + 4 <= end; row += 4) {
          for (auto& of_row : sums) {
            term(load<n>(pixel) + added, pivot, of_row);
            pixel += stride;
          }
        }
        for (; row < end; ++row, pixel += stride) term(load<n>(pixel) + added, pivot, sums[0]);
        for (int k = 0; k < kSums; ++k) {
          const Floats<n> sum = (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
          for (int i = 0; i < n; ++i) totals[k * tile.channels + column + i] += sum[i];
        }
      });
    }
  }

  template <int kLanes>
  ALWAYS_INLINE void normalize_rows_of_channels(const Tile& tile, const Channels& channels,
                                                double* totals) const {
    const auto for_groups = [&](const auto& function) {
      for (int64_t first = 0; first < tile.channels; first += tile.per_group) {
        double sums[2] = {};
        for (int64_t i = first; i < first + tile.per_group; ++i) {
          sums[0] += totals[i];
          sums[1] += totals[tile.channels + i];
        }
        function(first, sums);
      }
    };
    std::fill_n(channels.pivot(), tile.channels, 0.0f);
    std::fill_n(totals, 2 * tile.channels, 0.0);
    sum_rows<kLanes, 1>(tile, channels, totals,
                        [](const auto& h, const auto&, auto* sums) ALWAYS_INLINE_LAMBDA { sums[0] += h; });
    for_groups([&](int64_t first, const double* sums) {
      const double elements = static_cast<double>(tile.per_group) * static_cast<double>(params_.pixels);
      std::fill_n(channels.pivot() + first, tile.per_group, static_cast<float>(sums[0] / elements));
    });
    sum_rows<kLanes, 2>(tile, channels, totals,
                        [](const auto& h, const auto& pivot, auto* sums) ALWAYS_INLINE_LAMBDA {
                          const auto difference = h - pivot;
                          sums[0] += difference;
                          sums[1] += difference * difference;
                        });
    for_groups([&](int64_t first, const double* sums) {
      set_deviation(channels, first, tile.per_group, sums[0], sums[1]);
    });
    const T* in = input(tile);
    T* out = output(tile);
    for (int64_t block = 0; block < params_.pixels; block += kBlock) {
      const int64_t end = std::min(block + kBlock, params_.pixels);
      for_columns<kLanes>(0, tile.channels, [&]<int n>(Lanes<n>, int64_t column) ALWAYS_INLINE_LAMBDA {
        const Floats<n> added = load<n>(channels.added() + column),
                        pivot = load<n>(channels.pivot() + column);
        const Floats<n> rstd = load<n>(channels.rstd() + column),
                        offset = load<n>(channels.offset() + column);
        const Floats<n> weight = load<n>(channels.weight() + column),
                        bias = load<n>(channels.bias() + column);
        for (int64_t row = block; row < end; ++row) {
          const Floats<n> h = load<n>(in + row * params_.x_strides[2] + column) + added;
          write<n>(out + row * params_.out_strides[2] + column, h - pivot, rstd, offset, weight, bias);
        }
      });
    }
  }

  const GroupNormParams& params_;
  int64_t groups_ = 1;
  int64_t items_per_sample_;
};

}  // namespace

int64_t group_norm_workspace_bytes(const GroupNormParams&, Stream) { return 0; }

void group_norm(const GroupNormParams& params, Stream stream) {
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    const GroupNormKernel<T> kernel(params);
    parallel_run(stream, kernel.items(), kernel.item_size(), kernel);
  });
}

}  // namespace h100_diffusers_kernels
