// The schedule: which query tiles a block computes, and in which order.
#pragma once

#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

// kOnline: OnlineSoftmax for all tiles. kLazy: LazySoftmax, then OnlineSoftmax for the tiles where it was
// inaccurate.
enum class Rescaling { kOnline, kLazy };

// Tiles of a pass: a static share; or the tiles that the block claims, followed by those that it has marked
// inaccurate.
enum class Pass { kShare, kClaimed, kInaccurate };

// The tiles that a block has claimed, in order, in shared memory. Multiprocessors differ in speed by several
// percent, so the loading thread claims each tile when it is about to load it (notes/attention.md, "Claimed
// tiles").
struct TileList {
  static constexpr int kCapacity = 2048;
  static constexpr uint32_t kBytes = (kCapacity + 1) * 4;
  uint32_t address;

  // Calls body(tile) for each claimed tile. The first tile of a block needs no claim. A block whose list is
  // full stops claiming; the lists of all blocks together must hold all tiles.
  template <class Body>
  __device__ __forceinline__ void claim_each(const AttentionKernelParams& params, const Body& body) const {
    if (params.tiles > int64_t{gridDim.x} * kCapacity) __trap();
    int tile = static_cast<int>(blockIdx.x), index = 0;
#pragma unroll 1
    while (tile < params.tiles) {
      store_shared(entry(index), static_cast<uint32_t>(tile));
      body(tile);
      if (++index == kCapacity) break;
      // The reduction over one thread makes the value uniform for the compiler: coordinates of TMA copies
      // must be in uniform registers.
      tile = static_cast<int>(gridDim.x) + __reduce_max_sync(1u, atomicAdd(params.claimed_tiles, 1));
    }
    store_shared(entry(index), kEnd);
  }

  __device__ __forceinline__ void mark_inaccurate(int index) const {
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(entry(index)), "r"(kInaccurate) : "memory");
  }

  // Calls body(tile) for each marked tile.
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
  static constexpr uint32_t kInaccurate = 1u << 31;  // flag of an entry
  static constexpr uint32_t kEnd = kInaccurate - 1;

  __device__ __forceinline__ uint32_t entry(int index) const {
    return address + static_cast<uint32_t>(index * 4);
  }
};

// Calls body(tile) for every gridDim.x-th tile.
template <class Body>
__device__ __forceinline__ void for_each_static_tile(const AttentionKernelParams& params, const Body& body) {
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < params.tiles; tile += static_cast<int>(gridDim.x))
    body(tile);
}

}  // namespace h100_diffusers_kernels
