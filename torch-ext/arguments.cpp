// Argument checks, merging of leading dimensions, allocation, stream: see arguments.h.

#include "arguments.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <utility>

#ifdef CUDA_KERNEL
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace h100_diffusers_kernels {

std::string part(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

std::string to_string(std::span<const int64_t> sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
#define H100_NAME(type, name) \
  case ScalarType::type:      \
    return #name;
    H100_NAME(Float, float32)
    H100_NAME(Half, float16)
    H100_NAME(BFloat16, bfloat16)
    H100_NAME(Double, float64)
    H100_NAME(Byte, uint8)
    H100_NAME(Char, int8)
    H100_NAME(Short, int16)
    H100_NAME(Int, int32)
    H100_NAME(Long, int64)
    H100_NAME(UInt16, uint16)
    H100_NAME(UInt32, uint32)
    H100_NAME(UInt64, uint64)
    H100_NAME(Bool, bool)
    H100_NAME(ComplexHalf, complex32)
    H100_NAME(ComplexFloat, complex64)
    H100_NAME(ComplexDouble, complex128)
    H100_NAME(Float8_e4m3fn, float8_e4m3fn)
    H100_NAME(Float8_e4m3fnuz, float8_e4m3fnuz)
    H100_NAME(Float8_e5m2, float8_e5m2)
    H100_NAME(Float8_e5m2fnuz, float8_e5m2fnuz)
    H100_NAME(Float8_e8m0fnu, float8_e8m0fnu)
    H100_NAME(Float4_e2m1fn_x2, float4_e2m1fn_x2)
    H100_NAME(QInt8, qint8)
    H100_NAME(QUInt8, quint8)
    H100_NAME(QInt32, qint32)
#undef H100_NAME
    default:
      return "Torch's dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

std::string device_name(const Tensor& tensor) {
  const auto [type, index] = tensor.device();
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  return "Torch's device type number " + std::to_string(type);
}

Sizes sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return Sizes(sizes.begin(), sizes.end());
}

namespace {

// Empty for tensors with more than kCapacity dimensions, which the checker then refuses.
Sizes leading_shape(const Tensor& tensor) {
  return tensor.sizes().size() > Sizes::kCapacity ? Sizes{} : sizes_of(tensor);
}

}  // namespace

ArgumentChecker::ArgumentChecker(const char* operation, const char* x_name, const Tensor& x, int64_t min_dims,
                                 bool accepts_float32, Strides strides)
    : operation_(operation), x_name_(x_name), x_(x), shape_(leading_shape(x)) {
  on_device();
  const ScalarType dtype = x.scalar_type();
  if (dtype == ScalarType::BFloat16) {
    dtype_ = DType::kBFloat16;
  } else if (dtype == ScalarType::Half) {
    dtype_ = DType::kFloat16;
  } else if (dtype == ScalarType::Float && accepts_float32) {
    dtype_ = DType::kFloat32;
  } else {
    fail(operation_, x_name_, " must be ", accepts_float32 ? "float32, " : "", "float16 or bfloat16, got ",
         dtype_name(dtype));
  }
  has_dims(min_dims);
  if (strides == Strides::kUnitLast)
    readable(x_name_, x);
  else
    stored(x_name_, x);
}

ArgumentChecker::ArgumentChecker(const char* operation, const char* x_name, const Tensor& x, Fp8)
    : operation_(operation), x_name_(x_name), x_(x), shape_(leading_shape(x)), dtype_{} {
  on_device();
  float8(x_name_, x);
  has_dims(1);
  contiguous(x_name_, x);
}

void ArgumentChecker::has_dims(int64_t min_dims) const {
  if (x_.sizes().size() > Sizes::kCapacity)
    fail(operation_, x_name_, " must have at most ", Sizes::kCapacity, " dimensions, got ", x_.dim());
  if (x_.dim() < min_dims)
    fail(operation_, x_name_, " must have at least ", min_dims, min_dims == 1 ? " dimension" : " dimensions",
         ", got shape ", to_string(shape_));
}

void ArgumentChecker::on_device() const {
#ifdef CUDA_KERNEL
  if (x_.device().type != aoti_torch_device_type_cuda())
    fail(operation_, x_name_, " must be on a CUDA device (this build has CUDA kernels), got ",
         device_name(x_));
  const int capability = compute_capability(x_.device().index);
  if (capability != 90)
    fail(operation_, x_name_, " must be on a GPU of compute capability 9.0, got ", device_name(x_),
         " of compute capability ", capability / 10, ".", capability % 10);
#else
  if (x_.device().type != aoti_torch_device_type_cpu())
    fail(operation_, x_name_, " must be on the CPU (this build has CPU kernels), got ", device_name(x_));
#endif
}

void ArgumentChecker::readable(const char* name, const Tensor& tensor) const {
  const int64_t last = tensor.dim() - 1;
  if (last >= 0 && tensor.size(last) > 1 && tensor.stride(last) != 1)
    fail(operation_, name, " must have stride 1 in its last dimension, got stride ", tensor.stride(last));
  stored(name, tensor);
}

void ArgumentChecker::stored(const char* name, const Tensor& tensor) const {
  int64_t end = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return;
    end += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const int64_t bytes = tensor.storage_bytes();
  if (bytes < end * tensor.element_bytes())
    fail(operation_, name, " must have a storage of at least ", end * tensor.element_bytes(),
         " bytes, got one of ", bytes, " bytes");
}

void ArgumentChecker::contiguous(const char* name, const Tensor& tensor) const {
  int64_t stride = 1;
  for (int64_t dim = tensor.dim(); dim-- > 0 && tensor.numel() > 0;) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != stride)
      fail(operation_, name, " must be contiguous, got shape ", to_string(tensor.sizes()), " with strides ",
           to_string(tensor.strides()));
    stride *= tensor.size(dim);
  }
  stored(name, tensor);
}

void ArgumentChecker::aligned(const char* name, const Tensor& tensor, int64_t bytes) const {
  const auto excess = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<uintptr_t>(bytes);
  if (excess != 0)
    fail(operation_, name, " must be aligned to ", bytes, " bytes, got an address that is ", excess,
         excess == 1 ? " byte" : " bytes", " past a multiple of them");
}

void ArgumentChecker::same_device(const char* name, const Tensor& tensor) const {
  if (tensor.device() != x_.device())
    fail(operation_, name, " must be on the device of ", x_name_, " (", device_name(x_), "), got ",
         device_name(tensor));
}

void ArgumentChecker::same_dtype(const char* name, const Tensor& tensor) const {
  same_dtype_as(name, tensor, x_name_, x_);
}

void ArgumentChecker::same_dtype_as(const char* name, const Tensor& tensor, const char* other_name,
                                    const Tensor& other) const {
  if (tensor.dtype() != other.dtype())
    fail(operation_, name, " must have the dtype of ", other_name, " (", dtype_name(other.scalar_type()),
         "), got ", dtype_name(tensor.scalar_type()));
}

void ArgumentChecker::float8(const char* name, const Tensor& tensor) const {
  if (tensor.dtype() != aoti_torch_dtype_float8_e4m3fn())
    fail(operation_, name, " must be float8_e4m3fn, got ", dtype_name(tensor.scalar_type()));
}

void ArgumentChecker::float32(const char* name, const Tensor& tensor) const {
  if (tensor.scalar_type() != ScalarType::Float)
    fail(operation_, name, " must be float32, got ", dtype_name(tensor.scalar_type()));
}

void ArgumentChecker::float32_or_same_dtype(const char* name, const Tensor& tensor) const {
  if (tensor.dtype() != x_.dtype() && tensor.scalar_type() != ScalarType::Float)
    fail(operation_, name, " must be float32 or have the dtype of ", x_name_, " (",
         dtype_name(x_.scalar_type()), "), got ", dtype_name(tensor.scalar_type()));
}

void ArgumentChecker::same_shape(const char* name, const Tensor& tensor, const Sizes& shape) const {
  same_device(name, tensor);
  same_dtype(name, tensor);
  exact_shape(name, tensor, shape);
}

void ArgumentChecker::exact_shape(const char* name, const Tensor& tensor, const Sizes& shape) const {
  const auto sizes = tensor.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()))
    fail(operation_, name, " must have shape ", to_string(shape), ", got ", to_string(tensor.sizes()));
  readable(name, tensor);
}

const void* ArgumentChecker::vector(const char* name, const OptionalTensor& tensor, int64_t length,
                                    bool accepts_float32) const {
  if (!tensor.has_value()) return nullptr;
  same_device(name, *tensor);
  if (accepts_float32)
    float32_or_same_dtype(name, *tensor);
  else
    same_dtype(name, *tensor);
  exact_shape(name, *tensor, {length});
  return tensor->const_data_ptr();
}

void ArgumentChecker::sample_channels(const char* name, const OptionalTensor& tensor,
                                      Modulator& operand) const {
  if (!tensor.has_value()) return;
  same_device(name, *tensor);
  float32_or_same_dtype(name, *tensor);
  exact_shape(name, *tensor, {shape_[0], shape_[1]});
  operand.data = const_cast<void*>(tensor->const_data_ptr());
  operand.strides[0] = shape_[0] == 1 ? 0 : tensor->stride(0);
  operand.is_float32 = tensor->element_bytes() == 4;
}

void ArgumentChecker::countable(const char* name, const char* what, std::initializer_list<int64_t> sizes,
                                int64_t limit) const {
  int64_t count = 1;
  bool overflows = false;
  for (const int64_t size : sizes) overflows |= __builtin_mul_overflow(count, size, &count);
  if ((!overflows && count <= limit) || x_.numel() == 0) return;
  std::string factors;
  const char* separator = "";
  for (const int64_t size : sizes) factors += std::exchange(separator, " * ") + std::to_string(size);
  fail(operation_, name, " must have a ", what, " of at most ", limit, ", got ", factors);
}

void ArgumentChecker::broadcastable(const char* name, const Tensor& tensor) const {
  same_device(name, tensor);
  float32_or_same_dtype(name, tensor);
  const int64_t dims = tensor.dim();
  const int64_t x_dims = static_cast<int64_t>(shape_.size());
  bool matches = dims >= 1 && dims <= x_dims && tensor.size(dims - 1) == hidden();
  for (int64_t i = 0; matches && i < dims - 1; ++i) {
    const int64_t size = tensor.size(i);
    matches = size == 1 || size == shape_[static_cast<size_t>(x_dims - dims + i)];
  }
  if (!matches)
    fail(operation_, name, " must broadcast against ", x_name_, " of shape ", to_string(shape_),
         " with a last dimension of ", hidden(), ", got ", to_string(tensor.sizes()));
  readable(name, tensor);
}

int64_t ArgumentChecker::table(const char* name, const Tensor& tensor, int64_t rows) const {
  same_device(name, tensor);
  float32_or_same_dtype(name, tensor);
  if (tensor.dim() != 2 || tensor.size(0) < 1 || tensor.size(1) != hidden() ||
      (rows > 0 && tensor.size(0) != rows))
    fail(operation_, name, " must be a table of shape (", rows > 0 ? part(rows) : "N", ", ", hidden(),
         ") if there is an index, got ", to_string(tensor.sizes()));
  readable(name, tensor);
  return tensor.size(0);
}

void ArgumentChecker::row_index(const char* name, const Tensor& tensor) const {
  same_device(name, tensor);
  if (tensor.scalar_type() != ScalarType::Int)
    fail(operation_, name, " must be int32, got ", dtype_name(tensor.scalar_type()));
  const int64_t dims = tensor.dim();
  const int64_t leading = static_cast<int64_t>(shape_.size()) - 1;
  bool matches = dims <= leading;
  for (int64_t i = 0; matches && i < dims; ++i)
    matches = tensor.size(i) == 1 || tensor.size(i) == shape_[static_cast<size_t>(leading - dims + i)];
  if (!matches)
    fail(operation_, name, " must broadcast against ", x_name_, " of shape ", to_string(shape_),
         " without its last dimension, got ", to_string(tensor.sizes()));
  stored(name, tensor);
}

OwnedTensor ArgumentChecker::empty(const Sizes& shape, int32_t dtype) const {
  int64_t strides[Sizes::kCapacity];
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
  }
  return empty_strided(shape, strides, stride, dtype);
}

TwoTensors ArgumentChecker::empty_fp8(const Sizes& shape, int64_t scales) const {
  Sizes scale_shape = shape;
  scale_shape.back() = scales;
  return {empty(shape, aoti_torch_dtype_float8_e4m3fn()), empty(scale_shape, aoti_torch_dtype_float32())};
}

OwnedTensor ArgumentChecker::empty_channels_last(const Sizes& shape) const {
  int64_t strides[Sizes::kCapacity];
  strides[1] = 1;
  int64_t stride = std::max<int64_t>(shape[1], 1);
  for (size_t i = shape.size(); i-- > 0;) {
    if (i == 1) continue;
    strides[i] = stride;
    stride *= std::max<int64_t>(shape[i], 1);
  }
  return empty_strided(shape, strides, stride, x_.dtype());
}

OwnedTensor ArgumentChecker::empty_strided(const Sizes& shape, const int64_t* strides, int64_t elements,
                                           int32_t dtype) const {
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides,
                                              dtype, x_.device().type, x_.device().index, &handle);
  // Torch's own error is lost at its C interface. calls.py recognizes this text and repeats the
  // allocation in Python, which raises it.
  if (error != TORCH_SUCCESS)
    throw std::runtime_error(std::string(operation_) + ": cannot allocate " + std::to_string(elements) +
                             " elements of " + std::to_string(element_bytes_of(dtype)) + " bytes on " +
                             device_name(x_));
  return OwnedTensor(handle);
}

void RowLaunch::add(RowOperand& operand, const Tensor& tensor, int64_t offset) {
  add(operand, tensor, offset, tensor.sizes().size() - 1);
}

void RowLaunch::add(RowOperand& operand, const Tensor& tensor, int64_t offset, size_t own) {
  Operand& entry = operands_[operand_count_++];
  entry.target = &operand;
  entry.data =
      static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())) + offset * tensor.element_bytes();
  entry.element_bytes = tensor.element_bytes();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const size_t missing = leading_.size() - own;
  for (size_t dim = 0; dim < leading_.size(); ++dim)
    entry.strides[dim] = dim < missing || sizes[dim - missing] == 1 ? 0 : strides[dim - missing];
}

void RowLaunch::add(RowOperand& operand, const OptionalTensor& tensor, int64_t offset) {
  operand = RowOperand{};
  if (tensor.has_value()) add(operand, *tensor, offset);
}

void RowLaunch::add(RowOperand& operand, const OwnedTensor& tensor, int64_t offset) {
  operand = RowOperand{};
  if (tensor) add(operand, Tensor(tensor), offset);
}

void RowLaunch::merge() {
  size_t kept = 0;
  for (size_t dim = 0; dim < leading_.size(); ++dim) {
    const int64_t size = leading_[dim];
    if (size == 1) continue;
    bool is_mergeable = kept > 0;
    for (size_t i = 0; is_mergeable && i < operand_count_; ++i)
      is_mergeable = operands_[i].strides[kept - 1] == operands_[i].strides[dim] * size;
    if (is_mergeable)
      leading_[kept - 1] *= size;
    else
      leading_[kept++] = size;
    for (size_t i = 0; i < operand_count_; ++i) operands_[i].strides[kept - 1] = operands_[i].strides[dim];
  }
  if (kept == 0) {
    leading_ = {1};
    for (size_t i = 0; i < operand_count_; ++i) operands_[i].strides[0] = 0;
  } else {
    leading_.shrink(kept);
  }
}

// Moves kMaxRowDims dimensions to the front, in their order: the largest, or the last and the largest other.
void RowLaunch::sort(bool keeps_last) {
  const size_t dims = leading_.size();
  if (dims <= kMaxRowDims) return;
  size_t order[Sizes::kCapacity];
  std::iota(order, order + dims, size_t{0});
  const auto size_of = [&](size_t dim) { return keeps_last && dim == dims - 1 ? INT64_MAX : leading_[dim]; };
  std::stable_sort(order, order + dims, [&](size_t a, size_t b) { return size_of(a) > size_of(b); });
  std::sort(order, order + kMaxRowDims);
  const auto reorder = [&](auto& values, const auto& from) {
    for (size_t dim = 0; dim < dims; ++dim) values[dim] = from[order[dim]];
  };
  reorder(leading_, Sizes(leading_));
  for (size_t i = 0; i < operand_count_; ++i)
    reorder(operands_[i].strides, Sizes(operands_[i].strides, operands_[i].strides + dims));
}

int64_t RowLaunch::rows(size_t dims) const {
  int64_t rows = 1;
  for (size_t dim = 0; dim < dims; ++dim) rows *= leading_[dim];
  return rows;
}

void RowLaunch::write(size_t dims, RowShape& shape) const {
  shape = RowShape{rows(dims), static_cast<int32_t>(dims), {}};
  for (size_t dim = 0; dim < dims; ++dim) shape.sizes[dim] = leading_[dim];
  for (size_t i = 0; i < operand_count_; ++i) {
    RowOperand& target = *operands_[i].target;
    target.data = operands_[i].data;
    for (size_t dim = 0; dim < dims; ++dim) target.strides[dim] = operands_[i].strides[dim];
  }
}

void RowLaunch::advance(size_t dim, int64_t steps) {
  for (size_t i = 0; i < operand_count_; ++i)
    operands_[i].data += steps * operands_[i].strides[dim] * operands_[i].element_bytes;
}

#ifdef CUDA_KERNEL
DeviceStream::DeviceStream(const Tensor& tensor) : guard_(tensor.device().index), stream_{} {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.device().index, &stream_.handle));
  stream_.device = tensor.device().index;
}
#else
DeviceStream::DeviceStream(const Tensor&) : stream_{} {
  stream_.parallel_for = [](int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context) {
    torch::stable::parallel_for(begin, end, grain,
                                [&](int64_t first, int64_t last) { body(context, first, last); });
  };
}
#endif

}  // namespace h100_diffusers_kernels
