// Activations.
#include <optional>

#include "../output.h"
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using ActivationLauncher = void (*)(const ActivationParams&, Stream);

struct Activation {
  const char* name;
  ActivationLauncher launcher;
  bool is_gated;              // x and gate are halves of the last dimension
  bool takes_blocks = false;  // in FP8, with a scale for each
};

const Activation& activation_of(bool is_silu, bool is_gated) {
  static constexpr Activation kActivations[] = {
      {"gelu", gelu, false}, {"silu", silu, false}, {"geglu", geglu, true}, {"swiglu", swiglu, true}};
  return kActivations[(is_gated ? 2 : 0) + (is_silu ? 1 : 0)];
}

const Activation& fp8_activation_of(bool is_silu, bool is_gated) {
  static constexpr Activation kActivations[] = {{"gelu_fp8", gelu, false},
                                                {"silu_fp8", silu, false},
                                                {"geglu_fp8", geglu, true},
                                                {"swiglu_fp8", swiglu, true, true}};
  return kActivations[(is_gated ? 2 : 0) + (is_silu ? 1 : 0)];
}

class ActivationCall {
 public:
  ActivationCall(const Activation& activation, const Tensor& x, const OptionalTensor& bias,
                 bool tanh_approximation, bool first_is_activated, bool is_blocked = false)
      : activation_(activation), x_(x), bias_(bias), check_(activation.name, "x", x), shape_(check_.shape()) {
    if (activation.is_gated) {
      if (check_.hidden() % 2 != 0)
        fail(activation.name, "x must have an even last dimension, got ", check_.hidden());
      shape_.back() /= 2;
      gate_ = x;
    }
    if (is_blocked && !activation.takes_blocks) fail(activation.name, "is_blocked must be False, got True");
    params_.is_blocked = is_blocked;
    params_.hidden = shape_.back();
    params_.dtype = check_.dtype();
    params_.tanh_approximation = tanh_approximation;
    params_.bias = check_.vector("bias", bias, check_.hidden());
    if (!activation.is_gated) return;
    gate_offset_ = params_.hidden;
    if (params_.bias != nullptr)
      params_.gate_bias = static_cast<const char*>(params_.bias) + params_.hidden * bytes_of(params_.dtype);
    if (first_is_activated) {
      std::swap(x_offset_, gate_offset_);
      std::swap(params_.bias, params_.gate_bias);
    }
  }

  OwnedTensor run() {
    OwnedTensor out = check_.empty(shape_);
    if (x_.numel() > 0) launch(Tensor(out));
    return out;
  }

  // The values and their scales.
  TwoTensors run_fp8() {
    TwoTensors out = check_.empty_fp8(shape_, scales());
    launch_fp8(Tensor(out.first), Tensor(out.second));
    return out;
  }

  void run_fp8(const Tensor& out, const Tensor& scale) {
    check_fp8_out(check_, out, scale, shape_, scales(), {{"x", x_}, {"bias", bias_}});
    launch_fp8(out, scale);
  }

  void run(const Tensor& out) {
    const bool x_may_be_out = !activation_.is_gated;
    check_out(check_, out, shape_, {{"x", x_, x_may_be_out}, {"bias", bias_}});
    if (x_.numel() > 0) launch(out);
  }

 private:
  // Of a row.
  int64_t scales() const { return params_.is_blocked ? fp8_blocks(params_.hidden) : 1; }

  void launch_fp8(const Tensor& out, const Tensor& scale) {
    // Rows without elements have a scale, too, unless it is one of no block.
    if (scale.numel() > 0) launch(out, scale);
  }

  void launch(const Tensor& out, const OptionalTensor& scale = {}) {
    RowLaunch rows(shape_, RowBinding{params_.x, x_, x_offset_},
                   RowBinding{params_.gate, gate_, gate_offset_}, RowBinding{params_.out, out},
                   RowBinding{params_.scale, scale});
    const DeviceStream device(x_);
    rows.run(params_.shape, [&] { activation_.launcher(params_, device.stream()); });
  }

  const Activation& activation_;
  const Tensor& x_;
  const OptionalTensor& bias_;
  const ArgumentChecker check_;
  Sizes shape_;  // result
  OptionalTensor gate_;
  int64_t x_offset_ = 0, gate_offset_ = 0;  // elements from the start of a row of x
  ActivationParams params_{};
};

OwnedTensor call_activation(const char*, const Tensor& x, const OptionalTensor& bias, bool is_silu,
                            bool is_gated, bool tanh_approximation, bool first_is_activated) {
  return ActivationCall(activation_of(is_silu, is_gated), x, bias, tanh_approximation, first_is_activated)
      .run();
}

void call_activation_out(const char*, const Tensor& x, const OptionalTensor& bias, bool is_silu,
                         bool is_gated, bool tanh_approximation, bool first_is_activated, const Tensor& out) {
  ActivationCall(activation_of(is_silu, is_gated), x, bias, tanh_approximation, first_is_activated).run(out);
}

TwoTensors call_activation_fp8(const char*, const Tensor& x, const OptionalTensor& bias, bool is_silu,
                               bool is_gated, bool tanh_approximation, bool first_is_activated,
                               bool is_blocked) {
  const Activation& activation = fp8_activation_of(is_silu, is_gated);
  return ActivationCall(activation, x, bias, tanh_approximation, first_is_activated, is_blocked).run_fp8();
}

void call_activation_fp8_out(const char*, const Tensor& x, const OptionalTensor& bias, bool is_silu,
                             bool is_gated, bool tanh_approximation, bool first_is_activated, bool is_blocked,
                             const Tensor& values_out, const Tensor& scale_out) {
  const Activation& activation = fp8_activation_of(is_silu, is_gated);
  ActivationCall(activation, x, bias, tanh_approximation, first_is_activated, is_blocked)
      .run_fp8(values_out, scale_out);
}

constexpr Operation kOperations[] = {
    operation<"activation(Tensor x, Tensor? bias, bool is_silu, bool is_gated, bool tanh_approximation,"
              " bool first_is_activated) -> Tensor",
              call_activation>(),
    operation<"activation_out(Tensor x, Tensor? bias, bool is_silu, bool is_gated, bool tanh_approximation,"
              " bool first_is_activated, Tensor(a!) out) -> ()",
              call_activation_out>(),
    operation<"activation_fp8(Tensor x, Tensor? bias, bool is_silu, bool is_gated, bool tanh_approximation,"
              " bool first_is_activated, bool is_blocked) -> (Tensor, Tensor)",
              call_activation_fp8>(),
    operation<"activation_fp8_out(Tensor x, Tensor? bias, bool is_silu, bool is_gated,"
              " bool tanh_approximation, bool first_is_activated, bool is_blocked, Tensor(a!) values_out,"
              " Tensor(b!) scale_out) -> ()",
              call_activation_fp8_out>(),
};

}  // namespace

std::span<const Operation> activation_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
