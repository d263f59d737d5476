// Convolutions of videos with channels last.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

constexpr int64_t kMultiple = 8;    // elements, of strides and channels
constexpr int64_t kAlignment = 16;  // bytes

class Conv3dCall {
 public:
  Conv3dCall(const char* operation, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
             const OptionalTensor& previous, int64_t front, int64_t back, int64_t rows, int64_t columns,
             bool replicate_frames, int64_t border)
      : check_(operation, "x", x, 5, false, ArgumentChecker::Strides::kAny) {
    if (x.dim() != 5) fail(operation, "x must have 5 dimensions, got shape ", to_string(check_.shape()));
    const int64_t channels = x.size(1);
    if (channels < kMultiple || channels % kMultiple != 0)
      fail(operation, "x must have a multiple of ", kMultiple, " channels, got ", channels);
    for (int64_t dim = 2; dim < 5; ++dim)
      if (x.size(dim) == 0)
        fail(operation, "x must have frames, rows and columns, got shape ", to_string(check_.shape()));
    params_.dtype = check_.dtype();
    params_.batch = x.size(0);
    params_.channels = channels;
    params_.frames = x.size(2);
    params_.height = x.size(3);
    params_.width = x.size(4);
    params_.x = x.const_data_ptr();
    set_strides("x", x, params_.x_strides);
    if (previous.has_value()) set_previous(x, *previous);
    set_weight(weight);
    params_.bias = check_.vector("bias", bias, params_.out_channels);
    params_.replicates_frames = replicate_frames;
    params_.border = static_cast<Border>(border);
    set_padding("padding[0]", front, params_.taps[0]);
    set_padding("padding[1]", back, params_.taps[0]);
    set_padding("padding[2]", rows, params_.taps[1]);
    set_padding("padding[3]", columns, params_.taps[2]);
    params_.front = front;
    params_.padding[0] = rows;
    params_.padding[1] = columns;
    const auto size_of = [](int64_t size, int64_t padding, int64_t taps) {
      return size + padding - taps + 1;
    };
    params_.out_frames = size_of(params_.previous_frames + params_.frames, front + back, params_.taps[0]);
    params_.out_height = size_of(params_.height, 2 * rows, params_.taps[1]);
    params_.out_width = size_of(params_.width, 2 * columns, params_.taps[2]);
    if (std::min({params_.out_frames, params_.out_height, params_.out_width}) < 1)
      fail(operation, "x and its padding must be at least as large as the weight's taps, got shape ",
           to_string(check_.shape()));
    if (params_.border == Border::kReflect &&
        ((rows > 0 && params_.height < 2) || (columns > 0 && params_.width < 2)))
      fail(operation, "x must have at least 2 rows and columns to be reflected, got shape ",
           to_string(check_.shape()));
    check_.countable("x", "number of positions",
                     {params_.batch, params_.out_frames, params_.out_height, params_.out_width});
  }

  OwnedTensor run() {
    OwnedTensor out = check_.empty_channels_last(
        {params_.batch, params_.out_channels, params_.out_frames, params_.out_height, params_.out_width});
    if (params_.batch == 0 || params_.out_channels == 0) return out;
    params_.out = Tensor(out).mutable_data_ptr();
    const DeviceStream device{Tensor(out)};
    OwnedTensor workspace = check_.empty({conv3d_workspace_bytes(params_) / bytes_of(params_.dtype)});
    params_.workspace = Tensor(workspace).mutable_data_ptr();
    conv3d(params_, device.stream());
    return out;
  }

 private:
  void set_strides(const char* name, const Tensor& tensor, int64_t (&strides)[4]) const {
    bool is_right = tensor.size(1) == 1 || tensor.stride(1) == 1;
    constexpr int64_t kDims[4] = {0, 2, 3, 4};
    for (int i = 0; i < 4; ++i) {
      const bool is_one = tensor.size(kDims[i]) == 1;
      strides[i] = is_one ? 0 : tensor.stride(kDims[i]);
      is_right = is_right && (is_one || (strides[i] > 0 && strides[i] % kMultiple == 0));
    }
    if (!is_right && tensor.numel() > 0)
      fail(check_.operation(), name,
           " must have channels of stride 1 and other strides that are multiples of ", kMultiple,
           ", got strides ", to_string(tensor.strides()));
    check_.aligned(name, tensor, kAlignment);
  }

  void set_previous(const Tensor& x, const Tensor& previous) {
    check_.same_device("previous", previous);
    check_.same_dtype("previous", previous);
    check_.stored("previous", previous);
    bool is_right = previous.dim() == 5 && previous.size(2) > 0;
    for (const int64_t dim : {0, 1, 3, 4}) is_right = is_right && previous.size(dim) == x.size(dim);
    if (!is_right)
      fail(check_.operation(), "previous must have x's shape with frames of its own, got ",
           to_string(previous.sizes()));
    params_.previous_frames = previous.size(2);
    params_.previous = previous.const_data_ptr();
    set_strides("previous", previous, params_.previous_strides);
  }

  void set_weight(const Tensor& weight) {
    check_.same_device("weight", weight);
    check_.same_dtype("weight", weight);
    bool is_right = weight.dim() == 5 && weight.size(1) == params_.channels;
    for (int64_t i = 0; is_right && i < 3; ++i) {
      params_.taps[i] = weight.size(2 + i);
      is_right = params_.taps[i] == 1 || params_.taps[i] == kMaxConvTaps;
    }
    if (!is_right)
      fail(check_.operation(), "weight must have shape (N, ", params_.channels,
           ", ...) with 1 or 3 taps in each of the last dimensions, got ", to_string(weight.sizes()));
    check_.contiguous("weight", weight);
    check_.aligned("weight", weight, kAlignment);
    params_.out_channels = weight.size(0);
    params_.weight = weight.const_data_ptr();
  }

  void set_padding(const char* name, int64_t padding, int64_t taps) const {
    if (padding < 0 || padding >= taps)
      fail(check_.operation(), name, " must be at least 0 and less than the weight's ", taps, " taps, got ",
           padding);
  }

  const ArgumentChecker check_;
  Conv3dParams params_{};
};

OwnedTensor call_conv3d(const char* operation, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& previous, int64_t front,
                        int64_t back, int64_t rows, int64_t columns, bool replicate_frames, int64_t border) {
  return Conv3dCall(operation, x, weight, bias, previous, front, back, rows, columns, replicate_frames,
                    border)
      .run();
}

constexpr Operation kOperations[] = {
    operation<"conv3d(Tensor x, Tensor weight, Tensor? bias, Tensor? previous, int front, int back, int rows,"
              " int columns, bool replicate_frames, int border) -> Tensor",
              call_conv3d>(),
};

}  // namespace

std::span<const Operation> conv3d_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
