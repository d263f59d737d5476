// Norm, modulation, residual and gate.
#include <algorithm>
#include <tuple>

#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

using RowNormLauncher = void (*)(const RowNormParams&, Stream);

// The optional operands of a row operation.
struct RowNormArguments {
  OptionalTensor residual = {}, gate = {}, scale = {}, shift = {}, second_scale = {}, second_shift = {},
                 weight = {}, bias = {};
  double eps = 0.0;
  OptionalTensor scale_row = {}, shift_row = {}, gate_row = {}, addend = {}, x_weight = {};
  std::optional<double> x_eps = {};
  bool has_tanh_gate = false;
  OptionalTensor index = {};
};

enum class RowNormOutputs { kNone, kOne, kPair, kQuantized };

// The new residual and the outputs: one, two, or the quantized one and its scales. Null if the operation does
// not have them.
struct RowNormResults {
  OwnedTensor residual, out, second_out, scales;
};

// Returns whether the residual is float32 beside a 16-bit x, in a call that accepts it.
bool has_float32_residual(RowNormLauncher launcher, const Tensor& x, const RowNormArguments& arguments,
                          RowNormOutputs outputs) {
  if (launcher != gated_residual && launcher != gated_residual_rms_norm_modulate) return false;
  if (arguments.residual->scalar_type() != ScalarType::Float) return false;
  if (x.scalar_type() != ScalarType::Half && x.scalar_type() != ScalarType::BFloat16) return false;
  for (const OptionalTensor* part :
       {&arguments.addend, &arguments.gate_row, &arguments.scale_row, &arguments.shift_row, &arguments.index})
    if (part->has_value()) return false;
  return outputs != RowNormOutputs::kQuantized && !arguments.x_eps.has_value() && !arguments.has_tanh_gate;
}

RowNormResults run_row_norm(const char* operation, RowNormLauncher launcher, const Tensor& x,
                            const RowNormArguments& arguments,
                            RowNormOutputs outputs = RowNormOutputs::kOne) {
  RowNormParams params{};
  const bool has_residual = arguments.residual.has_value();
  params.has_float32_residual = has_float32_residual(launcher, x, arguments, outputs);
  const bool x_leads = !has_residual || params.has_float32_residual;
  const ArgumentChecker check(operation, x_leads ? "x" : "residual", x_leads ? x : *arguments.residual);
  if (params.has_float32_residual) {
    check.same_device("residual", *arguments.residual);
    check.exact_shape("residual", *arguments.residual, check.shape());
  } else if (has_residual) {
    check.same_shape("x", x, check.shape());
  }
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  params.eps = static_cast<float>(arguments.eps);
  if (arguments.index.has_value()) check.row_index("index", *arguments.index);
  int64_t table_rows = 0;
  const auto modulator = [&](const char* name, const OptionalTensor& tensor, Modulator& operand) {
    if (!tensor.has_value()) return;
    operand.is_float32 = tensor->element_bytes() == 4;
    if (!arguments.index.has_value()) return check.broadcastable(name, *tensor);
    table_rows = check.table(name, *tensor, table_rows);
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
  vector("gate's row", arguments.gate_row, params.gate_row);
  vector("scale's row", arguments.scale_row, params.scale_row);
  vector("shift's row", arguments.shift_row, params.shift_row);
  vector("x_weight", arguments.x_weight, params.x_weight);
  if (arguments.addend.has_value()) check.same_shape("addend", *arguments.addend, check.shape());
  params.normalizes_x = arguments.x_eps.has_value();
  params.x_eps = static_cast<float>(arguments.x_eps.value_or(0.0));
  params.has_tanh_gate = arguments.has_tanh_gate;
  params.table_rows = static_cast<int32_t>(std::min(table_rows, kMaxRows));
  if (arguments.index.has_value() && table_rows == 0)
    fail(operation, "index must be None without a scale, shift or gate, got a tensor");

  RowNormResults results;
  const bool is_quantized = outputs == RowNormOutputs::kQuantized;
  if (is_quantized)
    std::tie(results.out, results.scales) = check.empty_fp8(check.shape());
  else if (outputs != RowNormOutputs::kNone)
    results.out = check.empty(check.shape());
  if (outputs == RowNormOutputs::kPair) results.second_out = check.empty(check.shape());
  if (has_residual) results.residual = check.empty(check.shape(), arguments.residual->dtype());
  // Rows without elements have a scale, too.
  if (is_quantized ? Tensor(results.scales).numel() == 0 : x.numel() == 0) return results;

  // Tables are operands of no row.
  const auto by_row = [&](const OptionalTensor& modulator) {
    return arguments.index.has_value() ? OptionalTensor{} : modulator;
  };
  const OptionalTensor gate = by_row(arguments.gate), scale = by_row(arguments.scale),
                       shift = by_row(arguments.shift);
  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.residual, arguments.residual},
                   RowBinding{params.addend, arguments.addend}, RowBinding{params.gate, gate},
                   RowBinding{params.scale, scale}, RowBinding{params.shift, shift},
                   RowBinding{params.second_scale, arguments.second_scale},
                   RowBinding{params.second_shift, arguments.second_shift},
                   RowBinding{params.residual_out, results.residual}, RowBinding{params.out, results.out},
                   is_quantized ? RowBinding{params.row_scale, results.scales}
                                : RowBinding{params.second_out, results.second_out});
  launch.add(RowElements{params.index, arguments.index});
  const auto table = [&](const OptionalTensor& tensor, Modulator& operand) {
    if (!arguments.index.has_value() || !tensor.has_value()) return;
    operand.data = const_cast<void*>(tensor->const_data_ptr());
    std::ranges::fill(operand.strides, tensor->stride(0));
  };
  table(arguments.gate, params.gate);
  table(arguments.scale, params.scale);
  table(arguments.shift, params.shift);
  const DeviceStream device(x);
  launch.run(params.shape, [&] { launcher(params, device.stream()); });
  return results;
}

RowNormArguments norm_arguments(const OptionalTensor& weight, const OptionalTensor& bias,
                                const OptionalTensor& scale, const OptionalTensor& shift, double eps,
                                const OptionalTensor& scale_row, const OptionalTensor& shift_row,
                                const OptionalTensor& index) {
  return {.scale = scale,
          .shift = shift,
          .weight = weight,
          .bias = bias,
          .eps = eps,
          .scale_row = scale_row,
          .shift_row = shift_row,
          .index = index};
}

OwnedTensor call_norm(const char*, const Tensor& x, bool is_layer_norm, const OptionalTensor& weight,
                      const OptionalTensor& bias, const OptionalTensor& scale, const OptionalTensor& shift,
                      double eps, const OptionalTensor& scale_row, const OptionalTensor& shift_row,
                      const OptionalTensor& index) {
  const RowNormArguments arguments =
      norm_arguments(weight, bias, scale, shift, eps, scale_row, shift_row, index);
  if (scale || shift)
    return is_layer_norm ? run_row_norm("layer_norm_modulate", layer_norm_modulate, x, arguments).out
                         : run_row_norm("rms_norm_modulate", rms_norm_modulate, x, arguments).out;
  return is_layer_norm ? run_row_norm("layer_norm", layer_norm, x, arguments).out
                       : run_row_norm("rms_norm", rms_norm, x, arguments).out;
}

TwoTensors call_norm_fp8(const char*, const Tensor& x, bool is_layer_norm, const OptionalTensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& scale, const OptionalTensor& shift,
                         double eps, const OptionalTensor& scale_row, const OptionalTensor& shift_row,
                         const OptionalTensor& index) {
  const bool is_modulated = scale || shift;
  const char* operation = is_layer_norm ? (is_modulated ? "layer_norm_modulate_fp8" : "layer_norm_fp8")
                                        : (is_modulated ? "rms_norm_modulate_fp8" : "rms_norm_fp8");
  RowNormResults results =
      run_row_norm(operation, is_layer_norm ? layer_norm_modulate : rms_norm_modulate, x,
                   norm_arguments(weight, bias, scale, shift, eps, scale_row, shift_row, index),
                   RowNormOutputs::kQuantized);
  return {std::move(results.out), std::move(results.scales)};
}

TwoTensors call_layer_norm_modulate_pair(const char* operation, const Tensor& x, const OptionalTensor& scale,
                                         const OptionalTensor& shift, const OptionalTensor& second_scale,
                                         const OptionalTensor& second_shift, const OptionalTensor& weight,
                                         const OptionalTensor& bias, double eps) {
  RowNormResults results = run_row_norm(operation, layer_norm_modulate_pair, x,
                                        {.scale = scale,
                                         .shift = shift,
                                         .second_scale = second_scale,
                                         .second_shift = second_shift,
                                         .weight = weight,
                                         .bias = bias,
                                         .eps = eps},
                                        RowNormOutputs::kPair);
  return {std::move(results.out), std::move(results.second_out)};
}

OwnedTensor call_gated_residual(const char* operation, const Tensor& residual, const Tensor& x,
                                const OptionalTensor& gate, const OptionalTensor& gate_row,
                                const OptionalTensor& addend, const OptionalTensor& x_weight,
                                const std::optional<double>& x_eps, bool tanh_gate,
                                const OptionalTensor& index) {
  const RowNormArguments arguments{.residual = residual,
                                   .gate = gate,
                                   .gate_row = gate_row,
                                   .addend = addend,
                                   .x_weight = x_weight,
                                   .x_eps = x_eps,
                                   .has_tanh_gate = tanh_gate,
                                   .index = index};
  return run_row_norm(operation, gated_residual, x, arguments, RowNormOutputs::kNone).residual;
}

RowNormResults run_gated_residual_norm_modulate(
    const char* operation, RowNormOutputs outputs, const Tensor& residual, const Tensor& x,
    bool is_layer_norm, const OptionalTensor& gate, const OptionalTensor& scale, const OptionalTensor& shift,
    const OptionalTensor& weight, const OptionalTensor& bias, double eps, const OptionalTensor& scale_row,
    const OptionalTensor& shift_row, const OptionalTensor& gate_row, const OptionalTensor& addend,
    const OptionalTensor& x_weight, const std::optional<double>& x_eps, bool tanh_gate,
    const OptionalTensor& index) {
  return run_row_norm(
      operation, is_layer_norm ? gated_residual_layer_norm_modulate : gated_residual_rms_norm_modulate, x,
      {.residual = residual,
       .gate = gate,
       .scale = scale,
       .shift = shift,
       .weight = weight,
       .bias = bias,
       .eps = eps,
       .scale_row = scale_row,
       .shift_row = shift_row,
       .gate_row = gate_row,
       .addend = addend,
       .x_weight = x_weight,
       .x_eps = x_eps,
       .has_tanh_gate = tanh_gate,
       .index = index},
      outputs);
}

TwoTensors call_gated_residual_norm_modulate(
    const char*, const Tensor& residual, const Tensor& x, bool is_layer_norm, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& scale_row, const OptionalTensor& shift_row,
    const OptionalTensor& gate_row, const OptionalTensor& addend, const OptionalTensor& x_weight,
    const std::optional<double>& x_eps, bool tanh_gate, const OptionalTensor& index) {
  RowNormResults results = run_gated_residual_norm_modulate(
      is_layer_norm ? "gated_residual_layer_norm_modulate" : "gated_residual_rms_norm_modulate",
      RowNormOutputs::kOne, residual, x, is_layer_norm, gate, scale, shift, weight, bias, eps, scale_row,
      shift_row, gate_row, addend, x_weight, x_eps, tanh_gate, index);
  return {std::move(results.residual), std::move(results.out)};
}

ThreeTensors call_gated_residual_norm_modulate_fp8(
    const char*, const Tensor& residual, const Tensor& x, bool is_layer_norm, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& weight,
    const OptionalTensor& bias, double eps, const OptionalTensor& scale_row, const OptionalTensor& shift_row,
    const OptionalTensor& gate_row, const OptionalTensor& addend, const OptionalTensor& x_weight,
    const std::optional<double>& x_eps, bool tanh_gate, const OptionalTensor& index) {
  RowNormResults results = run_gated_residual_norm_modulate(
      is_layer_norm ? "gated_residual_layer_norm_modulate_fp8" : "gated_residual_rms_norm_modulate_fp8",
      RowNormOutputs::kQuantized, residual, x, is_layer_norm, gate, scale, shift, weight, bias, eps,
      scale_row, shift_row, gate_row, addend, x_weight, x_eps, tanh_gate, index);
  return {std::move(results.residual), std::move(results.out), std::move(results.scales)};
}

ThreeTensors call_gated_residual_layer_norm_modulate_pair(
    const char* operation, const Tensor& residual, const Tensor& x, const OptionalTensor& gate,
    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& second_scale,
    const OptionalTensor& second_shift, const OptionalTensor& weight, const OptionalTensor& bias,
    double eps) {
  RowNormResults results = run_row_norm(operation, gated_residual_layer_norm_modulate_pair, x,
                                        {.residual = residual,
                                         .gate = gate,
                                         .scale = scale,
                                         .shift = shift,
                                         .second_scale = second_scale,
                                         .second_shift = second_shift,
                                         .weight = weight,
                                         .bias = bias,
                                         .eps = eps},
                                        RowNormOutputs::kPair);
  return {std::move(results.residual), std::move(results.out), std::move(results.second_out)};
}

// `norm` serves rms_norm, layer_norm, rms_norm_modulate and layer_norm_modulate. `_fp8` returns quantized
// values and their scales in place of the output.
constexpr Operation kOperations[] = {
    operation<"norm(Tensor x, bool is_layer_norm, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift,"
              " float eps, Tensor? scale_row=None, Tensor? shift_row=None, Tensor? index=None) -> Tensor",
              call_norm>(),
    operation<"norm_fp8(Tensor x, bool is_layer_norm, Tensor? weight, Tensor? bias, Tensor? scale,"
              " Tensor? shift, float eps, Tensor? scale_row=None, Tensor? shift_row=None, Tensor? index=None)"
              " -> (Tensor, Tensor)",
              call_norm_fp8>(),
    operation<"layer_norm_modulate_pair(Tensor x, Tensor? scale, Tensor? shift, Tensor? second_scale,"
              " Tensor? second_shift, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
              call_layer_norm_modulate_pair>(),
    operation<
        "gated_residual(Tensor residual, Tensor x, Tensor? gate, Tensor? gate_row=None, Tensor? addend=None,"
        " Tensor? x_weight=None, float? x_eps=None, bool tanh_gate=False, Tensor? index=None) -> Tensor",
        call_gated_residual>(),
    operation<
        "gated_residual_norm_modulate(Tensor residual, Tensor x, bool is_layer_norm, Tensor? gate,"
        " Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, Tensor? scale_row=None,"
        " Tensor? shift_row=None, Tensor? gate_row=None, Tensor? addend=None, Tensor? x_weight=None,"
        " float? x_eps=None, bool tanh_gate=False, Tensor? index=None) -> (Tensor, Tensor)",
        call_gated_residual_norm_modulate>(),
    operation<
        "gated_residual_norm_modulate_fp8(Tensor residual, Tensor x, bool is_layer_norm, Tensor? gate,"
        " Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, Tensor? scale_row=None,"
        " Tensor? shift_row=None, Tensor? gate_row=None, Tensor? addend=None, Tensor? x_weight=None,"
        " float? x_eps=None, bool tanh_gate=False, Tensor? index=None) -> (Tensor, Tensor, Tensor)",
        call_gated_residual_norm_modulate_fp8>(),
    operation<"gated_residual_layer_norm_modulate_pair(Tensor residual, Tensor x, Tensor? gate,"
              " Tensor? scale, Tensor? shift, Tensor? second_scale, Tensor? second_shift, Tensor? weight,"
              " Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
              call_gated_residual_layer_norm_modulate_pair>(),
};

}  // namespace

std::span<const Operation> norm_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
