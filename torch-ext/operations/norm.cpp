// Norm, modulation, residual and gate.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using RowNormLauncher = void (*)(const RowNormParams&, Stream);

// The operands of a row operation; those that an operation does not have stay empty.
struct RowNormArguments {
  OptionalTensor residual = {}, gate = {}, scale = {}, shift = {}, second_scale = {}, second_shift = {},
                 weight = {}, bias = {};
  double eps = 0.0;
};

// The new residual, where the operation has one, and its outputs.
struct RowNormResults {
  OwnedTensor residual, out, second_out;
  TwoTensors residual_and_out() && { return {std::move(residual), std::move(out)}; }
  TwoTensors outs() && { return {std::move(out), std::move(second_out)}; }
  ThreeTensors all() && { return {std::move(residual), std::move(out), std::move(second_out)}; }
};

RowNormResults run_row_norm(const char* operation, RowNormLauncher launcher, const Tensor& x,
                            const RowNormArguments& arguments, int outputs = 1) {
  const bool has_residual = arguments.residual.has_value();
  const Tensor& leader = has_residual ? *arguments.residual : x;
  const ArgumentChecker check(operation, has_residual ? "residual" : "x", leader);
  if (has_residual) check.same_shape("x", x, check.shape());

  RowNormParams params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  params.eps = static_cast<float>(arguments.eps);
  const auto modulator = [&](const char* name, const OptionalTensor& tensor, Modulator& operand) {
    if (!tensor.has_value()) return;
    check.broadcastable(name, *tensor);
    operand.is_float32 = tensor->element_bytes() == 4;
  };
  const auto vector = [&](const char* name, const OptionalTensor& tensor, Modulator& operand) {
    operand.data = const_cast<void*>(check.vector(name, tensor, check.hidden(), true));
    operand.is_float32 = tensor.has_value() && tensor->element_bytes() == 4;
  };
  modulator("gate", arguments.gate, params.gate);
  modulator("scale", arguments.scale, params.scale);
  modulator("shift", arguments.shift, params.shift);
  modulator("second_scale", arguments.second_scale, params.second_scale);
  modulator("second_shift", arguments.second_shift, params.second_shift);
  vector("weight", arguments.weight, params.weight);
  vector("bias", arguments.bias, params.bias);

  RowNormResults results;
  if (outputs > 0) results.out = check.empty(check.shape());
  if (outputs > 1) results.second_out = check.empty(check.shape());
  if (has_residual) results.residual = check.empty(check.shape());
  if (x.numel() == 0) return results;

  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.residual, arguments.residual},
                   RowBinding{params.gate, arguments.gate}, RowBinding{params.scale, arguments.scale},
                   RowBinding{params.shift, arguments.shift},
                   RowBinding{params.second_scale, arguments.second_scale},
                   RowBinding{params.second_shift, arguments.second_shift},
                   RowBinding{params.residual_out, results.residual}, RowBinding{params.out, results.out},
                   RowBinding{params.second_out, results.second_out});
  const DeviceStream device(x);
  launch.run(params.shape, [&] { launcher(params, device.stream()); });
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
                                  const OptionalTensor& shift, const OptionalTensor& weight, double eps) {
  return run_row_norm(operation, launcher, x, {.scale = scale, .shift = shift, .weight = weight, .eps = eps})
      .out;
}

template <RowNormLauncher launcher>
OwnedTensor of_modulated_layer_norm(const char* operation, const Tensor& x, const Tensor& scale,
                                    const OptionalTensor& shift, const OptionalTensor& weight,
                                    const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.scale = scale, .shift = shift, .weight = weight, .bias = bias, .eps = eps})
      .out;
}

template <RowNormLauncher launcher>
TwoTensors of_layer_norm_of_two_modulations(const char* operation, const Tensor& x,
                                            const OptionalTensor& scale, const OptionalTensor& shift,
                                            const OptionalTensor& second_scale,
                                            const OptionalTensor& second_shift, const OptionalTensor& weight,
                                            const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.scale = scale,
                       .shift = shift,
                       .second_scale = second_scale,
                       .second_shift = second_shift,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps},
                      2)
      .outs();
}

template <RowNormLauncher launcher>
OwnedTensor of_residual(const char* operation, const Tensor& residual, const Tensor& x,
                        const OptionalTensor& gate) {
  return run_row_norm(operation, launcher, x, {.residual = residual, .gate = gate}, 0).residual;
}

template <RowNormLauncher launcher>
TwoTensors of_residual_and_rms_norm(const char* operation, const Tensor& residual, const Tensor& x,
                                    const OptionalTensor& gate, const OptionalTensor& scale,
                                    const OptionalTensor& shift, const OptionalTensor& weight, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .eps = eps})
      .residual_and_out();
}

template <RowNormLauncher launcher>
TwoTensors of_residual_and_layer_norm(const char* operation, const Tensor& residual, const Tensor& x,
                                      const OptionalTensor& gate, const OptionalTensor& scale,
                                      const OptionalTensor& shift, const OptionalTensor& weight,
                                      const OptionalTensor& bias, double eps) {
  return run_row_norm(operation, launcher, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps})
      .residual_and_out();
}

template <RowNormLauncher launcher>
ThreeTensors of_residual_and_layer_norm_of_two_modulations(
    const char* operation, const Tensor& residual, const Tensor& x, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& second_scale,
    const OptionalTensor& second_shift, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps) {
  return run_row_norm(operation, launcher, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .second_scale = second_scale,
                       .second_shift = second_shift,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps},
                      2)
      .all();
}

constexpr Operation kOperations[] = {
    operation<"rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor", of_rms_norm<rms_norm>>(),
    operation<"layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
              of_layer_norm<layer_norm>>(),
    operation<"rms_norm_modulate(Tensor x, Tensor scale, Tensor? shift, Tensor? weight, float eps) -> Tensor",
              of_modulated_rms_norm<rms_norm_modulate>>(),
    operation<"layer_norm_modulate(Tensor x, Tensor scale, Tensor? shift, Tensor? weight, Tensor? bias,"
              " float eps) -> Tensor",
              of_modulated_layer_norm<layer_norm_modulate>>(),
    operation<"layer_norm_modulate_pair(Tensor x, Tensor? scale, Tensor? shift, Tensor? second_scale,"
              " Tensor? second_shift, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
              of_layer_norm_of_two_modulations<layer_norm_modulate_pair>>(),
    operation<"gated_residual(Tensor residual, Tensor x, Tensor? gate) -> Tensor",
              of_residual<gated_residual>>(),
    operation<"gated_residual_rms_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor? scale,"
              " Tensor? shift, Tensor? weight, float eps) -> (Tensor, Tensor)",
              of_residual_and_rms_norm<gated_residual_rms_norm_modulate>>(),
    operation<"gated_residual_layer_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor? scale,"
              " Tensor? shift, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
              of_residual_and_layer_norm<gated_residual_layer_norm_modulate>>(),
    operation<"gated_residual_layer_norm_modulate_pair(Tensor residual, Tensor x, Tensor? gate,"
              " Tensor? scale, Tensor? shift, Tensor? second_scale, Tensor? second_shift, Tensor? weight,"
              " Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
              of_residual_and_layer_norm_of_two_modulations<gated_residual_layer_norm_modulate_pair>>(),
};

}  // namespace

std::span<const Operation> norm_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
