// Attention, and attention with a result that is quantized to FP8.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "../output.h"
#include "../torch_binding.h"
#include "heads.h"

namespace h100_diffusers_kernels {
namespace {

void set_operand(AttentionOperand& operand, const Tensor& tensor, int64_t head_dim) {
  operand.data = tensor.const_data_ptr();
  set_heads_strides(operand.strides, tensor, head_dim);
}

void check_head_dim(const ArgumentChecker& check, int64_t head_dim, bool is_quantized) {
  if (is_quantized && head_dim != kFp8BlockSize)
    fail(check.operation(), "q must have a head_dim of ", kFp8BlockSize, ", got ", head_dim);
  if (head_dim % kAttentionHeadDimStep != 0 || head_dim < 1 || head_dim > kMaxAttentionHeadDim)
    fail(check.operation(), "q must have a head_dim that is a multiple of ", kAttentionHeadDimStep, " up to ",
         kMaxAttentionHeadDim, ", got ", head_dim);
}

// Checks the shapes of query, key and value, and sets sizes and numbers of heads.
void set_shape(AttentionParams& params, const ArgumentChecker& check, const Tensor& k, const Tensor& v,
               std::optional<int64_t> heads, bool is_quantized) {
  const Sizes& shape = check.shape();
  if (heads.has_value()) {
    if (shape.size() != 3)
      fail(check.operation(), "q must have shape (batch, seq, heads*head_dim) if heads is given, got ",
           to_string(shape));
  } else if (shape.size() != 4) {
    fail(check.operation(), "q must have shape (batch, seq, heads, head_dim), got ", to_string(shape));
  }
  params.batch = shape[0];
  params.query_length = shape[1];
  params.heads = heads.value_or(shape[2]);
  params.head_dim = heads.has_value() ? head_dim_of(check, *heads) : shape[3];
  check_head_dim(check, params.head_dim, is_quantized);
  check.same_device("k", k);
  check.same_dtype("k", k);
  if (!has_heads(check, k.sizes(), k.dim() > 1 ? k.size(1) : 0, params.head_dim))
    fail(check.operation(), "k must have the batch and head_dim of q of shape ", to_string(shape),
         heads.has_value() ? " (head_dim " + std::to_string(params.head_dim) + ")" : "", ", got ",
         to_string(k.sizes()));
  params.key_length = k.size(1);
  params.key_heads = heads_of(k, params.head_dim);
  if (params.key_heads == 0 ? params.heads != 0 : params.heads % params.key_heads != 0)
    fail(check.operation(), "k must have a number of heads that divides that of q (", params.heads, "), got ",
         params.key_heads);
  check.readable("k", k);
  check.same_shape("v", v, sizes_of(k));
  check.countable("q", "batch * seq * heads", {params.batch, params.query_length, params.heads},
                  kMaxAttentionRows);
  check.countable("k", "seq", {params.key_length}, kMaxAttentionRows);
}

float attention_scale(const ArgumentChecker& check, int64_t head_dim, std::optional<double> scale) {
  if (!scale.has_value()) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!(*scale >= std::numeric_limits<float>::min() && *scale <= std::numeric_limits<float>::max()))
    fail(check.operation(), "scale must be positive and finite in float32, got ", *scale);
  return static_cast<float>(*scale);
}

void set_key_bias(AttentionParams& params, const ArgumentChecker& check, const Tensor& key_bias) {
  check.same_device("key_bias", key_bias);
  check.float32_or_same_dtype("key_bias", key_bias);
  if (key_bias.dim() != 2 || key_bias.size(0) != params.batch || key_bias.size(1) != params.key_length)
    fail(check.operation(), "key_bias must have shape (", params.batch, ", ", params.key_length, "), got ",
         to_string(key_bias.sizes()));
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
         to_string(key_lengths.sizes()));
  check.readable("key_lengths", key_lengths);
  params.key_lengths = static_cast<const int32_t*>(key_lengths.const_data_ptr());
}

// Sets the strides of (batch, seq, head) of a tensor with one value for each head.
void set_token_strides(int64_t (&strides)[3], const Tensor& tensor) {
  for (int64_t dim = 0; dim < 3; ++dim) strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

void set_gate(AttentionParams& params, const ArgumentChecker& check, const Tensor& gate) {
  check.same_device("gate", gate);
  check.float32_or_same_dtype("gate", gate);
  const int64_t shape[3] = {params.batch, params.query_length, params.heads};
  if (!std::ranges::equal(gate.sizes(), shape))
    fail(check.operation(), "gate must have shape ", to_string(std::span<const int64_t>(shape)), ", got ",
         to_string(gate.sizes()));
  check.stored("gate", gate);
  params.gate.data = gate.const_data_ptr();
  set_token_strides(params.gate.strides, gate);
  params.gate_is_float32 = gate.scalar_type() == ScalarType::Float;
}

struct AttentionInputs {
  const Tensor &q, &k, &v;
  std::optional<double> scale;
  const OptionalTensor &key_bias, &key_lengths;
  std::optional<int64_t> heads;
  const OptionalTensor &gate, &addend;
};

class AttentionCall {
 public:
  AttentionCall(const char* operation, const AttentionInputs& inputs, bool is_quantized = false)
      : inputs_(inputs), check_(operation, "q", inputs.q, inputs.heads.has_value() ? 3 : 4, false) {
    set_shape(params_, check_, inputs.k, inputs.v, inputs.heads, is_quantized);
    params_.dtype = check_.dtype();
    params_.scale = attention_scale(check_, params_.head_dim, inputs.scale);
    set_operand(params_.q, inputs.q, params_.head_dim);
    set_operand(params_.k, inputs.k, params_.head_dim);
    set_operand(params_.v, inputs.v, params_.head_dim);
    if (inputs.key_bias.has_value()) set_key_bias(params_, check_, *inputs.key_bias);
    if (inputs.key_lengths.has_value()) set_key_lengths(params_, check_, *inputs.key_lengths);
    if (inputs.gate.has_value()) set_gate(params_, check_, *inputs.gate);
    if (!inputs.addend.has_value()) return;
    check_.same_shape("addend", *inputs.addend, check_.shape());
    set_operand(params_.addend, *inputs.addend, params_.head_dim);
  }

  OwnedTensor run() {
    OwnedTensor out = check_.empty(check_.shape());
    launch(Tensor(out));
    return out;
  }

  void run(const Tensor& out) {
    check_read([&](std::initializer_list<ReadTensor> read) { check_out(check_, out, check_.shape(), read); });
    launch(out);
  }

  // The values and their scales.
  TwoTensors run_fp8() {
    TwoTensors out = check_.empty_fp8(check_.shape(), fp8_blocks(check_.hidden()));
    set_scale(Tensor(out.second));
    launch(Tensor(out.first));
    return out;
  }

  void run_fp8(const Tensor& out, const Tensor& scale) {
    check_read([&](std::initializer_list<ReadTensor> read) {
      check_fp8_out(check_, out, scale, check_.shape(), fp8_blocks(check_.hidden()), read);
    });
    set_scale(scale);
    launch(out);
  }

 private:
  template <typename Check>
  void check_read(const Check& check) const {
    check({{"q", inputs_.q},
           {"k", inputs_.k},
           {"v", inputs_.v},
           {"key_bias", inputs_.key_bias},
           {"key_lengths", inputs_.key_lengths},
           {"gate", inputs_.gate},
           {"addend", inputs_.addend}});
  }

  void set_scale(const Tensor& scale) {
    params_.out_scale.data = scale.mutable_data_ptr();
    set_token_strides(params_.out_scale.strides, scale);
  }

  void launch(const Tensor& out) {
    if (out.numel() == 0) return;
    params_.out.data = out.mutable_data_ptr();
    set_heads_strides(params_.out.strides, out, params_.head_dim);
    const DeviceStream device(out);
    OwnedTensor workspace;
    if (const int64_t bytes = attention_workspace_bytes(params_)) {
      workspace = check_.empty({bytes / bytes_of(params_.dtype)});
      params_.workspace = Tensor(workspace).mutable_data_ptr();
    }
    attention(params_, device.stream());
  }

  const AttentionInputs inputs_;
  const ArgumentChecker check_;
  AttentionParams params_{};
};

OwnedTensor call_attention(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                           std::optional<double> scale, const OptionalTensor& key_bias,
                           const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                           const OptionalTensor& gate, const OptionalTensor& addend) {
  return AttentionCall(operation, {q, k, v, scale, key_bias, key_lengths, heads, gate, addend}).run();
}

void call_attention_out(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                        std::optional<double> scale, const OptionalTensor& key_bias,
                        const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                        const OptionalTensor& gate, const OptionalTensor& addend, const Tensor& out) {
  AttentionCall(operation, {q, k, v, scale, key_bias, key_lengths, heads, gate, addend}).run(out);
}

TwoTensors call_attention_fp8(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                              std::optional<double> scale, const OptionalTensor& key_bias,
                              const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                              const OptionalTensor& gate, const OptionalTensor& addend) {
  return AttentionCall(operation, {q, k, v, scale, key_bias, key_lengths, heads, gate, addend}, true)
      .run_fp8();
}

void call_attention_fp8_out(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                            std::optional<double> scale, const OptionalTensor& key_bias,
                            const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                            const OptionalTensor& gate, const OptionalTensor& addend,
                            const Tensor& values_out, const Tensor& scale_out) {
  AttentionCall(operation, {q, k, v, scale, key_bias, key_lengths, heads, gate, addend}, true)
      .run_fp8(values_out, scale_out);
}

constexpr Operation kOperations[] = {
    operation<"attention(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias, Tensor? key_lengths,"
              " int? heads, Tensor? gate, Tensor? addend) -> Tensor",
              call_attention>(),
    operation<"attention_out(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, int? heads, Tensor? gate, Tensor? addend, Tensor(a!) out)"
              " -> ()",
              call_attention_out>(),
    operation<
        "attention_fp8(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias, Tensor? key_lengths,"
        " int? heads, Tensor? gate, Tensor? addend) -> (Tensor, Tensor)",
        call_attention_fp8>(),
    operation<"attention_fp8_out(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, int? heads, Tensor? gate, Tensor? addend, Tensor(a!) values_out,"
              " Tensor(b!) scale_out) -> ()",
              call_attention_fp8_out>(),
};

}  // namespace

std::span<const Operation> attention_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
