// What is asked of `out`, a tensor of the caller's that an operation writes in place of a new one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "arguments.h"
#include "overlap.h"

namespace h100_diffusers_kernels {

// A tensor that is read while `out` is written.
struct ReadTensor {
  const char* name;
  OptionalTensor tensor;
  bool may_be_out = false;  // if its elements are out's, each at the same index
};

inline bool is_same_view(const Tensor& a, const Tensor& b) {
  if (a.const_data_ptr() != b.const_data_ptr() || !std::ranges::equal(a.sizes(), b.sizes())) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim)
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  return true;
}

// Fails unless `out` is of this shape and of x's dtype and device, and no two of its elements are in one
// place, nor one of them in what is read.
inline void check_out(const ArgumentChecker& check, const Tensor& out, const Sizes& shape,
                      std::initializer_list<ReadTensor> read) {
  const char* const operation = check.operation();
  check.same_shape("out", out, shape);
  for (int64_t dim = 0; dim < out.dim(); ++dim)
    if (out.size(dim) > 1 && out.stride(dim) == 0)
      fail(operation, "out must not be expanded to be written, got stride 0 in dimension ", dim);
  if (overlaps_itself(out))
    fail(operation, "out must not overlap itself to be written, got shape ", to_string(out.sizes()),
         " with strides ", to_string(out.strides()));
  for (const auto& [name, tensor, may_be_out] : read) {
    if (!tensor.has_value() || (may_be_out && is_same_view(*tensor, out))) continue;
    if (overlap(*tensor, out))
      fail(operation, name, " must not share memory with out, which is written, got overlapping elements");
  }
}

}  // namespace h100_diffusers_kernels
