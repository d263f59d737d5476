// What the rotary embeddings have in common: layouts, heads and the tables of cosine and sine.
#pragma once

#include <string_view>

#include "../arguments.h"

namespace h100_diffusers_kernels {

inline RopeLayout parse_layout(const ArgumentChecker& check, std::string_view name) {
  if (name == "interleaved") return RopeLayout::kInterleaved;
  if (name == "half") return RopeLayout::kHalf;
  fail(check.operation(), "layout must be 'interleaved' or 'half', got '", name, "'");
}

struct HeadsShape {
  int64_t batch, seq, heads, head_dim;
};

// Launches number the heads of all tokens, kernels the elements of a head.
inline void require_countable_heads(const ArgumentChecker& check, const HeadsShape& shape) {
  check.countable(check.x_name(), "batch * seq * heads", {shape.batch, shape.seq, shape.heads});
  check.countable(check.x_name(), "head_dim", {shape.head_dim});
}

inline void require_even_head_dim(const ArgumentChecker& check, int64_t head_dim) {
  if (head_dim % 2 != 0)
    fail(check.operation(), check.x_name(), " must have an even head_dim to be rotated, got ", head_dim);
}

// Of (batch, seq, head), for a tensor (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim).
inline void set_heads_strides(int64_t (&strides)[3], const Tensor& tensor, int64_t head_dim) {
  for (int64_t dim = 0; dim < 2; ++dim) strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  strides[2] = tensor.dim() == 3 ? head_dim : (tensor.size(2) == 1 ? 0 : tensor.stride(2));
}

// Tables of (S, n), (1|B, S, n) or (1|B, S, 1|H, n), where n is d, with one value for each element, or d/2,
// with one for each pair; and of (S, H*d) or (1|B, S, H*d).
class TableChecker {
 public:
  TableChecker(const ArgumentChecker& check, const HeadsShape& shape) : check_(check), shape_(shape) {}

  // Returns the tables, and their strides of (batch, seq, head).
  RopeTables tables(const Tensor& cos, const Tensor& sin) {
    RopeTables tables{};
    tables.cos = table("cos", cos, tables.cos_strides);
    tables.sin = table("sin", sin, tables.sin_strides);
    tables.is_per_pair = is_per_pair(cos);
    if (is_per_pair(sin) != tables.is_per_pair)
      fail(check_.operation(), "sin must hold one value for each ", tables.is_per_pair ? "pair" : "element",
           ", as cos does, got ", to_string(sin.sizes()));
    tables.is_float32 = cos.scalar_type() == ScalarType::Float;
    check_.same_dtype_as("sin", sin, "cos", cos);
    return tables;
  }

  // The name of a table that differs between heads, or null.
  const char* per_head() const { return per_head_; }

 private:
  // Of a tensor that `table` accepts.
  bool is_per_pair(const Tensor& tensor) const {
    return tensor.size(tensor.dim() - 1) == shape_.head_dim / 2;
  }

  const void* table(const char* name, const Tensor& tensor, int64_t (&strides)[3]) {
    check_.same_device(name, tensor);
    check_.float32_or_same_dtype(name, tensor);
    const auto [batch, seq, heads, head_dim] = shape_;
    const auto shape = tensor.sizes();
    const size_t dims = shape.size();
    const size_t seq_dim = dims == 2 ? 0 : 1;
    bool matches =
        dims >= 2 && dims <= 4 && shape[seq_dim] == seq && (dims == 2 || shape[0] == 1 || shape[0] == batch);
    bool per_head = false;
    if (matches) {
      const int64_t last = shape.back();
      const bool is_of_head = last == head_dim || last == head_dim / 2;
      per_head = dims == 4 ? shape[2] != 1 : !is_of_head;
      matches = dims == 4 ? is_of_head && (shape[2] == 1 || shape[2] == heads)
                          : is_of_head || last == heads * head_dim;
    }
    if (!matches)
      fail(check_.operation(), name,
           " must have shape (S, d or d/2), (S, H*d), (1 or B, S, d or d/2), (1 or B, S, H*d) or ",
           "(1 or B, S, 1 or H, d or d/2) with B = ", batch, ", S = ", seq, ", H = ", heads,
           ", d = ", head_dim, ", got ", to_string(shape));
    check_.readable(name, tensor);
    if (per_head && per_head_ == nullptr) per_head_ = name;
    strides[0] = dims == 2 || shape[0] == 1 ? 0 : tensor.stride(0);
    strides[1] = shape_.seq == 1 ? 0 : tensor.stride(static_cast<int64_t>(seq_dim));
    strides[2] = !per_head ? 0 : (dims == 4 ? tensor.stride(2) : head_dim);
    return tensor.const_data_ptr();
  }

  const ArgumentChecker& check_;
  const HeadsShape shape_;
  const char* per_head_ = nullptr;
};

}  // namespace h100_diffusers_kernels
