// What the operations need of Torch's C++ (stable ABI only): argument checks that answer in one sentence,
// the merging of leading dimensions, output allocation and the stream to run on.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "params.h"

namespace h100_diffusers_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

template <typename... Parts>
[[noreturn]] void fail(const char* operation, const Parts&... parts) {
  std::ostringstream sentence;
  sentence << operation << ": ";
  ((sentence << parts), ...);
  throw std::runtime_error(sentence.str());
}

std::string to_string(const Sizes& sizes);
std::string dtype_name(ScalarType dtype);
std::string device_name(const Tensor& tensor);
Sizes sizes_of(const Tensor& tensor);

// Checks the arguments of one call. `x` is the tensor whose dtype, device and shape the others follow.
class ArgumentChecker {
 public:
  // x: supported dtype and device, at least `min_dims` dimensions, unit stride in the last one.
  ArgumentChecker(const char* operation, const char* x_name, const Tensor& x, int64_t min_dims = 1);

  // Same dtype, device and unit last stride as x; shape exactly `shape`.
  void same_shape(const char* name, const Tensor& tensor, const Sizes& shape) const;
  // As same_shape, and contiguous by having one dimension: a weight or a bias.
  const void* vector(const char* name, const OptionalTensor& tensor, int64_t length) const;
  // Broadcasts right-aligned against x in all dimensions but the last.
  void broadcastable(const char* name, const Tensor& tensor) const;

  void same_device(const char* name, const Tensor& tensor) const;
  void same_dtype(const char* name, const Tensor& tensor) const;
  void same_dtype_as(const char* name, const Tensor& tensor, const char* other_name,
                     const Tensor& other) const;
  void unit_last_stride(const char* name, const Tensor& tensor) const;
  void float32(const char* name, const Tensor& tensor) const;
  void float32_or_same_dtype(const char* name, const Tensor& tensor) const;

  DType dtype() const { return dtype_; }
  const Sizes& shape() const { return shape_; }
  int64_t hidden() const { return shape_.back(); }
  const char* operation() const { return operation_; }
  const char* x_name() const { return x_name_; }

 private:
  const char* operation_;
  const char* x_name_;
  const Tensor& x_;
  Sizes shape_;
  DType dtype_;
};

// A contiguous tensor of x's dtype and device.
Tensor empty(const Tensor& x, const Sizes& shape);

// Collects the row operands of one launch, merges the leading dimensions that all of them step through in
// the same way, and calls `launch` with the result: once, or once for each index of the dimensions that are
// left over beyond kMaxRowDims.
class RowLaunch {
 public:
  explicit RowLaunch(Sizes leading) : leading_(std::move(leading)) {}

  // The tensor's leading dimensions broadcast right-aligned against the launch's.
  void add(RowOperand& operand, const Tensor& tensor, bool is_present = true);
  void add(RowOperand& operand, const OptionalTensor& tensor);

  template <typename Launch>
  void run(RowShape& shape, DType dtype, const Launch& launch) {
    merge();
    run_from(0, shape, dtype, launch);
  }

 private:
  struct Operand {
    RowOperand* target;
    char* data;
    Sizes strides;
  };

  void merge();
  void write(size_t first_dim, RowShape& shape) const;

  template <typename Launch>
  void run_from(size_t dim, RowShape& shape, DType dtype, const Launch& launch) {
    if (leading_.size() - dim <= kMaxRowDims) {
      write(dim, shape);
      launch();
      return;
    }
    const int64_t element_bytes = dtype == DType::kFloat32 ? 4 : 2;
    for (int64_t i = 0; i < leading_[dim]; ++i) {
      run_from(dim + 1, shape, dtype, launch);
      for (Operand& operand : operands_) operand.data += operand.strides[dim] * element_bytes;
    }
    for (Operand& operand : operands_) operand.data -= leading_[dim] * operand.strides[dim] * element_bytes;
  }

  Sizes leading_;
  std::vector<Operand> operands_;
};

// Makes the tensor's device current for its lifetime and holds the stream that Torch is using on it.
class DeviceStream {
 public:
  explicit DeviceStream(const Tensor& tensor);
  Stream stream() const { return stream_; }

 private:
#ifdef CUDA_KERNEL
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  Stream stream_;
};

}  // namespace h100_diffusers_kernels
