// The operations as Torch sees them: schemas, what each argument must be, and the call of the launcher of
// the same name. Every check comes before the first launch or write.

#include "torch_binding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "overlap.h"
#include "registration.h"

namespace h100_diffusers_kernels {
namespace {

using TwoTensors = std::pair<OwnedTensor, OwnedTensor>;

// ---------------------------------------------------------------------------------------------------------
// Norm, modulation, residual and gate

using RowNormLauncher = void (*)(const RowNormParams&, Stream);

// The operands of a row operation; those that an operation does not have stay empty.
struct RowNormArguments {
  OptionalTensor residual = {}, gate = {}, scale = {}, shift = {}, weight = {}, bias = {};
  double eps = 0.0;
};

// The new residual, where the operation has one, and the output, if `has_output`.
struct RowNormResults {
  OwnedTensor residual, out;
  TwoTensors both() && { return {std::move(residual), std::move(out)}; }
};

RowNormResults run_row_norm(const char* operation, RowNormLauncher launcher, const Tensor& x,
                            const RowNormArguments& arguments, bool has_output = true) {
  const bool has_residual = arguments.residual.has_value();
  const Tensor& leader = has_residual ? *arguments.residual : x;
  const ArgumentChecker check(operation, has_residual ? "residual" : "x", leader);
  if (has_residual) check.same_shape("x", x, check.shape());

  RowNormParams params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  params.eps = static_cast<float>(arguments.eps);
  if (arguments.gate.has_value()) check.broadcastable("gate", *arguments.gate);
  if (arguments.scale.has_value()) check.broadcastable("scale", *arguments.scale);
  if (arguments.shift.has_value()) check.broadcastable("shift", *arguments.shift);
  params.weight = check.vector("weight", arguments.weight, check.hidden());
  params.bias = check.vector("bias", arguments.bias, check.hidden());

  RowNormResults results;
  if (has_output) results.out = empty(x, check.shape());
  if (has_residual) results.residual = empty(x, check.shape());
  if (x.numel() == 0) return results;

  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.residual, arguments.residual},
                   RowBinding{params.gate, arguments.gate}, RowBinding{params.scale, arguments.scale},
                   RowBinding{params.shift, arguments.shift},
                   RowBinding{params.residual_out, results.residual}, RowBinding{params.out, results.out});
  const DeviceStream device(x);
  launch.run(params.shape, params.dtype, [&] { launcher(params, device.stream()); });
  return results;
}

OwnedTensor op_rms_norm(const Tensor& x, const OptionalTensor& weight, double eps) {
  return run_row_norm("rms_norm", rms_norm, x, {.weight = weight, .eps = eps}).out;
}

OwnedTensor op_layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                          double eps) {
  return run_row_norm("layer_norm", layer_norm, x, {.weight = weight, .bias = bias, .eps = eps}).out;
}

OwnedTensor op_rms_norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift,
                                 const OptionalTensor& weight, double eps) {
  return run_row_norm("rms_norm_modulate", rms_norm_modulate, x,
                      {.scale = scale, .shift = shift, .weight = weight, .eps = eps})
      .out;
}

OwnedTensor op_layer_norm_modulate(const Tensor& x, const Tensor& scale, const Tensor& shift,
                                   const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return run_row_norm("layer_norm_modulate", layer_norm_modulate, x,
                      {.scale = scale, .shift = shift, .weight = weight, .bias = bias, .eps = eps})
      .out;
}

OwnedTensor op_gated_residual(const Tensor& residual, const Tensor& x, const OptionalTensor& gate) {
  return run_row_norm("gated_residual", gated_residual, x, {.residual = residual, .gate = gate}, false)
      .residual;
}

TwoTensors op_gated_residual_rms_norm_modulate(const Tensor& residual, const Tensor& x,
                                               const OptionalTensor& gate, const Tensor& scale,
                                               const Tensor& shift, const OptionalTensor& weight,
                                               double eps) {
  return run_row_norm("gated_residual_rms_norm_modulate", gated_residual_rms_norm_modulate, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .eps = eps})
      .both();
}

TwoTensors op_gated_residual_layer_norm_modulate(const Tensor& residual, const Tensor& x,
                                                 const OptionalTensor& gate, const Tensor& scale,
                                                 const Tensor& shift, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, double eps) {
  return run_row_norm("gated_residual_layer_norm_modulate", gated_residual_layer_norm_modulate, x,
                      {.residual = residual,
                       .gate = gate,
                       .scale = scale,
                       .shift = shift,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps})
      .both();
}

// ---------------------------------------------------------------------------------------------------------
// What the rotary embeddings have in common

RopeLayout parse_layout(const ArgumentChecker& check, std::string_view name) {
  if (name == "interleaved") return RopeLayout::kInterleaved;
  if (name == "half") return RopeLayout::kHalf;
  fail(check.operation(), "layout must be 'interleaved' or 'half', got '", name, "'");
}

struct HeadsShape {
  int64_t batch, seq, heads, head_dim;
};

// Launches number the heads of all tokens, kernels the elements of a head.
void require_countable_heads(const ArgumentChecker& check, const HeadsShape& shape) {
  check.countable(check.x_name(), "batch * seq * heads", {shape.batch, shape.seq, shape.heads});
  check.countable(check.x_name(), "head_dim", {shape.head_dim});
}

void require_even_head_dim(const ArgumentChecker& check, int64_t head_dim) {
  if (head_dim % 2 != 0)
    fail(check.operation(), check.x_name(), " must have an even head_dim to be rotated, got ", head_dim);
}

// Of (batch, seq, head), for a tensor (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim).
void set_heads_strides(int64_t (&strides)[3], const Tensor& tensor, int64_t head_dim) {
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
           ", as cos does, got ", to_string(sizes_of(sin)));
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
    const Sizes shape = sizes_of(tensor);
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

// ---------------------------------------------------------------------------------------------------------
// Query and key: norm and rotary embedding

// One call of qk_norm_rope, whichever way the rotation is given and the result is stored.
class QkNormRope {
 public:
  struct ReadOnly {
    const char* name;
    OptionalTensor tensor;
  };

  QkNormRope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
             int64_t heads, std::string_view norm, std::string_view layout, double eps)
      : q_(q), k_(k), check_(kOperation, "q", q, 3) {
    params_.dtype = check_.dtype();
    params_.eps = static_cast<float>(eps);
    params_.norm = parse_norm(norm);
    params_.layout = parse_layout(check_, layout);
    set_heads(heads);
    set_operand(params_.q, "q", q);
    set_operand(params_.k, "k", k);
    require_countable_heads(
        check_, {params_.batch, params_.seq, std::max(params_.q.heads, params_.k.heads), params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads) {
      require_countable_token("q", params_.q);
      require_countable_token("k", params_.k);
    }
    params_.q.weight = weight("q_weight", q_weight, params_.q.heads);
    params_.k.weight = weight("k_weight", k_weight, params_.k.heads);
  }

  void rotate_by_tables(const OptionalTensor& cos, const OptionalTensor& sin) {
    if (cos.has_value() != sin.has_value())
      fail(kOperation, cos.has_value() ? "sin" : "cos", " must be given along with ",
           cos.has_value() ? "cos" : "sin", ", got None");
    if (!cos.has_value()) return;
    require_even_head_dim(check_, params_.head_dim);
    TableChecker table_check(check_, {params_.batch, params_.seq, params_.q.heads, params_.head_dim});
    params_.tables = table_check.tables(*cos, *sin);
    if (table_check.per_head() != nullptr) require_equal_heads(table_check.per_head());
  }

  void rotate_by_coordinates(const Tensor& coordinates, const Tensor& frequencies) {
    require_even_head_dim(check_, params_.head_dim);
    check_.same_device("coordinates", coordinates);
    check_.float32("coordinates", coordinates);
    check_.same_device("frequencies", frequencies);
    check_.float32("frequencies", frequencies);
    if (coordinates.dim() != 3 || (coordinates.size(0) != 1 && coordinates.size(0) != params_.batch) ||
        coordinates.size(1) != params_.seq || coordinates.size(2) < 1)
      fail(kOperation, "coordinates must have shape (1 or ", params_.batch, ", ", params_.seq,
           ", axes), got ", to_string(sizes_of(coordinates)));
    check_.readable("coordinates", coordinates);
    if (frequencies.dim() != 1)
      fail(kOperation, "frequencies must have one dimension, got shape ", to_string(sizes_of(frequencies)));
    check_.readable("frequencies", frequencies);
    require_equal_heads("coordinates");
    require_countable_token("q", params_.q);
    const int64_t pairs = params_.q.heads * params_.head_dim / 2;
    const int64_t rotated = coordinates.size(2) * frequencies.size(0);
    if (rotated > pairs)
      fail(kOperation, "frequencies must hold at most ", pairs / coordinates.size(2), " values for ", pairs,
           " pairs and ", coordinates.size(2), " axes, got ", frequencies.size(0));
    params_.coordinates = static_cast<const float*>(coordinates.const_data_ptr());
    params_.coordinate_strides[0] = coordinates.size(0) == 1 ? 0 : coordinates.stride(0);
    params_.coordinate_strides[1] = coordinates.size(1) == 1 ? 0 : coordinates.stride(1);
    params_.frequencies = static_cast<const float*>(frequencies.const_data_ptr());
    params_.axes = static_cast<int32_t>(coordinates.size(2));
    params_.identity_pairs = static_cast<int32_t>(pairs - rotated);
    if (rotated == 0) params_.coordinates = nullptr;  // nothing to rotate
  }

  TwoTensors run() {
    OwnedTensor q_out = empty(q_, sizes_of(q_));
    OwnedTensor k_out = empty(k_, sizes_of(k_));
    set_output(params_.q, Tensor(q_out));
    set_output(params_.k, Tensor(k_out));
    launch();
    return {std::move(q_out), std::move(k_out)};
  }

  // read_only: the tensors that are read while q and k are written.
  void run_in_place(std::initializer_list<ReadOnly> read_only) {
    check_writable("q", q_);
    check_writable("k", k_);
    check_apart("k", k_, "q", q_);
    for (const auto& [name, tensor] : read_only) {
      if (!tensor.has_value()) continue;
      check_apart(name, *tensor, "q", q_);
      check_apart(name, *tensor, "k", k_);
    }
    set_output(params_.q, q_);
    set_output(params_.k, k_);
    launch();
  }

 private:
  NormScope parse_norm(std::string_view name) const {
    if (name == "across_heads") return NormScope::kAcrossHeads;
    if (name == "per_head") return NormScope::kPerHead;
    if (name == "none") return NormScope::kNone;
    fail(kOperation, "norm must be 'across_heads', 'per_head' or 'none', got '", name, "'");
  }

  void set_heads(int64_t heads) {
    const Sizes& shape = check_.shape();
    if (shape.size() > 4)
      fail(kOperation,
           "q must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), got ",
           to_string(shape));
    if (heads < 1) fail(kOperation, "heads must be at least 1, got ", heads);
    if (shape.size() == 4 && shape[2] != heads)
      fail(kOperation, "heads must equal the third dimension of q (", shape[2], "), got ", heads);
    if (shape.size() == 3 && shape[2] % heads != 0)
      fail(kOperation, "heads must divide the last dimension of q (", shape[2], "), got ", heads);
    params_.batch = shape[0];
    params_.seq = shape[1];
    params_.head_dim = shape.size() == 4 ? shape[3] : shape[2] / heads;
  }

  void set_operand(HeadsOperand& operand, const char* name, const Tensor& tensor) const {
    check_.same_device(name, tensor);
    check_.same_dtype(name, tensor);
    const Sizes shape = sizes_of(tensor);
    const Sizes& q_shape = check_.shape();
    const bool matches =
        shape.size() == q_shape.size() && shape[0] == params_.batch && shape[1] == params_.seq &&
        (shape.size() == 4 ? shape[3] == params_.head_dim
                           : (params_.head_dim == 0 ? shape[2] == 0 : shape[2] % params_.head_dim == 0));
    if (!matches)
      fail(kOperation, name, " must have the batch, seq and head_dim of q of shape ", to_string(q_shape),
           " (head_dim ", params_.head_dim, "), got ", to_string(shape));
    check_.readable(name, tensor);
    operand.in = tensor.const_data_ptr();
    operand.heads = shape.size() == 4 ? shape[2] : (params_.head_dim == 0 ? 0 : shape[2] / params_.head_dim);
    set_heads_strides(operand.in_strides, tensor, params_.head_dim);
  }

  void set_output(HeadsOperand& operand, const Tensor& tensor) const {
    operand.out = tensor.mutable_data_ptr();
    set_heads_strides(operand.out_strides, tensor, params_.head_dim);
  }

  const void* weight(const char* name, const OptionalTensor& tensor, int64_t heads) const {
    if (tensor.has_value() && params_.norm == NormScope::kNone)
      fail(kOperation, name, " is accepted only with norm 'across_heads' or 'per_head', got norm 'none'");
    return check_.vector(name, tensor,
                         params_.norm == NormScope::kPerHead ? params_.head_dim : heads * params_.head_dim);
  }

  void require_equal_heads(const char* name) const {
    if (params_.q.heads != params_.k.heads)
      fail(kOperation, name, " that differ between heads need q and k with the same number of heads, got ",
           params_.q.heads, " and ", params_.k.heads);
  }

  // Kernels number the elements of a token where a norm or a rotation spans its heads.
  void require_countable_token(const char* name, const HeadsOperand& operand) const {
    check_.countable(name, "heads * head_dim", {operand.heads, params_.head_dim});
  }

  void check_writable(const char* name, const Tensor& tensor) const {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      if (tensor.size(dim) > 1 && tensor.stride(dim) == 0)
        fail(kOperation, name, " must not be expanded to be written in place, got stride 0 in dimension ",
             dim);
    if (overlaps_itself(tensor))
      fail(kOperation, name, " must not overlap itself to be written in place, got shape ",
           to_string(sizes_of(tensor)), " with strides ",
           to_string(Sizes(tensor.strides().begin(), tensor.strides().end())));
  }

  void check_apart(const char* name, const Tensor& tensor, const char* written_name,
                   const Tensor& written) const {
    if (overlap(tensor, written))
      fail(kOperation, name, " must not share memory with ", written_name,
           ", which is written in place, got overlapping elements");
  }

  void launch() {
    if (q_.numel() == 0 && k_.numel() == 0) return;
    const DeviceStream device(q_);
    qk_norm_rope(params_, device.stream());
  }

  static constexpr const char* kOperation = "qk_norm_rope";  // whichever operator it is called through
  const Tensor& q_;
  const Tensor& k_;
  const ArgumentChecker check_;
  QkNormRopeParams params_{};
};

TwoTensors op_qk_norm_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                           const OptionalTensor& k_weight, const OptionalTensor& cos,
                           const OptionalTensor& sin, int64_t heads, std::string_view norm,
                           std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_tables(cos, sin);
  return call.run();
}

void op_qk_norm_rope_(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                      const OptionalTensor& k_weight, const OptionalTensor& cos, const OptionalTensor& sin,
                      int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_tables(cos, sin);
  call.run_in_place({{"q_weight", q_weight}, {"k_weight", k_weight}, {"cos", cos}, {"sin", sin}});
}

TwoTensors op_qk_norm_coordinate_rope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                      const OptionalTensor& k_weight, const Tensor& coordinates,
                                      const Tensor& frequencies, int64_t heads, std::string_view norm,
                                      std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_coordinates(coordinates, frequencies);
  return call.run();
}

void op_qk_norm_coordinate_rope_(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                                 const OptionalTensor& k_weight, const Tensor& coordinates,
                                 const Tensor& frequencies, int64_t heads, std::string_view norm,
                                 std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_coordinates(coordinates, frequencies);
  call.run_in_place({{"q_weight", q_weight},
                     {"k_weight", k_weight},
                     {"coordinates", coordinates},
                     {"frequencies", frequencies}});
}

// ---------------------------------------------------------------------------------------------------------
// Rotary embedding alone

// Fills what RopeParams and Rope3dParams have in common and returns the output.
template <typename Params>
OwnedTensor set_rotated(Params& params, const ArgumentChecker& check, const Tensor& x,
                        const HeadsShape& shape, RopeLayout layout) {
  OwnedTensor out = empty(x, check.shape());
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

// Heads of x as x shows them, or else as the table does: its last dimension is the head's.
HeadsShape heads_shape(const ArgumentChecker& check, const Tensor& cos) {
  const Sizes& shape = check.shape();
  if (shape.size() > 4)
    fail(check.operation(),
         "x must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), got ",
         to_string(shape));
  if (shape.size() == 4) return {shape[0], shape[1], shape[2], shape[3]};
  const int64_t width = shape[2], head_dim = cos.dim() == 0 ? 0 : cos.size(cos.dim() - 1);
  if (head_dim == 0 ? width != 0 || cos.dim() == 0 : width % head_dim != 0)
    fail(check.operation(), "cos must have a last dimension that divides the last dimension of x (", width,
         "), got shape ", to_string(sizes_of(cos)));
  return {shape[0], shape[1], head_dim == 0 ? 0 : width / head_dim, head_dim};
}

OwnedTensor op_rope(const Tensor& x, const Tensor& cos, const Tensor& sin, std::string_view layout_name) {
  const ArgumentChecker check("rope", "x", x, 3);
  const RopeLayout layout = parse_layout(check, layout_name);
  const HeadsShape shape = heads_shape(check, cos);
  require_even_head_dim(check, shape.head_dim);
  require_countable_heads(check, shape);
  RopeParams params{};
  params.tables = TableChecker(check, shape).tables(cos, sin);
  OwnedTensor out = set_rotated(params, check, x, shape, layout);
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
           to_string(sizes_of(table)));
    check.readable(name, table);
  };
  check_table(axis.cos_name, axis.cos);
  check_table(axis.sin_name, axis.sin);
  if (sizes_of(axis.sin) != sizes_of(axis.cos))
    fail(check.operation(), axis.sin_name, " must have the shape of ", axis.cos_name, " ",
         to_string(sizes_of(axis.cos)), ", got ", to_string(sizes_of(axis.sin)));
  RopeAxis result{};
  result.cos = axis.cos.const_data_ptr();
  result.sin = axis.sin.const_data_ptr();
  result.cos_stride = axis.cos.stride(0);
  result.sin_stride = axis.sin.stride(0);
  result.size = static_cast<int32_t>(axis.cos.size(0));
  result.pairs = static_cast<int32_t>(axis.cos.size(1));
  return result;
}

OwnedTensor op_rope_3d(const Tensor& x, const Tensor& frame_cos, const Tensor& frame_sin,
                       const Tensor& height_cos, const Tensor& height_sin, const Tensor& width_cos,
                       const Tensor& width_sin, std::string_view layout_name) {
  const ArgumentChecker check("rope_3d", "x", x, 4);
  const RopeLayout layout = parse_layout(check, layout_name);
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

  OwnedTensor out = set_rotated(params, check, x, shape, layout);
  if (x.numel() == 0) return out;
  const DeviceStream device(x);
  rope_3d(params, device.stream());
  return out;
}

// ---------------------------------------------------------------------------------------------------------
// Activations

OwnedTensor run_activation(const char* operation, void (*launcher)(const ActivationParams&, Stream),
                           const Tensor& x, bool is_gated, std::string_view approximate,
                           const OptionalTensor& bias) {
  const ArgumentChecker check(operation, "x", x);
  if (approximate != "none" && approximate != "tanh")
    fail(operation, "approximate must be 'none' or 'tanh', got '", approximate, "'");
  if (is_gated && check.hidden() % 2 != 0)
    fail(operation, "x must have an even last dimension, got ", check.hidden());
  ActivationParams params{};
  params.hidden = is_gated ? check.hidden() / 2 : check.hidden();
  params.dtype = check.dtype();
  params.tanh_approximation = approximate == "tanh";
  params.bias = check.vector("bias", bias, check.hidden());
  Sizes out_shape = check.shape();
  out_shape.back() = params.hidden;
  OwnedTensor out = empty(x, out_shape);
  if (x.numel() == 0) return out;

  RowLaunch launch(out_shape, RowBinding{params.x, x}, RowBinding{params.out, out});
  const DeviceStream device(x);
  launch.run(params.shape, params.dtype, [&] { launcher(params, device.stream()); });
  return out;
}

OwnedTensor op_gelu(const Tensor& x, std::string_view approximate, const OptionalTensor& bias) {
  return run_activation("gelu", gelu, x, false, approximate, bias);
}

OwnedTensor op_silu(const Tensor& x, const OptionalTensor& bias) {
  return run_activation("silu", silu, x, false, "none", bias);
}

OwnedTensor op_geglu(const Tensor& x, std::string_view approximate, const OptionalTensor& bias) {
  return run_activation("geglu", geglu, x, true, approximate, bias);
}

OwnedTensor op_swiglu(const Tensor& x, const OptionalTensor& bias) {
  return run_activation("swiglu", swiglu, x, true, "none", bias);
}

// ---------------------------------------------------------------------------------------------------------
// Softmax

OwnedTensor op_softmax(const Tensor& x) {
  const ArgumentChecker check("softmax", "x", x);
  SoftmaxParams params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  OwnedTensor out = empty(x, check.shape());
  if (x.numel() == 0) return out;

  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.out, out});
  const DeviceStream device(x);
  launch.run(params.shape, params.dtype, [&] { softmax(params, device.stream()); });
  return out;
}

// ---------------------------------------------------------------------------------------------------------
// Attention

AttentionOperand attention_operand(const Tensor& tensor) {
  AttentionOperand operand{tensor.const_data_ptr(), {}};
  for (int64_t dim = 0; dim < 3; ++dim) operand.strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  return operand;
}

float attention_scale(const ArgumentChecker& check, std::optional<double> scale) {
  if (!scale.has_value()) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(check.hidden())));
  if (!(*scale >= std::numeric_limits<float>::min() && *scale <= std::numeric_limits<float>::max()))
    fail(check.operation(), "scale must be positive and finite in float32, got ", *scale);
  return static_cast<float>(*scale);
}

void set_key_bias(AttentionParams& params, const ArgumentChecker& check, const Tensor& key_bias) {
  check.same_device("key_bias", key_bias);
  check.float32_or_same_dtype("key_bias", key_bias);
  if (key_bias.dim() != 2 || key_bias.size(0) != params.batch || key_bias.size(1) != params.key_length)
    fail(check.operation(), "key_bias must have shape (", params.batch, ", ", params.key_length, "), got ",
         to_string(sizes_of(key_bias)));
  check.readable("key_bias", key_bias);
  params.key_bias = key_bias.const_data_ptr();
  params.key_bias_stride = params.batch == 1 ? 0 : key_bias.stride(0);
  params.key_bias_is_float32 = key_bias.scalar_type() == ScalarType::Float;
}

void set_key_lengths(AttentionParams& params, const ArgumentChecker& check, const Tensor& key_lengths) {
  check.same_device("key_lengths", key_lengths);
  if (key_lengths.scalar_type() != ScalarType::Int)
    fail(check.operation(), "key_lengths must be int32, got ", dtype_name(key_lengths.scalar_type()));
  if (key_lengths.dim() != 1 || key_lengths.size(0) != params.batch)
    fail(check.operation(), "key_lengths must have shape (", params.batch, ",), got ",
         to_string(sizes_of(key_lengths)));
  check.readable("key_lengths", key_lengths);
  params.key_lengths = static_cast<const int32_t*>(key_lengths.const_data_ptr());
}

OwnedTensor op_attention(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale,
                         const OptionalTensor& key_bias, const OptionalTensor& key_lengths) {
  const ArgumentChecker check("attention", "q", q, 4, false);
  const Sizes& shape = check.shape();
  if (shape.size() != 4)
    fail(check.operation(), "q must have shape (batch, seq, heads, head_dim), got ", to_string(shape));
  if (check.hidden() != 64 && check.hidden() != 128)
    fail(check.operation(), "q must have a head_dim of 64 or 128, got ", check.hidden());
  check.same_device("k", k);
  check.same_dtype("k", k);
  if (k.dim() != 4 || k.size(0) != shape[0] || k.size(3) != shape[3])
    fail(check.operation(), "k must have the batch and head_dim of q of shape ", to_string(shape), ", got ",
         to_string(sizes_of(k)));
  const int64_t key_heads = k.size(2);
  if (key_heads == 0 ? shape[2] != 0 : shape[2] % key_heads != 0)
    fail(check.operation(), "k must have a number of heads that divides that of q (", shape[2], "), got ",
         key_heads);
  check.readable("k", k);
  check.same_shape("v", v, sizes_of(k));
  check.countable("q", "batch * seq * heads", {shape[0], shape[1], shape[2]}, kMaxAttentionRows);
  check.countable("k", "seq", {k.size(1)}, kMaxAttentionRows);

  AttentionParams params{};
  params.batch = shape[0];
  params.query_length = shape[1];
  params.key_length = k.size(1);
  params.heads = shape[2];
  params.key_heads = key_heads;
  params.head_dim = shape[3];
  params.dtype = check.dtype();
  params.scale = attention_scale(check, scale);
  params.q = attention_operand(q);
  params.k = attention_operand(k);
  params.v = attention_operand(v);
  if (key_bias.has_value()) set_key_bias(params, check, *key_bias);
  if (key_lengths.has_value()) set_key_lengths(params, check, *key_lengths);
  OwnedTensor out = empty(q, shape);
  if (q.numel() == 0) return out;
  params.out = Tensor(out).mutable_data_ptr();
  const DeviceStream device(q);
  OwnedTensor workspace;
  if (const int64_t bytes = attention_workspace_bytes(params)) {
    workspace = empty(q, {bytes / bytes_of(params.dtype)});
    params.workspace = Tensor(workspace).mutable_data_ptr();
  }
  attention(params, device.stream());
  return out;
}

// ---------------------------------------------------------------------------------------------------------
// Registration

void implement(torch::stable::detail::StableLibrary& ops) {
  ops.impl("rms_norm", Boxed<&op_rms_norm>::call);
  ops.impl("layer_norm", Boxed<&op_layer_norm>::call);
  ops.impl("rms_norm_modulate", Boxed<&op_rms_norm_modulate>::call);
  ops.impl("layer_norm_modulate", Boxed<&op_layer_norm_modulate>::call);
  ops.impl("gated_residual", Boxed<&op_gated_residual>::call);
  ops.impl("gated_residual_rms_norm_modulate", Boxed<&op_gated_residual_rms_norm_modulate>::call);
  ops.impl("gated_residual_layer_norm_modulate", Boxed<&op_gated_residual_layer_norm_modulate>::call);
  ops.impl("qk_norm_rope", Boxed<&op_qk_norm_rope>::call);
  ops.impl("qk_norm_rope_", Boxed<&op_qk_norm_rope_>::call);
  ops.impl("qk_norm_coordinate_rope", Boxed<&op_qk_norm_coordinate_rope>::call);
  ops.impl("qk_norm_coordinate_rope_", Boxed<&op_qk_norm_coordinate_rope_>::call);
  ops.impl("rope", Boxed<&op_rope>::call);
  ops.impl("rope_3d", Boxed<&op_rope_3d>::call);
  ops.impl("gelu", Boxed<&op_gelu>::call);
  ops.impl("silu", Boxed<&op_silu>::call);
  ops.impl("geglu", Boxed<&op_geglu>::call);
  ops.impl("swiglu", Boxed<&op_swiglu>::call);
  ops.impl("softmax", Boxed<&op_softmax>::call);
  ops.impl("attention", Boxed<&op_attention>::call);
}

}  // namespace
}  // namespace h100_diffusers_kernels

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor");
  ops.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  ops.def("rms_norm_modulate(Tensor x, Tensor scale, Tensor shift, Tensor? weight, float eps) -> Tensor");
  ops.def(
      "layer_norm_modulate(Tensor x, Tensor scale, Tensor shift, Tensor? weight, Tensor? bias, float eps)"
      " -> Tensor");
  ops.def("gated_residual(Tensor residual, Tensor x, Tensor? gate) -> Tensor");
  ops.def(
      "gated_residual_rms_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor scale, Tensor shift,"
      " Tensor? weight, float eps) -> (Tensor, Tensor)");
  ops.def(
      "gated_residual_layer_norm_modulate(Tensor residual, Tensor x, Tensor? gate, Tensor scale, Tensor "
      "shift,"
      " Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)");
  ops.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin,"
      " int heads, str norm, str layout, float eps) -> (Tensor, Tensor)");
  ops.def(
      "qk_norm_rope_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? "
      "sin,"
      " int heads, str norm, str layout, float eps) -> ()");
  ops.def(
      "qk_norm_coordinate_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor coordinates,"
      " Tensor frequencies, int heads, str norm, str layout, float eps) -> (Tensor, Tensor)");
  ops.def(
      "qk_norm_coordinate_rope_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight,"
      " Tensor coordinates, Tensor frequencies, int heads, str norm, str layout, float eps) -> ()");
  ops.def("rope(Tensor x, Tensor cos, Tensor sin, str layout) -> Tensor");
  ops.def(
      "rope_3d(Tensor x, Tensor frame_cos, Tensor frame_sin, Tensor height_cos, Tensor height_sin,"
      " Tensor width_cos, Tensor width_sin, str layout) -> Tensor");
  ops.def("gelu(Tensor x, str approximate, Tensor? bias) -> Tensor");
  ops.def("silu(Tensor x, Tensor? bias) -> Tensor");
  ops.def("geglu(Tensor x, str approximate, Tensor? bias) -> Tensor");
  ops.def("swiglu(Tensor x, Tensor? bias) -> Tensor");
  ops.def("softmax(Tensor x) -> Tensor");
  ops.def(
      "attention(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias, Tensor? key_lengths) -> "
      "Tensor");
}

// Registered for both device types, whichever this build has kernels for: a tensor on the other one gets a
// sentence that says so.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { h100_diffusers_kernels::implement(ops); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { h100_diffusers_kernels::implement(ops); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
