// Attention.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "../output.h"
#include "../torch_binding.h"
#include "heads.h"

namespace h100_diffusers_kernels {
namespace {

void set_operand(AttentionOperand& operand, const Tensor& tensor, int64_t head_dim) {
  operand.data = tensor.const_data_ptr();
  set_heads_strides(operand.strides, tensor, head_dim);
}

// Checks the shapes of query, key and value, and sets sizes and numbers of heads.
void set_shape(AttentionParams& params, const ArgumentChecker& check, const Tensor& k, const Tensor& v,
               std::optional<int64_t> heads) {
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
  if (params.head_dim % kAttentionHeadDimStep != 0 || params.head_dim < 1 ||
      params.head_dim > kMaxAttentionHeadDim)
    fail(check.operation(), "q must have a head_dim that is a multiple of ", kAttentionHeadDimStep, " up to ",
         kMaxAttentionHeadDim, ", got ", params.head_dim);
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

void set_gate(AttentionParams& params, const ArgumentChecker& check, const Tensor& gate) {
  check.same_device("gate", gate);
  check.float32_or_same_dtype("gate", gate);
  const int64_t shape[3] = {params.batch, params.query_length, params.heads};
  if (!std::ranges::equal(gate.sizes(), shape))
    fail(check.operation(), "gate must have shape ", to_string(std::span<const int64_t>(shape)), ", got ",
         to_string(gate.sizes()));
  check.stored("gate", gate);
  params.gate.data = gate.const_data_ptr();
  for (int64_t dim = 0; dim < 3; ++dim) params.gate.strides[dim] = gate.size(dim) == 1 ? 0 : gate.stride(dim);
  params.gate_is_float32 = gate.scalar_type() == ScalarType::Float;
}

int64_t blocks_of(int64_t length, int64_t rows) { return (length + rows - 1) / rows; }

// Checks an int32 tensor (batch or 1, heads or 1, ...), contiguous. Sets the strides of batch and head.
void check_of_heads(const AttentionParams& params, const ArgumentChecker& check, const char* name,
                    const Tensor& tensor, std::initializer_list<int64_t> inner, int64_t (&strides)[2]) {
  check.same_device(name, tensor);
  if (tensor.scalar_type() != ScalarType::Int)
    fail(check.operation(), name, " must be int32, got ", dtype_name(tensor.scalar_type()));
  const auto is_1_or = [](int64_t size, int64_t count) { return size == 1 || size == count; };
  const std::span<const int64_t> sizes = tensor.sizes();
  if (sizes.size() != 2 + inner.size() || !is_1_or(sizes[0], params.batch) ||
      !is_1_or(sizes[1], params.heads) || !std::ranges::equal(sizes.subspan(2), inner)) {
    std::string shape = "(1 or " + std::to_string(params.batch) + ", 1 or " + std::to_string(params.heads);
    for (const int64_t size : inner) shape += ", " + std::to_string(size);
    fail(check.operation(), name, " must have shape ", shape, "), got ", to_string(sizes));
  }
  check.contiguous(name, tensor);
  const int64_t rows = *inner.begin();
  strides[0] = sizes[0] == 1 ? 0 : sizes[1] * rows;
  strides[1] = sizes[1] == 1 ? 0 : rows;
}

void set_block_list(AttentionParams& params, const ArgumentChecker& check, const char* counts_name,
                    const OptionalTensor& counts, const char* indices_name, const OptionalTensor& indices,
                    KeyBlockList& list) {
  if (counts.has_value() != indices.has_value())
    fail(check.operation(), counts.has_value() ? indices_name : counts_name, " must be given with ",
         counts.has_value() ? counts_name : indices_name, ", got None");
  if (!counts.has_value()) return;
  const int64_t rows = blocks_of(params.query_length, params.blocks.query_rows);
  check_of_heads(params, check, counts_name, *counts, {rows}, list.strides);
  list.columns = indices->dim() == 4 ? indices->size(3) : 0;
  check_of_heads(params, check, indices_name, *indices, {rows, list.columns}, list.strides);
  if (!std::ranges::equal(counts->sizes(), indices->sizes().first(3)))
    fail(check.operation(), indices_name, " must have the first dimensions of ", counts_name, " ",
         to_string(counts->sizes()), ", got ", to_string(indices->sizes()));
  list.counts = static_cast<const int32_t*>(counts->const_data_ptr());
  list.indices = static_cast<const int32_t*>(indices->const_data_ptr());
}

struct KeyBlockTensors {
  const OptionalTensor &counts, &indices, &full_counts, &full_indices, &bounds;
  int64_t query_rows, key_rows;
};

void set_blocks(AttentionParams& params, const ArgumentChecker& check, const KeyBlockTensors& tensors) {
  KeyBlocks& blocks = params.blocks;
  for (const int64_t size : {tensors.query_rows, tensors.key_rows})
    if (size != 64 && size != 128)
      fail(check.operation(), "block_size must hold 64 or 128, got (", tensors.query_rows, ", ",
           tensors.key_rows, ")");
  blocks.is_given = true;
  blocks.query_rows = static_cast<int32_t>(tensors.query_rows);
  blocks.key_rows = static_cast<int32_t>(tensors.key_rows);
  set_block_list(params, check, "kv_num_blocks", tensors.counts, "kv_indices", tensors.indices,
                 blocks.bounded);
  set_block_list(params, check, "full_kv_num_blocks", tensors.full_counts, "full_kv_indices",
                 tensors.full_indices, blocks.full);
  if (tensors.bounds.has_value()) {
    check_of_heads(params, check, "key_bounds", *tensors.bounds, {params.query_length, 2},
                   blocks.bounds_strides);
    blocks.bounds = static_cast<const int32_t*>(tensors.bounds->const_data_ptr());
  }
  check.countable("k", "seq", {params.key_length}, kMaxListedKeys);
}

// All parameters of a call except its output.
AttentionParams attention_params(const ArgumentChecker& check, const Tensor& q, const Tensor& k,
                                 const Tensor& v, std::optional<double> scale, const OptionalTensor& key_bias,
                                 const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                                 const OptionalTensor& gate, const OptionalTensor& addend) {
  AttentionParams params{};
  set_shape(params, check, k, v, heads);
  params.dtype = check.dtype();
  params.scale = attention_scale(check, params.head_dim, scale);
  set_operand(params.q, q, params.head_dim);
  set_operand(params.k, k, params.head_dim);
  set_operand(params.v, v, params.head_dim);
  if (key_bias.has_value()) set_key_bias(params, check, *key_bias);
  if (key_lengths.has_value()) set_key_lengths(params, check, *key_lengths);
  if (gate.has_value()) set_gate(params, check, *gate);
  if (addend.has_value()) {
    check.same_shape("addend", *addend, check.shape());
    set_operand(params.addend, *addend, params.head_dim);
  }
  return params;
}

// The launcher of an operation, and its name in errors.
struct Kernel {
  const char* operation;
  int64_t (*workspace_bytes)(const AttentionParams& params);
  void (*launch)(const AttentionParams& params, Stream stream);
};

constexpr Kernel kAttention{"attention", attention_workspace_bytes, attention};
constexpr Kernel kAttentionInt8{"attention_int8", attention_int8_workspace_bytes, attention_int8};

void run(const Kernel& kernel, const ArgumentChecker& check, AttentionParams& params, const Tensor& out) {
  if (out.numel() == 0) return;
  params.out.data = out.mutable_data_ptr();
  set_heads_strides(params.out.strides, out, params.head_dim);
  const DeviceStream device(out);
  OwnedTensor workspace;
  if (const int64_t bytes = kernel.workspace_bytes(params)) {
    workspace = check.empty({bytes / bytes_of(params.dtype)});
    params.workspace = Tensor(workspace).mutable_data_ptr();
  }
  kernel.launch(params, device.stream());
}

ArgumentChecker checker(const Kernel& kernel, const Tensor& q, std::optional<int64_t> heads) {
  return ArgumentChecker(kernel.operation, "q", q, heads.has_value() ? 3 : 4, false);
}

OwnedTensor run_to_new(const Kernel& kernel, const ArgumentChecker& check, AttentionParams params) {
  OwnedTensor out = check.empty(check.shape());
  run(kernel, check, params, Tensor(out));
  return out;
}

// Returns the output and the logarithms of the sums of the exponentials, float32.
TwoTensors run_to_new_with_lse(const Kernel& kernel, const ArgumentChecker& check, AttentionParams params) {
  OwnedTensor out = check.empty(check.shape());
  OwnedTensor lse =
      check.empty({params.batch, params.query_length, params.heads}, aoti_torch_dtype_float32());
  params.lse = static_cast<float*>(Tensor(lse).mutable_data_ptr());
  run(kernel, check, params, Tensor(out));
  return {std::move(out), std::move(lse)};
}

OwnedTensor call_attention(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                           std::optional<double> scale, const OptionalTensor& key_bias,
                           const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                           const OptionalTensor& gate, const OptionalTensor& addend) {
  const ArgumentChecker check = checker(kAttention, q, heads);
  return run_to_new(kAttention, check,
                    attention_params(check, q, k, v, scale, key_bias, key_lengths, heads, gate, addend));
}

TwoTensors call_attention_lse(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                              std::optional<double> scale, const OptionalTensor& key_bias,
                              const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                              const OptionalTensor& gate, const OptionalTensor& addend) {
  const ArgumentChecker check = checker(kAttention, q, heads);
  return run_to_new_with_lse(
      kAttention, check, attention_params(check, q, k, v, scale, key_bias, key_lengths, heads, gate, addend));
}

void call_attention_out(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                        std::optional<double> scale, const OptionalTensor& key_bias,
                        const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                        const OptionalTensor& gate, const OptionalTensor& addend, const Tensor& out) {
  const ArgumentChecker check = checker(kAttention, q, heads);
  AttentionParams params =
      attention_params(check, q, k, v, scale, key_bias, key_lengths, heads, gate, addend);
  check_out(check, out, check.shape(),
            {{"q", q},
             {"k", k},
             {"v", v},
             {"key_bias", key_bias},
             {"key_lengths", key_lengths},
             {"gate", gate},
             {"addend", addend}});
  run(kAttention, check, params, out);
}

TwoTensors call_attention_blocks(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                                 std::optional<double> scale, const OptionalTensor& key_bias,
                                 const OptionalTensor& key_lengths, std::optional<int64_t> heads,
                                 const OptionalTensor& gate, const OptionalTensor& addend,
                                 const OptionalTensor& kv_num_blocks, const OptionalTensor& kv_indices,
                                 const OptionalTensor& full_kv_num_blocks,
                                 const OptionalTensor& full_kv_indices, int64_t query_rows, int64_t key_rows,
                                 const OptionalTensor& key_bounds) {
  const ArgumentChecker check = checker(kAttention, q, heads);
  AttentionParams params =
      attention_params(check, q, k, v, scale, key_bias, key_lengths, heads, gate, addend);
  set_blocks(
      params, check,
      {kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, key_bounds, query_rows, key_rows});
  return run_to_new_with_lse(kAttention, check, params);
}

OwnedTensor call_attention_int8(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                                std::optional<double> scale, const OptionalTensor& key_lengths,
                                std::optional<int64_t> heads, const OptionalTensor& gate,
                                const OptionalTensor& addend) {
  const ArgumentChecker check = checker(kAttentionInt8, q, heads);
  return run_to_new(kAttentionInt8, check,
                    attention_params(check, q, k, v, scale, {}, key_lengths, heads, gate, addend));
}

TwoTensors call_attention_int8_lse(const char*, const Tensor& q, const Tensor& k, const Tensor& v,
                                   std::optional<double> scale, const OptionalTensor& key_lengths,
                                   std::optional<int64_t> heads, const OptionalTensor& gate,
                                   const OptionalTensor& addend) {
  const ArgumentChecker check = checker(kAttentionInt8, q, heads);
  return run_to_new_with_lse(kAttentionInt8, check,
                             attention_params(check, q, k, v, scale, {}, key_lengths, heads, gate, addend));
}

constexpr Operation kOperations[] = {
    operation<"attention(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias, Tensor? key_lengths,"
              " int? heads, Tensor? gate, Tensor? addend) -> Tensor",
              call_attention>(),
    operation<"attention_lse(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, int? heads, Tensor? gate, Tensor? addend) -> (Tensor, Tensor)",
              call_attention_lse>(),
    operation<"attention_out(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, int? heads, Tensor? gate, Tensor? addend, Tensor(a!) out)"
              " -> ()",
              call_attention_out>(),
    operation<"attention_blocks(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_bias,"
              " Tensor? key_lengths, int? heads, Tensor? gate, Tensor? addend, Tensor? kv_num_blocks,"
              " Tensor? kv_indices, Tensor? full_kv_num_blocks, Tensor? full_kv_indices, int query_rows,"
              " int key_rows, Tensor? key_bounds) -> (Tensor, Tensor)",
              call_attention_blocks>(),
    operation<"attention_int8(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_lengths, int? heads,"
              " Tensor? gate, Tensor? addend) -> Tensor",
              call_attention_int8>(),
    operation<"attention_int8_lse(Tensor q, Tensor k, Tensor v, float? scale, Tensor? key_lengths,"
              " int? heads, Tensor? gate, Tensor? addend) -> (Tensor, Tensor)",
              call_attention_int8_lse>(),
};

}  // namespace

std::span<const Operation> attention_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
