// Caches and shared memory: bandwidth of 16-byte reads from L2, L1 and shared memory, and the latency of
// dependent loads from these and from device memory.
#include <numeric>
#include <random>

#include "common.cuh"

namespace ceilings {
namespace {

constexpr int kThreads = 1024;
constexpr int kRepetitions = 7;
constexpr int kLineBytes = 128;

// Each thread reads `steps` words of a ring, kThreads * gridDim.x apart in L2, kThreads apart in L1.
template <Cache kCache>
__global__ void __launch_bounds__(kThreads, 2)
    ring_kernel(const uint4* ring, uint32_t mask, int steps, bool verify, uint32_t* checksum,
                long long* cycles) {
  constexpr bool kIsShared = kCache == Cache::kL2;  // by all blocks
  const uint32_t stride = kIsShared ? kThreads * gridDim.x : kThreads;
  uint32_t index = (kIsShared ? blockIdx.x * kThreads : 0) + threadIdx.x;
  uint32_t sum = 0;
  __syncthreads();
  const long long begin = clock_cycles();
#pragma unroll 8
  for (int i = 0; i < steps; ++i) {
    sum ^= folded(load_16_bytes<kCache>(ring + (index & mask)));
    index += stride;
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock_cycles() - begin;
  if (needs_checksum(verify, sum)) atomicXor(checksum, sum);
}

constexpr int kSharedSteps = 4;  // kThreads words of 16 bytes each: 64 KiB

__global__ void __launch_bounds__(kThreads)
    shared_kernel(int rounds, uint32_t* checksums, long long* cycles) {
  extern __shared__ uint4 words[];
  for (int i = 0; i < kSharedSteps; ++i)
    words[i * kThreads + threadIdx.x] = make_uint4(i, threadIdx.x, blockIdx.x, 0);
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(words + threadIdx.x));
  uint32_t sum = 0;
  __syncthreads();
  const long long begin = clock_cycles();
#pragma unroll 4
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kSharedSteps; ++i) {
      uint4 v;
      // Volatile for ptxas too, which would otherwise read once and keep the words for all rounds.
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(address + i * kThreads * 16));
      sum += folded(v);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) cycles[blockIdx.x] = clock_cycles() - begin;
  checksums[blockIdx.x * kThreads + threadIdx.x] = sum;
}

struct ChaseResult {
  long long cycles;
  long long nanoseconds;
  uint64_t end;
};

template <Cache kCache>
__device__ __forceinline__ uint64_t next_of(uint64_t address) {
  uint64_t next;
  if constexpr (kCache == Cache::kL1)
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(next) : "l"(address));
  else
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(next) : "l"(address));
  return next;
}

// One thread follows a chain of addresses: `warm` untimed hops, then `hops` timed ones.
template <Cache kCache>
__global__ void chase_kernel(uint64_t address, int warm, int hops, ChaseResult* result) {
  for (int i = 0; i < warm; ++i) address = next_of<kCache>(address);
  const long long begin_ns = nanoseconds(), begin = clock_cycles();
#pragma unroll 16
  for (int i = 0; i < hops; ++i) address = next_of<kCache>(address);
  // Depends on the last address, so that the clock is read after its load.
  if (address == 0) return;
  const long long end = clock_cycles(), end_ns = nanoseconds();
  *result = {end - begin, end_ns - begin_ns, address};
}

constexpr int kSharedChain = 1024;

__global__ void shared_chase_kernel(const uint32_t* order, int hops, ChaseResult* result) {
  __shared__ uint32_t links[kSharedChain];
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(links));
  for (int i = 0; i < kSharedChain; ++i) links[order[i]] = base + order[(i + 1) % kSharedChain] * 4;
  uint32_t address = base + order[0] * 4;
  const long long begin_ns = nanoseconds(), begin = clock_cycles();
#pragma unroll 16
  for (int i = 0; i < hops; ++i)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(address) : "r"(address) : "memory");
  if (address == 0) return;
  const long long end = clock_cycles(), end_ns = nanoseconds();
  *result = {end - begin, end_ns - begin_ns, (address - base) / 4};
}

__global__ void link_kernel(unsigned char* base, const uint32_t* order, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int next = i + 1 == count ? 0 : i + 1;
  *reinterpret_cast<uint64_t*>(base + int64_t{order[i]} * kLineBytes) =
      reinterpret_cast<uint64_t>(base + int64_t{order[next]} * kLineBytes);
}

// Returns `count` random distinct numbers below `range`.
std::vector<uint32_t> random_order(int64_t range, int count) {
  std::mt19937 generator(1);
  std::vector<uint32_t> numbers(range);
  std::iota(numbers.begin(), numbers.end(), 0);
  for (int i = 0; i < count; ++i)
    std::swap(numbers[i], numbers[std::uniform_int_distribution<int64_t>(i, range - 1)(generator)]);
  numbers.resize(count);
  return numbers;
}

class Measurement {
 public:
  Measurement(const Device& device, const Report& report)
      : device_(device), report_(report), flush_(device) {}

  template <Cache kCache>
  void read_rate(const char* name, int64_t bytes, int blocks) {
    constexpr int kSteps = 4096, kVerifiedSteps = 16;
    const int64_t words = bytes / 16;
    std::vector<uint4> values(words);
    std::mt19937 generator(2);
    for (uint4& v : values) v = make_uint4(generator(), generator(), generator(), generator());
    const Buffer<uint4> ring(values);
    Buffer<uint32_t> checksum(1);
    Buffer<long long> cycles(blocks);
    const auto launch = [&](int steps, bool verify) {
      ring_kernel<kCache><<<blocks, kThreads>>>(ring.data(), static_cast<uint32_t>(words - 1), steps, verify,
                                                checksum.data(), cycles.data());
      LAUNCH_CHECK();
    };

    checksum.fill(0);
    launch(kVerifiedSteps, true);
    uint32_t expected = 0;
    constexpr bool kIsShared = kCache == Cache::kL2;
    const int64_t stride = kIsShared ? int64_t{kThreads} * blocks : kThreads;
    for (int64_t thread = 0; thread < int64_t{kThreads} * blocks; ++thread)
      for (int step = 0; step < kVerifiedSteps; ++step) {
        const uint4 v = values[((kIsShared ? thread : thread % kThreads) + step * stride) & (words - 1)];
        expected ^= v.x ^ v.y ^ v.z ^ v.w;
      }
    if (const uint32_t sum = checksum.to_host()[0]; sum != expected)
      fail("%s: the words read have checksum %08x, not %08x", name, sum, expected);

    const double seconds = median_seconds(kRepetitions, [] {}, [&] { launch(kSteps, false); });
    const double bytes_per_block = 16.0 * kThreads * kSteps;
    const int port_bytes = kIsShared ? 64 : 128;  // into a multiprocessor from L2, into its registers from L1
    const std::string port = std::to_string(port_bytes) + " B a clock a multiprocessor";
    report_.add(std::string(name) + " read rate", "TB/s", bytes_per_block * blocks / seconds * 1e-12,
                {port_bytes * device_.multiprocessors * device_.clock_hz * 1e-12,
                 port + " x multiprocessors x clock"});
    report_.add(std::string(name) + " read rate a multiprocessor", "B/clock",
                bytes_per_block * blocks / device_.multiprocessors / median(cycles.to_host()),
                {static_cast<double>(port_bytes), port});
  }

  void shared_rate() {
    constexpr int kRounds = 4096;
    constexpr int kBytes = kSharedSteps * kThreads * 16;
    const int blocks = device_.multiprocessors;
    CUDA_CHECK(cudaFuncSetAttribute(shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 2 * kBytes));
    Buffer<uint32_t> checksums(int64_t{blocks} * kThreads);
    Buffer<long long> cycles(blocks);
    const double seconds = median_seconds(
        kRepetitions, [] {},
        [&] {
          // Twice the memory that it uses, so that a multiprocessor holds one block.
          shared_kernel<<<blocks, kThreads, 2 * kBytes>>>(kRounds, checksums.data(), cycles.data());
          LAUNCH_CHECK();
        });
    const std::vector<uint32_t> sums = checksums.to_host();
    for (int64_t i = 0; i < checksums.count(); ++i) {
      uint32_t expected = 0;
      for (uint32_t step = 0; step < kSharedSteps; ++step)
        expected += step ^ static_cast<uint32_t>(i % kThreads) ^ static_cast<uint32_t>(i / kThreads);
      expected *= kRounds;
      if (sums[i] != expected) fail("shared memory: thread %ld read %08x, not %08x", i, sums[i], expected);
    }
    const double bytes = 16.0 * kThreads * kSharedSteps * kRounds;
    report_.add("shared memory read rate", "TB/s", bytes * blocks / seconds * 1e-12,
                {128 * device_.multiprocessors * device_.clock_hz * 1e-12,
                 "128 B a clock a multiprocessor x multiprocessors x clock"});
    report_.add("shared memory read rate a multiprocessor", "B/clock", bytes / median(cycles.to_host()),
                {128, "128 B a clock a multiprocessor"});
  }

  // Latency of the lines of a region in random order. is_warm: all have been visited before; otherwise L2 is
  // flushed.
  template <Cache kCache>
  void latency(const char* name, int64_t bytes, bool is_warm) {
    const int64_t lines = bytes / kLineBytes;
    const int count = static_cast<int>(std::min<int64_t>(lines, 32768));
    const Buffer<uint32_t> order(random_order(lines, count));
    Buffer<unsigned char> region(bytes);
    link_kernel<<<(count + 255) / 256, 256>>>(region.data(), order.data(), count);
    LAUNCH_CHECK();
    const uint64_t start =
        reinterpret_cast<uint64_t>(region.data() + int64_t{order.to_host()[0]} * kLineBytes);
    report_latency(name, count, start, [&](ChaseResult* result) {
      if (!is_warm) flush_();
      chase_kernel<kCache><<<1, 1>>>(start, is_warm ? count : 0, count, result);
      LAUNCH_CHECK();
    });
  }

  void shared_latency() {
    const std::vector<uint32_t> order = random_order(kSharedChain, kSharedChain);
    const Buffer<uint32_t> on_device(order);
    report_latency("shared memory latency", 8 * kSharedChain, order[0], [&](ChaseResult* result) {
      shared_chase_kernel<<<1, 1>>>(on_device.data(), 8 * kSharedChain, result);
      LAUNCH_CHECK();
    });
  }

 private:
  // `chase` must end where it started.
  template <class Chase>
  void report_latency(const char* name, int hops, uint64_t start, const Chase& chase) {
    Buffer<ChaseResult> result(1);
    std::vector<double> cycles, time;
    for (int i = 0; i < 4; ++i) {
      result.fill(0);
      chase(result.data());
      const ChaseResult taken = result.to_host()[0];
      if (taken.end != start) fail("%s: the chain ends at %lx, not at %lx", name, taken.end, start);
      if (i == 0) continue;  // the first use of the kernel
      cycles.push_back(static_cast<double>(taken.cycles) / hops);
      time.push_back(static_cast<double>(taken.nanoseconds) / hops);
    }
    report_.add(name, "clocks", median(cycles));
    report_.add(name, "ns", median(time));
  }

  Device device_;
  const Report& report_;
  L2Flush flush_;
};

}  // namespace
}  // namespace ceilings

int main(int argc, char** argv) {
  using namespace ceilings;
  const Report report("cache", argc, argv);
  const Device device;
  Measurement measurement(device, report);
  measurement.read_rate<Cache::kL2>("L2, 16 MiB", 16 * kMiB, 2 * device.multiprocessors);
  measurement.read_rate<Cache::kL1>("L1, 64 KiB", kMiB / 16, 2 * device.multiprocessors);
  measurement.shared_rate();
  measurement.shared_latency();
  measurement.latency<Cache::kL1>("L1 latency, 16 KiB", kMiB / 64, true);
  measurement.latency<Cache::kL2>("L2 latency, 4 MiB", 4 * kMiB, true);
  measurement.latency<Cache::kL2>("DRAM latency, 64 MiB", 64 * kMiB, false);
  measurement.latency<Cache::kL2>("DRAM latency, 1 GiB", kGiB, false);
}
