// Query and key: norm and rotary embedding. Every operator speaks as the public function: qk_norm_rope, or
// norm_rope for one tensor.
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>

#include "../overlap.h"
#include "../torch_binding.h"
#include "heads.h"
#include "rotary_tables.h"

namespace h100_diffusers_kernels {
namespace {

// What gives a rotation: tables, coordinates or nothing.
struct Rotation {
  struct Names {
    TableNames tables = {};
    const char* coordinates = "coordinates";
    const char* frequencies = "frequencies";
  };

  OptionalTensor cos = {}, sin = {}, coordinates = {}, frequencies = {};
  Names names = {};

  bool is_given() const { return cos || sin || coordinates || frequencies; }
};

constexpr Rotation::Names kKeyNames = {{"k_cos", "k_sin"}, "k_coordinates", "k_frequencies"};

// One call, whichever way the rotation is given and the result is stored.
class NormRope {
 public:
  struct Named {
    const char* name;
    OptionalTensor tensor;
  };

  // One tensor.
  NormRope(const Tensor& x, const OptionalTensor& weight, int64_t heads, std::string_view norm,
           std::string_view layout, double eps)
      : NormRope("norm_rope", "x", x, heads, norm, layout, eps) {
    require_countable_heads(check_, {params_.batch, params_.seq, params_.q.heads, params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads) require_countable_token("x", params_.q.heads);
    params_.q_weight_is_float32 = set_weight(params_.q, "weight", weight);
  }

  // Query and key. The key is of the query's length where one rotation turns both.
  NormRope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
           int64_t heads, std::string_view norm, std::string_view layout, double eps, bool turn_alike)
      : NormRope("qk_norm_rope", "q", q, heads, norm, layout, eps) {
    k_ = &k;
    set_key(k, turn_alike);
    require_countable_heads(
        check_, {params_.batch, params_.seq, std::max(params_.q.heads, params_.k.heads), params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads) {
      require_countable_token("q", params_.q.heads);
      require_countable_token("k", params_.k.heads);
    }
    if (k_seq_ != params_.seq) require_countable("k", k, params_.k.heads);
    params_.q_weight_is_float32 = set_weight(params_.q, "q_weight", q_weight);
    params_.k_weight_is_float32 = set_weight(params_.k, "k_weight", k_weight);
    is_apart_ = k_seq_ != params_.seq;
  }

  // The key turns with the query unless it has a rotation of its own.
  void rotate(const Rotation& rotation, const Rotation& of_key = {}) {
    const bool turn_alike = k_ != nullptr && !of_key.is_given();
    set_rotation(params_, {check_.x_name(), params_.q.heads, turn_alike}, rotation);
    if (!of_key.is_given()) return;
    is_apart_ = true;
    QkvNormRopeParams& params = k_rotation_.emplace();
    params.batch = params_.batch;
    params.seq = k_seq_;
    params.head_dim = params_.head_dim;
    set_rotation(params, {"k", params_.k.heads, false}, of_key);
  }

  // They are copied beside the key.
  void set_values(const Tensor& v) {
    v_ = &v;
    check_.same_device("v", v);
    check_.same_dtype("v", v);
    const auto shape = v.sizes();
    if (!has_heads(check_, shape, k_seq_, params_.head_dim))
      fail(operation_, "v must have the batch, seq and head_dim of k of shape ", to_string(k_->sizes()),
           " (head_dim ", params_.head_dim, "), got ", to_string(shape));
    check_.readable("v", v);
    set_heads(params_.v, v);
    require_countable("v", v, params_.v.heads);
  }

  OwnedTensor run_one() {
    OwnedTensor out = check_.empty(sizes_of(q_));
    set_output(params_.q, Tensor(out));
    launch();
    return out;
  }

  TwoTensors run() {
    OwnedTensor q_out = check_.empty(sizes_of(q_));
    OwnedTensor k_out = check_.empty(sizes_of(*k_));
    set_output(params_.q, Tensor(q_out));
    set_output(params_.k, Tensor(k_out));
    launch();
    return {std::move(q_out), std::move(k_out)};
  }

  // read_only: the tensors that are read while the others are written.
  void run_in_place(std::initializer_list<Named> read_only) {
    const Named outputs[] = {{check_.x_name(), q_}, {"k", optional(k_)}};
    check_written(outputs, " in place");
    for (const Named& read : read_only) check_read(read, outputs, " in place");
    set_output(params_.q, q_);
    if (k_ != nullptr) set_output(params_.k, *k_);
    launch();
  }

  // outputs: for the query, the key and the values, as far as these are given.
  void run_out(std::initializer_list<Named> outputs, std::initializer_list<Named> read_only) {
    const Named inputs[] = {{check_.x_name(), q_}, {"k", optional(k_)}, {"v", optional(v_)}};
    HeadsOperand* const operands[] = {&params_.q, &params_.k, &params_.v};
    size_t i = 0;
    for (const Named& output : outputs) {
      if (output.tensor.has_value()) {
        check_output(output, inputs[i]);
        set_output(*operands[i], *output.tensor);
      }
      ++i;
    }
    const std::span<const Named> written(outputs.begin(), outputs.end());
    check_written(written, "");
    for (i = 0; i < outputs.size(); ++i) check_read(inputs[i], written, "", &written[i]);
    for (const Named& read : read_only) check_read(read, written, "");
    launch();
  }

 private:
  static OptionalTensor optional(const Tensor* tensor) {
    return tensor == nullptr ? std::nullopt : OptionalTensor(*tensor);
  }

  NormRope(const char* operation, const char* x_name, const Tensor& q, int64_t heads, std::string_view norm,
           std::string_view layout, double eps)
      : operation_(operation), q_(q), check_(operation, x_name, q, 3) {
    params_.dtype = check_.dtype();
    params_.eps = static_cast<float>(eps);
    params_.norm = parse_norm(norm);
    params_.layout = parse_layout(check_, layout);
    set_shape(heads);
    set_heads(params_.q, q);
  }

  NormScope parse_norm(std::string_view name) const {
    if (name == "across_heads") return NormScope::kAcrossHeads;
    if (name == "per_head") return NormScope::kPerHead;
    if (name == "none") return NormScope::kNone;
    fail(operation_, "norm must be 'across_heads', 'per_head' or 'none', got '", name, "'");
  }

  void set_shape(int64_t heads) {
    const Sizes& shape = check_.shape();
    if (shape.size() > 4)
      fail(operation_, check_.x_name(),
           " must have shape (batch, seq, heads*head_dim) or (batch, seq, heads, head_dim), got ",
           to_string(shape));
    params_.head_dim = head_dim_of(check_, heads);
    params_.batch = shape[0];
    params_.seq = shape[1];
  }

  void set_heads(HeadsOperand& operand, const Tensor& tensor) const {
    operand.in = tensor.const_data_ptr();
    operand.heads = heads_of(tensor, params_.head_dim);
    set_heads_strides(operand.in_strides, tensor, params_.head_dim);
  }

  void set_key(const Tensor& k, bool has_one_length) {
    check_.same_device("k", k);
    check_.same_dtype("k", k);
    const auto shape = k.sizes();
    k_seq_ = has_one_length || shape.size() < 2 ? params_.seq : shape[1];
    if (!has_heads(check_, shape, k_seq_, params_.head_dim))
      fail(operation_, "k must have the batch", has_one_length ? ", seq" : "", " and head_dim of q of shape ",
           to_string(check_.shape()), " (head_dim ", params_.head_dim, "), got ", to_string(shape));
    check_.readable("k", k);
    set_heads(params_.k, k);
  }

  void set_output(HeadsOperand& operand, const Tensor& tensor) const {
    operand.out = tensor.mutable_data_ptr();
    set_heads_strides(operand.out_strides, tensor, params_.head_dim);
  }

  // Returns whether the weight is of float32 beside rows of 16 bits.
  bool set_weight(HeadsOperand& operand, const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return false;
    if (params_.norm == NormScope::kNone)
      fail(operation_, name, " is accepted only with norm 'across_heads' or 'per_head', got norm 'none'");
    check_.same_device(name, *tensor);
    check_.float32_or_same_dtype(name, *tensor);
    const int64_t heads = params_.norm == NormScope::kPerHead ? 1 : operand.heads;
    if (tensor->dim() != 1 || tensor->size(0) != heads * params_.head_dim)
      fail(operation_, name, " must have shape (", heads * params_.head_dim, ",), got ",
           to_string(tensor->sizes()));
    check_.readable(name, *tensor);
    operand.weight = tensor->const_data_ptr();
    return tensor->dtype() != q_.dtype();
  }

  // What a rotation turns.
  struct Rotated {
    const char* name;
    int64_t heads;
    bool turns_key;  // too
  };

  void set_rotation(QkvNormRopeParams& params, const Rotated& rotated, const Rotation& rotation) const {
    const auto& [cos, sin, coordinates, frequencies, names] = rotation;
    if (coordinates || frequencies) {
      if (cos || sin)
        fail(operation_, cos ? names.tables.cos : names.tables.sin, " must be None along with ",
             coordinates ? names.coordinates : names.frequencies, ", got a tensor");
      if (!coordinates || !frequencies)
        fail(operation_, coordinates ? names.frequencies : names.coordinates, " must be given along with ",
             coordinates ? names.coordinates : names.frequencies, ", got None");
      set_coordinates(params, rotated, *coordinates, *frequencies, names);
    } else if (cos) {
      require_even_head_dim(check_, params.head_dim);
      TableChecker table_check(check_, {params.batch, params.seq, rotated.heads, params.head_dim});
      params.tables = table_check.tables(*cos, sin, names.tables, true);
      if (rotated.turns_key && table_check.per_head() != nullptr) require_equal_heads(table_check.per_head());
    } else if (sin) {
      fail(operation_, names.tables.cos, " must be given along with ", names.tables.sin, ", got None");
    }
  }

  void set_coordinates(QkvNormRopeParams& params, const Rotated& rotated, const Tensor& coordinates,
                       const Tensor& frequencies, const Rotation::Names& names) const {
    require_even_head_dim(check_, params.head_dim);
    check_.same_device(names.coordinates, coordinates);
    check_.float32(names.coordinates, coordinates);
    check_.same_device(names.frequencies, frequencies);
    check_.float32(names.frequencies, frequencies);
    if (coordinates.dim() != 3 || (coordinates.size(0) != 1 && coordinates.size(0) != params.batch) ||
        coordinates.size(1) != params.seq || coordinates.size(2) < 1)
      fail(operation_, names.coordinates, " must have shape (1 or ", params.batch, ", ", params.seq,
           ", axes), got ", to_string(coordinates.sizes()));
    check_.readable(names.coordinates, coordinates);
    if (frequencies.dim() != 1)
      fail(operation_, names.frequencies, " must have one dimension, got shape ",
           to_string(frequencies.sizes()));
    check_.readable(names.frequencies, frequencies);
    if (rotated.turns_key) require_equal_heads(names.coordinates);
    require_countable_token(rotated.name, rotated.heads);
    const int64_t pairs = rotated.heads * params.head_dim / 2;
    const int64_t turned = coordinates.size(2) * frequencies.size(0);
    if (turned > pairs)
      fail(operation_, names.frequencies, " must hold at most ", pairs / coordinates.size(2), " values for ",
           pairs, " pairs and ", coordinates.size(2), " axes, got ", frequencies.size(0));
    if (turned == 0) return;  // nothing to rotate
    params.coordinates = static_cast<const float*>(coordinates.const_data_ptr());
    params.coordinate_strides[0] = coordinates.size(0) == 1 ? 0 : coordinates.stride(0);
    params.coordinate_strides[1] = coordinates.size(1) == 1 ? 0 : coordinates.stride(1);
    params.frequencies = static_cast<const float*>(frequencies.const_data_ptr());
    params.axes = static_cast<int32_t>(coordinates.size(2));
    params.identity_pairs = static_cast<int32_t>(pairs - turned);
  }

  void require_equal_heads(const char* name) const {
    if (params_.q.heads != params_.k.heads)
      fail(operation_, name, " that differ between heads need q and k with the same number of heads, got ",
           params_.q.heads, " and ", params_.k.heads);
  }

  // Kernels number the elements of a token where a norm or a rotation spans its heads.
  void require_countable_token(const char* name, int64_t heads) const {
    check_.countable(name, "heads * head_dim", {heads, params_.head_dim});
  }

  // Of the key and the values, whose length the query does not have.
  void require_countable(const char* name, const Tensor& tensor, int64_t heads) const {
    const ArgumentChecker check(operation_, name, tensor);
    require_countable_heads(check, {params_.batch, k_seq_, heads, params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads)
      check.countable(name, "heads * head_dim", {heads, params_.head_dim});
  }

  void check_output(const Named& output, const Named& input) const {
    const Tensor &out = *output.tensor, &in = *input.tensor;
    check_.same_device(output.name, out);
    check_.same_dtype(output.name, out);
    if (!std::ranges::equal(out.sizes(), in.sizes()))
      fail(operation_, output.name, " must have the shape of ", input.name, " ", to_string(in.sizes()),
           ", got ", to_string(out.sizes()));
    check_.readable(output.name, out);
  }

  // where: " in place", or nothing.
  void check_written(std::span<const Named> outputs, const char* where) const {
    for (const auto& [name, tensor] : outputs)
      if (tensor.has_value()) check_writable(name, *tensor, where);
    for (size_t i = 0; i < outputs.size(); ++i) check_read(outputs[i], outputs.subspan(0, i), where);
  }

  void check_writable(const char* name, const Tensor& tensor, const char* where) const {
    for (int64_t dim = 0; dim < tensor.dim(); ++dim)
      if (tensor.size(dim) > 1 && tensor.stride(dim) == 0)
        fail(operation_, name, " must not be expanded to be written", where, ", got stride 0 in dimension ",
             dim);
    if (overlaps_itself(tensor))
      fail(operation_, name, " must not overlap itself to be written", where, ", got shape ",
           to_string(tensor.sizes()), " with strides ",
           to_string(Sizes(tensor.strides().begin(), tensor.strides().end())));
  }

  // What is read has no elements in common with what is written, but an input may be its own output.
  void check_read(const Named& read, std::span<const Named> outputs, const char* where,
                  const Named* own = nullptr) const {
    if (!read.tensor.has_value()) return;
    for (const Named& output : outputs) {
      if (!output.tensor.has_value() || !overlap(*read.tensor, *output.tensor)) continue;
      if (&output != own || !is_same_view(*read.tensor, *output.tensor))
        fail(operation_, read.name, " must not share memory with ", output.name, ", which is written", where,
             ", got overlapping elements");
    }
  }

  static bool is_same_view(const Tensor& a, const Tensor& b) {
    bool same = a.const_data_ptr() == b.const_data_ptr();
    for (int64_t dim = 0; dim < a.dim(); ++dim)
      same = same && (a.size(dim) == 1 || a.stride(dim) == b.stride(dim));
    return same;
  }

  void launch() {
    const DeviceStream device(q_);
    if (!is_apart_) return launch(params_, device.stream());
    QkvNormRopeParams of_query = params_;
    of_query.k = of_query.v = {};
    launch(of_query, device.stream());
    // The key is the one tensor that is normalized and rotated.
    QkvNormRopeParams of_key = params_;
    of_key.seq = k_seq_;
    of_key.q = params_.k;
    of_key.q_weight_is_float32 = params_.k_weight_is_float32;
    of_key.k = {};
    if (k_rotation_.has_value()) {
      of_key.tables = k_rotation_->tables;
      of_key.coordinates = k_rotation_->coordinates;
      std::copy_n(k_rotation_->coordinate_strides, 2, of_key.coordinate_strides);
      of_key.frequencies = k_rotation_->frequencies;
      of_key.axes = k_rotation_->axes;
      of_key.identity_pairs = k_rotation_->identity_pairs;
    }
    launch(of_key, device.stream());
  }

  static void launch(const QkvNormRopeParams& params, Stream stream) {
    const int64_t heads = params.q.heads + params.k.heads + params.v.heads;
    if (params.batch == 0 || params.seq == 0 || heads == 0 || params.head_dim == 0) return;
    qk_norm_rope(params, stream);
  }

  const char* operation_;  // the public function, whichever operator it is called through
  const Tensor& q_;
  const Tensor* k_ = nullptr;
  const Tensor* v_ = nullptr;
  int64_t k_seq_ = 0;
  bool is_apart_ = false;  // the key is launched by itself
  const ArgumentChecker check_;
  QkvNormRopeParams params_{};
  std::optional<QkvNormRopeParams> k_rotation_;  // its own, and nothing else of these
};

TwoTensors call_qk_norm_rope(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                             const OptionalTensor& k_weight, const OptionalTensor& cos,
                             const OptionalTensor& sin, int64_t heads, std::string_view norm,
                             std::string_view layout, double eps) {
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps, cos || sin);
  call.rotate({.cos = cos, .sin = sin});
  return call.run();
}

void call_qk_norm_rope_(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                        const OptionalTensor& k_weight, const OptionalTensor& cos, const OptionalTensor& sin,
                        int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps, cos || sin);
  call.rotate({.cos = cos, .sin = sin});
  call.run_in_place({{"q_weight", q_weight}, {"k_weight", k_weight}, {"cos", cos}, {"sin", sin}});
}

TwoTensors call_qk_norm_coordinate_rope(const char*, const Tensor& q, const Tensor& k,
                                        const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                        const Tensor& coordinates, const Tensor& frequencies, int64_t heads,
                                        std::string_view norm, std::string_view layout, double eps) {
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps, true);
  call.rotate({.coordinates = coordinates, .frequencies = frequencies});
  return call.run();
}

void call_qk_norm_coordinate_rope_(const char*, const Tensor& q, const Tensor& k,
                                   const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                   const Tensor& coordinates, const Tensor& frequencies, int64_t heads,
                                   std::string_view norm, std::string_view layout, double eps) {
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps, true);
  call.rotate({.coordinates = coordinates, .frequencies = frequencies});
  call.run_in_place({{"q_weight", q_weight},
                     {"k_weight", k_weight},
                     {"coordinates", coordinates},
                     {"frequencies", frequencies}});
}

TwoTensors call_qk_norm_two_ropes(const char*, const Tensor& q, const Tensor& k,
                                  const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                  const OptionalTensor& cos, const OptionalTensor& sin,
                                  const OptionalTensor& coordinates, const OptionalTensor& frequencies,
                                  const OptionalTensor& k_cos, const OptionalTensor& k_sin,
                                  const OptionalTensor& k_coordinates, const OptionalTensor& k_frequencies,
                                  int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  const Rotation rotation{cos, sin, coordinates, frequencies};
  const Rotation of_key{k_cos, k_sin, k_coordinates, k_frequencies, kKeyNames};
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps,
                rotation.is_given() && !of_key.is_given());
  call.rotate(rotation, of_key);
  return call.run();
}

void call_qk_norm_two_ropes_(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                             const OptionalTensor& k_weight, const OptionalTensor& cos,
                             const OptionalTensor& sin, const OptionalTensor& coordinates,
                             const OptionalTensor& frequencies, const OptionalTensor& k_cos,
                             const OptionalTensor& k_sin, const OptionalTensor& k_coordinates,
                             const OptionalTensor& k_frequencies, int64_t heads, std::string_view norm,
                             std::string_view layout, double eps) {
  const Rotation rotation{cos, sin, coordinates, frequencies};
  const Rotation of_key{k_cos, k_sin, k_coordinates, k_frequencies, kKeyNames};
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps,
                rotation.is_given() && !of_key.is_given());
  call.rotate(rotation, of_key);
  call.run_in_place({{"q_weight", q_weight},
                     {"k_weight", k_weight},
                     {"cos", cos},
                     {"sin", sin},
                     {"coordinates", coordinates},
                     {"frequencies", frequencies},
                     {"k_cos", k_cos},
                     {"k_sin", k_sin},
                     {"k_coordinates", k_coordinates},
                     {"k_frequencies", k_frequencies}});
}

void call_qk_norm_rope_out(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                           const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                           const OptionalTensor& cos, const OptionalTensor& sin,
                           const OptionalTensor& coordinates, const OptionalTensor& frequencies,
                           const OptionalTensor& k_cos, const OptionalTensor& k_sin,
                           const OptionalTensor& k_coordinates, const OptionalTensor& k_frequencies,
                           const Tensor& q_out, const Tensor& k_out, const OptionalTensor& v_out,
                           int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  const Rotation rotation{cos, sin, coordinates, frequencies};
  const Rotation of_key{k_cos, k_sin, k_coordinates, k_frequencies, kKeyNames};
  NormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps,
                rotation.is_given() && !of_key.is_given());
  call.rotate(rotation, of_key);
  if (v.has_value() != v_out.has_value())
    fail("qk_norm_rope", v ? "v_out" : "v", " must be given along with ", v ? "v" : "v_out", ", got None");
  if (v) call.set_values(*v);
  call.run_out({{"q_out", q_out}, {"k_out", k_out}, {"v_out", v_out}}, {{"q_weight", q_weight},
                                                                        {"k_weight", k_weight},
                                                                        {"cos", cos},
                                                                        {"sin", sin},
                                                                        {"coordinates", coordinates},
                                                                        {"frequencies", frequencies},
                                                                        {"k_cos", k_cos},
                                                                        {"k_sin", k_sin},
                                                                        {"k_coordinates", k_coordinates},
                                                                        {"k_frequencies", k_frequencies}});
}

OwnedTensor call_norm_rope(const char*, const Tensor& x, const OptionalTensor& weight,
                           const OptionalTensor& cos, const OptionalTensor& sin,
                           const OptionalTensor& coordinates, const OptionalTensor& frequencies,
                           int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  NormRope call(x, weight, heads, norm, layout, eps);
  call.rotate({cos, sin, coordinates, frequencies});
  return call.run_one();
}

void call_norm_rope_(const char*, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& cos,
                     const OptionalTensor& sin, const OptionalTensor& coordinates,
                     const OptionalTensor& frequencies, int64_t heads, std::string_view norm,
                     std::string_view layout, double eps) {
  NormRope call(x, weight, heads, norm, layout, eps);
  call.rotate({cos, sin, coordinates, frequencies});
  call.run_in_place({{"weight", weight},
                     {"cos", cos},
                     {"sin", sin},
                     {"coordinates", coordinates},
                     {"frequencies", frequencies}});
}

void call_norm_rope_out(const char*, const Tensor& x, const OptionalTensor& weight, const OptionalTensor& cos,
                        const OptionalTensor& sin, const OptionalTensor& coordinates,
                        const OptionalTensor& frequencies, const Tensor& out, int64_t heads,
                        std::string_view norm, std::string_view layout, double eps) {
  NormRope call(x, weight, heads, norm, layout, eps);
  call.rotate({cos, sin, coordinates, frequencies});
  call.run_out({{"out", out}}, {{"weight", weight},
                                {"cos", cos},
                                {"sin", sin},
                                {"coordinates", coordinates},
                                {"frequencies", frequencies}});
}

constexpr Operation kOperations[] = {
    operation<"qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos,"
              " Tensor? sin, int heads, str norm, str layout, float eps) -> (Tensor, Tensor)",
              call_qk_norm_rope>(),
    operation<"qk_norm_rope_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight, Tensor? cos,"
              " Tensor? sin, int heads, str norm, str layout, float eps) -> ()",
              call_qk_norm_rope_>(),
    operation<"qk_norm_coordinate_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight,"
              " Tensor coordinates, Tensor frequencies, int heads, str norm, str layout, float eps)"
              " -> (Tensor, Tensor)",
              call_qk_norm_coordinate_rope>(),
    operation<"qk_norm_coordinate_rope_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight,"
              " Tensor coordinates, Tensor frequencies, int heads, str norm, str layout, float eps) -> ()",
              call_qk_norm_coordinate_rope_>(),
    operation<"qk_norm_two_ropes(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos,"
              " Tensor? sin, Tensor? coordinates, Tensor? frequencies, Tensor? k_cos, Tensor? k_sin,"
              " Tensor? k_coordinates, Tensor? k_frequencies, int heads, str norm, str layout, float eps)"
              " -> (Tensor, Tensor)",
              call_qk_norm_two_ropes>(),
    operation<"qk_norm_two_ropes_(Tensor(a!) q, Tensor(b!) k, Tensor? q_weight, Tensor? k_weight,"
              " Tensor? cos, Tensor? sin, Tensor? coordinates, Tensor? frequencies, Tensor? k_cos,"
              " Tensor? k_sin, Tensor? k_coordinates, Tensor? k_frequencies, int heads, str norm, str layout,"
              " float eps) -> ()",
              call_qk_norm_two_ropes_>(),
    operation<"qk_norm_rope_out(Tensor q, Tensor k, Tensor? v, Tensor? q_weight, Tensor? k_weight,"
              " Tensor? cos, Tensor? sin, Tensor? coordinates, Tensor? frequencies, Tensor? k_cos,"
              " Tensor? k_sin, Tensor? k_coordinates, Tensor? k_frequencies, Tensor(a!) q_out,"
              " Tensor(b!) k_out, Tensor(c!)? v_out, int heads, str norm, str layout, float eps) -> ()",
              call_qk_norm_rope_out>(),
    operation<"norm_rope(Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, Tensor? coordinates,"
              " Tensor? frequencies, int heads, str norm, str layout, float eps) -> Tensor",
              call_norm_rope>(),
    operation<"norm_rope_(Tensor(a!) x, Tensor? weight, Tensor? cos, Tensor? sin, Tensor? coordinates,"
              " Tensor? frequencies, int heads, str norm, str layout, float eps) -> ()",
              call_norm_rope_>(),
    operation<"norm_rope_out(Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, Tensor? coordinates,"
              " Tensor? frequencies, Tensor(a!) out, int heads, str norm, str layout, float eps) -> ()",
              call_norm_rope_out>(),
};

}  // namespace

std::span<const Operation> qk_norm_rope_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
