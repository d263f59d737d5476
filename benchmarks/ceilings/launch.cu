// Cost of a launch: successive empty kernels in a stream and in a graph, one empty kernel between two events,
// and chains of a small kernel with and without programmatic dependent launch.
#include <chrono>

#include "common.cuh"

namespace ceilings {
namespace {

constexpr int kRepetitions = 21;
constexpr int kLaunches = 500;  // fewer than a stream queues, so that the host never waits

__global__ void empty_kernel() {}

constexpr int kChainThreads = 256;

// One link of a chain: adds 1 to each element. With kIsDependent the next kernel may start before this one
// ends, and waits for its results.
template <bool kIsDependent>
__global__ void __launch_bounds__(kChainThreads) increment_kernel(int* values) {
  if constexpr (kIsDependent) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  values[blockIdx.x * kChainThreads + threadIdx.x] += 1;
}

class Stream {
 public:
  Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A graph of the launches of `body`.
class Graph {
 public:
  template <class Body>
  Graph(cudaStream_t stream, const Body& body) : stream_(stream) {
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&executable_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaGraphUpload(executable_, stream));
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { CUDA_CHECK(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

double host_seconds_per_launch(cudaStream_t stream) {
  std::vector<double> samples;
  for (int i = 0; i < kRepetitions; ++i) {
    CUDA_CHECK(cudaStreamSynchronize(stream));
    const auto begin = std::chrono::steady_clock::now();
    for (int launch = 0; launch < kLaunches; ++launch) empty_kernel<<<1, 1, 0, stream>>>();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    LAUNCH_CHECK();
    samples.push_back(elapsed.count() / kLaunches);
  }
  return median(samples);
}

template <bool kIsDependent>
void launch_increment(int blocks, cudaStream_t stream, int* values) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = kChainThreads;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = kIsDependent ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, increment_kernel<kIsDependent>, values));
}

class Measurement {
 public:
  explicit Measurement(const Report& report) : report_(report) {}

  void empty_kernels() {
    const auto launches = [&] {
      for (int i = 0; i < kLaunches; ++i) empty_kernel<<<1, 1, 0, stream_>>>();
      LAUNCH_CHECK();
    };
    add("empty kernel, in a stream", microseconds(launches) / kLaunches);
    const Graph graph(stream_, launches);
    add("empty kernel, in a graph", microseconds([&] { graph.launch(); }) / kLaunches);
    add("launch call on the host", host_seconds_per_launch(stream_) * 1e6);
  }

  // The device is busy while events and kernel are queued, so that the host is ahead.
  void between_events(const Device& device) {
    const L2Flush flush(device);
    const auto busy = [&] { flush(); };
    add("between two events, nothing", median_seconds(kRepetitions, busy, [] {}) * 1e6);
    add("between two events, an empty kernel", median_seconds(kRepetitions, busy, [] {
                                                 empty_kernel<<<1, 1>>>();
                                                 LAUNCH_CHECK();
                                               }) * 1e6);
  }

  // Chains of kernels with `blocks` blocks of 256 threads.
  void chains(const char* size, int blocks) {
    const std::string name = std::string("chain of ").append(size) + ", ";
    add(name + "stream", chain<false>(blocks, false));
    add(name + "stream, dependent launch", chain<true>(blocks, false));
    add(name + "graph", chain<false>(blocks, true));
    add(name + "graph, dependent launch", chain<true>(blocks, true));
  }

 private:
  template <bool kIsDependent>
  double chain(int blocks, bool in_graph) {
    Buffer<int> values(int64_t{blocks} * kChainThreads);
    values.fill(0);
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto launches = [&] {
      for (int i = 0; i < kLaunches; ++i) launch_increment<kIsDependent>(blocks, stream_, values.data());
    };
    double result;
    if (in_graph) {
      const Graph graph(stream_, launches);
      result = microseconds([&] { graph.launch(); }) / kLaunches;
    } else {
      result = microseconds(launches) / kLaunches;
    }
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    constexpr int kExpected = kLaunches * (kRepetitions + 1);
    for (const int value : values.to_host())
      if (value != kExpected) fail("a chain of %d launches added up to %d", kExpected, value);
    return result;
  }

  template <class Body>
  double microseconds(const Body& body) {
    return median_seconds(
               kRepetitions, [&] { CUDA_CHECK(cudaStreamSynchronize(stream_)); }, body, stream_) *
           1e6;
  }

  void add(const std::string& name, double value) const { report_.add(name, "us", value); }

  const Report& report_;
  Stream stream_;
};

}  // namespace
}  // namespace ceilings

int main(int argc, char** argv) {
  using namespace ceilings;
  const Report report("launch", argc, argv);
  const Device device;
  Measurement measurement(report);
  measurement.empty_kernels();
  measurement.between_events(device);
  measurement.chains("1 block", 1);
  measurement.chains("a block a multiprocessor", device.multiprocessors);
  measurement.chains("8 blocks a multiprocessor", 8 * device.multiprocessors);
}
