// LoRA's first products: of one x, FP8 or 16-bit, and the matrices of several adapters and layers.
#include <array>
#include <cmath>

#include "../torch_binding.h"
#include "linear.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kAlignment = 16;  // bytes, of rows and thereby of their number of features
constexpr const char* kNames[kMaxLoraDowns] = {"downs[0]", "downs[1]", "downs[2]",  "downs[3]",
                                               "downs[4]", "downs[5]", "downs[6]",  "downs[7]",
                                               "downs[8]", "downs[9]", "downs[10]", "downs[11]"};

struct Down {
  OptionalTensor tensor;
  double scale;
};
using Downs = std::array<Down, kMaxLoraDowns>;

ArgumentChecker checker_of(const char* operation, const Tensor& x, bool is_fp8) {
  if (is_fp8) return {operation, "x", x, ArgumentChecker::Fp8{}};
  if (x.dtype() == aoti_torch_dtype_float8_e4m3fn())
    fail(operation, "x_scale must be given with a float8_e4m3fn x, got None");
  return {operation, "x", x, 1, false};
}

class LoraDownCall {
 public:
  LoraDownCall(const char* operation, const Tensor& x, const OptionalTensor& x_scale, const Downs& downs)
      : x_(x), x_scale_(x_scale), check_(checker_of(operation, x, is_fp8())) {
    if (!is_fp8()) check_.contiguous("x", x);
    params_.in_features = check_.hidden();
    check_in_features(check_, kAlignment / x.element_bytes());
    params_.x_is_blocked = is_fp8() && check_x_scale(check_, *x_scale);
    check_.aligned("x", x, kAlignment);
    params_.rows = x.numel() / params_.in_features;
    check_.countable("x", "number of rows", {params_.rows}, kMaxProductRows);
    const Tensor& first = *downs[0].tensor;
    int64_t columns = 0;
    for (const Down& down : downs) {
      if (!down.tensor.has_value()) break;
      columns += lora_columns(add(down, first));
    }
    if (columns > kMaxLoraColumns)
      fail(operation, "downs must have at most ", kMaxLoraColumns,
           " rows, each number rounded up to a multiple of ", kLoraColumnStep, ", got ", columns);
    params_.columns = static_cast<int32_t>(columns);
    out_dtype_ = first.dtype();
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
  int64_t add(const Down& down, const Tensor& first) {
    const int32_t index = params_.down_count++;
    const char* name = kNames[index];
    const Tensor& tensor = *down.tensor;
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
    const auto scale = static_cast<float>(down.scale);
    if (!std::isfinite(scale))
      fail(check_.operation(), "scales[", index, "] must be finite in float32, got ", down.scale);
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
                           const Tensor& down_0, const OptionalTensor& down_1, const OptionalTensor& down_2,
                           const OptionalTensor& down_3, const OptionalTensor& down_4,
                           const OptionalTensor& down_5, const OptionalTensor& down_6,
                           const OptionalTensor& down_7, const OptionalTensor& down_8,
                           const OptionalTensor& down_9, const OptionalTensor& down_10,
                           const OptionalTensor& down_11, double scale_0, double scale_1, double scale_2,
                           double scale_3, double scale_4, double scale_5, double scale_6, double scale_7,
                           double scale_8, double scale_9, double scale_10, double scale_11) {
  const Downs downs{{{down_0, scale_0},
                     {down_1, scale_1},
                     {down_2, scale_2},
                     {down_3, scale_3},
                     {down_4, scale_4},
                     {down_5, scale_5},
                     {down_6, scale_6},
                     {down_7, scale_7},
                     {down_8, scale_8},
                     {down_9, scale_9},
                     {down_10, scale_10},
                     {down_11, scale_11}}};
  return LoraDownCall(operation, x, x_scale, downs).run();
}

// Matrices after the first absent one are not read.
constexpr Operation kOperations[] = {
    operation<"lora_down(Tensor x, Tensor? x_scale,"
              " Tensor down_0, Tensor? down_1, Tensor? down_2, Tensor? down_3,"
              " Tensor? down_4, Tensor? down_5, Tensor? down_6, Tensor? down_7,"
              " Tensor? down_8, Tensor? down_9, Tensor? down_10, Tensor? down_11,"
              " float scale_0, float scale_1, float scale_2, float scale_3, float scale_4,"
              " float scale_5, float scale_6, float scale_7, float scale_8, float scale_9,"
              " float scale_10, float scale_11) -> Tensor",
              call_lora_down>(),
};

}  // namespace

std::span<const Operation> lora_down_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
