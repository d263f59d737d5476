// Group norm.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

// The spatial dimensions of a tensor (batch, channels, ...), merged into one.
struct Pixels {
  int64_t count = 1;
  int64_t stride = 1;
};

Pixels pixels_of(const ArgumentChecker& check, const Tensor& x) {
  Pixels pixels;
  for (int64_t dim = x.dim() - 1; dim >= 2; --dim) {
    if (x.size(dim) == 1) continue;
    if (pixels.count == 1)
      pixels.stride = x.stride(dim);
    else if (x.stride(dim) != pixels.stride * pixels.count)
      fail(check.operation(), "x must have no gaps between its spatial dimensions, got strides ",
           to_string(x.strides()));
    pixels.count *= x.size(dim);
  }
  return pixels;
}

bool is_channels_last(const ArgumentChecker& check, const Tensor& x, const Pixels& pixels) {
  if (pixels.count == 1 || pixels.stride == 1) return false;
  if (x.size(1) > 1 && x.stride(1) != 1)
    fail(check.operation(), "x must have stride 1 in its spatial dimensions or in its channels, got strides ",
         to_string(x.strides()));
  return true;
}

void set_strides(int64_t (&strides)[3], const Tensor& tensor, const Pixels& pixels) {
  strides[0] = tensor.size(0) == 1 ? 0 : tensor.stride(0);
  strides[1] = tensor.size(1) == 1 ? 0 : tensor.stride(1);
  strides[2] = pixels.stride;
}

OwnedTensor call_group_norm(const char* operation, const Tensor& x, int64_t num_groups,
                            const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                            const OptionalTensor& channel_bias, bool silu) {
  const ArgumentChecker check(operation, "x", x, 2, true, ArgumentChecker::Strides::kAny);
  const Sizes& shape = check.shape();
  GroupNormParams params{};
  params.batch = shape[0];
  params.channels = shape[1];
  params.groups = num_groups;
  params.dtype = check.dtype();
  params.eps = eps;
  if (num_groups < 1) fail(operation, "num_groups must be at least 1, got ", num_groups);
  if (params.channels % num_groups != 0)
    fail(operation, "num_groups must divide the channels of x (", params.channels, "), got ", num_groups);
  const bool is_empty = x.numel() == 0;
  const Pixels pixels = is_empty ? Pixels{} : pixels_of(check, x);
  params.pixels = pixels.count;
  params.is_channels_last = is_channels_last(check, x, pixels);
  check.countable("x", "group", {params.channels / num_groups, pixels.count});
  const auto vector = [&](const char* name, const OptionalTensor& tensor, Modulator& operand) {
    operand.data = const_cast<void*>(check.vector(name, tensor, params.channels, true));
    operand.is_float32 = tensor.has_value() && tensor->element_bytes() == 4;
  };
  vector("weight", weight, params.weight);
  vector("bias", bias, params.bias);
  check.sample_channels("channel_bias", channel_bias, params.channel_bias);
  params.silu = silu;

  OwnedTensor out = params.is_channels_last ? check.empty_channels_last(shape) : check.empty(shape);
  if (is_empty) return out;
  const Tensor result(out);
  params.x = x.const_data_ptr();
  params.out = result.mutable_data_ptr();
  set_strides(params.x_strides, x, pixels);
  set_strides(params.out_strides, result, {pixels.count, params.is_channels_last ? params.channels : 1});
  const DeviceStream device(x);
  OwnedTensor workspace;
  if (const int64_t bytes = group_norm_workspace_bytes(params, device.stream())) {
    workspace = check.empty({bytes / bytes_of(params.dtype)});
    params.workspace = Tensor(workspace).mutable_data_ptr();
  }
  group_norm(params, device.stream());
  return out;
}

constexpr Operation kOperations[] = {
    operation<"group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps,"
              " Tensor? channel_bias, bool silu) -> Tensor",
              call_group_norm>(),
};

}  // namespace

std::span<const Operation> group_norm_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
