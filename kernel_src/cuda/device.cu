// Properties of the GPUs, queried once per device.
#include <array>
#include <atomic>

#include "launch.cuh"
#include "params.h"

namespace h100_diffusers_kernels {
namespace {

// One value per device, 0 until it is known. Threads that query it at the same time store the same value.
using DeviceValues = std::array<std::atomic<int>, kMaxDevices>;

int attribute(const char* operation, cudaDeviceAttr attribute, int device) {
  int value = 0;
  throw_on_error(operation, cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// Returns the device's value, which query() returns where it is not known. Devices from kMaxDevices on are
// queried at each call.
template <typename Query>
int cached_value(DeviceValues& values, int device, const Query& query) {
  const size_t index = static_cast<size_t>(device);
  if (index >= kMaxDevices) return query();
  int value = values[index].load(std::memory_order_relaxed);
  if (value == 0) {
    value = query();
    values[index].store(value, std::memory_order_relaxed);
  }
  return value;
}

}  // namespace

int compute_capability(int device) {
  static DeviceValues values{};
  return cached_value(values, device, [&] {
    constexpr const char* kOperation = "compute_capability";
    return 10 * attribute(kOperation, cudaDevAttrComputeCapabilityMajor, device) +
           attribute(kOperation, cudaDevAttrComputeCapabilityMinor, device);
  });
}

int multiprocessor_count(const char* operation, int device) {
  static DeviceValues values{};
  return cached_value(values, device,
                      [&] { return attribute(operation, cudaDevAttrMultiProcessorCount, device); });
}

int cluster_count(const char* operation, const void* kernel, int device, int blocks) {
  static std::array<DeviceValues, kMaxClusterBlocks> values{};
  return cached_value(values[static_cast<size_t>(blocks - 1)], device, [&] {
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = dim3(static_cast<unsigned>(blocks));
    config.attrs = &cluster;
    config.numAttrs = 1;
    config.dynamicSmemBytes = kMaxSharedBytes;
    int count = 0;
    throw_on_error(operation, cudaOccupancyMaxActiveClusters(&count, kernel, &config));
    return count;
  });
}

}  // namespace h100_diffusers_kernels
