// Linear layers of one 16-bit input, with low-rank terms.
#include "linear.h"

#include <array>

#include "../output.h"
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kMultiple = 8;    // elements
constexpr int64_t kAlignment = 16;  // bytes

struct LayerNames {
  const char *weight, *bias, *out;
};
constexpr LayerNames kNames[kMaxLinearLayers] = {{"weights[0]", "biases[0]", "out[0]"},
                                                 {"weights[1]", "biases[1]", "out[1]"},
                                                 {"weights[2]", "biases[2]", "out[2]"}};

// The tensors of a layer. A layer without a weight is absent.
struct LayerTensors {
  OptionalTensor weight, low, up, bias;
};
using Layers = std::array<LayerTensors, kMaxLinearLayers>;
using Outs = std::array<OptionalTensor, kMaxLinearLayers>;

class LinearsLoraCall {
 public:
  LinearsLoraCall(const char* operation, const Tensor& x, const Layers& layers, bool has_gelu,
                  bool tanh_approximation, const Tensors& more_ups)
      : x_(x), layers_(layers), more_ups_(more_ups), check_(operation, "x", x, 1, false) {
    check_.contiguous("x", x);
    params_.in_features = check_.hidden();
    check_in_features(check_, kMultiple);
    check_.aligned("x", x, kAlignment);
    check_.countable("x", "number of rows", {x.numel() / params_.in_features}, kMaxProductRows);
    params_.dtype = params_.low_dtype = check_.dtype();
    if (has_gelu) params_.gelu = tanh_approximation ? Gelu::kTanh : Gelu::kErf;
    MoreUps more(more_ups);
    for (; count_ < kMaxLinearLayers && layers[count_].weight.has_value(); ++count_) add(count_, more);
    more.check_taken(operation);
  }

  TensorList run() {
    TensorList results;
    results.reserve(count_);
    Outs outs;
    for (size_t i = 0; i < count_; ++i) {
      results.push_back(check_.empty(shape_of(i)));
      outs[i].emplace(results.back());
    }
    launch(outs);
    return results;
  }

  void run(const Outs& outs) {
    for (size_t i = 0; i < count_; ++i) {
      if (!outs[i].has_value()) fail(check_.operation(), kNames[i].out, " must be a tensor, got None");
      check_.same_shape(kNames[i].out, *outs[i], shape_of(i));
      check_writable(check_.operation(), kNames[i].out, *outs[i], "");
    }
    for (size_t i = 0; i < count_; ++i) {
      check_apart("x", x_, i, outs);
      for (const Tensor& up : more_ups_) check_apart("ups", up, i, outs);
      for (size_t j = 0; j < count_; ++j) {
        check_apart(kNames[j].weight, layers_[j].weight, i, outs);
        check_apart(kLowRanks[j].low, layers_[j].low, i, outs);
        check_apart(kLowRanks[j].up, layers_[j].up, i, outs);
        check_apart(kNames[j].bias, layers_[j].bias, i, outs);
        if (j > i) check_apart(kNames[j].out, outs[j], i, outs);
      }
    }
    launch(outs);
  }

 private:
  void add(size_t i, MoreUps& more_ups) {
    LinearLayer& layer = params_.layers[i];
    const Tensor& weight = *layers_[i].weight;
    const char* name = kNames[i].weight;
    check_.same_device(name, weight);
    check_.same_dtype(name, weight);
    if (weight.dim() != 2 || weight.size(1) != params_.in_features)
      fail(check_.operation(), name, " must have shape (N, ", params_.in_features, "), got ",
           to_string(weight.sizes()));
    check_.contiguous(name, weight);
    check_.aligned(name, weight, kAlignment);
    layer.out_features = weight.size(0);
    check_.countable(name, "number of rows", {layer.out_features}, kMaxProductRows);
    layer.weight = weight.const_data_ptr();
    layer.bias = check_.vector(kNames[i].bias, layers_[i].bias, layer.out_features);
    layer.bias_dtype = check_.dtype();
    const LowRankTerm term{check_, kLowRanks[i], layers_[i].low, layers_[i].up, more_ups};
    if (!term.is_given()) return;
    term.check_dtype("x", check_.dtype());
    term.check(layer);
  }

  void check_apart(const char* name, const OptionalTensor& tensor, size_t written, const Outs& outs) const {
    if (tensor.has_value() && overlap(*tensor, *outs[written]))
      fail(check_.operation(), name, " must not share memory with ", kNames[written].out,
           ", which is written, got overlapping elements");
  }

  Sizes shape_of(size_t layer) const {
    Sizes shape = check_.shape();
    shape.back() = params_.layers[layer].out_features;
    return shape;
  }

  // Layers without elements are left out.
  void launch(const Outs& outs) {
    if (x_.numel() == 0) return;
    OptionalTensor lows[kMaxLinearLayers], written[kMaxLinearLayers];
    int32_t count = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (params_.layers[i].out_features == 0) continue;
      lows[count] = layers_[i].low;
      written[count] = outs[i];
      params_.layers[count++] = params_.layers[i];
    }
    params_.layer_count = count;
    if (count == 0) return;
    RowShape shape;
    RowOperand of_x, of_low[kMaxLinearLayers], of_out[kMaxLinearLayers];
    RowLaunch rows(check_.shape(), RowBinding{of_x, x_}, RowBinding{of_low[0], lows[0]},
                   RowBinding{of_low[1], lows[1]}, RowBinding{of_low[2], lows[2]},
                   RowBinding{of_out[0], written[0]}, RowBinding{of_out[1], written[1]},
                   RowBinding{of_out[2], written[2]});
    const DeviceStream device(x_);
    const int64_t bytes = bytes_of(params_.dtype);
    const auto launch_rows = [&] {
      for_each_index(shape, [&](const RowsAt& at) {
        params_.rows = at.rows();
        params_.x = at.data(of_x, bytes);
        for (int32_t i = 0; i < count; ++i) {
          LinearLayer& layer = params_.layers[i];
          layer.low = lows[i].has_value() ? at.data(of_low[i], bytes) : nullptr;
          layer.low_stride = at.stride(of_low[i]);
          layer.out = at.data(of_out[i], bytes);
          layer.out_stride = at.stride(of_out[i]);
        }
        linears_lora(params_, device.stream());
      });
    };
    // The products read contiguous rows of x.
    rows.run(shape, launch_rows, true);
  }

  const Tensor& x_;
  const Layers layers_;
  const Tensors& more_ups_;
  const ArgumentChecker check_;
  size_t count_ = 0;  // of layers
  LinearParams params_{};
};

TensorList call_linears_lora(const char* operation, const Tensor& x, const Tensor& weight_0,
                             const OptionalTensor& low_0, const OptionalTensor& up_0,
                             const OptionalTensor& bias_0, const OptionalTensor& weight_1,
                             const OptionalTensor& low_1, const OptionalTensor& up_1,
                             const OptionalTensor& bias_1, const OptionalTensor& weight_2,
                             const OptionalTensor& low_2, const OptionalTensor& up_2,
                             const OptionalTensor& bias_2, bool has_gelu, bool tanh_approximation,
                             const Tensors& more_ups) {
  const Layers layers{
      {{weight_0, low_0, up_0, bias_0}, {weight_1, low_1, up_1, bias_1}, {weight_2, low_2, up_2, bias_2}}};
  return LinearsLoraCall(operation, x, layers, has_gelu, tanh_approximation, more_ups).run();
}

void call_linears_lora_out(const char* operation, const Tensor& x, const Tensor& weight_0,
                           const OptionalTensor& low_0, const OptionalTensor& up_0,
                           const OptionalTensor& bias_0, const OptionalTensor& weight_1,
                           const OptionalTensor& low_1, const OptionalTensor& up_1,
                           const OptionalTensor& bias_1, const OptionalTensor& weight_2,
                           const OptionalTensor& low_2, const OptionalTensor& up_2,
                           const OptionalTensor& bias_2, bool has_gelu, bool tanh_approximation,
                           const Tensor& out_0, const OptionalTensor& out_1, const OptionalTensor& out_2,
                           const Tensors& more_ups) {
  const Layers layers{
      {{weight_0, low_0, up_0, bias_0}, {weight_1, low_1, up_1, bias_1}, {weight_2, low_2, up_2, bias_2}}};
  LinearsLoraCall(operation, x, layers, has_gelu, tanh_approximation, more_ups).run({out_0, out_1, out_2});
}

// Layers beyond the first are absent if their weight is None, and then have no result. more_ups: MoreUps.
constexpr Operation kOperations[] = {
    operation<"linears_lora(Tensor x, Tensor weight_0, Tensor? low_0, Tensor? up_0, Tensor? bias_0,"
              " Tensor? weight_1, Tensor? low_1, Tensor? up_1, Tensor? bias_1, Tensor? weight_2,"
              " Tensor? low_2, Tensor? up_2, Tensor? bias_2, bool has_gelu, bool tanh_approximation,"
              " Tensor[]? more_ups=None) -> Tensor[]",
              call_linears_lora>(),
    operation<"linears_lora_out(Tensor x, Tensor weight_0, Tensor? low_0, Tensor? up_0, Tensor? bias_0,"
              " Tensor? weight_1, Tensor? low_1, Tensor? up_1, Tensor? bias_1, Tensor? weight_2,"
              " Tensor? low_2, Tensor? up_2, Tensor? bias_2, bool has_gelu, bool tanh_approximation,"
              " Tensor(a!) out_0, Tensor(b!)? out_1, Tensor(c!)? out_2, Tensor[]? more_ups=None) -> ()",
              call_linears_lora_out>(),
};

}  // namespace

std::span<const Operation> linear_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
