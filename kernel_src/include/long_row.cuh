// Rows that are too long for registers. Every thread copies to shared memory what it will read itself, so
// threads need not wait for each other's copies, and few registers are enough to have a multiprocessor's
// shared memory full of bytes under way.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "row_config.cuh"

namespace h100_diffusers_kernels {

// A long row is held in shared memory: of one block up to kLongRowPacks, else of a cluster of blocks. Six
// blocks with that many packs fit a multiprocessor, whose registers would hold half of that.
constexpr int kLongRowThreads = 256;
constexpr int kLongRowPacks = 2048;
constexpr int kMaxClusterBlocks = 8;

// Shared memory of each of the blocks, for operands of which each takes 16 bytes a pack.
inline int64_t long_row_shared_bytes(int64_t packs, int operands, int cluster_blocks,
                                     int threads = kLongRowThreads) {
  const int64_t packs_a_round = int64_t{threads} * cluster_blocks;
  return (packs + packs_a_round - 1) / packs_a_round * threads * kVectorBytes * operands;
}

// Calls body with the number of blocks, as a std::integral_constant; false if a row is too long for them.
template <typename Body>
bool dispatch_long_row(int64_t packs, int operands, const Body& body) {
  const auto try_blocks = [&](auto blocks) {
    if (packs > blocks * kLongRowPacks && blocks < kMaxClusterBlocks) return false;
    if (long_row_shared_bytes(packs, operands, blocks) > kMaxSharedBytes) return false;
    body(blocks);
    return true;
  };
  return try_blocks(std::integral_constant<int, 1>{}) || try_blocks(std::integral_constant<int, 2>{}) ||
         try_blocks(std::integral_constant<int, 4>{}) ||
         try_blocks(std::integral_constant<int, kMaxClusterBlocks>{});
}

// A row of `hidden` elements whose operands take 16 bytes each for a pack of kSize of them.
template <int kSize, int kOperands, int kClusterBlocks, int kThreads = kLongRowThreads>
struct LongRow {
  RowPlace<kThreads, kClusterBlocks> place;
  int hidden;
  uint4* slots;  // the thread's: of a pack's operands kThreads apart

  __device__ __forceinline__ explicit LongRow(int64_t row_hidden) : hidden(static_cast<int>(row_hidden)) {
    // Aligned as memory is: what 128 bytes become in two pieces takes longer to copy.
    extern __shared__ __align__(128) uint4 row_memory[];
    slots = row_memory + threadIdx.x;
  }

  // Starts all copies: fetch_pack(column, slots) those of a pack, by copy_async.
  template <class FetchPack>
  __device__ __forceinline__ void fetch(const FetchPack& fetch_pack) const {
    // In one piece, with addresses that differ by constants: up to 2% faster than a loop that counts them up.
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

  // Calls body(column, slots) for each of the thread's packs, kUnroll of them side by side.
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
