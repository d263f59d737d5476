// Activations.
#include <optional>
#include <string_view>

#include "../output.h"
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using ActivationLauncher = void (*)(const ActivationParams&, Stream);

// One call of an activation: of x, of the two halves of x, or of x and a gate.
class ActivationCall {
 public:
  ActivationCall(const char* operation, const Tensor& x, bool is_packed)
      : x_(x), check_(operation, "x", x), shape_(check_.shape()), is_packed_(is_packed) {
    if (is_packed && check_.hidden() % 2 != 0)
      fail(operation, "x must have an even last dimension, got ", check_.hidden());
    if (is_packed) {
      shape_.back() /= 2;
      gate_ = x;
      gate_offset_ = shape_.back();
    }
    params_.hidden = shape_.back();
    params_.dtype = check_.dtype();
  }

  void set_gate(const Tensor& gate) {
    check_.same_shape("gate", gate, check_.shape());
    gate_ = gate;
  }

  void set_approximation(std::string_view name) {
    if (name != "none" && name != "tanh")
      fail(check_.operation(), "approximate must be 'none' or 'tanh', got '", name, "'");
    params_.tanh_approximation = name == "tanh";
  }

  void set_bias(const OptionalTensor& bias) {
    bias_ = bias;
    params_.bias = check_.vector("bias", bias, check_.hidden());
    if (is_packed_) params_.gate_bias = advanced(params_.bias, params_.hidden);
  }

  // Which half goes through the activation; called after set_bias.
  void set_activated(std::string_view half) {
    if (half != "first" && half != "second")
      fail(check_.operation(), "activated must be 'first' or 'second', got '", half, "'");
    if (half == "second") return;
    std::swap(x_offset_, gate_offset_);
    std::swap(params_.bias, params_.gate_bias);
  }

  OwnedTensor run(ActivationLauncher launcher) {
    OwnedTensor out = check_.empty(shape_);
    launch(launcher, Tensor(out));
    return out;
  }

  void run(ActivationLauncher launcher, const Tensor& out) {
    if (is_packed_)
      check_out(check_, out, shape_, {{"x", x_}, {"bias", bias_}});
    else
      check_out(check_, out, shape_, {{"x", x_, true}, {"gate", gate_, true}, {"bias", bias_}});
    launch(launcher, out);
  }

 private:
  const void* advanced(const void* data, int64_t elements) const {
    return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * bytes_of(params_.dtype);
  }

  void launch(ActivationLauncher launcher, const Tensor& out) {
    if (x_.numel() == 0) return;
    RowLaunch rows(shape_, RowBinding{params_.x, x_, x_offset_},
                   RowBinding{params_.gate, gate_, gate_offset_}, RowBinding{params_.out, out});
    const DeviceStream device(x_);
    rows.run(params_.shape, [&] { launcher(params_, device.stream()); });
  }

  const Tensor& x_;
  const ArgumentChecker check_;
  Sizes shape_;  // of the result
  bool is_packed_;
  OptionalTensor gate_, bias_;
  int64_t x_offset_ = 0, gate_offset_ = 0;  // where in a row they begin
  ActivationParams params_{};
};

// What each operation does with its arguments, up to the launch: with a new result, or with `out`, the last
// one.

template <ActivationLauncher launcher, typename... Out>
auto call_gelu(const char* operation, const Tensor& x, std::string_view approximate,
               const OptionalTensor& bias, const Out&... out) {
  ActivationCall call(operation, x, false);
  call.set_approximation(approximate);
  call.set_bias(bias);
  return call.run(launcher, out...);
}

template <ActivationLauncher launcher, typename... Out>
auto call_silu(const char* operation, const Tensor& x, const OptionalTensor& bias, const Out&... out) {
  ActivationCall call(operation, x, false);
  call.set_bias(bias);
  return call.run(launcher, out...);
}

template <ActivationLauncher launcher, typename... Out>
auto call_geglu(const char* operation, const Tensor& x, std::string_view approximate,
                const OptionalTensor& bias, std::string_view activated, const Out&... out) {
  ActivationCall call(operation, x, true);
  call.set_approximation(approximate);
  call.set_bias(bias);
  call.set_activated(activated);
  return call.run(launcher, out...);
}

template <ActivationLauncher launcher, typename... Out>
auto call_swiglu(const char* operation, const Tensor& x, const OptionalTensor& bias,
                 std::string_view activated, const Out&... out) {
  ActivationCall call(operation, x, true);
  call.set_bias(bias);
  call.set_activated(activated);
  return call.run(launcher, out...);
}

constexpr Operation kOperations[] = {
    operation<"gelu(Tensor x, str approximate, Tensor? bias) -> Tensor", call_gelu<gelu>>(),
    operation<"gelu_out(Tensor x, str approximate, Tensor? bias, Tensor(a!) out) -> ()",
              call_gelu<gelu, Tensor>>(),
    operation<"silu(Tensor x, Tensor? bias) -> Tensor", call_silu<silu>>(),
    operation<"silu_out(Tensor x, Tensor? bias, Tensor(a!) out) -> ()", call_silu<silu, Tensor>>(),
    operation<"geglu(Tensor x, str approximate, Tensor? bias, str activated) -> Tensor", call_geglu<geglu>>(),
    operation<"geglu_out(Tensor x, str approximate, Tensor? bias, str activated, Tensor(a!) out) -> ()",
              call_geglu<geglu, Tensor>>(),
    operation<"swiglu(Tensor x, Tensor? bias, str activated) -> Tensor", call_swiglu<swiglu>>(),
    operation<"swiglu_out(Tensor x, Tensor? bias, str activated, Tensor(a!) out) -> ()",
              call_swiglu<swiglu, Tensor>>(),
};

}  // namespace

std::span<const Operation> activation_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
