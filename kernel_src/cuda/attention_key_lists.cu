// The kernel that makes lists of key tiles.
#include <climits>

#include "attention_key_lists.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {
namespace {

struct KeyListKernelParams {
  AttentionParams args;
  KeyLists lists;
  int heads;  // that have lists
};

// The bounds of a warp group's queries.
struct QueryBounds {
  int least_first = INT_MAX, most_first = INT_MIN, least_end = INT_MAX, most_end = INT_MIN;

  // bounds: of the first query
  __device__ __forceinline__ void read(const int2* bounds, int queries, int lane) {
    for (int i = lane; i < queries; i += 32) {
      const int2 bound = bounds[i];
      const bool is_empty = bound.x >= bound.y;
      least_first = min(least_first, is_empty ? INT_MAX : bound.x);
      most_end = max(most_end, is_empty ? INT_MIN : bound.y);
      most_first = max(most_first, is_empty ? INT_MAX : bound.x);
      least_end = min(least_end, bound.y);
    }
    least_first = __reduce_min_sync(~0u, least_first);
    most_end = __reduce_max_sync(~0u, most_end);
    most_first = __reduce_max_sync(~0u, most_first);
    least_end = __reduce_min_sync(~0u, least_end);
  }
  __device__ __forceinline__ bool may_include(int key, int end) const {
    return key < most_end && end > least_first;
  }
  __device__ __forceinline__ bool include_all(int key, int end) const {
    return key >= most_first && end <= least_end;
  }
};

// Sets bits in the byte of each key block of a list, in shared memory.
__device__ __forceinline__ void mark_blocks(const KeyBlockList& list, const KeyBlocks& blocks, int64_t row,
                                            int key_blocks, uint32_t bits, uint32_t* marks, int lane) {
  const int count = min(max(list.counts[row], 0), static_cast<int>(list.columns));
  const int32_t* indices = list.indices + row * list.columns;
  const int parts = blocks.key_rows / kListedKeys;
  for (int i = lane; i < count; i += 32) {
    const int index = indices[i];
    for (int part = 0; part < parts; ++part) {
      const int64_t block = static_cast<int64_t>(index) * parts + part;
      if (block >= 0 && block < key_blocks) atomicOr(&marks[block / 4], bits << (block % 4 * 8));
    }
  }
}

// A warp makes the list of one query tile.
template <int kGroups>
__global__ void __launch_bounds__(32)
    scalar_attention_key_list_kernel(const __grid_constant__ KeyListKernelParams params) {
  // Marks of a group; those of the others follow, two bits each.
  constexpr uint32_t kBounded = 1, kFull = 2;
  constexpr uint32_t kAllBounded = kGroups == 3 ? 0b010101 : 0b0101;
  extern __shared__ uint32_t marks[];
  const AttentionParams& args = params.args;
  const KeyBlocks& blocks = args.blocks;
  const int lane = static_cast<int>(threadIdx.x), query_tiles = params.lists.query_tiles;
  const int row_tile = static_cast<int>(blockIdx.x) % query_tiles;
  const int list = static_cast<int>(blockIdx.x) / query_tiles;
  const int head = list % params.heads, batch = list / params.heads;
  const int first_row = row_tile * kGroups * kWarpGroupRows,
            query_length = static_cast<int>(args.query_length);
  griddepcontrol_wait();
  const int key_count = key_count_of(args, batch);
  const int key_blocks = (key_count + kListedKeys - 1) / kListedKeys;
  const bool is_listed = blocks.bounded.counts != nullptr || blocks.full.counts != nullptr;

  if (is_listed) {
    for (int i = lane; i * 4 < key_blocks; i += 32) marks[i] = 0;
    __syncwarp();
    int group = 0;
    while (group < kGroups && first_row + group * kWarpGroupRows < query_length) {
      // All groups of this query block.
      const int query_block = (first_row + group * kWarpGroupRows) / blocks.query_rows;
      uint32_t groups = 0;
      for (; group < kGroups && (first_row + group * kWarpGroupRows) / blocks.query_rows == query_block;
           ++group)
        groups |= 1u << (2 * group);
      const auto mark = [&](const KeyBlockList& of, uint32_t mark) {
        if (of.counts == nullptr) return;
        const int64_t row = batch * of.strides[0] + head * of.strides[1] + query_block;
        mark_blocks(of, blocks, row, key_blocks, groups * mark, marks, lane);
      };
      mark(blocks.bounded, kBounded);
      mark(blocks.full, kFull);
    }
    __syncwarp();
  }

  QueryBounds bounds[kGroups];
  int queries[kGroups];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int row = first_row + group * kWarpGroupRows;
    queries[group] = min(max(query_length - row, 0), kWarpGroupRows);
    if (blocks.bounds == nullptr) continue;
    const int64_t query = batch * blocks.bounds_strides[0] + head * blocks.bounds_strides[1] + row;
    bounds[group].read(reinterpret_cast<const int2*>(blocks.bounds) + query, queries[group], lane);
  }

  // Kinds of blocks: plain ones, others of all groups, and those of some: 1 plus the groups' bits.
  constexpr int kAllGroups = (1 << kGroups) - 1, kKinds = kAllGroups + 1, kPlain = 0, kOfAll = 1;
  struct Found {
    int kind;  // kKinds if no group attends to the block
    ListedBlock block;
  };
  const auto find = [&](int index) -> Found {
    if (index >= key_blocks) return {kKinds, {}};
    const uint32_t marked = is_listed ? marks[index / 4] >> (index % 4 * 8) : kAllBounded;
    const int key = index * kListedKeys, end = min(key + kListedKeys, key_count);
    uint32_t attended = 0, bounded = 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t mark = marked >> (2 * group);
      const bool is_free = (mark & kFull) || blocks.bounds == nullptr || bounds[group].include_all(key, end);
      if (!(mark & (kBounded | kFull)) || queries[group] == 0) continue;
      if (!is_free && !bounds[group].may_include(key, end)) continue;
      attended |= 1u << group;
      bounded |= static_cast<uint32_t>(!is_free) << group;
    }
    const bool is_cut = key + kListedKeys > key_count;
    int kind = attended == 0 ? kKinds : 1 + static_cast<int>(attended);
    if (attended == kAllGroups) kind = bounded == 0 && !is_cut ? kPlain : kOfAll;
    return {kind, ListedBlock::of(index, attended, bounded)};
  };

  int counts[kKinds] = {};
#pragma unroll 1
  for (int first = 0; first < key_blocks; first += 32) {
    const int kind = find(first + lane).kind;
#pragma unroll
    for (int i = 0; i < kKinds; ++i) counts[i] += __popc(__ballot_sync(~0u, kind == i));
  }
  const int of_all = counts[kPlain] + counts[kOfAll], tiles_of_all = (of_all + 1) / 2;
  int tile_count = tiles_of_all;
#pragma unroll
  for (int i = kOfAll + 1; i < kKinds; ++i) tile_count += (counts[i] + 1) / 2;
  // Returns the place of a kind's block `i`, in blocks. Tiles of some groups take turns.
  const auto place_of = [&](int kind, int i) {
    if (kind == kPlain) return i;
    if (kind == kOfAll) return counts[kPlain] + i;
    int tile = tiles_of_all;
#pragma unroll
    for (int other = kOfAll + 1; other < kKinds; ++other)
      tile += min((counts[other] + 1) / 2, i / 2 + (other < kind));
    return tile * 2 + i % 2;
  };
  uint2* const out = params.lists.data + static_cast<int64_t>(blockIdx.x) * params.lists.list_pairs;
  ListedBlock* const tiles = reinterpret_cast<ListedBlock*>(out + 1);
  int placed[kKinds] = {};
#pragma unroll 1
  for (int first = 0; first < key_blocks; first += 32) {
    const Found found = find(first + lane);
#pragma unroll
    for (int i = 0; i < kKinds; ++i) {
      const uint32_t lanes = __ballot_sync(~0u, found.kind == i);
      if (found.kind == i) tiles[place_of(i, placed[i] + __popc(lanes & ((1u << lane) - 1)))] = found.block;
      placed[i] += __popc(lanes);
    }
  }
  if (lane != 0) return;
  // A tile without a second block has one beyond the keys, which is filled with zeros.
  const ListedBlock beyond =
      ListedBlock::of((static_cast<int>(args.key_length) + kListedKeys - 1) / kListedKeys, 0, 0);
  if (of_all % 2 != 0) tiles[of_all] = beyond;
#pragma unroll
  for (int i = kOfAll + 1; i < kKinds; ++i)
    if (counts[i] % 2 != 0) tiles[place_of(i, counts[i])] = beyond;
  *out = make_uint2(tile_count, counts[kPlain] / 2);
}

// The lists of a launch, without their address.
KeyLists key_lists_of(const AttentionParams& args, int groups) {
  const KeyBlocks& blocks = args.blocks;
  const auto differs = [&](int dim) {
    return blocks.bounded.strides[dim] != 0 || blocks.full.strides[dim] != 0 ||
           blocks.bounds_strides[dim] != 0;
  };
  KeyLists lists{};
  lists.rows = groups * kWarpGroupRows;
  lists.query_tiles = static_cast<int>(ceil_divide(args.query_length, lists.rows));
  // A header, and tiles for all blocks. Those of each set of groups may end with half a tile.
  lists.list_pairs = static_cast<int>(ceil_divide(args.key_length, kTileKeys)) + 1 + (1 << groups) / 2;
  lists.head_step = differs(1) ? lists.query_tiles : 0;
  lists.batch_step = differs(0) || args.key_lengths != nullptr
                         ? lists.query_tiles * (lists.head_step == 0 ? 1 : static_cast<int>(args.heads))
                         : 0;
  return lists;
}

int64_t key_list_count(const AttentionParams& args, const KeyLists& lists) {
  return lists.query_tiles * (lists.head_step == 0 ? 1 : args.heads) *
         (lists.batch_step == 0 ? 1 : args.batch);
}

}  // namespace

int64_t key_list_bytes(const AttentionParams& args, int groups) {
  if (!args.blocks.is_given) return 0;
  const KeyLists lists = key_lists_of(args, groups);
  return key_list_count(args, lists) * lists.list_pairs * static_cast<int64_t>(sizeof(uint2));
}

KeyLists make_key_lists(const char* operation, const AttentionParams& args, int groups, int64_t offset,
                        Stream stream) {
  KeyListKernelParams params{args, key_lists_of(args, groups), 1};
  params.lists.data = reinterpret_cast<uint2*>(static_cast<char*>(args.workspace) + offset);
  if (params.lists.head_step != 0) params.heads = static_cast<int>(args.heads);
  const int64_t mark_bytes = ceil_divide(args.key_length, 4 * kListedKeys) * 4;
  const dim3 grid(static_cast<unsigned>(key_list_count(args, params.lists)));
  if (groups == 3)
    launch_kernel_with_shared_memory<scalar_attention_key_list_kernel<3>>(operation, grid, 32, params, stream,
                                                                          mark_bytes);
  else
    launch_kernel_with_shared_memory<scalar_attention_key_list_kernel<2>>(operation, grid, 32, params, stream,
                                                                          mark_bytes);
  return params.lists;
}

}  // namespace h100_diffusers_kernels
