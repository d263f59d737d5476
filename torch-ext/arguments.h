// The operations' helpers on Torch's stable ABI: argument checks with one-sentence errors, merging of leading
// dimensions, output allocation and the stream to run on.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "boxing.h"
#include "params.h"

namespace h100_diffusers_kernels {

// The sizes or strides of a tensor without a heap allocation: the CPU time of a call matters beside a small
// kernel.
class Sizes {
 public:
  static constexpr size_t kCapacity = 64;

  Sizes(std::initializer_list<int64_t> values) : Sizes(values.begin(), values.end()) {}
  template <typename Iterator>
  Sizes(Iterator first, Iterator last) : size_(static_cast<size_t>(last - first)) {
    if (size_ > kCapacity) throw std::logic_error("a tensor's number of dimensions was not checked");
    std::copy(first, last, values_);
  }
  Sizes(const Sizes& other) : Sizes(other.begin(), other.end()) {}
  Sizes& operator=(const Sizes& other) {
    size_ = other.size_;
    std::copy(other.begin(), other.end(), values_);
    return *this;
  }

  size_t size() const { return size_; }
  void shrink(size_t size) { size_ = size; }
  const int64_t* data() const { return values_; }
  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + size_; }
  int64_t& operator[](size_t i) { return values_[i]; }
  int64_t operator[](size_t i) const { return values_[i]; }
  int64_t& back() { return values_[size_ - 1]; }
  int64_t back() const { return values_[size_ - 1]; }
  bool operator==(const Sizes& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  size_t size_;
  int64_t values_[kCapacity];
};

// Parts of an error text. No iostreams: they need an initialized C++ library in each build that links it.
inline std::string part(std::string_view text) { return std::string(text); }
inline std::string part(char letter) { return std::string(1, letter); }
inline std::string part(std::integral auto number) { return std::to_string(number); }
std::string part(double number);

template <typename... Parts>
[[noreturn]] void fail(const char* operation, const Parts&... parts) {
  std::string sentence = std::string(operation) + ": ";
  ((sentence += part(parts)), ...);
  throw std::invalid_argument(sentence);  // a ValueError in Python
}

std::string to_string(std::span<const int64_t> sizes);
inline std::string to_string(const Sizes& sizes) { return to_string({sizes.data(), sizes.size()}); }
std::string dtype_name(ScalarType dtype);
std::string device_name(const Tensor& tensor);
Sizes sizes_of(const Tensor& tensor);

// Checks the arguments of one call. `x` is the tensor whose dtype, device and shape the others follow.
class ArgumentChecker {
 public:
  // x: supported dtype and device, from `min_dims` to 64 dimensions, unit stride in the last one, or
  // in any dimension with `Strides::kAny`.
  enum class Strides { kUnitLast, kAny };
  ArgumentChecker(const char* operation, const char* x_name, const Tensor& x, int64_t min_dims = 1,
                  bool accepts_float32 = true, Strides strides = Strides::kUnitLast);
  // x: float8_e4m3fn, contiguous. The checker has no dtype then.
  enum class Fp8 {};
  ArgumentChecker(const char* operation, const char* x_name, const Tensor& x, Fp8);

  // Same dtype, device and unit last stride as x; shape exactly `shape`.
  void same_shape(const char* name, const Tensor& tensor, const Sizes& shape) const;
  // As same_shape, for a one-dimensional and therefore contiguous weight or bias. With `accepts_float32` it
  // may be float32 for any dtype of x.
  const void* vector(const char* name, const OptionalTensor& tensor, int64_t length,
                     bool accepts_float32 = false) const;
  // A value for each sample and channel of x, whose first two dimensions they are: shape (batch, channels),
  // unit last stride, float32 or of x's dtype. Sets the operand.
  void sample_channels(const char* name, const OptionalTensor& tensor, Modulator& operand) const;
  // `what`, the product of the sizes, is at most `limit`. Not checked for an empty x.
  void countable(const char* name, const char* what, std::initializer_list<int64_t> sizes,
                 int64_t limit = kMaxRows) const;
  // Broadcasts right-aligned against x in all dimensions except the last; float32 or of x's dtype.
  void broadcastable(const char* name, const Tensor& tensor) const;

  void same_device(const char* name, const Tensor& tensor) const;
  void same_dtype(const char* name, const Tensor& tensor) const;
  void same_dtype_as(const char* name, const Tensor& tensor, const char* other_name,
                     const Tensor& other) const;
  // Shape exactly `shape`, and readable.
  void exact_shape(const char* name, const Tensor& tensor, const Sizes& shape) const;
  // Stride 1 in the last dimension, and a storage that holds all elements.
  void readable(const char* name, const Tensor& tensor) const;
  // Only the storage check.
  void stored(const char* name, const Tensor& tensor) const;
  void contiguous(const char* name, const Tensor& tensor) const;
  void aligned(const char* name, const Tensor& tensor, int64_t bytes) const;
  void float8(const char* name, const Tensor& tensor) const;
  void float32(const char* name, const Tensor& tensor) const;
  void float32_or_same_dtype(const char* name, const Tensor& tensor) const;

  // A table (rows, hidden), float32 or of x's dtype; `rows` is 0 if any number of them is accepted. Returns
  // it.
  int64_t table(const char* name, const Tensor& tensor, int64_t rows) const;
  // An int32 for each row: broadcasts right-aligned against x's dimensions except the last.
  void row_index(const char* name, const Tensor& tensor) const;

  // A new contiguous tensor on x's device, of x's dtype or one in Torch's numbering.
  OwnedTensor empty(const Sizes& shape) const { return empty(shape, x_.dtype()); }
  OwnedTensor empty(const Sizes& shape, int32_t dtype) const;
  // New contiguous FP8 values of this shape, and float32 scales, this number a row.
  TwoTensors empty_fp8(const Sizes& shape, int64_t scales = 1) const;
  // The same as empty, with dense channels (dimension 1).
  OwnedTensor empty_channels_last(const Sizes& shape) const;

  DType dtype() const { return dtype_; }
  const Sizes& shape() const { return shape_; }
  int64_t hidden() const { return shape_.back(); }
  const char* operation() const { return operation_; }
  const char* x_name() const { return x_name_; }

 private:
  void on_device() const;
  void has_dims(int64_t min_dims) const;
  OwnedTensor empty_strided(const Sizes& shape, const int64_t* strides, int64_t elements,
                            int32_t dtype) const;

  const char* operation_;
  const char* x_name_;
  const Tensor& x_;
  Sizes shape_;
  DType dtype_;
};

// A row operand and the (optional) tensor behind it; `offset` is its first element in each row.
template <typename T>
struct RowBinding {
  RowOperand& operand;
  const T& tensor;
  int64_t offset = 0;
};

// An operand with one element in each row, and the (optional) tensor behind it, which has no last dimension.
struct RowElements {
  RowOperand& operand;
  const OptionalTensor& tensor;
};

// Collects the row operands of one launch, merges leading dimensions that are contiguous in all of them, and
// calls `launch`. If more than kMaxRowDims dimensions or kMaxRows rows remain, it splits the rows over
// several launches, each with the largest dimensions, so that they are few.
class RowLaunch {
 public:
  // shape: full shape of the operand with the most dimensions. The leading dimensions of the bindings'
  // tensors broadcast right-aligned against it.
  template <typename... Tensors>
  explicit RowLaunch(const Sizes& shape, const RowBinding<Tensors>&... bindings)
      : leading_(shape.begin(), shape.end() - 1) {
    static_assert(sizeof...(bindings) <= kMaxOperands);
    (add(bindings.operand, bindings.tensor, bindings.offset), ...);
  }

  void add(const RowElements& elements) {
    elements.operand = RowOperand{};
    if (elements.tensor.has_value())
      add(elements.operand, *elements.tensor, 0, static_cast<size_t>(elements.tensor->dim()));
  }

  // keeps_last: whether consecutive rows of a launch are those of the last dimension.
  template <typename Launch>
  void run(RowShape& shape, const Launch& launch, bool keeps_last = false) {
    merge();
    sort(keeps_last);
    run_dims(leading_.size(), shape, launch);
  }

 private:
  struct Operand {
    RowOperand* target;
    char* data;
    int64_t element_bytes;
    int64_t strides[Sizes::kCapacity];
  };

  // own: number of the tensor's leading dimensions
  void add(RowOperand& operand, const Tensor& tensor, int64_t offset, size_t own);
  void add(RowOperand& operand, const Tensor& tensor, int64_t offset);
  void add(RowOperand& operand, const OptionalTensor& tensor, int64_t offset);
  void add(RowOperand& operand, const OwnedTensor& tensor, int64_t offset);
  void merge();
  void sort(bool keeps_last);
  int64_t rows(size_t dims) const;
  void write(size_t dims, RowShape& shape) const;
  void advance(size_t dim, int64_t steps);

  // Launches over the first `dims` leading dimensions. The operands already point at one index of the others.
  template <typename Launch>
  void run_dims(size_t dims, RowShape& shape, const Launch& launch) {
    if (dims > kMaxRowDims) {
      const size_t last = dims - 1;
      for (int64_t i = 0; i < leading_[last]; ++i) {
        run_dims(last, shape, launch);
        advance(last, 1);
      }
      advance(last, -leading_[last]);
      return;
    }
    const size_t largest = dims == 2 && leading_[1] > leading_[0] ? 1 : 0;
    const int64_t size = leading_[largest];
    const int64_t step = std::min(size, std::max<int64_t>(kMaxRows / (rows(dims) / size), 1));
    for (int64_t i = 0; i < size; i += step) {
      leading_[largest] = std::min(step, size - i);
      write(dims, shape);
      launch();
      advance(largest, step);
    }
    leading_[largest] = size;
    advance(largest, -(size + step - 1) / step * step);
  }

  Sizes leading_;
  static constexpr size_t kMaxOperands = 12;
  Operand operands_[kMaxOperands];
  size_t operand_count_ = 0;
};

// Makes the tensor's device current for its lifetime, and holds Torch's current stream on it.
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
