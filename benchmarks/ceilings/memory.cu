// Bandwidth of global memory: reads, writes and copies by threads, 4 to 16 bytes at a time, and by bulk
// copies (TMA). The size is that of the buffer read or written; a copy reads one and writes one. L2 is cold
// and clean at the start of each run. Writes of a small run may still be in L2 at its end, as with any
// kernel.
#include "common.cuh"

namespace ceilings {
namespace {

constexpr int kThreads = 256;
constexpr int kRepetitions = 15;
constexpr int64_t kSizes[] = {16 * kMiB, 32 * kMiB, 64 * kMiB, 128 * kMiB, 256 * kMiB, kGiB};

// Expected word i of a buffer.
__host__ __device__ constexpr uint32_t pattern(int64_t i) {
  return static_cast<uint32_t>(i) * 2654435761u + 12345u;
}

template <typename Word>
__device__ __forceinline__ Word pattern_at(int64_t i);
template <>
__device__ __forceinline__ uint32_t pattern_at(int64_t i) {
  return pattern(i);
}
template <>
__device__ __forceinline__ uint2 pattern_at(int64_t i) {
  return make_uint2(pattern(2 * i), pattern(2 * i + 1));
}
template <>
__device__ __forceinline__ uint4 pattern_at(int64_t i) {
  return make_uint4(pattern(4 * i), pattern(4 * i + 1), pattern(4 * i + 2), pattern(4 * i + 3));
}

// Volatile, so that all loads of a thread are issued before their values are used.
__device__ __forceinline__ void load(const uint32_t* address, uint32_t& v) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
}
__device__ __forceinline__ void load(const uint2* address, uint2& v) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
}
__device__ __forceinline__ void load(const uint4* address, uint4& v) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
}

template <typename Word, int kAccesses>
__global__ void __launch_bounds__(kThreads) copy_kernel(const Word* in, Word* out) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAccesses} + threadIdx.x;
  Word words[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) load(in + first + i * kThreads, words[i]);
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) out[first + i * kThreads] = words[i];
}

template <typename Word, int kAccesses>
__global__ void __launch_bounds__(kThreads) read_kernel(const Word* in, bool verify, uint32_t* checksum) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAccesses} + threadIdx.x;
  Word words[kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) load(in + first + i * kThreads, words[i]);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) sum ^= folded(words[i]);
  if (needs_checksum(verify, sum)) atomicXor(checksum, sum);
}

template <typename Word, int kAccesses>
__global__ void __launch_bounds__(kThreads) write_kernel(Word* out) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kAccesses} + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) out[first + i * kThreads] = pattern_at<Word>(first + i * kThreads);
}

// Bulk copies. Each multiprocessor has one warp, one thread of which issues the copies, and a ring of enough
// stages for all loads that memory can have in flight.
constexpr int kStages = 16;
constexpr int kStageBytes = 8192;
constexpr int kStageWords = kStageBytes / 4;
// Stores that may be pending when a stage is loaded again.
constexpr int kPendingStores = 6;

struct Ring {
  alignas(128) uint32_t stages[kStages][kStageWords];
  uint64_t loaded[kStages];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barriers(Ring& ring) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&ring.loaded[i]))
                   : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
}

__device__ __forceinline__ void bulk_load(Ring& ring, int stage, const uint32_t* from) {
  const uint32_t barrier = shared_address(&ring.loaded[stage]);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kStageBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(ring.stages[stage])),
      "l"(from), "r"(kStageBytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void wait_loaded(Ring& ring, int stage, int round) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(&ring.loaded[stage])),
      "r"(round & 1)
      : "memory");
}

__device__ __forceinline__ void bulk_store(const Ring& ring, int stage, uint32_t* to) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(ring.stages[stage])), "r"(kStageBytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending stores have read their stage.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void wait_stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__global__ void __launch_bounds__(32, 1)
    bulk_read_kernel(const uint32_t* in, int64_t chunks, bool verify, uint32_t* checksum) {
  extern __shared__ __align__(128) unsigned char shared[];
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  init_barriers(ring);
  const int64_t own_chunks = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto issue = [&](int64_t i) {
    if (threadIdx.x == 0 && i < own_chunks)
      bulk_load(ring, i % kStages, in + (blockIdx.x + i * gridDim.x) * kStageWords);
  };
  for (int i = 0; i < kStages; ++i) issue(i);
  uint32_t sum = 0;
  for (int64_t i = 0; i < own_chunks; ++i) {
    const int stage = i % kStages;
    wait_loaded(ring, stage, static_cast<int>(i / kStages));
    if (verify)
      for (int word = threadIdx.x; word < kStageWords; word += 32) sum ^= ring.stages[stage][word];
    __syncwarp();
    issue(i + kStages);
  }
  if (verify) atomicXor(checksum, sum);
}

// Writes words 0 to kStageWords of the pattern to every chunk.
__global__ void __launch_bounds__(32, 1) bulk_write_kernel(uint32_t* out, int64_t chunks) {
  extern __shared__ __align__(128) unsigned char shared[];
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  for (int stage = 0; stage < kStages; ++stage)
    for (int word = threadIdx.x; word < kStageWords; word += 32) ring.stages[stage][word] = pattern(word);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x != 0) return;
  int stage = 0;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    bulk_store(ring, stage, out + chunk * kStageWords);
    stage = (stage + 1) % kStages;
  }
  wait_stores_done();
}

__global__ void __launch_bounds__(32, 1) bulk_copy_kernel(const uint32_t* in, uint32_t* out, int64_t chunks) {
  extern __shared__ __align__(128) unsigned char shared[];
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  init_barriers(ring);
  if (threadIdx.x != 0) return;
  const int64_t own_chunks = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto offset = [&](int64_t i) { return (blockIdx.x + i * gridDim.x) * kStageWords; };
  for (int64_t i = 0; i < kStages && i < own_chunks; ++i) bulk_load(ring, i, in + offset(i));
  for (int64_t i = 0; i < own_chunks; ++i) {
    const int stage = i % kStages;
    wait_loaded(ring, stage, static_cast<int>(i / kStages));
    bulk_store(ring, stage, out + offset(i));
    const int64_t next = i - kPendingStores + kStages;
    if (next >= kStages && next < own_chunks) {
      wait_stores_read<kPendingStores>();
      bulk_load(ring, next % kStages, in + offset(next));
    }
  }
  wait_stores_done();
}

__global__ void fill_kernel(uint32_t* out, int64_t words) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    out[i] = pattern(i);
}

// Counts words that differ from the pattern, which repeats after `period` words.
__global__ void mismatch_kernel(const uint32_t* words, int64_t count, int64_t period, uint32_t* mismatches) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    if (words[i] != pattern(i % period)) atomicAdd(mismatches, 1);
}

class Measurement {
 public:
  Measurement(const Device& device, const Report& report) : device_(device), report_(report), flush_(device) {
    fill_kernel<<<1024, 256>>>(in_.data(), in_.count());
    LAUNCH_CHECK();
  }

  // Measures `body(bytes)`, which moves `times * bytes` bytes. If period > 0 it writes the pattern, which is
  // verified.
  template <class Body>
  void rate(const char* name, int64_t bytes, int times, int64_t period, const Body& body) {
    if (period > 0) out_.fill(0);
    const double seconds = median_seconds(kRepetitions, flush_, [&] { body(bytes); });
    if (period > 0) verify_pattern(name, bytes, period);
    report_.add(std::string(name) + ", " + size_name(bytes), "TB/s", times * bytes / seconds * 1e-12,
                dram_theory(device_));
  }

  template <typename Word, int kAccesses>
  void threads(int64_t bytes) {
    const std::string how =
        std::string(" ").append(std::to_string(sizeof(Word))) + " B x " + std::to_string(kAccesses);
    const auto blocks = [](int64_t size) {
      constexpr int64_t kTile = kThreads * kAccesses * sizeof(Word);
      if (size % kTile != 0) fail("%ld bytes are not a multiple of %ld", size, kTile);
      return static_cast<unsigned>(size / kTile);
    };
    const Word* in = reinterpret_cast<const Word*>(in_.data());
    Word* out = reinterpret_cast<Word*>(out_.data());
    const auto read = [&](int64_t size, bool verify) {
      read_kernel<Word, kAccesses><<<blocks(size), kThreads>>>(in, verify, counter_.data());
      LAUNCH_CHECK();
    };
    verify_read(("read" + how).c_str(), read);
    rate(("copy" + how).c_str(), bytes, 2, bytes / 4, [&](int64_t size) {
      copy_kernel<Word, kAccesses><<<blocks(size), kThreads>>>(in, out);
      LAUNCH_CHECK();
    });
    rate(("read" + how).c_str(), bytes, 1, 0, [&](int64_t size) { read(size, false); });
    rate(("write" + how).c_str(), bytes, 1, bytes / 4, [&](int64_t size) {
      write_kernel<Word, kAccesses><<<blocks(size), kThreads>>>(out);
      LAUNCH_CHECK();
    });
  }

  void bulk(int64_t bytes) {
    for (const void* kernel :
         {reinterpret_cast<const void*>(bulk_read_kernel), reinterpret_cast<const void*>(bulk_write_kernel),
          reinterpret_cast<const void*>(bulk_copy_kernel)})
      CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Ring)));
    const int blocks = device_.multiprocessors;
    const auto read = [&](int64_t size, bool verify) {
      bulk_read_kernel<<<blocks, 32, sizeof(Ring)>>>(in_.data(), size / kStageBytes, verify, counter_.data());
      LAUNCH_CHECK();
    };
    verify_read("bulk read", read);
    rate("bulk copy", bytes, 2, bytes / 4, [&](int64_t size) {
      bulk_copy_kernel<<<blocks, 32, sizeof(Ring)>>>(in_.data(), out_.data(), size / kStageBytes);
      LAUNCH_CHECK();
    });
    rate("bulk read", bytes, 1, 0, [&](int64_t size) { read(size, false); });
    rate("bulk write", bytes, 1, kStageWords, [&](int64_t size) {
      bulk_write_kernel<<<blocks, 32, sizeof(Ring)>>>(out_.data(), size / kStageBytes);
      LAUNCH_CHECK();
    });
  }

  void memcpy_async(int64_t bytes) {
    rate("cudaMemcpyAsync", bytes, 2, bytes / 4, [&](int64_t size) {
      CUDA_CHECK(cudaMemcpyAsync(out_.data(), in_.data(), size, cudaMemcpyDeviceToDevice));
    });
  }

 private:
  static std::string size_name(int64_t bytes) {
    return bytes >= kGiB ? std::to_string(bytes / kGiB) + " GiB" : std::to_string(bytes / kMiB) + " MiB";
  }

  void verify_pattern(const char* name, int64_t bytes, int64_t period) {
    counter_.fill(0);
    mismatch_kernel<<<1024, 256>>>(out_.data(), bytes / 4, period, counter_.data());
    LAUNCH_CHECK();
    if (const uint32_t wrong = counter_.to_host()[0])
      fail("%s: %u words of %ld bytes are wrong", name, wrong, bytes);
  }

  template <class Read>
  void verify_read(const char* name, const Read& read) {
    constexpr int64_t kBytes = 4 * kMiB;
    uint32_t expected = 0;
    for (int64_t i = 0; i < kBytes / 4; ++i) expected ^= pattern(i);
    counter_.fill(0);
    read(kBytes, true);
    if (const uint32_t sum = counter_.to_host()[0]; sum != expected)
      fail("%s: the words read have checksum %08x, not %08x", name, sum, expected);
  }

  Device device_;
  const Report& report_;
  L2Flush flush_;
  Buffer<uint32_t> in_{kGiB / 4}, out_{kGiB / 4};
  Buffer<uint32_t> counter_{1};
};

}  // namespace
}  // namespace ceilings

int main(int argc, char** argv) {
  using namespace ceilings;
  const Report report("memory", argc, argv);
  Measurement measurement(Device{}, report);
  for (const int64_t bytes : kSizes) {
    measurement.threads<uint32_t, 4>(bytes);
    measurement.threads<uint2, 4>(bytes);
    measurement.threads<uint4, 1>(bytes);
    measurement.threads<uint4, 2>(bytes);
    measurement.threads<uint4, 4>(bytes);
    measurement.threads<uint4, 8>(bytes);
    measurement.bulk(bytes);
    measurement.memcpy_async(bytes);
  }
}
