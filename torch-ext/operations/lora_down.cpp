// LoRA's first products: of one x, FP8 or 16-bit, and the matrices of several adapters and layers.
#include <cmath>

#include "../torch_binding.h"
#include "linear.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kAlignment = 16;  // bytes, of rows and thereby of their number of features
constexpr const char* kNames[kMaxLoraDowns] = {"downs[0]", "downs[1]", "downs[2]",  "downs[3]",
                                               "downs[4]", "downs[5]", "downs[6]",  "downs[7]",
                                               "downs[8]", "downs[9]", "downs[10]", "downs[11]"};

ArgumentChecker checker_of(const char* operation, const Tensor& x, bool is_fp8) {
  if (is_fp8) return {operation, "x", x, ArgumentChecker::Fp8{}};
  if (x.dtype() == aoti_torch_dtype_float8_e4m3fn())
    fail(operation, "x_scale must be given with a float8_e4m3fn x, got None");
  return {operation, "x", x, 1, false};
}

class LoraDownCall {
 public:
  LoraDownCall(const char* operation, const Tensor& x, const OptionalTensor& x_scale, const Tensor& down,
               double scale, const Tensors& more_downs, const Numbers& more_scales)
      : x_(x), x_scale_(x_scale), check_(checker_of(operation, x, is_fp8())) {
    if (!is_fp8()) check_.contiguous("x", x);
    params_.in_features = check_.hidden();
    check_in_features(check_, kAlignment / x.element_bytes());
    params_.x_is_blocked = is_fp8() && check_x_scale(check_, *x_scale);
    check_.aligned("x", x, kAlignment);
    params_.rows = x.numel() / params_.in_features;
    check_.countable("x", "number of rows", {params_.rows}, kMaxProductRows);
    if (more_downs.size() != more_scales.size() || more_downs.size() >= kMaxLoraDowns)
      fail(operation, "downs must hold 1 to ", kMaxLoraDowns, " tensors, with a scale each");
    int64_t columns = lora_columns(add(down, scale, down));
    for (size_t i = 0; i < more_downs.size(); ++i)
      columns += lora_columns(add(more_downs[i], more_scales[i], down));
    if (columns > kMaxLoraColumns)
      fail(operation, "downs must have at most ", kMaxLoraColumns,
           " rows, each number rounded up to a multiple of ", kLoraColumnStep, ", got ", columns);
    params_.columns = static_cast<int32_t>(columns);
    out_dtype_ = down.dtype();
    params_.dtype = out_dtype_ == torch_dtype(DType::kFloat16) ? DType::kFloat16 : DType::kBFloat16;
  }

  OwnedTensor run() {
    Sizes shape = check_.shape();
    shape.back() = params_.columns;
    OwnedTensor out = check_.empty(shape, out_dtype_);
    if (params_.rows == 0) return out;
    params_.x = x_.const_data_ptr();
    if (is_fp8()) params_.x_scale = static_cast<const float*>(x_scale_->const_data_ptr());
    params_.out = Tensor(out).mutable_data_ptr();
    const DeviceStream device(x_);
    lora_down(params_, device.stream());
    return out;
  }

 private:
  bool is_fp8() const { return x_scale_.has_value(); }

  // Returns the number of rows.
  int64_t add(const Tensor& tensor, double given_scale, const Tensor& first) {
    const int32_t index = params_.down_count++;
    const char* name = kNames[index];
    check_.same_device(name, tensor);
    if (!is_fp8())
      check_.same_dtype(name, tensor);
    else if (index > 0)
      check_.same_dtype_as(name, tensor, kNames[0], first);
    else if (tensor.dtype() != torch_dtype(DType::kFloat16) &&
             tensor.dtype() != torch_dtype(DType::kBFloat16))
      fail(check_.operation(), name, " must be float16 or bfloat16, got ", dtype_name(tensor.scalar_type()));
    if (tensor.dim() != 2 || tensor.size(1) != params_.in_features)
      fail(check_.operation(), name, " must have shape (R, ", params_.in_features, "), got ",
           to_string(tensor.sizes()));
    const int64_t rows = tensor.size(0);
    if (rows < 1 || rows > kMaxLoraColumns)
      fail(check_.operation(), name, " must have 1 to ", kMaxLoraColumns, " rows, got ", rows);
    check_.contiguous(name, tensor);
    check_.aligned(name, tensor, kAlignment);
    const auto scale = static_cast<float>(given_scale);
    if (!std::isfinite(scale))
      fail(check_.operation(), "scales[", index, "] must be finite in float32, got ", given_scale);
    params_.downs[index] = {tensor.const_data_ptr(), static_cast<int32_t>(rows), scale};
    return rows;
  }

  const Tensor& x_;
  const OptionalTensor& x_scale_;
  const ArgumentChecker check_;
  int32_t out_dtype_;
  LoraDownParams params_{};
};

OwnedTensor call_lora_down(const char* operation, const Tensor& x, const OptionalTensor& x_scale,
                           const Tensor& down, double scale, const Tensors& more_downs,
                           const Numbers& more_scales) {
  return LoraDownCall(operation, x, x_scale, down, scale, more_downs, more_scales).run();
}

constexpr Operation kOperations[] = {
    operation<"lora_down(Tensor x, Tensor? x_scale, Tensor down, float scale, Tensor[]? more_downs=None,"
              " float[]? more_scales=None) -> Tensor",
              call_lora_down>(),
};

}  // namespace

std::span<const Operation> lora_down_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
