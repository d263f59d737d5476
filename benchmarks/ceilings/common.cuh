// Shared by the programs that measure hardware limits: error checks, device properties, timing and output.
// They need only the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace ceilings {

[[noreturn]] inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::exit(1);
}

#define CUDA_CHECK(call)                                                                        \
  do {                                                                                          \
    const cudaError_t error_ = (call);                                                          \
    if (error_ != cudaSuccess)                                                                  \
      ::ceilings::fail("%s:%d: %s: %s", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
  } while (false)

// Checks the launch before it.
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// Properties of the current device.
struct Device {
  int multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  double clock_hz = attribute(cudaDevAttrClockRate) * 1e3;  // maximum
  double memory_clock_hz = attribute(cudaDevAttrMemoryClockRate) * 1e3;
  int memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
  int l2_bytes = attribute(cudaDevAttrL2CacheSize);

  static int attribute(cudaDeviceAttr name) {
    int device = 0, value = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    if (value <= 0) fail("the driver gives %d for device attribute %d", value, static_cast<int>(name));
    return value;
  }
};

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) { CUDA_CHECK(cudaMalloc(&data_, bytes())); }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<int64_t>(values.size())) {
    CUDA_CHECK(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  int64_t count() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

  void fill(int byte) { CUDA_CHECK(cudaMemset(data_, byte, bytes())); }
  std::vector<T> to_host() const {
    std::vector<T> values(count_);
    CUDA_CHECK(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

template <typename T>
T median(std::vector<T> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

class Event {
 public:
  Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream = nullptr) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
  double seconds_since(const Event& start) const {
    float milliseconds = 0;
    CUDA_CHECK(cudaEventSynchronize(event_));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Median time of `body`, measured with events. `prepare` runs before each call and is not timed. The first
// call is a warm-up.
template <class Prepare, class Body>
double median_seconds(int repetitions, const Prepare& prepare, const Body& body,
                      cudaStream_t stream = nullptr) {
  Event start, end;
  std::vector<double> samples;
  for (int i = 0; i <= repetitions; ++i) {
    prepare();
    start.record(stream);
    body();
    end.record(stream);
    const double seconds = end.seconds_since(start);
    if (i > 0) samples.push_back(seconds);
  }
  return median(samples);
}

__device__ __forceinline__ long long clock_cycles() {
  long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

__device__ __forceinline__ long long nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// Whether a global load is cached in L1 or bypasses it.
enum class Cache { kL1, kL2 };

// Volatile, so that loads are not reordered or merged.
template <Cache kCache>
__device__ __forceinline__ uint4 load_16_bytes(const uint4* address) {
  uint4 v;
  if constexpr (kCache == Cache::kL1) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  } else {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
  }
  return v;
}

__device__ __forceinline__ uint32_t folded(uint32_t v) { return v; }
__device__ __forceinline__ uint32_t folded(uint2 v) { return v.x ^ v.y; }
__device__ __forceinline__ uint32_t folded(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// Returns `verify`, and practically never anything else, but depends on the sum, so that the compiler does
// not remove the loads.
__device__ __forceinline__ bool needs_checksum(bool verify, uint32_t sum) {
  return verify || sum == 0x9e3779b9u;
}

static __global__ void flush_kernel(uint4* words) {
  uint4* word = words + blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (const uint32_t sum = folded(load_16_bytes<Cache::kL2>(word)); needs_checksum(false, sum)) word->x = sum;
}

// Fills L2 with unrelated lines. They are read, not written: dirty lines would be written back during the
// next measurement.
class L2Flush {
 public:
  explicit L2Flush(const Device& device) : words_(kBytes / int64_t{sizeof(uint4)}) {
    if (kBytes < 8 * int64_t{device.l2_bytes}) fail("L2 holds %d bytes, too many to flush", device.l2_bytes);
    words_.fill(0x5a);
  }
  void operator()() const {
    flush_kernel<<<static_cast<unsigned>(words_.count() / kThreads), kThreads>>>(words_.data());
    LAUNCH_CHECK();
  }

 private:
  static constexpr int64_t kBytes = 512 * kMiB;
  static constexpr int kThreads = 512;
  Buffer<uint4> words_;
};

// A limit and its formula in terms of device properties. An empty formula means that there is no limit.
struct Theory {
  double value = 0;
  std::string formula;
};

inline Theory dram_theory(const Device& device) {
  return {2 * device.memory_clock_hz * device.memory_bus_bits / 8 * 1e-12,
          "2 x memory clock x bus width / 8"};
}

// Prints each measure on one line: as text, or as JSON with --json.
class Report {
 public:
  Report(const char* program, int argc, char** argv) : program_(program) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "--json") != 0) fail("usage: %s [--json]", argv[0]);
      json_ = true;
    }
  }

  void add(const std::string& name, const char* unit, double measured, const Theory& theory = {}) const {
    const bool has_theory = !theory.formula.empty();
    if (!(measured > 0)) fail("%s: measured %g %s, which is impossible", name.c_str(), measured, unit);
    if (json_) {
      std::printf("{\"program\": \"%s\", \"name\": \"%s\", \"unit\": \"%s\", \"measured\": %.6g, ", program_,
                  name.c_str(), unit, measured);
      if (has_theory) {
        std::printf("\"theoretical\": %.6g, \"formula\": \"%s\", \"ratio\": %.4f}\n", theory.value,
                    theory.formula.c_str(), measured / theory.value);
      } else {
        std::printf("\"theoretical\": null, \"formula\": null, \"ratio\": null}\n");
      }
    } else {
      std::printf("%-46s %10.2f %-14s", name.c_str(), measured, unit);
      if (has_theory)
        std::printf(" of %10.2f = %5.1f %%  (%s)", theory.value, 100 * measured / theory.value,
                    theory.formula.c_str());
      std::printf("\n");
    }
    std::fflush(stdout);
  }

 private:
  const char* program_;
  bool json_ = false;
};

}  // namespace ceilings
