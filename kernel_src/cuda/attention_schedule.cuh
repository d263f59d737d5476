// The schedule says which tiles of queries a block computes, one after the other.
#pragma once

#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

// A kernel has OnlineSoftmax for all tiles; or it has LazySoftmax, and then OnlineSoftmax for those tiles for
// which that was not accurate.
enum class Rescaling { kOnline, kLazy };

// A block treats its share of the tiles; or those that it claims, and then those that it has marked.
enum class Pass { kShare, kClaimed, kInaccurate };

// A block lists the tiles that it has claimed, in shared memory, in their order. Multiprocessors differ in
// speed by several percent, so a block claims each tile when it is about to load it. Its loading thread does
// that (NOTES, "To 1.10 of FA3 at 2×2688: claimed tiles").
struct TileList {
  static constexpr int kCapacity = 2048;
  static constexpr uint32_t kBytes = (kCapacity + 1) * 4;
  uint32_t address;

  // Calls body(tile) for each tile, claimed one by one: the first of each block is its own without a claim.
  // A block whose list is full leaves the rest to others; all together must have room for all tiles.
  template <class Body>
  __device__ __forceinline__ void claim_each(const AttentionKernelParams& params, const Body& body) const {
    if (params.tiles > int64_t{gridDim.x} * kCapacity) __trap();
    int tile = static_cast<int>(blockIdx.x), index = 0;
#pragma unroll 1
    while (tile < params.tiles) {
      store_shared(entry(index), static_cast<uint32_t>(tile));
      body(tile);
      if (++index == kCapacity) break;
      // The maximum, of one thread, is for the compiler: coordinates of copies have to be in uniform
      // registers.
      tile = static_cast<int>(gridDim.x) + __reduce_max_sync(1u, atomicAdd(params.claimed_tiles, 1));
    }
    store_shared(entry(index), kEnd);
  }

  __device__ __forceinline__ void mark_inaccurate(int index) const {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(entry(index)), "r"(kInaccurate) : "memory");
  }

  // Calls body(tile) for each tile that has been marked.
  template <class Body>
  __device__ __forceinline__ void for_each_inaccurate(const Body& body) const {
#pragma unroll 1
    for (int index = 0;; ++index) {
      const uint32_t tile = load_shared(entry(index));
      if (tile == kEnd) return;
      if (tile & kInaccurate) body(static_cast<int>(tile & ~kInaccurate));
    }
  }

 private:
  static constexpr uint32_t kInaccurate = 1u << 31;  // It marks an entry.
  static constexpr uint32_t kEnd = kInaccurate - 1;

  __device__ __forceinline__ uint32_t entry(int index) const {
    return address + static_cast<uint32_t>(index * 4);
  }
};

// Without claims a block has every gridDim.x-th tile.
template <class Body>
__device__ __forceinline__ void for_each_own_tile(const AttentionKernelParams& params, const Body& body) {
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles; tile += static_cast<int>(gridDim.x))
    body(tile);
}

}  // namespace h100_diffusers_kernels
