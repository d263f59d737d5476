// Synchronization of the warps of a block: mbarriers in rings between the warps that fill shared memory and
// the warps that read it, and named barriers (bar.sync) of warp groups. mbarriers are 32-bit addresses in
// shared memory.
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

  // Arrives at the barrier with the same address in block `rank` of the cluster.
  __device__ __forceinline__ void arrive_at(int rank) const {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(address),
        "r"(rank)
        : "memory");
  }

  // Arrives, and adds `bytes` to the bytes that must be copied before the phase ends.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
  }

  // Returns whether the phase of this parity has ended, without waiting.
  __device__ __forceinline__ bool test_wait(uint32_t parity) const {
    uint32_t result;
    asm volatile(
        "{\n"
        ".reg .pred is_complete;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 is_complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, is_complete;\n"
        "}"
        : "=r"(result)
        : "r"(address), "r"(parity)
        : "memory");
    return result != 0;
  }

  // Waits for the end of the phase of this parity. Initially the phase of parity 1 counts as ended.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n"
        ".reg .pred is_complete;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 is_complete, [%0], %1;\n"
        "@!is_complete bra again;\n"
        "}" ::"r"(address),
        "r"(parity)
        : "memory");
  }
};

// mbarriers of a ring buffer of kStages stages in shared memory. Writers and readers each have their own
// RingState.
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
struct RingState {
  int stage = 0;
  uint32_t parity = 0;

  // Advances by `stages`, at most kStages. Returns the difference of the stage index, which is negative if it
  // wraps.
  __device__ __forceinline__ int advance(int stages = 1) {
    const bool wraps = stage + stages >= RingType::kStages;
    const int moved = wraps ? stages - RingType::kStages : stages;
    stage += moved;
    parity ^= wraps;
    return moved;
  }
  __device__ __forceinline__ bool is_full(const RingType& ring) const {
    return ring.full(stage).test_wait(parity);
  }
  __device__ __forceinline__ void wait_full(const RingType& ring) const { ring.full(stage).wait(parity); }
  __device__ __forceinline__ void wait_empty(const RingType& ring) const {
    ring.empty(stage).wait(parity ^ 1);
  }
};

// Makes initialized mbarriers visible to TMA and to the cluster. A barrier of the threads must follow.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Makes this thread's stores to shared memory visible to wgmma and TMA (the async proxy). A barrier of the
// threads must follow.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Synchronizes `threads` threads at a named barrier. Number 0 is the barrier of __syncthreads.
__device__ __forceinline__ void bar_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace h100_diffusers_kernels
