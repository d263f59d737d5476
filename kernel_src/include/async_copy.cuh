// These copies go on while the thread does something else: from global to shared memory (cp.async), and
// between the blocks of a cluster (st.async), with the barriers (mbarrier) that tell when bytes have arrived.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "barrier.cuh"

namespace h100_diffusers_kernels {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// These store and load one word at an address in shared memory.
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// All threads of the block together fill memory with one word.
__device__ __forceinline__ void fill_shared(uint32_t address, uint32_t bytes, uint32_t word) {
  for (uint32_t byte = threadIdx.x * 4; byte < bytes; byte += blockDim.x * 4)
    store_shared(address + byte, word);
}

// Copies 16 bytes from global to shared memory, past L1. A thread may read what it has copied so after
// wait_for_own_copies, which waits for nobody else's copies.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

__device__ __forceinline__ void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// This barrier in shared memory opens once: when the bytes that it is told to expect have arrived, be it
// before or after it was told. One thread initializes it, and makes it known to the cluster by
// fence_barrier_init and cluster_arrive; later one thread says what to expect.
struct ByteBarrier {
  uint64_t state;

  __device__ __forceinline__ void init() { barrier().init(1); }
  __device__ __forceinline__ void expect(uint32_t bytes) { barrier().arrive_and_expect(bytes); }

  __device__ __forceinline__ void wait() const {
    uint32_t is_open;
    do {
      asm volatile(
          "{\n"
          ".reg .pred is_open;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_open, [%1], 0;\n"
          "selp.u32 %0, 1, 0, is_open;\n"
          "}"
          : "=r"(is_open)
          : "r"(shared_address(&state))
          : "memory");
    } while (!is_open);
  }

 private:
  __device__ __forceinline__ Barrier barrier() const { return {shared_address(&state)}; }
};

// Returns where, in the shared memory of the cluster's block `rank`, stands what is at `pointer` in this
// block's.
__device__ __forceinline__ uint32_t cluster_address(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

// Stores into another block's shared memory, where a barrier counts the bytes when they have arrived.
__device__ __forceinline__ void store_async(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, double value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
               "l"(__double_as_longlong(value)), "r"(barrier)
               : "memory");
}

}  // namespace h100_diffusers_kernels
