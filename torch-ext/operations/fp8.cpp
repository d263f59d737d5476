// FP8 (E4M3): quantization of rows or of blocks, and matrix products of quantized tensors.
#include "../output.h"
#include "../torch_binding.h"
#include "linear.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kFp8Alignment = 16;  // bytes, of rows and thereby of their number of features

// --------------------------------------------------------------------------------------------------------
// Quantization

class QuantizeFp8Call {
 public:
  QuantizeFp8Call(const char* operation, const Tensor& x, bool is_blocked)
      : x_(x), check_(operation, "x", x), scales_(is_blocked ? fp8_blocks(check_.hidden()) : 1) {
    params_.hidden = check_.hidden();
    params_.dtype = check_.dtype();
    params_.is_blocked = is_blocked;
  }

  TwoTensors run() {
    TwoTensors out = check_.empty_fp8(check_.shape(), scales_);
    launch(Tensor(out.first), Tensor(out.second));
    return out;
  }

  void run(const Tensor& out, const Tensor& scale) {
    check_fp8_out(check_, out, scale, check_.shape(), scales_, {{"x", x_}});
    launch(out, scale);
  }

 private:
  void launch(const Tensor& out, const Tensor& scale) {
    // Rows without elements have a scale, too, unless it is one of no block.
    if (scale.numel() == 0) return;
    RowLaunch rows(check_.shape(), RowBinding{params_.x, x_}, RowBinding{params_.out, out},
                   RowBinding{params_.scale, scale});
    const DeviceStream device(x_);
    rows.run(params_.shape, [&] { quantize_fp8(params_, device.stream()); });
  }

  const Tensor& x_;
  const ArgumentChecker check_;
  const int64_t scales_;  // of a row
  QuantizeFp8Params params_{};
};

TwoTensors call_quantize_fp8(const char* operation, const Tensor& x, bool is_blocked) {
  return QuantizeFp8Call(operation, x, is_blocked).run();
}

void call_quantize_fp8_out(const char* operation, const Tensor& x, bool is_blocked, const Tensor& values_out,
                           const Tensor& scale_out) {
  QuantizeFp8Call(operation, x, is_blocked).run(values_out, scale_out);
}

// --------------------------------------------------------------------------------------------------------
// Products

struct Fp8LayerNames {
  const char *weight, *scale, *bias;
  LowRankNames low_rank;
};
constexpr Fp8LayerNames kLayer{"weight", "weight_scale", "bias", {"low", "up"}};
constexpr Fp8LayerNames kLayers[kMaxLinearLayers] = {
    {"weights[0]", "weight_scales[0]", "biases[0]", kLowRanks[0]},
    {"weights[1]", "weight_scales[1]", "biases[1]", kLowRanks[1]},
    {"weights[2]", "weight_scales[2]", "biases[2]", kLowRanks[2]}};

class LinearFp8Call {
 public:
  LinearFp8Call(const char* operation, const Tensor& x, const Tensor& x_scale, const Tensors& more_ups)
      : x_(x), x_scale_(x_scale), more_ups_(more_ups), check_(operation, "x", x, ArgumentChecker::Fp8{}) {
    params_.in_features = check_.hidden();
    check_in_features(check_, kFp8Alignment);
    params_.x_is_blocked = check_x_scale(check_, x_scale);
    check_.aligned("x", x, kFp8Alignment);
    params_.rows = x.numel() / params_.in_features;
    check_.countable("x", "number of rows", {params_.rows}, kMaxProductRows);
  }

  // With a 16-bit result its dtype, for the bias and the low-rank term.
  void add(const Fp8LayerNames& names, const Tensor& weight, const Tensor& scale, const OptionalTensor& bias,
           const OptionalTensor& low, const OptionalTensor& up, std::optional<DType> result = std::nullopt) {
    LinearLayer& added = params_.layers[params_.layer_count++];
    check_.same_device(names.weight, weight);
    check_.float8(names.weight, weight);
    if (weight.dim() != 2 || weight.size(1) != params_.in_features)
      fail(check_.operation(), names.weight, " must have shape (N, ", params_.in_features, "), got ",
           to_string(weight.sizes()));
    check_.contiguous(names.weight, weight);
    added.out_features = weight.size(0);
    added.has_one_scale = check_weight_scale(names.scale, scale, added.out_features);
    if (bias.has_value()) {
      added.bias_dtype = check_bias(names.bias, *bias, result);
      check_.exact_shape(names.bias, *bias, {added.out_features});
      added.bias = bias->const_data_ptr();
    }
    check_.aligned(names.weight, weight, kFp8Alignment);
    check_.countable(names.weight, "number of rows", {added.out_features}, kMaxProductRows);
    added.weight = weight.const_data_ptr();
    added.scale = static_cast<const float*>(scale.const_data_ptr());
    const LowRankTerm term{check_, names.low_rank, low, up, more_ups_};
    if (!term.is_given()) return;
    if (result.has_value()) term.check_dtype("the result", *result);
    params_.low_dtype = term.check(added);
    low_ = low;
  }

  // residual + gate * product of the only layer, with the residual's dtype.
  OwnedTensor run_residual(const Tensor& residual, const OptionalTensor& gate) {
    more_ups_.check_taken(check_.operation());
    const Sizes shape = shape_of(params_.layers[0]);
    const ArgumentChecker check(check_.operation(), "residual", residual, 1, false);
    check_.same_device("residual", residual);
    check.exact_shape("residual", residual, shape);
    if (gate.has_value()) {
      check.broadcastable("gate", *gate);
      params_.gate_is_float32 = gate->element_bytes() == 4;
    }
    if (low_.has_value()) check.same_dtype("low", *low_);
    params_.dtype = check.dtype();
    OwnedTensor out = check.empty(shape);
    RowOperand of_residual, of_gate;
    const auto launch = [&](const RowsAt& at, Stream stream) {
      params_.residual = at.data(of_residual, bytes_of(params_.dtype));
      params_.residual_stride = at.stride(of_residual);
      params_.gate = gate.has_value() ? at.data(of_gate, gate->element_bytes()) : nullptr;
      params_.gate_stride = at.stride(of_gate);
      linear_gated_residual_fp8(params_, stream);
    };
    for_rows(Tensor(out), launch, RowBinding{of_residual, residual}, RowBinding{of_gate, gate});
    return out;
  }

  // The 16-bit products of all weights.
  TensorList run(DType dtype) {
    more_ups_.check_taken(check_.operation());
    params_.dtype = dtype;
    TensorList outs;
    outs.reserve(static_cast<size_t>(params_.layer_count));
    int32_t count = 0;  // of layers that are not empty
    for (int32_t i = 0; i < params_.layer_count; ++i) {
      LinearLayer layer = params_.layers[i];
      outs.push_back(check_.empty(shape_of(layer), torch_dtype(dtype)));
      if (layer.out_features == 0) continue;
      layer.out = Tensor(outs.back()).mutable_data_ptr();
      layer.out_stride = layer.out_features;
      params_.layers[count++] = layer;
    }
    params_.layer_count = count;
    if (params_.rows == 0 || count == 0) return outs;
    params_.x = x_.const_data_ptr();
    params_.x_scale = static_cast<const float*>(x_scale_.const_data_ptr());
    const DeviceStream device(x_);
    linear_fp8(params_, device.stream());
    return outs;
  }

  // The quantized GELU of the product of the only layer.
  TwoTensors run_gelu(bool tanh_approximation) {
    const LinearLayer& layer = params_.layers[0];
    TwoTensors out = check_.empty_fp8(shape_of(layer), fp8_blocks(layer.out_features));
    launch_gelu(Tensor(out.first), Tensor(out.second), tanh_approximation);
    return out;
  }

  void run_gelu(bool tanh_approximation, const Tensor& out, const Tensor& scale,
                const std::vector<ReadTensor>& read) {
    const LinearLayer& layer = params_.layers[0];
    check_fp8_out(check_, out, scale, shape_of(layer), fp8_blocks(layer.out_features), read);
    launch_gelu(out, scale, tanh_approximation);
  }

 private:
  // The scale of a weight has one value, or one for each row of the weight.
  bool check_weight_scale(const char* name, const Tensor& scale, int64_t out_features) const {
    check_.same_device(name, scale);
    check_.float32(name, scale);
    const bool is_one = scale.numel() == 1 && scale.dim() <= 2;
    const bool is_column = scale.dim() == 2 && scale.size(0) == out_features && scale.size(1) == 1;
    if (!is_one && !is_column)
      fail(check_.operation(), name, " must have shape ", to_string(Sizes{out_features, 1}),
           " or one element, got ", to_string(scale.sizes()));
    check_.contiguous(name, scale);
    return is_one;
  }

  DType check_bias(const char* name, const Tensor& bias, std::optional<DType> result) const {
    check_.same_device(name, bias);
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      if (bias.dtype() == torch_dtype(dtype) && (!result || dtype == DType::kFloat32 || dtype == *result))
        return dtype;
    if (!result)
      fail(check_.operation(), name, " must be float32, float16 or bfloat16, got ",
           dtype_name(bias.scalar_type()));
    fail(check_.operation(), name, " must be float32 or have the dtype of the result (",
         *result == DType::kFloat16 ? "float16" : "bfloat16", "), got ", dtype_name(bias.scalar_type()));
  }

  Sizes shape_of(const LinearLayer& layer) const {
    Sizes shape = check_.shape();
    shape.back() = layer.out_features;
    return shape;
  }

  void launch_gelu(const Tensor& out, const Tensor& scale, bool tanh_approximation) {
    more_ups_.check_taken(check_.operation());
    params_.gelu = tanh_approximation ? Gelu::kTanh : Gelu::kErf;
    RowOperand of_scale;
    const auto launch = [&](const RowsAt& at, Stream stream) {
      params_.out_scale = static_cast<float*>(at.data(of_scale, sizeof(float)));
      params_.out_scale_stride = at.stride(of_scale);
      linear_gelu_fp8(params_, stream);
    };
    for_rows(out, launch, RowBinding{of_scale, scale});
  }

  // Calls launch(rows, stream) with the rows of the only layer in params_.
  template <typename Launch, typename... Tensors>
  void for_rows(const Tensor& out, const Launch& launch, const RowBinding<Tensors>&... others) {
    if (out.numel() == 0) return;
    RowShape shape;
    RowOperand of_x, of_x_scale, of_low, of_out;
    RowLaunch rows(check_.shape(), RowBinding{of_x, x_}, RowBinding{of_x_scale, x_scale_},
                   RowBinding{of_low, low_}, RowBinding{of_out, out}, others...);
    const DeviceStream device(x_);
    LinearLayer& layer = params_.layers[0];
    const auto launch_rows = [&] {
      for_each_index(shape, [&](const RowsAt& at) {
        params_.rows = at.rows();
        params_.x = at.data(of_x, 1);
        params_.x_scale = static_cast<const float*>(at.data(of_x_scale, sizeof(float)));
        layer.low = low_.has_value() ? at.data(of_low, low_->element_bytes()) : nullptr;
        layer.low_stride = at.stride(of_low);
        layer.out = at.data(of_out, out.element_bytes());
        layer.out_stride = at.stride(of_out);
        launch(at, device.stream());
      });
    };
    // The products read contiguous rows of x.
    rows.run(shape, launch_rows, true);
  }

  const Tensor &x_, &x_scale_;
  MoreUps more_ups_;
  const ArgumentChecker check_;
  OptionalTensor low_;  // of the last layer
  LinearParams params_{};
};

DType result_dtype(bool is_float16) { return is_float16 ? DType::kFloat16 : DType::kBFloat16; }

OwnedTensor call_linear_fp8(const char* operation, const Tensor& x, const Tensor& x_scale,
                            const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
                            const OptionalTensor& low, const OptionalTensor& up, bool is_float16,
                            const Tensors& more_ups) {
  LinearFp8Call call(operation, x, x_scale, more_ups);
  call.add(kLayer, weight, weight_scale, bias, low, up, result_dtype(is_float16));
  return std::move(call.run(result_dtype(is_float16)).front());
}

TensorList call_linears_fp8(const char* operation, const Tensor& x, const Tensor& x_scale,
                            const Tensor& weight_0, const Tensor& weight_scale_0,
                            const OptionalTensor& bias_0, const OptionalTensor& low_0,
                            const OptionalTensor& up_0, const Tensor& weight_1, const Tensor& weight_scale_1,
                            const OptionalTensor& bias_1, const OptionalTensor& low_1,
                            const OptionalTensor& up_1, const OptionalTensor& weight_2,
                            const OptionalTensor& weight_scale_2, const OptionalTensor& bias_2,
                            const OptionalTensor& low_2, const OptionalTensor& up_2, bool is_float16,
                            const Tensors& more_ups) {
  const DType dtype = result_dtype(is_float16);
  LinearFp8Call call(operation, x, x_scale, more_ups);
  call.add(kLayers[0], weight_0, weight_scale_0, bias_0, low_0, up_0, dtype);
  call.add(kLayers[1], weight_1, weight_scale_1, bias_1, low_1, up_1, dtype);
  if (weight_2.has_value() && weight_scale_2.has_value())
    call.add(kLayers[2], *weight_2, *weight_scale_2, bias_2, low_2, up_2, dtype);
  return call.run(dtype);
}

TwoTensors call_linear_gelu_fp8(const char* operation, const Tensor& x, const Tensor& x_scale,
                                const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
                                const OptionalTensor& low, const OptionalTensor& up, bool tanh_approximation,
                                const Tensors& more_ups) {
  LinearFp8Call call(operation, x, x_scale, more_ups);
  call.add(kLayer, weight, weight_scale, bias, low, up);
  return call.run_gelu(tanh_approximation);
}

void call_linear_gelu_fp8_out(const char* operation, const Tensor& x, const Tensor& x_scale,
                              const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
                              const OptionalTensor& low, const OptionalTensor& up, bool tanh_approximation,
                              const Tensor& values_out, const Tensor& scale_out, const Tensors& more_ups) {
  LinearFp8Call call(operation, x, x_scale, more_ups);
  call.add(kLayer, weight, weight_scale, bias, low, up);
  std::vector<ReadTensor> read{
      {"x", x},       {"x_scale", x_scale}, {"weight", weight}, {"weight_scale", weight_scale},
      {"bias", bias}, {"low", low},         {"up", up}};
  for (const Tensor& each : more_ups) read.push_back({"up", each});
  call.run_gelu(tanh_approximation, values_out, scale_out, read);
}

OwnedTensor call_linear_gated_residual_fp8(const char* operation, const Tensor& residual, const Tensor& x,
                                           const Tensor& x_scale, const Tensor& weight,
                                           const Tensor& weight_scale, const OptionalTensor& bias,
                                           const OptionalTensor& low, const OptionalTensor& up,
                                           const OptionalTensor& gate, const Tensors& more_ups) {
  LinearFp8Call call(operation, x, x_scale, more_ups);
  call.add(kLayer, weight, weight_scale, bias, low, up);
  return call.run_residual(residual, gate);
}

// In linears_fp8 the third weight and its scale are either both given or not. more_ups: MoreUps.
constexpr Operation kOperations[] = {
    operation<"quantize_fp8(Tensor x, bool is_blocked) -> (Tensor, Tensor)", call_quantize_fp8>(),
    operation<
        "quantize_fp8_out(Tensor x, bool is_blocked, Tensor(a!) values_out, Tensor(b!) scale_out) -> ()",
        call_quantize_fp8_out>(),
    operation<"linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
              " Tensor? low, Tensor? up, bool is_float16, Tensor[]? more_up=None) -> Tensor",
              call_linear_fp8>(),
    operation<"linears_fp8(Tensor x, Tensor x_scale, Tensor weight_0, Tensor weight_scale_0, Tensor? bias_0,"
              " Tensor? low_0, Tensor? up_0, Tensor weight_1, Tensor weight_scale_1, Tensor? bias_1,"
              " Tensor? low_1, Tensor? up_1, Tensor? weight_2, Tensor? weight_scale_2, Tensor? bias_2,"
              " Tensor? low_2, Tensor? up_2, bool is_float16, Tensor[]? more_ups=None) -> Tensor[]",
              call_linears_fp8>(),
    operation<"linear_gated_residual_fp8(Tensor residual, Tensor x, Tensor x_scale, Tensor weight,"
              " Tensor weight_scale, Tensor? bias, Tensor? low, Tensor? up, Tensor? gate,"
              " Tensor[]? more_up=None) -> Tensor",
              call_linear_gated_residual_fp8>(),
    operation<"linear_gelu_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
              " Tensor? low, Tensor? up, bool tanh_approximation,"
              " Tensor[]? more_up=None) -> (Tensor, Tensor)",
              call_linear_gelu_fp8>(),
    operation<
        "linear_gelu_fp8_out(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
        " Tensor? low, Tensor? up, bool tanh_approximation, Tensor(a!) values_out, Tensor(b!) scale_out,"
        " Tensor[]? more_up=None) -> ()",
        call_linear_gelu_fp8_out>(),
};

}  // namespace

std::span<const Operation> fp8_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
