// What is asked of a GPU once.
#include <array>
#include <atomic>

#include "launch.cuh"
#include "params.h"

namespace h100_diffusers_kernels {
namespace {

// As many as are asked for once only; a machine has no more.
constexpr size_t kDevices = 64;

int ask_compute_capability(int device) {
  int major = 0, minor = 0;
  throw_on_error("compute_capability",
                 cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  throw_on_error("compute_capability",
                 cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}

}  // namespace

int compute_capability(int device) {
  static std::array<std::atomic<int>, kDevices> known{};
  const size_t index = static_cast<size_t>(device);
  if (index >= kDevices) return ask_compute_capability(device);
  int capability = known[index].load(std::memory_order_relaxed);
  if (capability == 0) {
    capability = ask_compute_capability(device);
    known[index].store(capability, std::memory_order_relaxed);
  }
  return capability;
}

}  // namespace h100_diffusers_kernels
