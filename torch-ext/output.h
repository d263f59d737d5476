// Checks of `out`, tensors given by the caller for the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "arguments.h"
#include "overlap.h"

namespace h100_diffusers_kernels {

// An input that the operation reads while it writes `out`.
struct ReadTensor {
  const char* name;
  OptionalTensor tensor;
  bool may_be_out = false;  // if it is the same view as out
};

inline bool is_same_view(const Tensor& a, const Tensor& b) {
  if (a.const_data_ptr() != b.const_data_ptr() || !std::ranges::equal(a.sizes(), b.sizes())) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim)
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  return true;
}

// Fails if elements of the tensor share memory. `where`: end of the error's "to be written" clause.
inline void check_writable(const char* operation, const char* name, const Tensor& tensor, const char* where) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0)
      fail(operation, name, " must not be expanded to be written", where, ", got stride 0 in dimension ",
           dim);
  if (overlaps_itself(tensor))
    fail(operation, name, " must not overlap itself to be written", where, ", got shape ",
         to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

// Fails unless `out` has this shape and x's dtype and device, and shares no memory with the inputs.
inline void check_out(const ArgumentChecker& check, const Tensor& out, const Sizes& shape,
                      std::initializer_list<ReadTensor> read) {
  check.same_shape("out", out, shape);
  check_writable(check.operation(), "out", out, "");
  for (const auto& [name, tensor, may_be_out] : read) {
    if (!tensor.has_value() || (may_be_out && is_same_view(*tensor, out))) continue;
    if (overlap(*tensor, out))
      fail(check.operation(), name,
           " must not share memory with out, which is written, got overlapping elements");
  }
}

// The number of scales of a row with one for each block.
inline int64_t fp8_blocks(int64_t hidden) { return (hidden + kFp8BlockSize - 1) / kFp8BlockSize; }

// Fails unless these are FP8 values of this shape and scales, this number a row, on x's device, which share
// no memory with each other and with the inputs.
inline void check_fp8_out(const ArgumentChecker& check, const Tensor& values, const Tensor& scale,
                          const Sizes& shape, int64_t scales, const std::vector<ReadTensor>& read) {
  Sizes scale_shape = shape;
  scale_shape.back() = scales;
  check.same_device("values_out", values);
  check.float8("values_out", values);
  check.exact_shape("values_out", values, shape);
  check.same_device("scale_out", scale);
  check.float32("scale_out", scale);
  check.exact_shape("scale_out", scale, scale_shape);
  check_writable(check.operation(), "values_out", values, "");
  check_writable(check.operation(), "scale_out", scale, "");
  const auto check_apart = [&](const char* name, const Tensor& tensor, const char* written,
                               const Tensor& out) {
    if (overlap(tensor, out))
      fail(check.operation(), name, " must not share memory with ", written,
           ", which is written, got overlapping elements");
  };
  check_apart("scale_out", scale, "values_out", values);
  for (const auto& [name, tensor, _] : read) {
    if (!tensor.has_value()) continue;
    check_apart(name, *tensor, "values_out", values);
    check_apart(name, *tensor, "scale_out", scale);
  }
}

}  // namespace h100_diffusers_kernels
