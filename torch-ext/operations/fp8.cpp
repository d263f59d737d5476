// FP8 (E4M3): quantization of rows or of blocks, and the matrix product of quantized tensors.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kFp8Alignment = 16;  // bytes, of rows and thereby of their number of features

int64_t fp8_blocks(int64_t hidden) { return (hidden + kFp8BlockSize - 1) / kFp8BlockSize; }

TwoTensors call_quantize_fp8(const char* operation, const Tensor& x, bool is_blocked) {
  const ArgumentChecker check(operation, "x", x);
  QuantizeFp8Params params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  params.is_blocked = is_blocked;
  auto [out, scale] = check.empty_fp8(check.shape(), is_blocked ? fp8_blocks(params.hidden) : 1);
  // Rows without elements have a scale, too, unless it is one of no block.
  if (Tensor(scale).numel() > 0) {
    RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.out, out},
                     RowBinding{params.scale, scale});
    const DeviceStream device(x);
    launch.run(params.shape, [&] { quantize_fp8(params, device.stream()); });
  }
  return {std::move(out), std::move(scale)};
}

// x_scale has one value a row, or one for each block of a row.
bool check_x_scale(const ArgumentChecker& check, const Tensor& x_scale) {
  check.same_device("x_scale", x_scale);
  check.float32("x_scale", x_scale);
  Sizes of_rows = check.shape(), of_blocks = check.shape();
  of_rows.back() = 1;
  of_blocks.back() = fp8_blocks(check.hidden());
  const std::span<const int64_t> sizes = x_scale.sizes();
  const auto has = [&](const Sizes& shape) { return std::ranges::equal(sizes, shape); };
  if (!has(of_rows) && !has(of_blocks))
    fail(check.operation(), "x_scale must have shape ", to_string(of_rows), " or ", to_string(of_blocks),
         ", got ", to_string(sizes));
  check.contiguous("x_scale", x_scale);
  return !has(of_rows);
}

// weight_scale has one value, or one for each row of the weight.
bool check_weight_scale(const ArgumentChecker& check, const Tensor& weight_scale, int64_t out_features) {
  check.same_device("weight_scale", weight_scale);
  check.float32("weight_scale", weight_scale);
  const bool is_one = weight_scale.numel() == 1 && weight_scale.dim() <= 2;
  const bool is_column =
      weight_scale.dim() == 2 && weight_scale.size(0) == out_features && weight_scale.size(1) == 1;
  if (!is_one && !is_column)
    fail(check.operation(), "weight_scale must have shape ", to_string(Sizes{out_features, 1}),
         " or one element, got ", to_string(weight_scale.sizes()));
  check.contiguous("weight_scale", weight_scale);
  return is_one;
}

OwnedTensor call_linear_fp8(const char* operation, const Tensor& x, const Tensor& x_scale,
                            const Tensor& weight, const Tensor& weight_scale, const OptionalTensor& bias,
                            bool is_float16) {
  const ArgumentChecker check(operation, "x", x, ArgumentChecker::Fp8{});
  LinearFp8Params params{};
  params.in_features = check.hidden();
  if (params.in_features < kFp8Alignment || params.in_features % kFp8Alignment != 0)
    fail(operation, "x must have a last dimension that is a positive multiple of ", kFp8Alignment, ", got ",
         params.in_features);
  params.x_is_blocked = check_x_scale(check, x_scale);

  check.same_device("weight", weight);
  check.float8("weight", weight);
  if (weight.dim() != 2 || weight.size(1) != params.in_features)
    fail(operation, "weight must have shape (N, ", params.in_features, "), got ", to_string(weight.sizes()));
  check.contiguous("weight", weight);
  params.out_features = weight.size(0);
  params.weight_has_one_scale = check_weight_scale(check, weight_scale, params.out_features);

  const int32_t dtype = is_float16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  params.dtype = is_float16 ? DType::kFloat16 : DType::kBFloat16;
  if (bias.has_value()) {
    params.bias_is_float32 = bias->dtype() == aoti_torch_dtype_float32();
    check.same_device("bias", *bias);
    if (!params.bias_is_float32 && bias->dtype() != dtype)
      fail(operation, "bias must be float32 or have the dtype of the result (",
           is_float16 ? "float16" : "bfloat16", "), got ", dtype_name(bias->scalar_type()));
    check.exact_shape("bias", *bias, {params.out_features});
    params.bias = bias->const_data_ptr();
  }
  check.aligned("x", x, kFp8Alignment);
  check.aligned("weight", weight, kFp8Alignment);
  params.rows = x.numel() / params.in_features;
  check.countable("x", "number of rows", {params.rows}, kMaxFp8Rows);
  check.countable("weight", "number of rows", {params.out_features}, kMaxFp8Rows);

  Sizes shape = check.shape();
  shape.back() = params.out_features;
  OwnedTensor out = check.empty(shape, dtype);
  if (params.rows == 0 || params.out_features == 0) return out;
  params.x = x.const_data_ptr();
  params.x_scale = static_cast<const float*>(x_scale.const_data_ptr());
  params.weight = weight.const_data_ptr();
  params.weight_scale = static_cast<const float*>(weight_scale.const_data_ptr());
  params.out = Tensor(out).mutable_data_ptr();
  const DeviceStream device(x);
  linear_fp8(params, device.stream());
  return out;
}

constexpr Operation kOperations[] = {
    operation<"quantize_fp8(Tensor x, bool is_blocked) -> (Tensor, Tensor)", call_quantize_fp8>(),
    operation<"linear_fp8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias,"
              " bool is_float16) -> Tensor",
              call_linear_fp8>(),
};

}  // namespace

std::span<const Operation> fp8_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
