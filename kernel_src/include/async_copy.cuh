// Asynchronous copies: global to shared memory (cp.async), and between the blocks of a cluster (st.async),
// with an mbarrier that counts the arrived bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "barrier.cuh"

namespace h100_diffusers_kernels {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Store to and load from shared memory.
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_u16(uint32_t address, uint16_t half_word) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(half_word) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ uint16_t load_shared_u16(uint32_t address) {
  uint16_t half_word;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half_word) : "r"(address) : "memory");
  return half_word;
}

__device__ __forceinline__ void store_shared(uint32_t address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 values) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

__device__ __forceinline__ float4 load_shared_float4(uint32_t address) {
  float4 values;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(address)
               : "memory");
  return values;
}

// Fills shared memory with one word. All threads of the block call it.
__device__ __forceinline__ void fill_shared(uint32_t address, uint32_t bytes, uint32_t word) {
  for (uint32_t byte = threadIdx.x * 4; byte < bytes; byte += blockDim.x * 4)
    store_shared(address + byte, word);
}

// Copies 16 bytes from global to shared memory, bypassing L1. A thread may read its own copies after
// cp_async_wait_all, which does not wait for the copies of other threads.
__device__ __forceinline__ void cp_async(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// An mbarrier that is used for one phase, which ends when the expected bytes have arrived (the transaction
// count). One thread initializes it, followed by fence_mbarrier_init and cluster_arrive, and later one thread
// calls expect_tx, before or after bytes arrive.
struct TransactionBarrier {
  uint64_t state;

  __device__ __forceinline__ void init() { barrier().init(1); }
  __device__ __forceinline__ void expect_tx(uint32_t bytes) { barrier().arrive_expect_tx(bytes); }

  __device__ __forceinline__ void wait() const {
    uint32_t is_complete;
    do {
      asm volatile(
          "{\n"
          ".reg .pred is_complete;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_complete, [%1], 0;\n"
          "selp.u32 %0, 1, 0, is_complete;\n"
          "}"
          : "=r"(is_complete)
          : "r"(shared_address(&state))
          : "memory");
    } while (!is_complete);
  }

 private:
  __device__ __forceinline__ Barrier barrier() const { return {shared_address(&state)}; }
};

// Returns the address of a location in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t mapa(uint32_t shared, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
__device__ __forceinline__ uint32_t mapa(const void* pointer, int rank) {
  return mapa(shared_address(pointer), rank);
}

// Loads from the shared memory of a block of the cluster.
__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
  float4 values;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(address)
               : "memory");
  return values;
}

// Stores into another block's shared memory. The barrier there counts the bytes when they arrive.
__device__ __forceinline__ void st_async(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, double value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
               "l"(__double_as_longlong(value)), "r"(barrier)
               : "memory");
}

}  // namespace h100_diffusers_kernels
