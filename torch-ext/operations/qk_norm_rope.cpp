// Query and key: norm and rotary embedding.
#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "../output.h"
#include "../torch_binding.h"
#include "heads.h"
#include "rotary_tables.h"

namespace h100_diffusers_kernels {
namespace {

// A rotation: tables (cos, sin), one complex table, coordinates and frequencies, or none.
struct Rotation {
  struct Names {
    TableNames tables = {};
    const char* coordinates = "coordinates";
    const char* frequencies = "frequencies";
  };

  OptionalTensor first, second;
  bool is_coordinates;
  Names names = {};

  bool is_given() const { return first || second; }
  const char* first_name() const { return is_coordinates ? names.coordinates : names.tables.cos; }
  const char* second_name() const { return is_coordinates ? names.frequencies : names.tables.sin; }
};

constexpr Rotation::Names kKeyNames = {{"k_cos", "k_sin"}, "k_coordinates", "k_frequencies"};

constexpr const char* kNormNames[] = {"none", "across_heads", "per_head", "layer_per_head"};  // by NormScope

class NormRope {
 public:
  struct Named {
    const char* name;
    OptionalTensor tensor;
  };

  // Without a rotation of its own the key uses the query's, and must then have the query's length.
  NormRope(const Tensor& q, const Tensor& k, const OptionalTensor& q_weight, const OptionalTensor& k_weight,
           const OptionalTensor& q_bias, const OptionalTensor& k_bias, const Rotation& rotation,
           const Rotation& k_rotation, int64_t heads, int64_t norm, int64_t layout, double eps)
      : q_(q),
        k_(k),
        q_weight_(q_weight),
        k_weight_(k_weight),
        q_bias_(q_bias),
        k_bias_(k_bias),
        rotation_(rotation),
        k_rotation_(k_rotation) {
    params_.dtype = check_.dtype();
    params_.eps = static_cast<float>(eps);
    params_.norm = static_cast<NormScope>(norm);
    params_.layout = static_cast<RopeLayout>(layout);
    set_shape(heads);
    set_heads(params_.q, q);
    set_key(rotation.is_given() && !k_rotation.is_given());
    require_countable_heads(
        check_, {params_.batch, params_.seq, std::max(params_.q.heads, params_.k.heads), params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads) {
      require_countable_token("q", params_.q.heads);
      require_countable_token("k", params_.k.heads);
    }
    if (k_seq_ != params_.seq) require_countable("k", k, params_.k.heads);
    params_.q_weight_is_float32 = set_weight(params_.q, "q_weight", q_weight);
    params_.k_weight_is_float32 = set_weight(params_.k, "k_weight", k_weight);
    set_bias(params_.q_bias, "q_bias", q_bias);
    set_bias(params_.k_bias, "k_bias", k_bias);
    set_rotation(params_, {"q", params_.q.heads, !k_rotation.is_given()}, rotation);
    if (!k_rotation.is_given()) return;
    k_params_.batch = params_.batch;
    k_params_.seq = k_seq_;
    k_params_.head_dim = params_.head_dim;
    set_rotation(k_params_, {"k", params_.k.heads, false}, k_rotation);
  }

  // Sets the values, which the key's launch copies.
  void set_values(const Tensor& v) {
    v_ = &v;
    check_.same_device("v", v);
    check_.same_dtype("v", v);
    const auto shape = v.sizes();
    if (!has_heads(check_, shape, k_seq_, params_.head_dim))
      fail(operation_, "v must have the batch, seq and head_dim of k of shape ", to_string(k_.sizes()),
           " (head_dim ", params_.head_dim, "), got ", to_string(shape));
    check_.readable("v", v);
    set_heads(params_.v, v);
    require_countable("v", v, params_.v.heads);
  }

  TwoTensors run() {
    OwnedTensor q_out = check_.empty(sizes_of(q_));
    OwnedTensor k_out = check_.empty(sizes_of(k_));
    set_output(params_.q, Tensor(q_out));
    set_output(params_.k, Tensor(k_out));
    launch();
    return {std::move(q_out), std::move(k_out)};
  }

  // in_place: the outputs are q and k themselves, which error texts mention.
  void run(const Tensor& q_out, const Tensor& k_out, const OptionalTensor& v_out, bool in_place) {
    const Named inputs[] = {{"q", q_}, {"k", k_}, {"v", v_ == nullptr ? std::nullopt : OptionalTensor(*v_)}};
    const Named outputs[] = {
        {in_place ? "q" : "q_out", q_out}, {in_place ? "k" : "k_out", k_out}, {"v_out", v_out}};
    HeadsOperand* const operands[] = {&params_.q, &params_.k, &params_.v};
    for (size_t i = 0; i < 3; ++i) {
      if (!outputs[i].tensor.has_value()) continue;
      check_output(outputs[i], inputs[i], *operands[i], i == 0 ? params_.seq : k_seq_);
      set_output(*operands[i], *outputs[i].tensor);
    }
    const char* const where = in_place ? " in place" : "";
    for (const auto& [name, tensor] : outputs)
      if (tensor.has_value()) check_writable(operation_, name, *tensor, where);
    for (size_t i = 0; i < 3; ++i) check_read(outputs[i], std::span(outputs, i), where);
    if (!in_place)
      for (size_t i = 0; i < 3; ++i) check_read(inputs[i], outputs, where, &outputs[i]);
    check_read({"q_weight", q_weight_}, outputs, where);
    check_read({"k_weight", k_weight_}, outputs, where);
    check_read({"q_bias", q_bias_}, outputs, where);
    check_read({"k_bias", k_bias_}, outputs, where);
    for (const Rotation* rotation : {&rotation_, &k_rotation_}) {
      check_read({rotation->first_name(), rotation->first}, outputs, where);
      check_read({rotation->second_name(), rotation->second}, outputs, where);
    }
    launch();
  }

 private:
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

  void set_key(bool has_one_length) {
    check_.same_device("k", k_);
    check_.same_dtype("k", k_);
    const auto shape = k_.sizes();
    k_seq_ = has_one_length || shape.size() < 2 ? params_.seq : shape[1];
    if (!has_heads(check_, shape, k_seq_, params_.head_dim))
      fail(operation_, "k must have the batch", has_one_length ? ", seq" : "", " and head_dim of q of shape ",
           to_string(check_.shape()), " (head_dim ", params_.head_dim, "), got ", to_string(shape));
    check_.readable("k", k_);
    set_heads(params_.k, k_);
  }

  void set_output(HeadsOperand& operand, const Tensor& tensor) const {
    operand.out = tensor.mutable_data_ptr();
    set_heads_strides(operand.out_strides, tensor, params_.head_dim);
    if (tensor.dim() != kChunkedDims) return;
    const int64_t chunks = tensor.size(2), chunk_heads = tensor.size(3);
    if (chunk_heads <= 1) {
      operand.out_strides[2] = chunks == 1 ? 0 : tensor.stride(2);
    } else {
      operand.out_strides[2] = tensor.stride(3);
      if (chunks <= 1) return;
      operand.out_chunk_heads = chunk_heads;
      operand.out_chunk_gap = tensor.stride(2) - chunk_heads * tensor.stride(3);
    }
  }

  // Whether an output is (batch, seq, chunks, heads of a chunk, head_dim).
  bool is_chunked(const Tensor& out, const HeadsOperand& operand, int64_t seq) const {
    if (out.dim() != kChunkedDims || out.size(0) != params_.batch || out.size(1) != seq ||
        out.size(4) != params_.head_dim)
      return false;
    const int64_t chunks = out.size(2), heads = out.size(3);
    if (chunks == 0 || heads == 0) return operand.heads == 0;
    return operand.heads % heads == 0 && operand.heads / heads == chunks && operand.heads > 0;
  }

  // Returns whether the weight is float32 and the rows are 16-bit.
  bool set_weight(HeadsOperand& operand, const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return false;
    if (params_.norm == NormScope::kNone)
      fail(operation_, name, " is accepted only with a norm, got norm 'none'");
    check_.same_device(name, *tensor);
    check_.float32_or_same_dtype(name, *tensor);
    const int64_t heads = params_.norm == NormScope::kAcrossHeads ? operand.heads : 1;
    if (tensor->dim() != 1 || tensor->size(0) != heads * params_.head_dim)
      fail(operation_, name, " must have shape (", heads * params_.head_dim, ",), got ",
           to_string(tensor->sizes()));
    check_.readable(name, *tensor);
    operand.weight = tensor->const_data_ptr();
    return tensor->dtype() != q_.dtype();
  }

  void set_bias(Bias& bias, const char* name, const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return;
    if (params_.norm != NormScope::kLayerPerHead)
      fail(operation_, name, " is accepted only with norm 'layer_per_head', got norm '",
           kNormNames[static_cast<int>(params_.norm)], "'");
    check_.same_device(name, *tensor);
    check_.float32_or_same_dtype(name, *tensor);
    if (tensor->dim() != 1 || tensor->size(0) != params_.head_dim)
      fail(operation_, name, " must have shape (", params_.head_dim, ",), got ", to_string(tensor->sizes()));
    check_.readable(name, *tensor);
    bias = {tensor->const_data_ptr(), tensor->dtype() != q_.dtype()};
  }

  // The tensor that a rotation applies to.
  struct Rotated {
    const char* name;
    int64_t heads;
    bool turns_key;  // whether it also rotates the key
  };

  void set_rotation(QkvNormRopeParams& params, const Rotated& rotated, const Rotation& rotation) const {
    if (!rotation.is_given()) return;
    const auto& [first, second, is_coordinates, names] = rotation;
    if (!first || (is_coordinates && !second))
      fail(operation_, first ? rotation.second_name() : rotation.first_name(), " must be given along with ",
           first ? rotation.first_name() : rotation.second_name(), ", got None");
    if (is_coordinates) return set_coordinates(params, rotated, *first, *second, names);
    require_even_head_dim(check_, params.head_dim);
    TableChecker table_check(check_, {params.batch, params.seq, rotated.heads, params.head_dim});
    params.tables = table_check.tables(*first, second, names.tables, true);
    if (rotated.turns_key && table_check.per_head() != nullptr) require_equal_heads(table_check.per_head());
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

  // Kernels index the elements of a token with an int if a norm or a rotation spans its heads.
  void require_countable_token(const char* name, int64_t heads) const {
    check_.countable(name, "heads * head_dim", {heads, params_.head_dim});
  }

  // For the key and the values, whose length may differ from the query's.
  void require_countable(const char* name, const Tensor& tensor, int64_t heads) const {
    const ArgumentChecker check(operation_, name, tensor);
    require_countable_heads(check, {params_.batch, k_seq_, heads, params_.head_dim});
    if (params_.norm == NormScope::kAcrossHeads)
      check.countable(name, "heads * head_dim", {heads, params_.head_dim});
  }

  void check_output(const Named& output, const Named& input, const HeadsOperand& operand, int64_t seq) const {
    const Tensor &out = *output.tensor, &in = *input.tensor;
    check_.same_device(output.name, out);
    check_.same_dtype(output.name, out);
    if (!std::ranges::equal(out.sizes(), in.sizes()) && !is_chunked(out, operand, seq))
      fail(operation_, output.name, " must have the shape of ", input.name, " ", to_string(in.sizes()),
           " or shape (", params_.batch, ", ", seq, ", chunks, ", operand.heads, " / chunks, ",
           params_.head_dim, "), got ", to_string(out.sizes()));
    check_.readable(output.name, out);
    if (out.dim() == kChunkedDims && operand.heads > kMaxChunkedHeads)
      fail(operation_, output.name, " must have at most ", kMaxChunkedHeads, " heads in chunks, got ",
           operand.heads);
  }

  // Fails if an input overlaps an output. It may be identical to its own output.
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

  void launch() {
    const DeviceStream device(q_);
    const bool has_own_launch = k_rotation_.is_given() || k_seq_ != params_.seq;
    if (!has_own_launch) return launch(params_, device.stream());
    QkvNormRopeParams of_query = params_;
    of_query.k = of_query.v = {};
    launch(of_query, device.stream());
    // The second launch has the key as its query.
    QkvNormRopeParams of_key = params_;
    of_key.seq = k_seq_;
    of_key.q = params_.k;
    of_key.q_weight_is_float32 = params_.k_weight_is_float32;
    of_key.q_bias = params_.k_bias;
    of_key.k = {};
    if (k_rotation_.is_given()) {
      of_key.tables = k_params_.tables;
      of_key.coordinates = k_params_.coordinates;
      std::copy_n(k_params_.coordinate_strides, 2, of_key.coordinate_strides);
      of_key.frequencies = k_params_.frequencies;
      of_key.axes = k_params_.axes;
      of_key.identity_pairs = k_params_.identity_pairs;
    }
    launch(of_key, device.stream());
  }

  static void launch(const QkvNormRopeParams& params, Stream stream) {
    const int64_t heads = params.q.heads + params.k.heads + params.v.heads;
    if (params.batch == 0 || params.seq == 0 || heads == 0 || params.head_dim == 0) return;
    qk_norm_rope(params, stream);
  }

  static constexpr const char* operation_ = "qk_norm_rope";
  static constexpr int64_t kChunkedDims = 5;
  const Tensor &q_, &k_;
  const Tensor* v_ = nullptr;
  const OptionalTensor &q_weight_, &k_weight_, &q_bias_, &k_bias_;
  const Rotation &rotation_, &k_rotation_;
  int64_t k_seq_ = 0;
  const ArgumentChecker check_{operation_, "q", q_, 3};
  QkvNormRopeParams params_{};
  QkvNormRopeParams k_params_{};  // only the key's own rotation
};

TwoTensors call_qk_norm_rope(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                             const OptionalTensor& k_weight, const OptionalTensor& q_bias,
                             const OptionalTensor& k_bias, const OptionalTensor& first,
                             const OptionalTensor& second, bool is_coordinates, int64_t heads, int64_t norm,
                             int64_t layout, double eps) {
  const Rotation rotation{first, second, is_coordinates}, none{};
  return NormRope(q, k, q_weight, k_weight, q_bias, k_bias, rotation, none, heads, norm, layout, eps).run();
}

void call_qk_norm_rope_out(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                           const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                           const OptionalTensor& q_bias, const OptionalTensor& k_bias,
                           const OptionalTensor& first, const OptionalTensor& second, bool is_coordinates,
                           const OptionalTensor& k_first, const OptionalTensor& k_second,
                           bool k_is_coordinates, int64_t heads, int64_t norm, int64_t layout, double eps,
                           const Tensor& q_out, const Tensor& k_out, const OptionalTensor& v_out,
                           bool in_place) {
  const Rotation rotation{first, second, is_coordinates};
  const Rotation k_rotation{k_first, k_second, k_is_coordinates, kKeyNames};
  NormRope call(q, k, q_weight, k_weight, q_bias, k_bias, rotation, k_rotation, heads, norm, layout, eps);
  if (v.has_value() != v_out.has_value())
    fail("qk_norm_rope", v ? "v_out" : "v", " must be given along with ", v ? "v" : "v_out", ", got None");
  if (v) call.set_values(*v);
  call.run(q_out, k_out, v_out, in_place);
}

// `first` and `second` are a rotation: cos and sin, a complex table and None, or, with `is_coordinates`,
// coordinates and frequencies. `qk_norm_rope_out` also takes the key's own rotation, and values to copy.
constexpr Operation kOperations[] = {
    operation<"qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? q_bias,"
              " Tensor? k_bias, Tensor? first, Tensor? second, bool is_coordinates, int heads, int norm,"
              " int layout, float eps)"
              " -> (Tensor, Tensor)",
              call_qk_norm_rope>(),
    operation<"qk_norm_rope_out(Tensor q, Tensor k, Tensor? v, Tensor? q_weight, Tensor? k_weight,"
              " Tensor? q_bias, Tensor? k_bias, Tensor? first, Tensor? second, bool is_coordinates, Tensor? "
              "k_first, Tensor? k_second,"
              " bool k_is_coordinates, int heads, int norm, int layout, float eps, Tensor(a!) q_out,"
              " Tensor(b!) k_out, Tensor(c!)? v_out, bool in_place) -> ()",
              call_qk_norm_rope_out>(),
};

}  // namespace

std::span<const Operation> qk_norm_rope_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
