// Shared by the rotary embeddings: limits and the tables of cosine and sine.
#pragma once

#include <algorithm>

#include "../arguments.h"

namespace h100_diffusers_kernels {

struct HeadsShape {
  int64_t batch, seq, heads, head_dim;
};

// Launches index the heads of all tokens, kernels the elements of a head.
inline void require_countable_heads(const ArgumentChecker& check, const HeadsShape& shape) {
  check.countable(check.x_name(), "batch * seq * heads", {shape.batch, shape.seq, shape.heads});
  check.countable(check.x_name(), "head_dim", {shape.head_dim});
}

inline void require_even_head_dim(const ArgumentChecker& check, int64_t head_dim) {
  if (head_dim % 2 != 0)
    fail(check.operation(), check.x_name(), " must have an even head_dim to be rotated, got ", head_dim);
}

inline bool is_complex(const Tensor& table) { return table.dtype() == aoti_torch_dtype_complex64(); }

struct TableNames {
  const char* cos = "cos";
  const char* sin = "sin";
};

// Checks tables (S, n), (1|B, S, n) or (1|B, S, 1|H, n), where n is d (one value per element) or d/2 (one per
// pair; always if complex), and tables (S, H*d) or (1|B, S, H*d).
class TableChecker {
 public:
  TableChecker(const ArgumentChecker& check, const HeadsShape& shape) : check_(check), shape_(shape) {}

  // Returns the tables with their strides of (batch, seq, head). A complex cos holds both, and so does its
  // real view (..., 2) if `accepts_view`.
  RopeTables tables(const Tensor& cos, const OptionalTensor& sin, const TableNames& names = {},
                    bool accepts_view = false) {
    if (is_complex(cos) || !sin.has_value()) return complex_table(cos, sin, names, accepts_view);
    RopeTables tables{};
    tables.cos = table(names.cos, cos, tables.cos_strides);
    tables.sin = table(names.sin, *sin, tables.sin_strides);
    tables.is_per_pair = is_per_pair(cos);
    if (is_per_pair(*sin) != tables.is_per_pair)
      fail(check_.operation(), names.sin, " must hold one value for each ",
           tables.is_per_pair ? "pair" : "element", ", as ", names.cos, " does, got ",
           to_string(sin->sizes()));
    tables.is_float32 = cos.scalar_type() == ScalarType::Float;
    check_.same_dtype_as(names.sin, *sin, names.cos, cos);
    return tables;
  }

  // The name of a table that differs between heads, or null.
  const char* per_head() const { return per_head_; }

 private:
  // For a tensor that `table` has accepted.
  bool is_per_pair(const Tensor& tensor) const {
    return tensor.size(tensor.dim() - 1) == shape_.head_dim / 2;
  }

  RopeTables complex_table(const Tensor& cos, const OptionalTensor& sin, const TableNames& names,
                           bool accepts_view) {
    const int64_t dims = cos.dim();
    const bool is_view = accepts_view && cos.scalar_type() == ScalarType::Float && dims >= 2 &&
                         cos.size(dims - 1) == 2 && cos.stride(dims - 1) == 1 &&
                         (cos.stride(dims - 2) == 2 || cos.size(dims - 2) == 1);
    if (!is_complex(cos) && !is_view)
      fail(check_.operation(), names.sin, " must be given along with a ", names.cos, " of ",
           dtype_name(cos.scalar_type()), ", got None");
    if (sin.has_value())
      fail(check_.operation(), names.sin, " must be None if ", names.cos, " is complex, got a tensor of ",
           dtype_name(sin->scalar_type()));
    check_.same_device(names.cos, cos);
    RopeTables tables{};
    tables.cos = table(names.cos, cos, tables.cos_strides, is_view);
    for (int64_t& stride : tables.cos_strides) stride *= is_view ? 1 : 2;
    std::copy_n(tables.cos_strides, 3, tables.sin_strides);
    tables.sin = static_cast<const float*>(tables.cos) + 1;
    tables.is_float32 = tables.is_per_pair = tables.is_complex = true;
    return tables;
  }

  // A real view of a complex table has one more dimension.
  const void* table(const char* name, const Tensor& tensor, int64_t (&strides)[3], bool is_view = false) {
    check_.same_device(name, tensor);
    const bool of_pairs = is_complex(tensor) || is_view;
    if (!of_pairs) check_.float32_or_same_dtype(name, tensor);
    const auto [batch, seq, heads, head_dim] = shape_;
    const auto shape = tensor.sizes().first(tensor.sizes().size() - (is_view ? 1 : 0));
    const size_t dims = shape.size();
    const size_t seq_dim = dims == 2 ? 0 : 1;
    bool matches =
        dims >= 2 && dims <= 4 && shape[seq_dim] == seq && (dims == 2 || shape[0] == 1 || shape[0] == batch);
    bool per_head = false;
    if (matches) {
      const int64_t last = shape.back();
      const bool is_of_head = (last == head_dim && !of_pairs) || last == head_dim / 2;
      per_head = dims == 4 ? shape[2] != 1 : !is_of_head;
      matches = dims == 4 ? is_of_head && (shape[2] == 1 || shape[2] == heads)
                          : is_of_head || (last == heads * head_dim && !of_pairs);
    }
    if (!matches && of_pairs)
      fail(check_.operation(), name,
           " must have shape (S, d/2), (1 or B, S, d/2) or (1 or B, S, 1 or H, d/2) with B = ", batch,
           ", S = ", seq, ", H = ", heads, ", d = ", head_dim, ", got ", to_string(shape));
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
