// Lists of key tiles, for attention by blocks (KeyBlocks of params.h). One kernel makes a list for each query
// tile, and attention_stream.cuh reads it. A key tile of a list is two blocks of 64 keys, from anywhere. The
// lists of the warp groups of a query tile are merged: key tiles of all groups come first, then those of
// some, in turns. A tile that all queries of all groups attend to is plain; plain tiles are the first of
// their list, so that no thread reads what is known of them.
#pragma once

#include "attention_tiles.cuh"

namespace h100_diffusers_kernels {

// A block of 64 keys in a list: its index, and how each warp group attends to it.
struct ListedBlock {
  static constexpr int kIndexBits = 24, kMaxGroups = 3;
  uint32_t bits;

  __device__ __forceinline__ int key() const {
    return static_cast<int>(bits % (1 << kIndexBits)) * kListedKeys;
  }
  __device__ __forceinline__ bool is_attended(int group) const { return bits >> (kIndexBits + group) & 1; }
  // Whether the bounds of the group's queries apply.
  __device__ __forceinline__ bool is_bounded(int group) const {
    return bits >> (kIndexBits + kMaxGroups + group) & 1;
  }
  // attended, bounded: a bit for each group
  __device__ __forceinline__ static ListedBlock of(int index, uint32_t attended, uint32_t bounded) {
    return {static_cast<uint32_t>(index) | attended << kIndexBits | bounded << (kIndexBits + kMaxGroups)};
  }
};
static_assert(kMaxListedKeys / kListedKeys < 1 << ListedBlock::kIndexBits);

struct ListedTile {
  ListedBlock blocks[2];

  __device__ __forceinline__ bool is_attended(int group) const {
    return blocks[0].is_attended(group) || blocks[1].is_attended(group);
  }
  // Returns the key of a row of the tile.
  __device__ __forceinline__ int key_of(int row) const {
    return (row < kListedKeys ? blocks[0] : blocks[1]).key() + row % kListedKeys;
  }
};

struct ListHeader {
  int tiles, plain_tiles;
};

__device__ __forceinline__ ListHeader list_header(const uint2* list) {
  const uint2 pair = *list;
  return {static_cast<int>(pair.x), static_cast<int>(pair.y)};
}
__device__ __forceinline__ ListedTile listed_tile(const uint2* list, int index) {
  const uint2 pair = list[1 + index];
  return {{{pair.x}, {pair.y}}};
}

// Bytes of the lists of a launch. groups: warp groups of a query tile, 2 or 3
int64_t key_list_bytes(const AttentionParams& args, int groups);

// Makes the lists at `offset` of the workspace.
KeyLists make_key_lists(const char* operation, const AttentionParams& args, int groups, int64_t offset,
                        Stream stream);

}  // namespace h100_diffusers_kernels
