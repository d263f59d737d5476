// Rotary embedding alone.
#include <limits>

#include "../torch_binding.h"
#include "heads.h"
#include "rotary_tables.h"

namespace h100_diffusers_kernels {
namespace {

// Sets the common fields of RopeParams and Rope3dParams, and returns the output.
template <typename Params>
OwnedTensor set_rotated(Params& params, const ArgumentChecker& check, const Tensor& x,
                        const HeadsShape& shape, RopeLayout layout) {
  OwnedTensor out = check.empty(check.shape());
  const Tensor new_x(out);
  params.batch = shape.batch;
  params.seq = shape.seq;
  params.head_dim = shape.head_dim;
  params.dtype = check.dtype();
  params.layout = layout;
  params.x.in = x.const_data_ptr();
  params.x.out = new_x.mutable_data_ptr();
  params.x.heads = shape.heads;
  set_heads_strides(params.x.in_strides, x, shape.head_dim);
  set_heads_strides(params.x.out_strides, new_x, shape.head_dim);
  return out;
}

// The shape of x. A 3-D x takes its head dim from the table's last dimension, which holds elements or, if
// complex, pairs.
HeadsShape heads_shape(const ArgumentChecker& check, const Tensor& cos) {
  const Sizes& shape = check.shape();
  if (shape.size() > 4)
    fail(check.operation(),
         "x must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), got ",
         to_string(shape));
  if (shape.size() == 4) return {shape[0], shape[1], shape[2], shape[3]};
  const int64_t width = shape[2], last = cos.dim() == 0 ? 0 : cos.size(cos.dim() - 1);
  const int64_t head_dim = is_complex(cos) ? 2 * last : last;
  if (head_dim == 0 ? width != 0 || cos.dim() == 0 : width % head_dim != 0)
    fail(check.operation(), "cos must have a last dimension that divides ", is_complex(cos) ? "half of " : "",
         "the last dimension of x (", width, "), got shape ", to_string(cos.sizes()));
  return {shape[0], shape[1], head_dim == 0 ? 0 : width / head_dim, head_dim};
}

OwnedTensor call_rope(const char* operation, const Tensor& x, const Tensor& cos, const OptionalTensor& sin,
                      int64_t layout) {
  const ArgumentChecker check(operation, "x", x, 3);
  const HeadsShape shape = heads_shape(check, cos);
  require_even_head_dim(check, shape.head_dim);
  require_countable_heads(check, shape);
  RopeParams params{};
  params.tables = TableChecker(check, shape).tables(cos, sin);
  OwnedTensor out = set_rotated(params, check, x, shape, static_cast<RopeLayout>(layout));
  if (x.numel() == 0) return out;
  const DeviceStream device(x);
  rope(params, device.stream());
  return out;
}

constexpr int64_t kMaxAxis = std::numeric_limits<int32_t>::max();

// One axis of rope_3d.
struct AxisTables {
  const char* cos_name;
  const char* sin_name;
  const Tensor& cos;
  const Tensor& sin;
};

RopeAxis rope_axis(const ArgumentChecker& check, const AxisTables& axis, const AxisTables& first) {
  const auto check_table = [&](const char* name, const Tensor& table) {
    check.same_device(name, table);
    check.float32_or_same_dtype(name, table);
    check.same_dtype_as(name, table, first.cos_name, first.cos);
    if (table.dim() != 2 || table.size(0) > kMaxAxis || table.size(1) > kMaxAxis)
      fail(check.operation(), name, " must have shape (positions, pairs), each at most ", kMaxAxis, ", got ",
           to_string(table.sizes()));
    check.readable(name, table);
  };
  check_table(axis.cos_name, axis.cos);
  check_table(axis.sin_name, axis.sin);
  if (sizes_of(axis.sin) != sizes_of(axis.cos))
    fail(check.operation(), axis.sin_name, " must have the shape of ", axis.cos_name, " ",
         to_string(axis.cos.sizes()), ", got ", to_string(axis.sin.sizes()));
  RopeAxis result{};
  result.cos = axis.cos.const_data_ptr();
  result.sin = axis.sin.const_data_ptr();
  result.cos_stride = axis.cos.stride(0);
  result.sin_stride = axis.sin.stride(0);
  result.size = static_cast<int32_t>(axis.cos.size(0));
  result.pairs = static_cast<int32_t>(axis.cos.size(1));
  return result;
}

OwnedTensor call_rope_3d(const char* operation, const Tensor& x, const Tensor& frame_cos,
                         const Tensor& frame_sin, const Tensor& height_cos, const Tensor& height_sin,
                         const Tensor& width_cos, const Tensor& width_sin, int64_t layout) {
  const ArgumentChecker check(operation, "x", x, 4);
  const Sizes& sizes = check.shape();
  if (sizes.size() != 4)
    fail(check.operation(), "x must have shape (batch, seq, heads, head_dim), got ", to_string(sizes));
  const HeadsShape shape{sizes[0], sizes[1], sizes[2], sizes[3]};
  require_even_head_dim(check, shape.head_dim);
  require_countable_heads(check, shape);

  Rope3dParams params{};
  const AxisTables tables[kRope3dAxes] = {{"frame_cos", "frame_sin", frame_cos, frame_sin},
                                          {"height_cos", "height_sin", height_cos, height_sin},
                                          {"width_cos", "width_sin", width_cos, width_sin}};
  for (int i = 0; i < kRope3dAxes; ++i) params.axes[i] = rope_axis(check, tables[i], tables[0]);
  params.table_is_float32 = frame_cos.scalar_type() == ScalarType::Float;
  const auto& [frame, height, width] = params.axes;
  const int64_t pairs = int64_t{frame.pairs} + height.pairs + width.pairs;
  if (shape.head_dim != 2 * pairs)
    fail(check.operation(), "x must have a head_dim of 2 * (", frame.pairs, " + ", height.pairs, " + ",
         width.pairs, ") for the pairs of frame, height and width, got ", shape.head_dim);
  int64_t tokens = int64_t{frame.size} * height.size;
  if (__builtin_mul_overflow(tokens, int64_t{width.size}, &tokens) || shape.seq != tokens)
    fail(check.operation(), "x must have a seq of ", frame.size, " * ", height.size, " * ", width.size,
         " for the positions of frame, height and width, got ", shape.seq);

  OwnedTensor out = set_rotated(params, check, x, shape, static_cast<RopeLayout>(layout));
  if (x.numel() == 0) return out;
  const DeviceStream device(x);
  rope_3d(params, device.stream());
  return out;
}

constexpr Operation kOperations[] = {
    operation<"rope(Tensor x, Tensor cos, Tensor? sin, int layout) -> Tensor", call_rope>(),
    operation<"rope_3d(Tensor x, Tensor frame_cos, Tensor frame_sin, Tensor height_cos, Tensor height_sin,"
              " Tensor width_cos, Tensor width_sin, int layout) -> Tensor",
              call_rope_3d>(),
};

}  // namespace

std::span<const Operation> rope_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
