// Registers all operations with Torch.

#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

namespace h100_diffusers_kernels {
namespace {

template <typename Body>
void for_each_operation(const Body& body) {
#define H100_APPLY(family) \
  for (const Operation& operation : family##_operations()) body(operation);
  H100_EACH_FAMILY(H100_APPLY)
#undef H100_APPLY
}

void implement(torch::stable::detail::StableLibrary& ops) {
  for_each_operation([&](const Operation& operation) { ops.impl(operation.name, operation.call); });
}

}  // namespace
}  // namespace h100_diffusers_kernels

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  h100_diffusers_kernels::for_each_operation([&](const auto& operation) { ops.def(operation.schema); });
}

// Registered for both device types, so that tensors on a device without kernels in this build get a clear
// error.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { h100_diffusers_kernels::implement(ops); }
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { h100_diffusers_kernels::implement(ops); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
