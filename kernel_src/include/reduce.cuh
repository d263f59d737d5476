// The threads that share a row reduce over part of a warp, over a block, or over a cluster of blocks that
// exchange their parts through distributed shared memory. The order of operations is fixed, so that every run
// gives the same bits.
#pragma once

#include <cooperative_groups.h>

#include "async_copy.cuh"

namespace h100_diffusers_kernels {

constexpr int kWarpThreads = 32;

// A block of so many threads holds several groups of up to a warp, or one that is larger.
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

// It ignores NaN unless both are NaN.
struct Max {
  __device__ __forceinline__ static float combine(float a, float b) { return fmaxf(a, b); }
  template <typename Value>
  __device__ __forceinline__ static Value identity() {
    return -INFINITY;
  }
};

// Reduces over aligned groups of kLanes lanes (a power of two up to 32). Every lane gets the result.
template <class Operation, int kLanes, typename Value>
__device__ __forceinline__ Value warp_reduce(Value value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value = Operation::combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Returns this block's number in its cluster.
template <int kClusterBlocks>
__device__ __forceinline__ int cluster_rank() {
  if constexpr (kClusterBlocks == 1) return 0;
  return static_cast<int>(cooperative_groups::cluster_group::block_rank());
}

// The warps that share a row lay down their parts, kValues each, for all of them to read: in the shared
// memory of their block, or of every block of their cluster.
//
// kRounds exchanges can be made, each with its own `round`, from 0 up, and no barrier between them. In a
// cluster a block waits for the bytes that it is to get, and for nothing else, because a barrier of the
// cluster takes longer (NOTES, "Long rows"). A block may end before its neighbours do: nothing more is on its
// way to it then.
template <typename Value, int kGroupThreads, int kValues, int kRounds, int kClusterBlocks>
struct Exchange {
  static constexpr int kWarps = kGroupThreads / kWarpThreads;
  static constexpr int kParts = kWarps * kClusterBlocks;
  using Parts = Value[kParts];

  struct Storage {
    Value parts[kRounds][kValues][kParts];
    ByteBarrier arrived[kRounds];  // They are used in a cluster only.
  };
  __device__ __forceinline__ static Storage& storage() {
    __shared__ Storage storage;
    return storage;
  }

  // cluster_arrive calls it. A kernel makes one exchange of a type, because the storage is the type's.
  __device__ __forceinline__ static void prepare() {
    for (ByteBarrier& barrier : storage().arrived) barrier.init();
  }

  // All threads call it, with values that are equal within a warp. Returns the parts, by [value][part].
  __device__ __forceinline__ const Parts* operator()(const Value (&values)[kValues], int round) const {
    auto& parts = storage().parts[round];
    const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    if constexpr (kClusterBlocks == 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if (lane == 0) parts[i][warp] = values[i];
      __syncthreads();
    } else {
      ByteBarrier& barrier = storage().arrived[round];
      if (threadIdx.x == 0) barrier.expect(sizeof(parts));
      const int part = cluster_rank<kClusterBlocks>() * kWarps + warp;
      if (lane < kClusterBlocks) {
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          store_async(cluster_address(&parts[i][part], lane), values[i], cluster_address(&barrier, lane));
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

// By these the blocks of a cluster tell each other that they run and have prepared their exchanges, and wait
// for that. Every thread calls both before its first exchange, with work of its own between them.
template <int kClusterBlocks, class... Exchanges>
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kClusterBlocks > 1) {
    if (threadIdx.x == 0) {
      (Exchanges::prepare(), ...);
      fence_barrier_init();
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
template <int kClusterBlocks>
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kClusterBlocks > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Reduces kValues values over each group of kGroupThreads consecutive threads of a block, or, with
// kClusterBlocks > 1, over all threads of a cluster of blocks of kGroupThreads threads; every thread gets the
// result, and all threads must call it. Exchange says what a round is.
template <class Operation, typename Value, int kGroupThreads, int kValues = 1, int kRounds = 1,
          int kClusterBlocks = 1>
struct GroupReduce {
  using Warps = Exchange<Value, kGroupThreads, kValues, kRounds, kClusterBlocks>;

  // cluster_arrive calls it.
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
