// Activations.
#include <string_view>

#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using ActivationLauncher = void (*)(const ActivationParams&, Stream);

OwnedTensor run_activation(const char* operation, ActivationLauncher launcher, const Tensor& x, bool is_gated,
                           std::string_view approximate, const OptionalTensor& bias) {
  const ArgumentChecker check(operation, "x", x);
  if (is_gated && check.hidden() % 2 != 0)
    fail(operation, "x must have an even last dimension, got ", check.hidden());
  if (approximate != "none" && approximate != "tanh")
    fail(operation, "approximate must be 'none' or 'tanh', got '", approximate, "'");
  ActivationParams params{};
  params.hidden = is_gated ? check.hidden() / 2 : check.hidden();
  params.dtype = check.dtype();
  params.tanh_approximation = approximate == "tanh";
  params.bias = check.vector("bias", bias, check.hidden());
  Sizes out_shape = check.shape();
  out_shape.back() = params.hidden;
  OwnedTensor out = check.empty(out_shape);
  if (x.numel() == 0) return out;

  RowLaunch launch(out_shape, RowBinding{params.x, x}, RowBinding{params.out, out});
  const DeviceStream device(x);
  launch.run(params.shape, [&] { launcher(params, device.stream()); });
  return out;
}

template <ActivationLauncher launcher, bool is_gated>
OwnedTensor with_approximation(const char* operation, const Tensor& x, std::string_view approximate,
                               const OptionalTensor& bias) {
  return run_activation(operation, launcher, x, is_gated, approximate, bias);
}

template <ActivationLauncher launcher, bool is_gated>
OwnedTensor activation(const char* operation, const Tensor& x, const OptionalTensor& bias) {
  return run_activation(operation, launcher, x, is_gated, "none", bias);
}

constexpr Operation kOperations[] = {
    operation<"gelu(Tensor x, str approximate, Tensor? bias) -> Tensor", with_approximation<gelu, false>>(),
    operation<"silu(Tensor x, Tensor? bias) -> Tensor", activation<silu, false>>(),
    operation<"geglu(Tensor x, str approximate, Tensor? bias) -> Tensor", with_approximation<geglu, true>>(),
    operation<"swiglu(Tensor x, Tensor? bias) -> Tensor", activation<swiglu, true>>(),
};

}  // namespace

std::span<const Operation> activation_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
