// Reductions over part of a warp, a block, or a cluster of blocks that exchange partial results through
// distributed shared memory. The order of operations is fixed, so every run gives the same bits.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"

namespace h100_diffusers_kernels {

constexpr int kWarpThreads = 32;

// Threads of a block: several groups of up to 32 threads, or one larger group. A multiprocessor runs at most
// 32 blocks, which blocks of one warp would not fill.
template <int kGroupThreads>
constexpr int kBlockThreads = kGroupThreads > kWarpThreads ? kGroupThreads : 4 * kWarpThreads;

struct Sum {
  template <typename Value>
  __device__ __forceinline__ static Value combine(Value a, Value b) {
    return a + b;
  }
  template <typename Value>
  __device__ __forceinline__ static Value identity() {
    return 0;
  }
};

// Ignores NaN unless both values are NaN.
struct Max {
  __device__ __forceinline__ static float combine(float a, float b) { return fmaxf(a, b); }
  template <typename Value>
  __device__ __forceinline__ static Value identity() {
    return -INFINITY;
  }
};

struct UnsignedMax {
  __device__ __forceinline__ static uint32_t combine(uint32_t a, uint32_t b) { return max(a, b); }
  template <typename Value>
  __device__ __forceinline__ static Value identity() {
    return 0;
  }
};

// Reduces over aligned groups of kLanes lanes (a power of two up to 32). Every lane gets the result.
template <class Operation, int kLanes, typename Value>
__device__ __forceinline__ Value warp_reduce(Value value) {
  if constexpr (std::is_same_v<Operation, UnsignedMax> && kLanes == kWarpThreads) {
    return __reduce_max_sync(0xffffffffu, value);  // one instruction
  } else {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      value = Operation::combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
  }
}

// Returns this block's rank in its cluster.
template <int kClusterBlocks>
__device__ __forceinline__ int cluster_rank() {
  if constexpr (kClusterBlocks == 1) return 0;
  return static_cast<int>(cooperative_groups::cluster_group::block_rank());
}

// Exchanges kValues partial results of each warp: every warp writes them to the shared memory of its block,
// or of every block of its cluster, and all warps read them.
//
// Up to kRounds exchanges need no barrier between them; each has its own `round`, counted from 0. In a
// cluster a block waits only for the bytes that it receives, because a barrier of the cluster takes longer
// (notes/row_kernels.md, "Long rows"). A block may exit before the other blocks: it has received all its
// bytes by then.
template <typename Value, int kGroupThreads, int kValues, int kRounds, int kClusterBlocks>
struct Exchange {
  static constexpr int kWarps = kGroupThreads / kWarpThreads;
  static constexpr int kParts = kWarps * kClusterBlocks;
  using Parts = Value[kParts];

  struct Storage {
    Value parts[kRounds][kValues][kParts];
    TransactionBarrier arrived[kRounds];  // used only in a cluster
  };
  __device__ __forceinline__ static Storage& storage() {
    __shared__ Storage storage;
    return storage;
  }

  // Called by cluster_arrive. A kernel uses each Exchange type once, because the type owns the storage.
  __device__ __forceinline__ static void prepare() {
    for (TransactionBarrier& barrier : storage().arrived) barrier.init();
  }

  // Returns the parts as [value][part]. All threads call it, with the same values in all lanes of a warp.
  __device__ __forceinline__ const Parts* operator()(const Value (&values)[kValues], int round) const {
    auto& parts = storage().parts[round];
    const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    if constexpr (kClusterBlocks == 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if (lane == 0) parts[i][warp] = values[i];
      __syncthreads();
    } else {
      TransactionBarrier& barrier = storage().arrived[round];
      if (threadIdx.x == 0) barrier.expect_tx(sizeof(parts));
      const int part = cluster_rank<kClusterBlocks>() * kWarps + warp;
      if (lane < kClusterBlocks) {
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          st_async(mapa(&parts[i][part], lane), values[i], mapa(&barrier, lane));
      }
      barrier.wait();
    }
    return parts;
  }

  // Combines term(part) over all parts, in every thread.
  template <class Operation, class Term>
  __device__ __forceinline__ static Value reduce(const Term& term) {
    Value result = Operation::template identity<Value>();
    if constexpr (kParts <= 4) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) result = Operation::combine(result, term(part));
      return result;
    } else {
#pragma unroll
      for (int first = 0; first < kParts; first += kWarpThreads) {
        const int part = first + threadIdx.x % kWarpThreads;
        if (part < kParts) result = Operation::combine(result, term(part));
      }
      return warp_reduce<Operation, kWarpThreads>(result);
    }
  }
};

// Synchronize the blocks of a cluster before their first exchange: all blocks run and have initialized their
// barriers. Every thread calls both, with independent work in between.
template <int kClusterBlocks, class... Exchanges>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusterBlocks > 1) {
    if (threadIdx.x == 0) {
      (Exchanges::prepare(), ...);
      fence_mbarrier_init();
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
template <int kClusterBlocks>
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusterBlocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Reduces kValues values over each group of kGroupThreads consecutive threads of a block, or with
// kClusterBlocks > 1 over a cluster of blocks of kGroupThreads threads. All threads call it and get the
// result. For rounds see Exchange.
template <class Operation, typename Value, int kGroupThreads, int kValues = 1, int kRounds = 1,
          int kClusterBlocks = 1>
struct GroupReduce {
  using Warps = Exchange<Value, kGroupThreads, kValues, kRounds, kClusterBlocks>;

  // Called by cluster_arrive.
  __device__ __forceinline__ static void prepare() { Warps::prepare(); }

  __device__ __forceinline__ void operator()(Value (&values)[kValues], int round = 0) const {
    constexpr int kLanes = kGroupThreads < kWarpThreads ? kGroupThreads : kWarpThreads;
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_reduce<Operation, kLanes>(values[i]);
    if constexpr (kGroupThreads > kWarpThreads) {
      const auto* parts = Warps{}(values, round);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        values[i] = Warps::template reduce<Operation>([&](int part) { return parts[i][part]; });
    }
  }
};

}  // namespace h100_diffusers_kernels
