// Tensors and boxed calls on Torch's stable ABI, with little CPU time per call. Torch's own
// torch::stable::Tensor and TORCH_BOX cost an allocation per tensor and a call into Torch for each size read.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace h100_diffusers_kernels {

using torch::headeronly::ScalarType;

struct DeleteHandle {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};

// An owning reference to a tensor, or null.
using OwnedTensor = std::unique_ptr<std::remove_pointer_t<AtenTensorHandle>, DeleteHandle>;

// Torch's device type and index.
struct Device {
  int32_t type, index;
  bool operator==(const Device&) const = default;
};

// Bytes of an element of a dtype, in Torch's numbering, that operations take or return.
inline int64_t element_bytes_of(int32_t dtype) {
  if (dtype == aoti_torch_dtype_complex64()) return 8;
  if (dtype == aoti_torch_dtype_float8_e4m3fn()) return 1;
  return dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_int32() ? 4 : 2;
}

// A tensor owned elsewhere, with its metadata read once.
class Tensor {
 public:
  explicit Tensor(const OwnedTensor& tensor) : handle_(tensor.get()) {
    int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &dims));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle_, &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &strides));
    sizes_ = {sizes, static_cast<size_t>(dims)};
    strides_ = {strides, static_cast<size_t>(dims)};
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &dtype_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle_, &device_.type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &device_.index));
  }

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t dim) const { return sizes_[static_cast<size_t>(dim)]; }
  int64_t stride(int64_t dim) const { return strides_[static_cast<size_t>(dim)]; }
  std::span<const int64_t> sizes() const { return sizes_; }
  std::span<const int64_t> strides() const { return strides_; }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes_) count *= size;
    return count;
  }

  Device device() const { return device_; }
  int32_t dtype() const { return dtype_; }  // in Torch's numbering
  ScalarType scalar_type() const {
    // Common dtypes first: Torch's conversion compares all of them in turn.
    if (dtype_ == aoti_torch_dtype_bfloat16()) return ScalarType::BFloat16;
    if (dtype_ == aoti_torch_dtype_float32()) return ScalarType::Float;
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype_));
  }

  int64_t element_bytes() const { return element_bytes_of(dtype_); }

  // The storage's size, and the first element's index in it. Storages can be freed or resized.
  int64_t storage_bytes() const {
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle_, &bytes));
    return bytes;
  }
  int64_t storage_offset() const {
    int64_t offset = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle_, &offset));
    return offset;
  }

  const void* const_data_ptr() const {
    const void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &data));
    return data;
  }
  void* mutable_data_ptr() const {
    void* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_, &data));
    return data;
  }

 private:
  AtenTensorHandle handle_;
  std::span<const int64_t> sizes_, strides_;
  Device device_{};
  int32_t dtype_ = 0;
};

using OptionalTensor = std::optional<Tensor>;
using TwoTensors = std::pair<OwnedTensor, OwnedTensor>;
using ThreeTensors = std::tuple<OwnedTensor, OwnedTensor, OwnedTensor>;
using TensorList = std::vector<OwnedTensor>;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<double>;

// One argument of a call. It takes ownership from the stack, so that the value is freed in any case.
template <typename T>
class Argument {
 public:
  explicit Argument(StableIValue value) : value_(torch::stable::detail::to<T>(value)) {}
  T get() const { return value_; }

 private:
  T value_;
};

template <>
class Argument<Tensor> {
 public:
  explicit Argument(StableIValue value) : tensor_(torch::stable::detail::to<AtenTensorHandle>(value)) {}
  Tensor get() const { return Tensor(tensor_); }

 private:
  OwnedTensor tensor_;
};

template <>
class Argument<OptionalTensor> {
 public:
  explicit Argument(StableIValue value)
      : tensor_(torch::stable::detail::to<std::optional<AtenTensorHandle>>(value).value_or(nullptr)) {}
  OptionalTensor get() const { return tensor_ ? OptionalTensor(tensor_) : std::nullopt; }

 private:
  OwnedTensor tensor_;
};

struct DeleteList {
  void operator()(StableListHandle list) const { torch_delete_list(list); }
};

// Calls body with each item of a list or None, as a T.
template <typename T, typename Body>
void for_items(StableIValue value, const Body& body) {
  const auto list = torch::stable::detail::to<std::optional<StableListHandle>>(value);
  if (!list.has_value()) return;
  const std::unique_ptr<std::remove_pointer_t<StableListHandle>, DeleteList> owned(*list);
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(*list, &size));
  for (size_t i = 0; i < size; ++i) {
    StableIValue item{};
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(*list, i, &item));
    body(torch::stable::detail::to<T>(item));
  }
}

// A list or None, which is an empty one.
template <>
class Argument<Tensors> {
 public:
  explicit Argument(StableIValue value) {
    for_items<AtenTensorHandle>(value, [&](AtenTensorHandle tensor) { tensors_.emplace_back(tensor); });
  }
  Tensors get() const { return {tensors_.begin(), tensors_.end()}; }

 private:
  TensorList tensors_;
};

template <>
class Argument<Numbers> {
 public:
  explicit Argument(StableIValue value) {
    for_items<double>(value, [&](double number) { numbers_.push_back(number); });
  }
  Numbers get() const { return numbers_; }

 private:
  Numbers numbers_;
};

inline StableIValue released(OwnedTensor& tensor) { return torch::stable::detail::from(tensor.release()); }

inline StableIValue released(TensorList& tensors) {
  StableListHandle list = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(tensors.size(), &list));
  for (OwnedTensor& tensor : tensors) TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, released(tensor)));
  return torch::stable::detail::from(list);
}

// `Boxed<function, name>::call` is the boxed form of a function of the operation's name, tensors and numbers
// that returns one new tensor, several, a list of them or none.
template <auto function, const auto& name>
struct Boxed;

template <typename Result>
constexpr uint64_t kResults = std::tuple_size_v<Result>;
template <>
constexpr uint64_t kResults<void> = 0;
template <>
constexpr uint64_t kResults<OwnedTensor> = 1;
template <>
constexpr uint64_t kResults<TensorList> = 1;

template <typename Result, typename... Parameters, Result (*function)(const char*, Parameters...),
          const auto& name>
struct Boxed<function, name> {
  static void call(StableIValue* stack, uint64_t argument_count, uint64_t result_count) {
    STD_TORCH_CHECK(argument_count == sizeof...(Parameters) && result_count == kResults<Result>,
                    "the schema does not match its function");
    call(stack, std::index_sequence_for<Parameters...>{});
  }

 private:
  template <size_t... i>
  static void call(StableIValue* stack, std::index_sequence<i...>) {
    const std::tuple<Argument<std::remove_cvref_t<Parameters>>...> arguments(stack[i]...);
    if constexpr (std::is_void_v<Result>) {
      function(name.data(), std::get<i>(arguments).get()...);
    } else if constexpr (kResults<Result> == 1) {
      Result result = function(name.data(), std::get<i>(arguments).get()...);
      stack[0] = released(result);
    } else {
      Result results = function(name.data(), std::get<i>(arguments).get()...);
      std::apply([&](auto&... result) { ((*stack++ = released(result)), ...); }, results);
    }
  }
};

}  // namespace h100_diffusers_kernels
