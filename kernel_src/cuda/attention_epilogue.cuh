// A warp's outputs go to its 16 rows in memory by way of shared memory and the copy engine.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

constexpr int kStoreRows = kWarpGroupRows / kWarpGroupWarps;  // A warp stores so many.

// `tile` has 64 rows, this warp group's own; box_bytes lead from one box of it to the next; `place` is the
// tile's.
template <class Tile>
__device__ __forceinline__ void store_rows(const WarpRole& role, const MappedTensor& out, uint32_t tile,
                                           uint32_t box_bytes, const QueryTile& place,
                                           const Outputs<Tile>& outputs) {
  if (role.is_elected()) wait_for_store_reads();
  __syncwarp();
  const int row = role.fragment_row();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragment[i] = pack_pair<typename Tile::T>(outputs[8 * step + 2 * i], outputs[8 * step + 2 * i + 1]);
    constexpr int kSteps = kBoxColumns / 16;
    store_fragment(tile + step / kSteps * box_bytes + swizzled_piece(row, step % kSteps * 2 + role.lane / 16),
                   fragment);
  }
  fence_shared_stores();
  __syncwarp();
  if (role.is_elected()) {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      tensor_store(out.map, tile + box * box_bytes + Tile::box_bytes(role.warp * kStoreRows),
                   out.box(box * kBoxColumns, place.head, place.row + role.warp * kStoreRows, place.batch));
    commit_stores();
  }
}

}  // namespace h100_diffusers_kernels
