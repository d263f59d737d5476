// Rows that are too long for registers are held in shared memory. Every thread copies there what it will read
// itself, so threads need not wait for each other's copies, and few registers are enough to have a
// multiprocessor's shared memory full of bytes under way (NOTES, "Long rows").
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "row_config.cuh"

namespace h100_diffusers_kernels {

// One block holds a row of up to kLongRowPacks packs, a cluster of blocks a longer one. Six blocks with that
// many packs fit a multiprocessor, whose registers would hold half of that.
constexpr int kLongRowThreads = 256;
constexpr int kLongRowPacks = 2048;
constexpr int kMaxClusterBlocks = 8;

// Returns the shared memory that each of the blocks needs for operands of which each takes 16 bytes a pack.
inline int64_t long_row_shared_bytes(int64_t packs, int operands, int cluster_blocks,
                                     int threads = kLongRowThreads) {
  const int64_t packs_a_round = int64_t{threads} * cluster_blocks;
  return (packs + packs_a_round - 1) / packs_a_round * threads * kVectorBytes * operands;
}

// Calls body with the number of blocks that hold a row, as a Constant. Returns false if it is too long for
// them.
template <typename Body>
bool dispatch_long_row(int64_t packs, int operands, const Body& body) {
  const auto try_blocks = [&](auto blocks) {
    if (packs > blocks * kLongRowPacks && blocks < kMaxClusterBlocks) return false;
    if (long_row_shared_bytes(packs, operands, blocks) > kMaxSharedBytes) return false;
    body(blocks);
    return true;
  };
  return try_blocks(Constant<1>{}) || try_blocks(Constant<2>{}) || try_blocks(Constant<4>{}) ||
         try_blocks(Constant<kMaxClusterBlocks>{});
}

// This is a row of `hidden` elements, whose operands take 16 bytes each for a pack of kSize of them.
template <int kSize, int kOperands, int kClusterBlocks, int kThreads = kLongRowThreads>
struct LongRow {
  RowPlace<kThreads, kClusterBlocks> place;
  int hidden;
  uint4* slots;  // They are this thread's; those of a pack's operands are kThreads apart.

  __device__ __forceinline__ explicit LongRow(int64_t row_hidden) : hidden(static_cast<int>(row_hidden)) {
    // This is aligned as memory is, because 128 bytes in two pieces take longer to copy (NOTES, "Long rows").
    extern __shared__ __align__(128) uint4 row_memory[];
    slots = row_memory + threadIdx.x;
  }

  // Starts all copies. fetch_pack(column, slots) starts those of a pack, by copy_async.
  template <class FetchPack>
  __device__ __forceinline__ void fetch(const FetchPack& fetch_pack) const {
    // All packs of a turn are fetched in one piece, with addresses that differ by constants: that was up to
    // 2% faster than a loop that counts them up.
    constexpr int kPacks = kLongRowPacks / kLongRowThreads;
#pragma unroll 1
    for (int first = 0; first < hidden; first += kPacks * kStep) {
      const int64_t own_first = first + place.thread * kSize;
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (own_first + i * kStep < hidden)
          fetch_pack(own_first + i * kStep, slots + (first / kStep + i) * kSlots);
    }
  }

  // Calls body(column, slots) for each of the thread's packs, and unrolls kUnroll of them.
  template <int kUnroll = 2, class Body>
  __device__ __forceinline__ void for_each_pack(const Body& body) const {
    const uint4* pack_slots = slots;
#pragma unroll kUnroll
    for (int column = place.thread * kSize; column < hidden; column += kStep) {
      body(column, pack_slots);
      pack_slots += kSlots;
    }
  }

 private:
  static constexpr int kStep = RowPlace<kThreads, kClusterBlocks>::kThreads * kSize;
  static constexpr int kSlots = kThreads * kOperands;
};

}  // namespace h100_diffusers_kernels
