// float16 values, for the float16 probabilities of attention_lazy_softmax.cuh. They are multiplied by
// kHalfValueScale, so that bfloat16 values from 2^-21 to 4096 convert exactly, smaller ones have an error of
// at most 2^-29, and larger ones become infinite. The output shows whether that was accurate enough.
#pragma once

#include "attention_lazy_softmax.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace h100_diffusers_kernels {

// Returns whether the outputs of all rows with keys of the warp are finite, and the largest of each row is at
// least 2^13 times the error of small values, which is then negligible beside bfloat16's rounding.
template <class Tile>
__device__ __forceinline__ bool has_accurate_rows(const Outputs<Tile>& outputs, const bool (&has_keys)[2]) {
  constexpr float kLeast = 0x1p-16f;
  constexpr uint32_t kRowLanes = 0x11111111;  // the first of the four lanes of each row
  float largest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < Tile::kOutputs; ++i)
    largest[i / 2 % 2] = maximum_of(largest[i / 2 % 2], fabsf(outputs[i]));
  bool are_accurate = __all_sync(~0u, largest[0] < INFINITY && largest[1] < INFINITY);  // NaN fails.
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    uint32_t lanes = __ballot_sync(~0u, largest[row] >= kLeast || !has_keys[row]);
    lanes |= lanes >> 1;
    lanes |= lanes >> 2;
    are_accurate = are_accurate && (lanes & kRowLanes) == kRowLanes;
  }
  return are_accurate;
}

// Columns from one head's values to the next. Heads begin at whole sectors of 32 bytes: TMA takes longer for
// rows that begin within one.
inline int64_t value_columns(const AttentionParams& args) { return ceil_divide(args.head_dim, 16) * 16; }

struct ValueKernelParams {
  AttentionOperand values;
  __half* out;  // (batch, key_length, key_heads, out_columns), of which head_dim columns are written
  int key_length, key_heads, head_dim, out_columns;
  FastDivisor head_pieces;  // head_dim / 8
  int* claimed_tiles;       // set to 0 for the attention kernel
};

constexpr int kValueThreads = 256;
static_assert(kMultiprocessorThreads % kValueThreads == 0);
constexpr int kValueTokens = 8;  // tokens of a block (notes/attention.md, "Claimed tiles")

// A thread converts 8 columns of one head, for all tokens of its block.
__global__ void __launch_bounds__(kValueThreads)
    attention_value_kernel(const __grid_constant__ ValueKernelParams params) {
  using Values = Pack<__nv_bfloat16, 8>;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int piece = static_cast<int>(blockIdx.y * kValueThreads + threadIdx.x);
  const int head = static_cast<int>(params.head_pieces.divide(static_cast<uint32_t>(piece)));
  const int first = static_cast<int>(blockIdx.x) * kValueTokens;
  const int64_t batch = blockIdx.z;
  const int column = piece * 8 - head * params.head_dim;
  if (piece == 0 && first == 0 && batch == 0) *params.claimed_tiles = 0;
  if (head >= params.key_heads) return;
  const __nv_bfloat16* in = static_cast<const __nv_bfloat16*>(params.values.data) +
                            batch * params.values.strides[0] + head * params.values.strides[2] + column;
  const int64_t token_size = int64_t{params.key_heads} * params.out_columns;
  const int gaps = head * (params.out_columns - params.head_dim);
  __half* out = params.out + batch * params.key_length * token_size + piece * 8 + gaps;
  Values packs[kValueTokens];
#pragma unroll
  for (int i = 0; i < kValueTokens; ++i)
    if (first + i < params.key_length) packs[i].load(in + (first + i) * params.values.strides[1]);
#pragma unroll
  for (int i = 0; i < kValueTokens; ++i) {
    if (first + i >= params.key_length) break;
    float values[8];
    packs[i].to_floats(values);
#pragma unroll
    for (int k = 0; k < 8; ++k) values[k] *= kHalfValueScale;
    store_floats(out + (first + i) * token_size, values);
  }
}

// Global memory of a launch.
struct Workspace {
  int64_t value_bytes;

  explicit Workspace(const AttentionParams& args)
      : value_bytes(args.batch * args.key_length * args.key_heads * value_columns(args) * 2) {}

  // A multiple of the alignment that TMA needs for the output that may follow.
  int64_t bytes() const { return value_bytes + kVectorBytes; }
  int* claimed_tiles(void* begin) const {
    return reinterpret_cast<int*>(static_cast<char*>(begin) + value_bytes);
  }
};

// Converts the values into the workspace and sets its parts in params.
//
// tile_keys: rows of a box of values
inline void prepare_workspace(const char* operation, AttentionKernelParams& params, int tile_keys,
                              Stream stream) {
  const AttentionParams& args = params.args;
  HeadsTensor values =
      contiguous_tensor(args.workspace, args.batch, args.key_length, args.key_heads, value_columns(args));
  values.head_dim = args.head_dim;
  params.half_values = map_tensor(operation, values, DType::kFloat16, tile_keys);
  params.claimed_tiles = Workspace(args).claimed_tiles(args.workspace);
  ValueKernelParams conversion{args.v,
                               static_cast<__half*>(args.workspace),
                               static_cast<int>(args.key_length),
                               static_cast<int>(args.key_heads),
                               static_cast<int>(args.head_dim),
                               static_cast<int>(value_columns(args)),
                               {},
                               params.claimed_tiles};
  conversion.head_pieces.set(static_cast<uint32_t>(args.head_dim / 8));
  const dim3 grid(static_cast<unsigned>(ceil_divide(args.key_length, kValueTokens)),
                  static_cast<unsigned>(ceil_divide(args.key_heads * args.head_dim / 8, kValueThreads)),
                  static_cast<unsigned>(args.batch));
  launch_kernel(operation, attention_value_kernel, grid, kValueThreads, conversion, stream);
}

}  // namespace h100_diffusers_kernels
