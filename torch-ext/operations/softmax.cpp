// Softmax.
#include "../torch_binding.h"

namespace h100_diffusers_kernels {
namespace {

OwnedTensor call_softmax(const char* operation, const Tensor& x) {
  const ArgumentChecker check(operation, "x", x);
  SoftmaxParams params{};
  params.hidden = check.hidden();
  params.dtype = check.dtype();
  OwnedTensor out = check.empty(check.shape());
  if (x.numel() == 0) return out;

  RowLaunch launch(check.shape(), RowBinding{params.x, x}, RowBinding{params.out, out});
  const DeviceStream device(x);
  launch.run(params.shape, [&] { softmax(params, device.stream()); });
  return out;
}

constexpr Operation kOperations[] = {
    operation<"softmax(Tensor x) -> Tensor", call_softmax>(),
};

}  // namespace

std::span<const Operation> softmax_operations() { return kOperations; }

}  // namespace h100_diffusers_kernels
