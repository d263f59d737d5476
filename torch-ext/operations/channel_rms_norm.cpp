// RMS norm over channels.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

// Adjacent spatial dimensions without gaps between them, merged into one.
struct Run {
  int64_t count = 1;
  int64_t stride = 1;
};

// The spatial dimensions of a tensor (batch, channels, ...).
struct Positions {
  Run frames, pixels;
};

Positions positions_of(const ArgumentChecker& check, const Tensor& x) {
  Run runs[2];  // the innermost first
  int last = 0;
  for (int64_t dim = x.dim() - 1; dim >= 2; --dim) {
    if (x.size(dim) == 1) continue;
    const bool has_gap = runs[last].count > 1 && x.stride(dim) != runs[last].stride * runs[last].count;
    if (has_gap && ++last == 2)
      fail(check.operation(), "x must have at most one gap between its spatial dimensions, got strides ",
           to_string(x.strides()));
    if (runs[last].count == 1) runs[last].stride = x.stride(dim);
    runs[last].count *= x.size(dim);
  }
  return {runs[1], runs[0]};
}

bool is_channels_last(const ArgumentChecker& check, const Tensor& x, const Run& pixels) {
  if (pixels.count == 1 || pixels.stride == 1) return false;
  if (x.size(1) > 1 && x.stride(1) != 1)
    fail(check.operation(), "x must have stride 1 in its spatial dimensions or in its channels, got strides ",
         to_string(x.strides()));
  return true;
}

OwnedTensor call_channel_rms_norm(const char* operation, const Tensor& x, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& scale,
                                  const OptionalTensor& shift, double eps, bool silu) {
  const ArgumentChecker check(operation, "x", x, 3, true, ArgumentChecker::Strides::kAny);
  const Sizes& shape = check.shape();
  ChannelRmsNormParams params{};
  params.batch = shape[0];
  params.channels = shape[1];
  params.dtype = check.dtype();
  params.eps = static_cast<float>(eps);
  const bool is_empty = x.numel() == 0;
  const auto [frames, pixels] = is_empty ? Positions{} : positions_of(check, x);
  params.frames = frames.count;
  params.pixels = pixels.count;
  params.is_channels_last = is_channels_last(check, x, pixels);
  check.countable("x", "number of channels", {params.channels});
  check.countable("x", "number of positions", {params.batch, frames.count, pixels.count});
  const auto vector = [&](const char* name, const OptionalTensor& tensor, Modulator& operand) {
    operand.data = const_cast<void*>(check.vector(name, tensor, params.channels, true));
    operand.is_float32 = tensor.has_value() && tensor->element_bytes() == 4;
  };
  vector("weight", weight, params.weight);
  vector("bias", bias, params.bias);
  check.sample_channels("scale", scale, params.scale);
  check.sample_channels("shift", shift, params.shift);
  params.silu = silu;

  OwnedTensor out = params.is_channels_last ? check.empty_channels_last(shape) : check.empty(shape);
  if (is_empty) return out;
  params.x = x.const_data_ptr();
  params.out = Tensor(out).mutable_data_ptr();
  const auto stride = [&](int64_t dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
  params.x_strides[0] = stride(0);
  params.x_strides[1] = stride(1);
  params.x_strides[2] = frames.count == 1 ? 0 : frames.stride;
  params.x_strides[3] = pixels.stride;
  const DeviceStream device(x);
  channel_rms_norm(params, device.stream());
  return out;
}

constexpr Operation kOperations[] = {
    operation<"channel_rms_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift,"
              " float eps, bool silu) -> Tensor",
              call_channel_rms_norm>(),
};

}  // namespace

std::span<const Operation> channel_rms_norm_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
