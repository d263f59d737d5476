// Norm, modulation, residual and gate.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using RowNormLauncher = void (*)(const RowNormParams&, Stream);

// The operands of a row operation; those that an operation does not have stay empty.
struct RowNormArguments {
  OptionalTensor residual = {}, gate = {}, scale = {}, shift = {}, weight = {}, bias = {};
  double eps = 0.0;
};

// The new residual, where the operation has one, and the output, if `has_output`.
struct RowNormResults {
  OwnedTensor residual, out;
  TwoTensors both() && { return {std::move(residual), std::move(out)}; }
};

RowNormResults run_row_norm(const char* operation, RowNormLauncher launcher, const Tensor& x,
                            const RowNormArguments& arguments, bool has_output = true) {
  const bool has_residual = arguments.residual.has_value();
  const Tensor& leader = has_residual ? *arguments.residual : x;
  const ArgumentChecker check(operation, has_residual ? "residual" : "x", leader);
  if (has_residual) check.same_shape("x", x, check.shape());

  RowNormParams params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  params.eps = static_cast<float>(arguments.eps);
  if (arguments.gate.has_value()) check.broadcastable("gate", *arguments.gate);
  if (arguments.scale.has_value()) check.broadcastable("scale", *arguments.scale);
  if (arguments.shift.has_value()) check.broadcastable("shift", *arguments.shift);
  params.weight = check.vector("weight", arguments.weight, check.hidden());
  params.bias = check.vector("bias", arguments.bias, check.hidden());

  RowNormResults results;
  if (has_output) results.out = check.empty(check.shape());
  if (has_residual) results.residual = check.empty(check.shape());
  if (x.numel() == 0) return results;

  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.residual, arguments.residual},
                   RowBinding{params.gate, arguments.gate}, RowBinding{params.scale, arguments.scale},
                   RowBinding{params.shift, arguments.shift},
                   RowBinding{params.residual_out, results.residual}, RowBinding{params.out, results.out});
  const DeviceStream device(x);
  launch.run(params.shape, params.dtype, [&] { launcher(params, device.stream()); });
  return results;
}

template <RowNormLauncher launcher>
OwnedTensor of_rms_norm(const char* operation, const Tensor& x, const OptionalTensor& weight, double eps) {
  return run_row_norm(operation, launcher, x, {.weight = weight, .eps = eps}).out;
}

template <RowNormLauncher launcher>
OwnedTensor of_layer_norm(const char* operation, const Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x, {.weight = weight, .bias = bias, .eps = eps}).out;
}

template <RowNormLauncher launcher>
OwnedTensor of_modulated_rms_norm(const char* operation, const Tensor& x, const Tensor& scale,
                                  const Tensor& shift, const OptionalTensor& weight, double eps) {
  return run_row_norm(operation, launcher, x, {.scale = scale, .shift = shift, .weight = weight, .eps = eps})
      .out;
}

template <RowNormLauncher launcher>
OwnedTensor of_modulated_layer_norm(const char* operation, const Tensor& x, const Tensor& scale,
                                    const Tensor& shift, const OptionalTensor& weight,
                                    const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.scale = scale, .shift = shift, .weight = weight, .bias = bias, .eps = eps})
      .out;
}

template <RowNormLauncher launcher>
OwnedTensor of_residual(const char* operation, const Tensor& residual, const Tensor& x,
                        const OptionalTensor& gate) {
  return run_row_norm(operation, launcher, x, {.residual = residual, .gate = gate}, false).residual;
}

template <RowNormLauncher launcher>
TwoTensors of_residual_and_rms_norm(const char* operation, const Tensor& residual, const Tensor& x,
                                    const OptionalTensor& gate, const Tensor& scale, const Tensor& shift,
                                    const OptionalTensor& weight, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .eps = eps})
      .both();
}

template <RowNormLauncher launcher>
TwoTensors of_residual_and_layer_norm(const char* operation, const Tensor& residual, const Tensor& x,
                                      const OptionalTensor& gate, const Tensor& scale, const Tensor& shift,
                                      const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps})
      .both();
}

constexpr Operation kOperations[] = {
    operation<"rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", of_rms_norm<rms_norm>>(),
    operation<"layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
              of_layer_norm<layer_norm>>(),
    operation<"rms_norm_modulate(Tensor x, Tensor scale, Tensor shift, Tensor? weight, float eps) -> Tensor",
              of_modulated_rms_norm<rms_norm_modulate>>(),
    operation<"layer_norm_modulate(Tensor x, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias,"
              " float eps) -> Tensor",
              of_modulated_layer_norm<layer_norm_modulate>>(),
    operation<"gated_residual(Tensor residual, Tensor x, Tensor? gate) -> Tensor",
              of_residual<gated_residual>>(),
    operation<"gated_residual_rms_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor scale,"
              " Tensor shift, Tensor? weight, float eps) -> (Tensor, Tensor)",
              of_residual_and_rms_norm<gated_residual_rms_norm_modulate>>(),
    operation<"gated_residual_layer_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor scale,"
              " Tensor shift, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
              of_residual_and_layer_norm<gated_residual_layer_norm_modulate>>(),
};

}  // namespace

std::span<const Operation> norm_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
