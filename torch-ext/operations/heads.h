// Tensors (batch, seq, heads, head_dim), or (batch, seq, heads*head_dim) with the heads of a token adjacent.
#pragma once

#include <cstdint>
#include <span>

#include "../arguments.h"

namespace h100_diffusers_kernels {

// Head dim of the checker's tensor, which has this number of heads.
inline int64_t head_dim_of(const ArgumentChecker& check, int64_t heads) {
  const Sizes& shape = check.shape();
  const char* const name = check.x_name();
  if (heads < 1) fail(check.operation(), "heads must be at least 1, got ", heads);
  if (shape.size() == 4 && shape[2] != heads)
    fail(check.operation(), "heads must equal the third dimension of ", name, " (", shape[2], "), got ",
         heads);
  if (shape.size() == 3 && shape[2] % heads != 0)
    fail(check.operation(), "heads must divide the last dimension of ", name, " (", shape[2], "), got ",
         heads);
  return shape.size() == 4 ? shape[3] : shape[2] / heads;
}

inline int64_t heads_of(const Tensor& tensor, int64_t head_dim) {
  if (tensor.dim() == 4) return tensor.size(2);
  return head_dim == 0 ? 0 : tensor.size(2) / head_dim;
}

// Whether a shape matches the checker's tensor, with its own length and any number of heads.
inline bool has_heads(const ArgumentChecker& check, std::span<const int64_t> shape, int64_t seq,
                      int64_t head_dim) {
  if (shape.size() != check.shape().size() || shape[0] != check.shape()[0] || shape[1] != seq) return false;
  if (shape.size() == 4) return shape[3] == head_dim;
  return head_dim == 0 ? shape[2] == 0 : shape[2] % head_dim == 0;
}

// Sets the strides of (batch, seq, head).
inline void set_heads_strides(int64_t (&strides)[3], const Tensor& tensor, int64_t head_dim) {
  for (int64_t dim = 0; dim < 2; ++dim) strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  strides[2] = tensor.dim() == 3 ? head_dim : (tensor.size(2) == 1 ? 0 : tensor.stride(2));
}

}  // namespace h100_diffusers_kernels
