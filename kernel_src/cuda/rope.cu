// rope and rope_3d rotate one tensor. A thread rotates the units (rope.cuh) at the same position of two
// heads, which read the tables once if they share them, or of one head if there are few units.
#include <type_traits>

#include "fast_divisor.cuh"
#include "launch.cuh"
#include "rope.cuh"

namespace h100_diffusers_kernels {
namespace {

constexpr int kThreads = 128;
static_assert(kMultiprocessorThreads % kThreads == 0);
constexpr int kHeadsPerThread = 2;
// Up to this many units a thread rotates one head. It is about as many as an H100 holds threads.
constexpr int64_t kFewUnits = 1 << 18;

// Units are numbered by batch, seq, slot and position in the head. Slot i has the heads i and i + head_slots.
template <class Args>
struct RopeKernelParams : Args {
  uint32_t units;
  FastDivisor units_per_head, head_slots, seq_divisor;
  FastDivisor width, height;  // of the grid, for rope_3d
};

// Tables of each axis of a grid. The pairs of a head are split between the axes, and the token's position in
// the grid selects the row of each table.
template <typename Table>
struct GridRope {
  // Limits the registers to 64, which the compiler would exceed without need (notes/row_kernels.md,
  // "From tables").
  static constexpr int kMinBlocks = 8;
  static_assert(kMultiprocessorRegisters / (kMinBlocks * kThreads) == 64);

  template <typename T, RopeLayout kLayout, int kSize>
  class Lookup {
   public:
    __device__ __forceinline__ void fetch(const RopeKernelParams<Rope3dParams>& p,
                                          const UnitPosition& position) {
      const uint32_t seq = static_cast<uint32_t>(position.seq);
      const uint32_t line = p.width.divide(seq), frame = p.height.divide(line);
      const uint32_t rows[kRope3dAxes] = {frame, line - frame * p.height.divisor,
                                          seq - line * p.width.divisor};
      // Pointers that are offset so that the pair's index in the head can be added.
      const Table *cos[kRope3dAxes], *sin[kRope3dAxes];
      int end[kRope3dAxes], pairs = 0;
#pragma unroll
      for (int axis = 0; axis < kRope3dAxes; ++axis) {
        const RopeAxis& tables = p.axes[axis];
        cos[axis] = static_cast<const Table*>(tables.cos) + rows[axis] * tables.cos_stride - pairs;
        sin[axis] = static_cast<const Table*>(tables.sin) + rows[axis] * tables.sin_stride - pairs;
        end[axis] = pairs += tables.pairs;
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const int pair = Layout<kLayout>::template number_of<kSize>(position, j);
        const Table* pair_cos = pair < end[0] ? cos[0] : pair < end[1] ? cos[1] : cos[2];
        const Table* pair_sin = pair < end[0] ? sin[0] : pair < end[1] ? sin[1] : sin[2];
        cos_[j] = pair_cos[pair];
        sin_[j] = pair_sin[pair];
      }
    }

    __device__ __forceinline__ void rotation(UnitRotation<kSize>& rotation) const {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        rotation.cos_a[j] = rotation.cos_b[j] = to_float(cos_[j]);
        rotation.sin_a[j] = rotation.sin_b[j] = to_float(sin_[j]);
      }
    }

   private:
    Table cos_[kSize], sin_[kSize];
  };

  // Returns whether all heads of a token have the same rotation.
  __device__ __forceinline__ static bool is_shared_by_heads(const RopeKernelParams<Rope3dParams>&) {
    return true;
  }
};

template <class Tables>
struct TokenRope : Tables {
  static constexpr int kMinBlocks = 0;  // The loads in flight need the registers.

  __device__ __forceinline__ static bool is_shared_by_heads(const RopeKernelParams<RopeParams>& p) {
    return p.tables.cos_strides[2] == 0 && p.tables.sin_strides[2] == 0;
  }
};
template <typename Table>
using PairRope = TokenRope<TableRope<Table, TableValues::kPerPair>>;
template <typename Table>
using ElementRope = TokenRope<TableRope<Table, TableValues::kPerElement>>;

template <typename T, class Rope, RopeLayout kLayout, class Params>
__global__ void __launch_bounds__(kThreads, Rope::kMinBlocks) rope_kernel(const __grid_constant__ Params p) {
  constexpr int kSize = kPackSize<T, Access::kVector>;
  const uint32_t unit = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t slot_unit = p.units_per_head.divide(unit);
  const int within = unit - slot_unit * p.units_per_head.divisor;
  const uint32_t token = p.head_slots.divide(slot_unit);
  const uint32_t batch = p.seq_divisor.divide(token);
  UnitPosition position;
  position.batch = batch;
  position.seq = token - batch * p.seq_divisor.divisor;
  position.pair = within * kSize;
  // The packs are half a head apart in both layouts, so that adjacent threads read adjacent packs
  // (notes/row_kernels.md, "From tables").
  position.first = within * kSize;
  position.second = position.first + static_cast<int>(p.head_dim) / 2;
  const int slot = slot_unit - token * p.head_slots.divisor;
  const auto head_of = [&](int i) { return slot + i * static_cast<int>(p.head_slots.divisor); };
  griddepcontrol_wait();
  if (unit >= p.units) return;

  Pack<T, kSize> first[kHeadsPerThread], second[kHeadsPerThread];
  const auto has_head = [&](int i) { return i == 0 || head_of(i) < p.x.heads; };
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    position.head = head_of(i);
    if (has_head(i)) {
      const T* head = static_cast<const T*>(p.x.in) + head_offset(p.x.in_strides, position);
      first[i].load(head + position.first);
      second[i].load(head + position.second);
    }
  }
  typename Rope::template Lookup<T, kLayout, kSize> lookup;
  position.head = head_of(0);
  lookup.fetch(p, position);
  UnitRotation<kSize> rotation;
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    position.head = head_of(i);
    if (!has_head(i)) continue;
    if (i > 0 && !Rope::is_shared_by_heads(p)) lookup.fetch(p, position);
    if (i == 0 || !Rope::is_shared_by_heads(p)) lookup.rotation(rotation);
    float a[kSize], b[kSize];
    first[i].to_floats(a);
    second[i].to_floats(b);
    rotate<kLayout>(a, b, rotation);
    T* head = static_cast<T*>(p.x.out) + head_offset(p.x.out_strides, position);
    store_floats(head + position.first, a);
    store_floats(head + position.second, b);
  }
}

// Heads of any size, alignment and number: each thread rotates one pair.
template <typename T, class Rope, RopeLayout kLayout, class Params>
__global__ void __launch_bounds__(kThreads) scalar_rope_kernel(const __grid_constant__ Params p) {
  const int half = static_cast<int>(p.head_dim) / 2;
  const int64_t pair = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t head_number = pair / half;
  const int64_t token = head_number / p.x.heads;
  UnitPosition position;
  position.batch = token / p.seq;
  position.seq = token - position.batch * p.seq;
  position.head = static_cast<int>(head_number - token * p.x.heads);
  position.pair = static_cast<int>(pair - head_number * half);
  position.first = kLayout == RopeLayout::kHalf ? position.pair : 2 * position.pair;
  position.second = kLayout == RopeLayout::kHalf ? position.pair + half : 2 * position.pair + 1;
  griddepcontrol_wait();
  if (position.batch >= p.batch) return;
  // A pair is two packs of one element, as in the half layout.
  typename Rope::template Lookup<T, RopeLayout::kHalf, 1> lookup;
  lookup.fetch(p, position);
  UnitRotation<1> rotation;
  lookup.rotation(rotation);
  const T* in = static_cast<const T*>(p.x.in) + head_offset(p.x.in_strides, position);
  T* out = static_cast<T*>(p.x.out) + head_offset(p.x.out_strides, position);
  float a[1] = {to_float(in[position.first])}, b[1] = {to_float(in[position.second])};
  rotate<RopeLayout::kHalf>(a, b, rotation);
  out[position.first] = from_float<T>(a[0]);
  out[position.second] = from_float<T>(b[0]);
}

// ---------------------------------------------------------------------------------------------------------
// Launch

template <typename T, class Rope, RopeLayout kLayout, class Args>
void launch(const char* operation, const Args& args, bool has_vectors, Stream stream) {
  using Params = RopeKernelParams<Args>;
  Params params{args, 0, {}, {}, {}, {}, {}};
  if constexpr (std::is_same_v<Args, Rope3dParams>) {
    params.height.set(args.axes[1].size);
    params.width.set(args.axes[2].size);
  }
  const int64_t unit_size = 2 * kPackSize<T, Access::kVector>;
  const int64_t tokens = args.batch * args.seq;
  const int64_t head_units = args.head_dim / unit_size;
  const bool has_few_units = tokens * args.x.heads * head_units <= kFewUnits;
  const int64_t head_slots = has_few_units ? args.x.heads : ceil_divide(args.x.heads, kHeadsPerThread);
  const int64_t units = tokens * head_slots * head_units;
  if (has_vectors && args.head_dim % unit_size == 0 && units < kFastDivisionEnd) {
    params.units = static_cast<uint32_t>(units);
    params.units_per_head.set(static_cast<uint32_t>(head_units));
    params.head_slots.set(static_cast<uint32_t>(head_slots));
    params.seq_divisor.set(static_cast<uint32_t>(args.seq));
    launch_kernel(operation, rope_kernel<T, Rope, kLayout, Params>, dim3(ceil_divide(units, kThreads)),
                  kThreads, params, stream);
  } else {
    const int64_t pairs = tokens * args.x.heads * args.head_dim / 2;
    launch_kernel(operation, scalar_rope_kernel<T, Rope, kLayout, Params>, dim3(ceil_divide(pairs, kThreads)),
                  kThreads, params, stream);
  }
}

// Launches with Rope<Table>, for the call's dtypes and layout.
template <template <typename> class Rope, class Args>
void dispatch(const char* operation, const Args& args, bool table_is_float32, bool has_vectors,
              Stream stream) {
  dispatch_dtype(args.dtype, [&]<typename T>(std::type_identity<T> dtype) {
    const auto launch_with_tables = [&]<typename Table>(std::type_identity<Table>) {
      dispatch_layout(args.layout, [&](auto layout) {
        launch<T, Rope<Table>, layout>(operation, args, has_vectors, stream);
      });
    };
    if (table_is_float32) return launch_with_tables(std::type_identity<float>{});
    launch_with_tables(dtype);
  });
}

}  // namespace

void rope(const RopeParams& params, Stream stream) {
  const int bytes = bytes_of(params.dtype);
  const RopeTables& tables = params.tables;
  const bool has_vectors = has_vector_rows(params.x, bytes) && has_vector_rows(tables, bytes);
  if (tables.is_complex)
    return dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
      dispatch_layout(params.layout, [&](auto layout) {
        launch<T, TokenRope<ComplexRope>, layout>("rope", params, has_vectors, stream);
      });
    });
  if (tables.is_per_pair) return dispatch<PairRope>("rope", params, tables.is_float32, has_vectors, stream);
  dispatch<ElementRope>("rope", params, tables.is_float32, has_vectors, stream);
}

void rope_3d(const Rope3dParams& params, Stream stream) {
  dispatch<GridRope>("rope_3d", params, params.table_is_float32,
                     has_vector_rows(params.x, bytes_of(params.dtype)), stream);
}

}  // namespace h100_diffusers_kernels
