// Query and key: norm and rotary embedding. Every operator speaks as the public qk_norm_rope.
#include <algorithm>
#include <initializer_list>

#include "../overlap.h"
#include "../torch_binding.h"
#include "rotary_tables.h"

namespace h100_diffusers_kernels {
namespace {

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
           ", axes), got ", to_string(coordinates.sizes()));
    check_.readable("coordinates", coordinates);
    if (frequencies.dim() != 1)
      fail(kOperation, "frequencies must have one dimension, got shape ", to_string(frequencies.sizes()));
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
    OwnedTensor q_out = check_.empty(sizes_of(q_));
    OwnedTensor k_out = check_.empty(sizes_of(k_));
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
    const auto shape = tensor.sizes();
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
           to_string(tensor.sizes()), " with strides ",
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

TwoTensors call_qk_norm_rope(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                             const OptionalTensor& k_weight, const OptionalTensor& cos,
                             const OptionalTensor& sin, int64_t heads, std::string_view norm,
                             std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_tables(cos, sin);
  return call.run();
}

void call_qk_norm_rope_(const char*, const Tensor& q, const Tensor& k, const OptionalTensor& q_weight,
                        const OptionalTensor& k_weight, const OptionalTensor& cos, const OptionalTensor& sin,
                        int64_t heads, std::string_view norm, std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_tables(cos, sin);
  call.run_in_place({{"q_weight", q_weight}, {"k_weight", k_weight}, {"cos", cos}, {"sin", sin}});
}

TwoTensors call_qk_norm_coordinate_rope(const char*, const Tensor& q, const Tensor& k,
                                        const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                        const Tensor& coordinates, const Tensor& frequencies, int64_t heads,
                                        std::string_view norm, std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_coordinates(coordinates, frequencies);
  return call.run();
}

void call_qk_norm_coordinate_rope_(const char*, const Tensor& q, const Tensor& k,
                                   const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                                   const Tensor& coordinates, const Tensor& frequencies, int64_t heads,
                                   std::string_view norm, std::string_view layout, double eps) {
  QkNormRope call(q, k, q_weight, k_weight, heads, norm, layout, eps);
  call.rotate_by_coordinates(coordinates, frequencies);
  call.run_in_place({{"q_weight", q_weight},
                     {"k_weight", k_weight},
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
};

}  // namespace

std::span<const Operation> qk_norm_rope_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
