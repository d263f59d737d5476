// Linear layers of several kinds of operands (fp8.cpp, linear.cpp, lora_down.cpp): checks of x, low-rank
// terms, and launches of rows at one distance.
#pragma once

#include <cstdint>
#include <string>

#include "../output.h"

namespace h100_diffusers_kernels {

inline int32_t torch_dtype(DType dtype) {
  if (dtype == DType::kFloat32) return aoti_torch_dtype_float32();
  return dtype == DType::kFloat16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}

// x's number of features is a multiple of this one.
inline void check_in_features(const ArgumentChecker& x, int64_t multiple) {
  if (x.hidden() < multiple || x.hidden() % multiple != 0)
    fail(x.operation(), "x must have a last dimension that is a positive multiple of ", multiple, ", got ",
         x.hidden());
}

// x_scale has one value a row, or one for each block of a row. Returns whether for each block.
inline bool check_x_scale(const ArgumentChecker& x, const Tensor& x_scale) {
  x.same_device("x_scale", x_scale);
  x.float32("x_scale", x_scale);
  Sizes of_rows = x.shape(), of_blocks = x.shape();
  of_rows.back() = 1;
  of_blocks.back() = fp8_blocks(x.hidden());
  const std::span<const int64_t> sizes = x_scale.sizes();
  const auto has = [&](const Sizes& shape) { return std::ranges::equal(sizes, shape); };
  if (!has(of_rows) && !has(of_blocks))
    fail(x.operation(), "x_scale must have shape ", to_string(of_rows), " or ", to_string(of_blocks),
         ", got ", to_string(sizes));
  x.contiguous("x_scale", x_scale);
  return !has(of_rows);
}

struct LowRankNames {
  const char *low, *up;
};
constexpr LowRankNames kLowRanks[kMaxLinearLayers] = {
    {"lows[0]", "ups[0]"}, {"lows[1]", "ups[1]"}, {"lows[2]", "ups[2]"}};

// The ups of a call's layers beyond each one's first. A layer takes those that complete its columns.
class MoreUps {
 public:
  explicit MoreUps(const Tensors& ups) : ups_(ups) {}

  bool is_empty() const { return next_ == ups_.size(); }
  const Tensor& take() { return ups_[next_++]; }
  void check_taken(const char* operation) const {
    if (!is_empty()) fail(operation, "the ups of all layers must have the columns of low, got more");
  }

 private:
  const Tensors& ups_;
  size_t next_ = 0;
};

// The checks of a layer's term low @ up.T. `x` is the checker of the layer's input.
struct LowRankTerm {
  static constexpr int64_t kMultiple = 8;  // elements, which TMA copies: 16 bytes
  static constexpr int64_t kAlignment = 16;

  const ArgumentChecker& x;
  const LowRankNames& names;
  const OptionalTensor &low, &up;
  MoreUps& more_ups;

  bool is_given() const {
    if (low.has_value() != up.has_value())
      fail(x.operation(), names.low, " and ", names.up, " must be given together, got only ",
           low.has_value() ? names.low : names.up);
    return low.has_value();
  }

  void check_dtype(const char* owner, DType dtype) const {
    if (low->dtype() != torch_dtype(dtype))
      fail(x.operation(), names.low, " must have the dtype of ", owner, " (",
           dtype == DType::kFloat16 ? "float16" : "bfloat16", "), got ", dtype_name(low->scalar_type()));
  }

  // Sets the layer's operands. Returns their dtype.
  DType check(LinearLayer& layer) const {
    x.same_device(names.low, *low);
    const bool is_float16 = low->dtype() == aoti_torch_dtype_float16();
    if (!is_float16 && low->dtype() != aoti_torch_dtype_bfloat16())
      fail(x.operation(), names.low, " must be float16 or bfloat16, got ", dtype_name(low->scalar_type()));
    check_low_shape();
    layer.rank = low->size(low->dim() - 1);
    layer.low_stride = row_distance(layer.rank);
    x.aligned(names.low, *low, kAlignment);
    layer.low = low->const_data_ptr();
    const bool may_be_several = !more_ups.is_empty() && up->dim() == 2;
    int64_t columns = add_up(layer, names.up, *up, may_be_several ? up->size(1) : layer.rank);
    while (columns < layer.rank && !more_ups.is_empty()) {
      const Tensor& next = more_ups.take();
      std::string name(names.up);
      name.append("[").append(std::to_string(layer.up_count)).append("]");
      columns += add_up(layer, name.c_str(), next, next.dim() == 2 ? next.size(1) : kMultiple);
    }
    if (columns != layer.rank)
      fail(x.operation(), names.up, " must have ", layer.rank, " columns together, got ", columns);
    return is_float16 ? DType::kFloat16 : DType::kBFloat16;
  }

 private:
  // Returns the number of columns.
  int64_t add_up(LinearLayer& layer, const char* name, const Tensor& up, int64_t rank) const {
    x.same_device(name, up);
    x.same_dtype_as(name, up, names.low, *low);
    x.exact_shape(name, up, {layer.out_features, rank});
    if (rank < kMultiple || rank % kMultiple != 0)
      fail(x.operation(), name, " must have a last dimension that is a positive multiple of ", kMultiple,
           ", got ", rank);
    x.contiguous(name, up);
    x.aligned(name, up, kAlignment);
    const int32_t count = layer.up_count;
    if (count == kMaxLowRankUps)
      fail(x.operation(), names.up, " must hold 1 to ", count, " tensors, got more");
    const int32_t low_column = count == 0 ? 0 : layer.ups[count - 1].low_column + layer.ups[count - 1].rank;
    layer.ups[layer.up_count++] = {up.const_data_ptr(), static_cast<int32_t>(rank), low_column};
    return rank;
  }

  void check_low_shape() const {
    const std::span<const int64_t> sizes = low->sizes();
    const Sizes& shape = x.shape();
    const size_t leading = shape.size() - 1;
    if (sizes.size() != shape.size() || !std::equal(sizes.begin(), sizes.end() - 1, shape.begin())) {
      std::string expected = "(";
      for (size_t i = 0; i < leading; ++i) expected += std::to_string(shape[i]) + ", ";
      fail(x.operation(), names.low, " must have shape ", expected, leading > 0 ? "R)" : "R,)", ", got ",
           to_string(sizes));
    }
    if (sizes.back() < kMultiple || sizes.back() % kMultiple != 0)
      fail(x.operation(), names.low, " must have a last dimension that is a positive multiple of ", kMultiple,
           ", got ", sizes.back());
    x.readable(names.low, *low);
  }

  int64_t row_distance(int64_t rank) const {
    int64_t distance = 0, rows = 1;
    bool is_regular = true;
    for (int64_t dim = low->dim() - 1; dim-- > 0;) {
      const int64_t size = low->size(dim);
      if (size == 1) continue;
      if (distance == 0) distance = low->stride(dim);
      is_regular &= low->stride(dim) == distance * rows;
      rows *= size;
    }
    if (rows == 1) return rank;
    if (rows > 0 && (!is_regular || distance < rank || distance % kMultiple != 0))
      fail(x.operation(), names.low, " must have rows at one distance, a multiple of ", kMultiple,
           " elements, got shape ", to_string(low->sizes()), " with strides ", to_string(low->strides()));
    return distance;
  }
};

// Rows at one distance from each other: all, or those of an index of the first of two leading dimensions.
struct RowsAt {
  const RowShape& shape;
  int64_t index;

  int64_t rows() const { return shape.sizes[shape.ndim - 1]; }
  int64_t stride(const RowOperand& operand) const { return operand.strides[shape.ndim - 1]; }
  void* data(const RowOperand& operand, int64_t element_bytes) const {
    return static_cast<char*>(operand.data) + index * operand.strides[0] * element_bytes;
  }
};

// Calls body(rows) for all rows of a RowLaunch that keeps its last dimension.
template <typename Body>
void for_each_index(const RowShape& shape, const Body& body) {
  for (int64_t i = 0; i < (shape.ndim > 1 ? shape.sizes[0] : 1); ++i) body(RowsAt{shape, i});
}

}  // namespace h100_diffusers_kernels
