// Stores the outputs of a warp, 16 rows, through shared memory and TMA.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

constexpr int kStoreRows = kWarpGroupRows / kWarpGroupWarps;  // rows of a warp

// tile: shared memory for the warp group's 64 rows, with boxes that are box_bytes apart
// position: the position of the tile
template <class Tile>
__device__ __forceinline__ void store_rows(const WarpRole& role, const MappedTensor& out, uint32_t tile,
                                           uint32_t box_bytes, const QueryTile& position,
                                           const Outputs<Tile>& outputs) {
  if (role.is_elected()) tma_wait_group_read();
  __syncwarp();
  const int row = role.fragment_row();
#pragma unroll
  for (int step = 0; step < Tile::kHeadDim / 16; ++step) {
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragment[i] = pack_pair<typename Tile::T>(outputs[8 * step + 2 * i], outputs[8 * step + 2 * i + 1]);
    constexpr int kSteps = kBoxColumns / 16;
    stmatrix(tile + step / kSteps * box_bytes + swizzled_piece(row, step % kSteps * 2 + role.lane / 16),
             fragment);
  }
  fence_proxy_async();
  __syncwarp();
  if (role.is_elected()) {
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box)
      tma_store(
          out.map, tile + box * box_bytes + Tile::box_bytes(role.warp * kStoreRows),
          out.box(box * kBoxColumns, position.head, position.row + role.warp * kStoreRows, position.batch));
    tma_commit_group();
  }
}

}  // namespace h100_diffusers_kernels
