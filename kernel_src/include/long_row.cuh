// Rows that are too long for registers, held in shared memory. Each thread copies what it reads itself, so
// threads do not wait for each other's copies, and few registers suffice to fill a multiprocessor's shared
// memory with loads in flight (notes/row_kernels.md, "Long rows").
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "row_config.cuh"

namespace h100_diffusers_kernels {

// Six blocks fit on a multiprocessor if each holds up to kLongRowPacks packs; its registers would hold half
// as much. Softmax holds longer rows in a cluster of blocks. Norms hold them in one block: no model has them.
constexpr int kLongRowThreads = 256;
constexpr int kLongRowPacks = 2048;
static_assert(6 * kLongRowPacks * kVectorBytes <= kMaxSharedBytes);

// Returns the shared memory of each block, with 16 bytes for each pack of each operand.
inline int64_t long_row_shared_bytes(int64_t packs, int operands, int cluster_blocks = 1,
                                     int threads = kLongRowThreads) {
  const int64_t packs_a_round = int64_t{threads} * cluster_blocks;
  return (packs + packs_a_round - 1) / packs_a_round * threads * kVectorBytes * operands;
}

// Calls body with the number of blocks that hold a row of one operand, as a Constant. Returns false if the
// row is too long.
template <typename Body>
bool dispatch_long_row(int64_t packs, const Body& body) {
  const auto try_blocks = [&](auto blocks) {
    if (packs > blocks * kLongRowPacks && blocks < kMaxClusterBlocks) return false;
    if (long_row_shared_bytes(packs, 1, blocks) > kMaxSharedBytes) return false;
    body(blocks);
    return true;
  };
  return try_blocks(Constant<1>{}) || try_blocks(Constant<2>{}) || try_blocks(Constant<4>{}) ||
         try_blocks(Constant<kMaxClusterBlocks>{});
}

// A row of `hidden` elements, in packs of kSize elements (16 bytes of each operand).
template <int kSize, int kOperands, int kClusterBlocks = 1, int kThreads = kLongRowThreads>
struct LongRow {
  RowPosition<kThreads, kClusterBlocks> position;
  int hidden;
  uint4* slots;  // of this thread; the operands of a pack are kThreads slots apart

  __device__ __forceinline__ explicit LongRow(int64_t row_hidden) : hidden(static_cast<int>(row_hidden)) {
    // Aligned like global memory: 128 bytes across two lines take longer to copy (notes/row_kernels.md, "Long
    // rows").
    extern __shared__ __align__(128) uint4 row_memory[];
    slots = row_memory + threadIdx.x;
  }

  // Starts all copies. fetch_pack(column, slots) starts the copies of a pack with cp_async.
  template <class FetchPack>
  __device__ __forceinline__ void fetch(const FetchPack& fetch_pack) const {
    // Unrolled, so that the addresses of an iteration differ by constants. That was up to 2% faster than a
    // loop over packs.
    constexpr int kPacks = kLongRowPacks / kLongRowThreads;
#pragma unroll 1
    for (int first = 0; first < hidden; first += kPacks * kStep) {
      const int64_t own_first = first + position.thread * kSize;
#pragma unroll
      for (int i = 0; i < kPacks; ++i)
        if (own_first + i * kStep < hidden)
          fetch_pack(own_first + i * kStep, slots + (first / kStep + i) * kSlots);
    }
  }

  // Calls body(column, slots) for each pack of the thread, unrolled by kUnroll.
  template <int kUnroll = 2, class Body>
  __device__ __forceinline__ void for_each_pack(const Body& body) const {
    const uint4* pack_slots = slots;
#pragma unroll kUnroll
    for (int column = position.thread * kSize; column < hidden; column += kStep) {
      body(column, pack_slots);
      pack_slots += kSlots;
    }
  }

 private:
  static constexpr int kStep = RowPosition<kThreads, kClusterBlocks>::kThreads * kSize;
  static constexpr int kSlots = kThreads * kOperands;
};

}  // namespace h100_diffusers_kernels
