// The end of a query tile: logarithms of the sums, gate, addend, and the store of the outputs of a warp, 16
// rows, through shared memory and TMA.
#pragma once

#include "attention_softmax.cuh"

namespace h100_diffusers_kernels {

constexpr int kStoreRows = kWarpGroupRows / kWarpGroupWarps;  // rows of a warp

// Stores the logarithm of the sum of the exponentials of each row. The first of the four lanes of a row
// stores it. A recomputed tile overwrites its first result: the same threads store it again.
__device__ __forceinline__ void store_lse(const AttentionParams& args, const WarpRole& role,
                                          const QueryTile& position, const float (&lse)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = position.row + role.output_row(i);
    if (role.lane % 4 == 0 && row < args.query_length)
      args.lse[(position.batch * args.query_length + row) * args.heads + position.head] = lse[i];
  }
}

// Multiplies by the gate of each query and head. Rows beyond the last query are not stored.
template <class Tile>
__device__ __forceinline__ void apply_gate(const AttentionParams& args, const WarpRole& role,
                                           const QueryTile& position, Outputs<Tile>& outputs) {
  float gate[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = min(position.row + role.output_row(i), static_cast<int>(args.query_length) - 1);
    const int64_t offset = args.gate.offset(position.batch, row, position.head);
    gate[i] = args.gate_is_float32 ? static_cast<const float*>(args.gate.data)[offset]
                                   : to_float(static_cast<const typename Tile::T*>(args.gate.data)[offset]);
  }
  scale_rows(outputs, gate);
}

template <class Tile>
__device__ __forceinline__ void add_addend(const AttentionParams& args, const WarpRole& role,
                                           const QueryTile& position, Outputs<Tile>& outputs) {
  using T = typename Tile::T;
  constexpr int kPairs = Tile::kOutputs / 2;
  const uint16_t* rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = min(position.row + role.output_row(i), static_cast<int>(args.query_length) - 1);
    rows[i] = static_cast<const uint16_t*>(args.addend.data) +
              args.addend.offset(position.batch, row, position.head) + role.lane % 4 * 2;
  }
  const bool are_aligned =
      (reinterpret_cast<uintptr_t>(rows[0]) | reinterpret_cast<uintptr_t>(rows[1])) % 4 == 0;
  const auto add = [&](const auto& load_pair) {
    uint32_t pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      pairs[i] = i / 2 * 8 < args.head_dim ? load_pair(rows[i % 2] + i / 2 * 8) : 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 pair = unpack_pair<T>(pairs[i]);
      outputs[2 * i] += pair.x;
      outputs[2 * i + 1] += pair.y;
    }
  };
  if (are_aligned)
    add([](const uint16_t* pair) { return *reinterpret_cast<const uint32_t*>(pair); });
  else
    add([](const uint16_t* pair) { return pair[0] | uint32_t{pair[1]} << 16; });
}

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
