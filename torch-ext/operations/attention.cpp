// Attention.
#include <cmath>
#include <limits>
#include <optional>

#include "../output.h"
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

AttentionOperand attention_operand(const Tensor& tensor) {
  AttentionOperand operand{tensor.const_data_ptr(), {}};
  for (int64_t dim = 0; dim < 3; ++dim) operand.strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  return operand;
}

AttentionOutput attention_output(const Tensor& tensor) {
  AttentionOutput output{tensor.mutable_data_ptr(), {}};
  for (int64_t dim = 0; dim < 3; ++dim) output.strides[dim] = tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
  return output;
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

// Everything that is known of a call but its output.
AttentionParams attention_params(const ArgumentChecker& check, const Tensor& q, const Tensor& k,
                                 const Tensor& v, std::optional<double> scale, const OptionalTensor& key_bias,
                                 const OptionalTensor& key_lengths) {
  const Sizes& shape = check.shape();
  if (shape.size() != 4)
    fail(check.operation(), "q must have shape (batch, seq, heads, head_dim), got ", to_string(shape));
  if (check.hidden() != 64 && check.hidden() != 128)
    fail(check.operation(), "q must have a head_dim of 64 or 128, got ", check.hidden());
  check.same_device("k", k);
  check.same_dtype("k", k);
  if (k.dim() != 4 || k.size(0) != shape[0] || k.size(3) != shape[3])
    fail(check.operation(), "k must have the batch and head_dim of q of shape ", to_string(shape), ", got ",
         to_string(k.sizes()));
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
  return params;
}

void run_attention(const ArgumentChecker& check, AttentionParams& params, const Tensor& out) {
  if (out.numel() == 0) return;
  params.out = attention_output(out);
  const DeviceStream device(out);
  OwnedTensor workspace;
  if (const int64_t bytes = attention_workspace_bytes(params)) {
    workspace = check.empty({bytes / bytes_of(params.dtype)});
    params.workspace = Tensor(workspace).mutable_data_ptr();
  }
  attention(params, device.stream());
}

OwnedTensor call_attention(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                           std::optional<double> scale, const OptionalTensor& key_bias,
                           const OptionalTensor& key_lengths) {
  const ArgumentChecker check(operation, "q", q, 4, false);
  AttentionParams params = attention_params(check, q, k, v, scale, key_bias, key_lengths);
  OwnedTensor out = check.empty(check.shape());
  run_attention(check, params, Tensor(out));
  return out;
}

void call_attention_out(const char* operation, const Tensor& q, const Tensor& k, const Tensor& v,
                        std::optional<double> scale, const OptionalTensor& key_bias,
                        const OptionalTensor& key_lengths, const Tensor& out) {
  const ArgumentChecker check(operation, "q", q, 4, false);
  AttentionParams params = attention_params(check, q, k, v, scale, key_bias, key_lengths);
  check_out(check, out, check.shape(),
            {{"q", q}, {"k", k}, {"v", v}, {"key_bias", key_bias}, {"key_lengths", key_lengths}});
  run_attention(check, params, out);
}

constexpr Operation kOperations[] = {
    operation<"attention(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias, Tensor? key_lengths)"
              " -> Tensor",
              call_attention>(),
    operation<"attention_out(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, Tensor(a!) out) -> ()",
              call_attention_out>(),
};

}  // namespace

std::span<const Operation> attention_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
