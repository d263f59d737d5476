// conv3d: convolutions of videos with channels last, in steps of 1, as an implicit product with wgmma.
//
// A block computes tiles of four patches, each of 8 x 8 positions of one frame, by up to 192 channels of the
// result. For each frame and 32 channels that a tile reads, TMA copies boxes of positions with their borders
// once: one of 16 x 16, or each patch by itself where fewer tiles cover a frame then. All taps of rows and
// columns then multiply parts of a box. A product's 64 rows are a patch: 8 positions are adjacent rows, and
// the stride in its descriptor is that of the box's rows, so that a tap only moves the address. The 64-byte
// swizzle depends on the address, thus not on where a product begins. Beyond the image TMA writes zeros. With
// another border a warp overwrites them in shared memory.
//
// Before, another kernel copies the weight into the order in which tiles are loaded, swizzled: a stage is the
// taps of one row.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "barrier.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "params.h"
#include "reduce.cuh"
#include "tensor_copy.cuh"
#include "warp_group.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr int kConvGroups = 2;  // multiplying warp groups of a block
constexpr int kConvThreads = (1 + kConvGroups) * kWarpGroupThreads;
constexpr int kPatchSide = 8;  // positions of a product: its square
constexpr int kGroupPatches = 2;
constexpr int kPatches = kConvGroups * kGroupPatches;
constexpr int kStageChannels = 32;
constexpr int kStageRowBytes = 64;                           // of a position's channels
constexpr int kSwizzledBytes = kPatchSide * kStageRowBytes;  // the period of the swizzle: 8 rows
constexpr int kInputStages = 3;
// A box of one patch with its border, rounded up to the period of the swizzle.
constexpr uint32_t kBoxBytes = 6656;
static_assert((kPatchSide + 2) * (kPatchSide + 2) * kStageRowBytes <= kBoxBytes &&
              kBoxBytes % kSwizzledBytes == 0);
constexpr uint32_t kInputBytes = kPatches * kBoxBytes;
static_assert((2 * kPatchSide + 2) * (2 * kPatchSide + 2) * kStageRowBytes <= kInputBytes);

// A matrix in shared memory whose rows have 64 bytes. Groups of 8 rows are at any distance.
struct PatchDescriptor {
  uint64_t bits;

  __device__ __forceinline__ PatchDescriptor(uint32_t address, uint32_t group_bytes)
      : bits(uint64_t{address / 16} | uint64_t{group_bytes / 16} << 32 | uint64_t{2} << 62) {}
  __device__ __forceinline__ PatchDescriptor plus(uint32_t bytes) const {
    PatchDescriptor moved = *this;
    moved.bits += bytes / 16;
    return moved;
  }
  __device__ __forceinline__ uint64_t descriptor() const { return bits; }
};

template <int kColumns, int kTaps>
struct ConvMemory {
  static constexpr uint32_t kTapBytes = kColumns * kStageRowBytes;
  static constexpr uint32_t kWeightBytes = kTaps * kTapBytes;
  static constexpr int kOutBoxes = kColumns / kStageChannels;
  static constexpr uint32_t kOutBoxBytes = kWarpGroupRows * kStageRowBytes;
  static constexpr int kStoredBoxes = kOutBoxes > 4 ? kOutBoxes / 2 : kOutBoxes;  // at a time
  static constexpr uint32_t kOutBytes = kConvGroups * kStoredBoxes * kOutBoxBytes;
  static constexpr uint32_t kBarrierBytes = 256;
  static constexpr int kFitting = static_cast<int>(
      (kMaxSharedBytes - kSwizzleBytes - kBarrierBytes - kOutBytes - kInputStages * kInputBytes) /
      kWeightBytes);
  static constexpr int kWeightStages = kFitting < 8 ? kFitting : 8;
  static_assert(kWeightStages >= 3);
  static constexpr int64_t kBytes =
      kSwizzleBytes + kInputStages * kInputBytes + kWeightStages * kWeightBytes + kOutBytes + kBarrierBytes;
  using InputRing = Ring<kInputStages>;
  using WeightRing = Ring<kWeightStages>;
  static_assert(InputRing::kBytes + WeightRing::kBytes + kInputStages * Barrier::kBytes <= kBarrierBytes);

  uint32_t base = shared_tiles();

  __device__ __forceinline__ uint32_t input(int stage) const { return base + stage * kInputBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const {
    return input(kInputStages) + stage * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t out(int group) const {
    return weight(kWeightStages) + group * kStoredBoxes * kOutBoxBytes;
  }
  __device__ __forceinline__ InputRing inputs() const { return {out(kConvGroups)}; }
  __device__ __forceinline__ WeightRing weights() const { return {inputs().address + InputRing::kBytes}; }
  // Of a stage whose border is still to be written.
  __device__ __forceinline__ Barrier copied(int stage) const {
    return {weights().address + WeightRing::kBytes + stage * Barrier::kBytes};
  }
};

struct ConvKernelParams {
  CUtensorMap x, previous, out;
  Conv3dParams args;
  int column_tiles, frame_tiles, tiles;
  int side;                // of a box in patches: 1, or 2 so that a tile is a box
  int boxes, box_columns;  // of a frame
  int chunks;              // of channels
  uint32_t row_bytes;      // of a box with its border
  uint32_t box_bytes;
  bool is_out_mapped;
};

struct Place {
  int row, column;
};

struct ConvTile {
  int column_tile, box, frame, sample;

  __device__ __forceinline__ ConvTile(const ConvKernelParams& params, int index) {
    const auto next = [&](int count) {
      const int quotient = index / count, place = index - quotient * count;
      index = quotient;
      return place;
    };
    column_tile = next(params.column_tiles);
    box = next(params.frame_tiles) * (kPatches / (params.side * params.side));
    frame = next(static_cast<int>(params.args.out_frames));
    sample = index;
  }
  // Of a box of the tile.
  __device__ __forceinline__ Place place(const ConvKernelParams& params, int i) const {
    const int row = (box + i) / params.box_columns, column = box + i - row * params.box_columns;
    return {row * params.side * kPatchSide, column * params.side * kPatchSide};
  }
  __device__ __forceinline__ int boxes(const ConvKernelParams& params) const {
    return min(kPatches / (params.side * params.side), params.boxes - box);
  }
  // Of the input: one for each frame that the tile reads and 32 channels.
  __device__ __forceinline__ int stages(const ConvKernelParams& params) const {
    int count = 0;
    for (int tap = 0; tap < params.args.taps[0]; ++tap)
      if (params.args.source_frame(frame, tap) >= 0) count += params.chunks;
    return count;
  }
};

// First element of a box in (batch, frame, row, column, channel).
struct VideoBox {
  int channel, column, row, frame, sample;
};

__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, Barrier barrier,
                                         const VideoBox& box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], [%2];" ::"r"(shared),
      "l"(&map), "r"(barrier.address), "r"(box.channel), "r"(box.column), "r"(box.row), "r"(box.frame),
      "r"(box.sample)
      : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t shared, const VideoBox& box) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(shared), "r"(box.channel), "r"(box.column), "r"(box.row), "r"(box.frame), "r"(box.sample)
      : "memory");
}

// The rows or columns of a box that are beyond the image, and those that they become; -1: none.
struct BorderCopy {
  int first = -1, first_from = 0, last = -1, last_from = 0;

  // `begin`: the position of the box's first row or column, of `size` of the image.
  __device__ __forceinline__ BorderCopy(Border border, int begin, int box_size, int size) {
    if (border == Border::kZeros) return;
    const int inside = border == Border::kReflect ? 1 : 0;
    if (begin < 0) {
      first = 0;
      first_from = 1 + inside;
    }
    if (size - begin < box_size) {
      last = size - begin;
      last_from = last - 1 - inside;
    }
  }
  __device__ __forceinline__ bool is_any() const { return first >= 0 || last >= 0; }
};

struct BoxBorder {
  BorderCopy rows, columns;

  __device__ __forceinline__ BoxBorder(const ConvKernelParams& params, const Place& place)
      : rows(params.args.border, place.row - static_cast<int>(params.args.padding[0]),
             static_cast<int>(params.box_bytes / params.row_bytes), static_cast<int>(params.args.height)),
        columns(params.args.border, place.column - static_cast<int>(params.args.padding[1]),
                static_cast<int>(params.row_bytes) / kStageRowBytes, static_cast<int>(params.args.width)) {}
  __device__ __forceinline__ bool is_any() const { return rows.is_any() || columns.is_any(); }
};

template <class M>
struct ConvLoader {
  const ConvKernelParams& params;
  const M& memory;

  __device__ __forceinline__ bool has_border(const ConvTile& tile) const {
    bool has = false;
    for (int i = 0; i < tile.boxes(params); ++i)
      has = has || BoxBorder(params, tile.place(params, i)).is_any();
    return has;
  }

  // One thread.
  __device__ __forceinline__ void load() const {
    RingState<typename M::InputRing> input;
    RingState<typename M::WeightRing> weight;
    const Conv3dParams& args = params.args;
    const int previous = static_cast<int>(args.previous_frames), taps = static_cast<int>(args.taps[0]);
    const int rows = static_cast<int>(args.taps[1]);
    for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
      const ConvTile tile(params, index);
      const bool has_border = this->has_border(tile);
      const int boxes = tile.boxes(params);
      for (int tap = 0; tap < taps; ++tap) {
        const int frame = static_cast<int>(args.source_frame(tile.frame, tap));
        if (frame < 0) continue;
        const CUtensorMap& map = frame < previous ? params.previous : params.x;
        const auto* weights = static_cast<const unsigned char*>(args.workspace) +
                              int64_t{tile.column_tile * taps + tap} * params.chunks * rows * M::kWeightBytes;
        for (int chunk = 0; chunk < params.chunks; ++chunk) {
          input.wait_empty(memory.inputs());
          const Barrier full = has_border ? memory.copied(input.stage) : memory.inputs().full(input.stage);
          full.arrive_expect_tx(boxes * params.box_bytes);
          for (int i = 0; i < boxes; ++i) {
            const Place place = tile.place(params, i);
            tma_load(memory.input(input.stage) + i * kBoxBytes, map, full,
                     VideoBox{chunk * kStageChannels, place.column - static_cast<int>(args.padding[1]),
                              place.row - static_cast<int>(args.padding[0]),
                              frame < previous ? frame : frame - previous, tile.sample});
          }
          input.advance();
          for (int row = 0; row < rows; ++row) {
            weight.wait_empty(memory.weights());
            const Barrier barrier = memory.weights().full(weight.stage);
            barrier.arrive_expect_tx(M::kWeightBytes);
            bulk_load(memory.weight(weight.stage), weights, M::kWeightBytes, barrier);
            weights += M::kWeightBytes;
            weight.advance();
          }
        }
      }
    }
  }

  // One warp, which writes the borders that are not zeros.
  __device__ __forceinline__ void write_borders(int lane) const {
    RingState<typename M::InputRing> input;
    uint32_t parities = 0;
    for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
      const ConvTile tile(params, index);
      const bool has_border = this->has_border(tile);
      const int stages = tile.stages(params);
      for (int stage = 0; stage < stages; ++stage) {
        if (has_border) {
          memory.copied(input.stage).wait(parities >> input.stage & 1);
          parities ^= 1u << input.stage;
          for (int i = 0; i < tile.boxes(params); ++i)
            write_border(memory.input(input.stage) + i * kBoxBytes, BoxBorder(params, tile.place(params, i)),
                         lane);
          fence_proxy_async();
          __syncwarp();
          if (lane == 0) memory.inputs().full(input.stage).arrive();
        }
        input.advance();
      }
    }
  }

 private:
  __device__ __forceinline__ void write_border(uint32_t address, const BoxBorder& border, int lane) const {
    const BorderCopy &rows = border.rows, &columns = border.columns;
    if (rows.first >= 0) copy_row(address, rows.first_from, rows.first, lane);
    if (rows.last >= 0) copy_row(address, rows.last_from, rows.last, lane);
    __syncwarp();  // corners are copied with the columns
    if (columns.first >= 0) copy_column(address, columns.first_from, columns.first, lane);
    if (columns.last >= 0) copy_column(address, columns.last_from, columns.last, lane);
  }
  __device__ __forceinline__ void copy_row(uint32_t address, int from, int to, int lane) const {
    const int positions = static_cast<int>(params.row_bytes) / kStageRowBytes;
    for (int i = lane; i < positions * 4; i += 32)
      copy_piece(address, from * positions + i / 4, to * positions + i / 4, i % 4);
  }
  __device__ __forceinline__ void copy_column(uint32_t address, int from, int to, int lane) const {
    const int positions = static_cast<int>(params.row_bytes) / kStageRowBytes;
    const int rows = static_cast<int>(params.box_bytes / params.row_bytes);
    for (int i = lane; i < rows * 4; i += 32)
      copy_piece(address, i / 4 * positions + from, i / 4 * positions + to, i % 4);
  }
  __device__ __forceinline__ static void copy_piece(uint32_t address, int from, int to, int piece) {
    store_shared(address + swizzled_piece<kStageRowBytes>(to, piece),
                 load_shared_float4(address + swizzled_piece<kStageRowBytes>(from, piece)));
  }
};

template <typename T, int kColumns, int kTaps>
class Convolution {
 public:
  using M = ConvMemory<kColumns, kTaps>;
  static constexpr int kValues = kColumns / 2;

  __device__ __forceinline__ Convolution(const ConvKernelParams& params, const M& memory,
                                         const WarpRole& role)
      : params_(params), memory_(memory), role_(role) {
#pragma unroll
    for (int i = 0; i < kGroupPatches; ++i) {
      const int patch = role.group * kGroupPatches + i, side = params.side;
      const int inside = patch % (side * side);
      boxes_[i] = patch / (side * side);
      places_[i] = {inside / side * kPatchSide, inside % side * kPatchSide};
      offsets_[i] =
          boxes_[i] * kBoxBytes + places_[i].row * params.row_bytes + places_[i].column * kStageRowBytes;
    }
  }

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x; index < params_.tiles; index += gridDim.x) {
      const ConvTile tile(params_, index);
      float sums[kGroupPatches][kValues];
      multiply(tile, sums);
#pragma unroll
      for (int i = 0; i < kGroupPatches; ++i) {
        if (boxes_[i] >= tile.boxes(params_)) continue;
        Place place = tile.place(params_, boxes_[i]);
        place.row += places_[i].row;
        place.column += places_[i].column;
        if (place.row < params_.args.out_height && place.column < params_.args.out_width)
          store(tile, place, sums[i]);
      }
    }
    if (role_.thread == 0) tma_wait_group();
  }

 private:
  __device__ __forceinline__ void multiply(const ConvTile& tile, float (&sums)[kGroupPatches][kValues]) {
    const int rows = static_cast<int>(params_.args.taps[1]);
    const int steps = tile.stages(params_) * rows;
    int row = 0;
    step(row, false, sums);
    for (int i = 1; i < steps; ++i) {
      const int previous_weight = weight_.stage, previous_input = input_.stage;
      const bool ends_input = next_row(row, rows);
      step(row, true, sums);
      wgmma_wait_group<1>();
      release(previous_weight, previous_input, ends_input);
    }
    wgmma_wait_group();
#pragma unroll
    for (int i = 0; i < kGroupPatches; ++i) compiler_fence(sums[i]);
    const int last_weight = weight_.stage, last_input = input_.stage;
    next_row(row, rows);
    release(last_weight, last_input, true);
  }

  // Returns whether it was the last row of taps of the input's stage.
  __device__ __forceinline__ bool next_row(int& row, int rows) {
    weight_.advance();
    const bool is_last = ++row == rows;
    if (is_last) {
      row = 0;
      input_.advance();
    }
    return is_last;
  }

  // Starts to add the products of a row of taps.
  __device__ __forceinline__ void step(int row, bool accumulate, float (&sums)[kGroupPatches][kValues]) {
    if (row == 0) input_.wait_full(memory_.inputs());
    weight_.wait_full(memory_.weights());
    const PatchDescriptor x(memory_.input(input_.stage) + row * params_.row_bytes, params_.row_bytes);
    const PatchDescriptor weight(memory_.weight(weight_.stage), kSwizzledBytes);
    wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int byte = 0; byte < kStageRowBytes; byte += 2 * kWgmmaDepth) {
#pragma unroll
        for (int i = 0; i < kGroupPatches; ++i)
          Wgmma<T, kColumns>::a_from_shared(sums[i], x.plus(offsets_[i] + tap * kStageRowBytes + byte),
                                            weight.plus(tap * M::kTapBytes + byte),
                                            accumulate || tap > 0 || byte > 0);
      }
    }
    wgmma_commit_group();
  }

  __device__ __forceinline__ void release(int weight, int input, bool ends_input) const {
    if (!role_.is_elected()) return;
    memory_.weights().empty(weight).arrive();
    if (ends_input) memory_.inputs().empty(input).arrive();
  }

  __device__ __forceinline__ void store(const ConvTile& tile, const Place& place, float (&sums)[kValues]) {
    const Conv3dParams& args = params_.args;
    const int channel = tile.column_tile * kColumns, pair = channel + 2 * (role_.lane % 4);
    if (args.bias != nullptr) {
      const T* bias = static_cast<const T*>(args.bias);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int at = pair + 8 * j + k;
          const float value = at < args.out_channels ? to_float(bias[at]) : 0.0f;
          sums[4 * j + k] += value;
          sums[4 * j + 2 + k] += value;
        }
      }
    }
    if (!params_.is_out_mapped) return store_unmapped(tile, place, pair, sums);
    const uint32_t out = memory_.out(role_.group);
#pragma unroll
    for (int first_box = 0; first_box < M::kOutBoxes; first_box += M::kStoredBoxes) {
      // The earlier stores have read the memory.
      if (role_.thread == 0) tma_wait_group_read();
      role_.sync_group();
#pragma unroll
      for (int p = 0; p < 2 * M::kStoredBoxes; ++p) {
        const float* v = sums + 8 * (2 * first_box + p);
        const uint32_t fragment[4] = {pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]),
                                      pack_pair<T>(v[4], v[5]), pack_pair<T>(v[6], v[7])};
        stmatrix(out + p / 2 * M::kOutBoxBytes +
                     swizzled_piece<kStageRowBytes>(role_.fragment_row(), p % 2 * 2 + role_.lane / 16),
                 fragment);
      }
      fence_proxy_async();
      role_.sync_group();
      if (role_.thread != 0) continue;
#pragma unroll
      for (int box = 0; box < M::kStoredBoxes; ++box)
        if (const int first = channel + (first_box + box) * kStageChannels; first < args.out_channels)
          tma_store(params_.out, out + box * M::kOutBoxBytes,
                    VideoBox{first, place.column, place.row, tile.frame, tile.sample});
      tma_commit_group();
    }
  }

  // TMA cannot write positions whose distance is no multiple of 16 bytes.
  __device__ __forceinline__ void store_unmapped(const ConvTile& tile, const Place& place, int pair,
                                                 const float (&sums)[kValues]) const {
    const Conv3dParams& args = params_.args;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = role_.output_row(i);
      const int y = place.row + position / kPatchSide, x = place.column + position % kPatchSide;
      if (y >= args.out_height || x >= args.out_width) continue;
      const int64_t frame = tile.sample * args.out_frames + tile.frame;
      T* out = static_cast<T*>(args.out) +
               ((frame * args.out_height + y) * args.out_width + x) * args.out_channels;
#pragma unroll
      for (int j = 0; j < kValues / 2; ++j) {
        const int channel = pair + j / 2 * 8 + j % 2;
        if (channel < args.out_channels) out[channel] = from_float<T>(sums[j / 2 * 4 + 2 * i + j % 2]);
      }
    }
  }

  const ConvKernelParams& params_;
  const M& memory_;
  const WarpRole& role_;
  // Of the warp group's patches: the box of the tile, the place in it, and the offset in shared memory.
  int boxes_[kGroupPatches];
  Place places_[kGroupPatches];
  uint32_t offsets_[kGroupPatches];
  RingState<typename M::InputRing> input_;
  RingState<typename M::WeightRing> weight_;
};

template <typename T, int kColumns, int kTaps>
__global__ void __launch_bounds__(kConvThreads, 1)
    conv3d_kernel(const __grid_constant__ ConvKernelParams params) {
  constexpr int kLoadRegisters = 56, kMultiplyRegisters = 224;
  constexpr int kLaunchRegisters = kMultiprocessorRegisters / kConvThreads / 8 * 8;
  static_assert(kConvGroups * kMultiplyRegisters + kLoadRegisters <= (kConvGroups + 1) * kLaunchRegisters);
  using M = ConvMemory<kColumns, kTaps>;
  const M memory;
  const WarpRole role;
  if (threadIdx.x == 0) {
    memory.inputs().init(1, kConvGroups * kWarpGroupWarps);
    memory.weights().init(1, kConvGroups * kWarpGroupWarps);
    for (int stage = 0; stage < kInputStages; ++stage) memory.copied(stage).init(1);
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();
  if (role.is_loader()) {
    setmaxnreg_dec<kLoadRegisters>();
    const ConvLoader<M> loader{params, memory};
    if (role.thread == 0) loader.load();
    if (role.warp == 1 && params.args.border != Border::kZeros) loader.write_borders(role.lane);
  } else {
    setmaxnreg_inc<kMultiplyRegisters>();
    Convolution<T, kColumns, kTaps>(params, memory, role).run();
  }
}

// ---------------------------------------------------------------------------------------------------------
// Weights

struct ArrangeParams {
  const unsigned char* weight;
  unsigned char* out;
  int out_channels, padded_channels, channels, chunks;
  int taps, rows, columns;  // of all dimensions together, of rows and of columns
  int tile_columns;
};

constexpr int kArrangeWarps = 4;
constexpr int kMaxTaps = kMaxConvTaps * kMaxConvTaps * kMaxConvTaps;

// A warp copies 32 channels of one output channel: from (channels, taps) to (taps, channels).
__global__ void __launch_bounds__(kArrangeWarps* kWarpThreads)
    arrange_weight_kernel(const __grid_constant__ ArrangeParams params) {
  __shared__ __align__(16) uint16_t values[kArrangeWarps][kStageChannels * kMaxTaps];
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const int item = blockIdx.x * kArrangeWarps + warp;
  const int out_channel = item / params.chunks, chunk = item - out_channel * params.chunks;
  griddepcontrol_wait();
  if (out_channel >= params.padded_channels) return;
  const int first = chunk * kStageChannels, count = min(kStageChannels, params.channels - first);
  uint16_t* own = values[warp];
  const int bytes = out_channel < params.out_channels ? count * params.taps * 2 : 0;
  const unsigned char* from =
      params.weight + (int64_t{out_channel} * params.channels + first) * params.taps * 2;
  for (int i = lane * 16; i < kStageChannels * params.taps * 2; i += kWarpThreads * 16)
    *reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(own) + i) =
        i < bytes ? *reinterpret_cast<const uint4*>(from + i) : uint4{};
  __syncwarp();
  const int column_tile = out_channel / params.tile_columns;
  const int column = out_channel - column_tile * params.tile_columns;
  const int row_taps = params.rows * params.columns, frame_taps = params.taps / row_taps;
  for (int i = lane; i < params.taps * 4; i += kWarpThreads) {
    const int tap = i / 4, piece = i % 4, frame = tap / row_taps;
    // (tile, frame, chunk, row, column) of the tap
    const int64_t place =
        ((int64_t{column_tile} * frame_taps + frame) * params.chunks + chunk) * row_taps + tap % row_taps;
    uint4 out;
    auto* words = reinterpret_cast<uint32_t*>(&out);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = piece * 8 + 2 * j;
      words[j] = own[channel * params.taps + tap] |
                 static_cast<uint32_t>(own[(channel + 1) * params.taps + tap]) << 16;
    }
    *reinterpret_cast<uint4*>(params.out + place * params.tile_columns * kStageRowBytes +
                              swizzled_piece<kStageRowBytes>(column, piece)) = out;
  }
}

// ---------------------------------------------------------------------------------------------------------

constexpr int64_t kConvColumns[] = {192, 128, 96};
constexpr int64_t kFewColumns = 32;

// The boxes of a frame, of this side in patches.
int64_t frame_boxes(const Conv3dParams& args, int64_t side) {
  return ceil_divide(args.out_height, side * kPatchSide) * ceil_divide(args.out_width, side * kPatchSide);
}

int64_t frame_tiles(const Conv3dParams& args, int64_t side) {
  return ceil_divide(frame_boxes(args, side) * side * side, kPatches);
}

// Boxes of one patch load a quarter more positions, which takes up to a tenth of the time.
int box_side(const Conv3dParams& args) {
  return 20 * frame_tiles(args, 2) <= 21 * frame_tiles(args, 1) ? 2 : 1;
}

// Of all frames.
int64_t position_tiles(const Conv3dParams& args) {
  return frame_tiles(args, box_side(args)) * args.out_frames * args.batch;
}

// The columns of a tile for which a block's tiles take the fewest cycles. Some 12 columns' worth of them are
// those of a tile's end.
int64_t tile_columns(const Conv3dParams& args, int multiprocessors) {
  if (args.out_channels <= kFewColumns) return kFewColumns;
  const auto cycles = [&](int64_t columns) {
    return ceil_divide(position_tiles(args) * ceil_divide(args.out_channels, columns), multiprocessors) *
           (columns + 12);
  };
  return std::ranges::min(kConvColumns, {}, cycles);
}

int64_t all_taps(const Conv3dParams& args) { return args.taps[0] * args.taps[1] * args.taps[2]; }

// Of the weight in the order of tiles of this width.
int64_t arranged_bytes(const Conv3dParams& args, int64_t columns) {
  return ceil_divide(args.out_channels, columns) * columns * ceil_divide(args.channels, kStageChannels) *
         all_taps(args) * kStageRowBytes;
}

void arrange_weight(const char* operation, const Conv3dParams& args, int columns, Stream stream) {
  ArrangeParams params{};
  params.weight = static_cast<const unsigned char*>(args.weight);
  params.out = static_cast<unsigned char*>(args.workspace);
  params.out_channels = static_cast<int>(args.out_channels);
  params.padded_channels = static_cast<int>(ceil_divide(args.out_channels, columns) * columns);
  params.channels = static_cast<int>(args.channels);
  params.chunks = static_cast<int>(ceil_divide(args.channels, kStageChannels));
  params.taps = static_cast<int>(all_taps(args));
  params.rows = static_cast<int>(args.taps[1]);
  params.columns = static_cast<int>(args.taps[2]);
  params.tile_columns = columns;
  const int64_t items = int64_t{params.padded_channels} * params.chunks;
  launch_kernel(operation, arrange_weight_kernel,
                dim3(static_cast<unsigned>(ceil_divide(items, kArrangeWarps))), kArrangeWarps * kWarpThreads,
                params, stream);
}

CUtensorMap map_video(const char* operation, const Conv3dParams& args, const void* data, int64_t channels,
                      const int64_t (&sizes)[4], const int64_t (&strides)[4], int box_height, int box_width) {
  cuuint64_t map_sizes[5] = {static_cast<cuuint64_t>(channels)}, map_strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    map_sizes[4 - dim] = static_cast<cuuint64_t>(sizes[dim]);
    // The stride of one element has no meaning, but must be a multiple of 16 bytes.
    map_strides[3 - dim] = static_cast<cuuint64_t>(sizes[dim] == 1 ? kVectorBytes : strides[dim] * 2);
  }
  const cuuint32_t box[5] = {kStageChannels, static_cast<cuuint32_t>(box_width),
                             static_cast<cuuint32_t>(box_height), 1, 1};
  return encode_tensor_map<5>(operation, tensor_map_type(args.dtype), data, map_sizes, map_strides, box,
                              CU_TENSOR_MAP_SWIZZLE_64B);
}

template <typename T, int kColumns, int kTaps>
void launch_conv3d(const char* operation, const Conv3dParams& args, Stream stream) {
  ConvKernelParams params{};
  params.args = args;
  params.column_tiles = static_cast<int>(ceil_divide(args.out_channels, kColumns));
  params.side = box_side(args);
  params.boxes = static_cast<int>(frame_boxes(args, params.side));
  params.box_columns = static_cast<int>(ceil_divide(args.out_width, params.side * kPatchSide));
  params.frame_tiles = static_cast<int>(frame_tiles(args, params.side));
  params.tiles = static_cast<int>(position_tiles(args)) * params.column_tiles;
  params.chunks = static_cast<int>(ceil_divide(args.channels, kStageChannels));
  const int box_height = params.side * kPatchSide + static_cast<int>(args.taps[1]) - 1;
  const int box_width = params.side * kPatchSide + static_cast<int>(args.taps[2]) - 1;
  params.row_bytes = box_width * kStageRowBytes;
  params.box_bytes = box_height * params.row_bytes;
  const int64_t sizes[4] = {args.batch, args.frames, args.height, args.width};
  params.x = map_video(operation, args, args.x, args.channels, sizes, args.x_strides, box_height, box_width);
  if (args.previous_frames > 0) {
    const int64_t of_previous[4] = {args.batch, args.previous_frames, args.height, args.width};
    params.previous = map_video(operation, args, args.previous, args.channels, of_previous,
                                args.previous_strides, box_height, box_width);
  }
  params.is_out_mapped = args.out_channels * 2 % kVectorBytes == 0 && is_16_byte_aligned(args.out);
  if (params.is_out_mapped) {
    const int64_t outs[4] = {args.batch, args.out_frames, args.out_height, args.out_width};
    const int64_t row = args.out_width * args.out_channels, frame = row * args.out_height;
    const int64_t strides[4] = {frame * args.out_frames, frame, row, args.out_channels};
    params.out =
        map_video(operation, args, args.out, args.out_channels, outs, strides, kPatchSide, kPatchSide);
  }
  arrange_weight(operation, args, kColumns, stream);
  const int blocks = std::min(multiprocessor_count(operation, stream.device), params.tiles);
  launch_kernel_with_shared_memory<conv3d_kernel<T, kColumns, kTaps>>(
      operation, dim3(static_cast<unsigned>(blocks)), kConvThreads, params, stream,
      ConvMemory<kColumns, kTaps>::kBytes);
}

}  // namespace

int64_t conv3d_workspace_bytes(const Conv3dParams& args) {
  int64_t bytes = arranged_bytes(args, kFewColumns);
  for (const int64_t columns : kConvColumns) bytes = std::max(bytes, arranged_bytes(args, columns));
  return bytes;
}

void conv3d(const Conv3dParams& args, Stream stream) {
  constexpr const char* kOperation = "conv3d";
  const int64_t columns = tile_columns(args, multiprocessor_count(kOperation, stream.device));
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T>) {
    if constexpr (sizeof(T) == 2) {
      const auto launch = [&](auto tile_columns) {
        if (columns != tile_columns) return;
        if (args.taps[2] == 1) return launch_conv3d<T, tile_columns, 1>(kOperation, args, stream);
        if (args.taps[2] == kMaxConvTaps)
          launch_conv3d<T, tile_columns, kMaxConvTaps>(kOperation, args, stream);
      };
      launch(Constant<192>{});
      launch(Constant<128>{});
      launch(Constant<96>{});
      launch(Constant<32>{});
    }
  });
}

}  // namespace h100_diffusers_kernels
