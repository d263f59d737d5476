// By these the warps of a block wait for each other and for copies: rings of barriers (mbarrier) stand
// between the warps that fill shared memory and those that read it, and a warp group has a named barrier
// (bar.sync). All of them are known by 32-bit addresses in shared memory, which are converted once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace h100_diffusers_kernels {

struct Barrier {
  static constexpr uint32_t kBytes = 8;
  uint32_t address;

  __device__ __forceinline__ void init(uint32_t arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
  }

  __device__ __forceinline__ void arrive() const {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address) : "memory");
  }

  // Arrives, and keeps the phase from ending before so many bytes have been copied, too.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }

  // Tells, without waiting, whether the phase of this parity has ended.
  __device__ __forceinline__ bool has_ended(uint32_t parity) const {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred has_ended;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 has_ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, has_ended;\n"
        "}"
        : "=r"(result)
        : "r"(address), "r"(parity)
        : "memory");
    return result != 0;
  }

  // Waits until the phase of this parity has ended. Before the first phase, that of parity 1 counts as ended.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred has_ended;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 has_ended, [%0], %1;\n"
        "@!has_ended bra again;\n"
        "}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// A ring has kStages pieces of shared memory that are filled, read and filled anew (a circular buffer). Each
// side keeps its own RingPlace.
template <int kStages_>
struct Ring {
  static constexpr int kStages = kStages_;
  static constexpr uint32_t kBytes = 2 * kStages * Barrier::kBytes;
  uint32_t address;

  __device__ __forceinline__ Barrier full(int stage) const { return {address + stage * Barrier::kBytes}; }
  __device__ __forceinline__ Barrier empty(int stage) const {
    return {address + (kStages + stage) * Barrier::kBytes};
  }

  __device__ __forceinline__ void init(uint32_t writers, uint32_t readers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      full(stage).init(writers);
      empty(stage).init(readers);
    }
  }
};

template <class RingType>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  // Goes on by `stages`, which are at most kStages. Returns by how many stages the place has moved in memory,
  // which is less than 0 where it begins anew.
  __device__ __forceinline__ int advance(int stages = 1) {
    const bool wraps = stage + stages >= RingType::kStages;
    const int moved = wraps ? stages - RingType::kStages : stages;
    stage += moved;
    parity ^= wraps;
    return moved;
  }
  __device__ __forceinline__ bool is_full(const RingType& ring) const {
    return ring.full(stage).has_ended(parity);
  }
  __device__ __forceinline__ void wait_full(const RingType& ring) const { ring.full(stage).wait(parity); }
  __device__ __forceinline__ void wait_empty(const RingType& ring) const {
    ring.empty(stage).wait(parity ^ 1);
  }
};

// Makes initialized barriers known to the copy engine and to the cluster. A barrier of the threads follows.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's stores to shared memory visible to the tensor cores and to the copy engine (the async
// proxy). A barrier of the threads follows.
__device__ __forceinline__ void fence_shared_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// `threads` threads wait for each other at a named barrier. Number 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace h100_diffusers_kernels
