// A launcher is told raw pointers, sizes, strides, and where to run. The CUDA and the CPU kernels share these
// structures, which know no framework. Strides count elements, and the last dimension's stride is always 1.
#pragma once

#include <cstdint>

namespace h100_diffusers_kernels {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

constexpr int bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

#ifdef CPU_KERNEL
// A ParallelFor calls body(context, begin, end) on sub-ranges of [begin, end) from several threads and waits
// for them. It splits no range below `grain` items.
using RangeBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context);
struct Stream {
  ParallelFor parallel_for;
};
#else
// The handle is a cudaStream_t, untyped so that this header needs no CUDA.
struct Stream {
  void* handle;
};

// Ten times the compute capability of a GPU: 90 for 9.0.
int compute_capability(int device);
#endif

// One launch takes so many leading dimensions, after those with a common stride pattern have been merged, and
// so many rows. The binding makes several launches of more.
constexpr int kMaxRowDims = 2;
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;

// The leading dimensions of an operation, outermost first. All operands of a launch share them.
struct RowShape {
  int64_t rows;  // product of sizes
  int32_t ndim;  // 1 to kMaxRowDims
  int64_t sizes[kMaxRowDims];
};

// Element (r0, r1, ..., column) of an operand is at data + r0*strides[0] + r1*strides[1] + ... + column.
// A stride of 0 broadcasts; data == nullptr means that the operand is absent.
struct RowOperand {
  void* data;
  int64_t strides[kMaxRowDims];
};

// What rows are scaled, shifted or gated by may be float32 where they have 16 bits.
struct Modulator : RowOperand {
  bool is_float32;  // else the dtype of the rows
};

// A row operation is norm, modulation, residual and gate of rows of `hidden` elements:
//   h          = residual ? residual + gate * x : x   (gate absent: 1); stored to residual_out, rounded
//   n          = norm(h) * weight + bias              (each optional; h unrounded)
//   out        = n * (1 + scale) + shift              (each optional)
//   second_out = n * (1 + second_scale) + second_shift, where it is not null
struct RowNormParams {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  float eps;
  RowOperand x;
  RowOperand residual;
  RowOperand residual_out;
  RowOperand out;
  RowOperand second_out;
  Modulator gate;
  Modulator scale;
  Modulator shift;
  Modulator second_scale;
  Modulator second_shift;
  Modulator weight;  // (hidden,), with strides of 0
  Modulator bias;    // (hidden,), with strides of 0
};

// Tells whether a modulator is float32 where the rows have 16 bits.
inline bool has_mixed_dtypes(const RowNormParams& p) {
  bool has_float32 = false;
  for (const Modulator* modulator :
       {&p.gate, &p.scale, &p.shift, &p.second_scale, &p.second_shift, &p.weight, &p.bias})
    has_float32 = has_float32 || (modulator->data != nullptr && modulator->is_float32);
  return has_float32 && p.dtype != DType::kFloat32;
}

void rms_norm(const RowNormParams& params, Stream stream);
void layer_norm(const RowNormParams& params, Stream stream);
void rms_norm_modulate(const RowNormParams& params, Stream stream);
void layer_norm_modulate(const RowNormParams& params, Stream stream);
void layer_norm_modulate_pair(const RowNormParams& params, Stream stream);
void gated_residual(const RowNormParams& params, Stream stream);
void gated_residual_rms_norm_modulate(const RowNormParams& params, Stream stream);
void gated_residual_layer_norm_modulate(const RowNormParams& params, Stream stream);
void gated_residual_layer_norm_modulate_pair(const RowNormParams& params, Stream stream);

// A group norm is of channels, weight, bias and channel_bias are theirs:
//   h   = x + channel_bias
//   n   = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias   (mean and variance over a sample's group)
//   out = silu ? n * sigmoid(n) : n
// weight, bias and channel_bias are each optional. The pixels are all spatial dimensions as one. Either
// pixels or channels have a stride of 1, in x and in out alike.
struct GroupNormParams {
  int64_t batch;
  int64_t channels;
  int64_t groups;
  int64_t pixels;
  DType dtype;
  double eps;
  const void* x;
  void* out;
  int64_t x_strides[3];    // batch, channel, pixel
  int64_t out_strides[3];  // likewise; dense
  bool is_channels_last;   // channels have the stride 1
  Modulator weight;        // (channels,), with strides of 0
  Modulator bias;          // (channels,), with strides of 0
  Modulator channel_bias;  // (batch, channels), strides[0] is that of the batch
  bool silu;
  void* workspace;
};

int64_t group_norm_workspace_bytes(const GroupNormParams& params);
void group_norm(const GroupNormParams& params, Stream stream);

enum class NormScope : int32_t { kNone, kAcrossHeads, kPerHead };

// The elements (2i, 2i+1) of a head form a rotated pair, or the elements (i, i + head_dim/2).
enum class RopeLayout : int32_t { kInterleaved, kHalf };

// Query or key is (batch, seq, heads, head_dim); the strides are those of the first three.
struct HeadsOperand {
  const void* in;
  void* out;  // may equal in
  int64_t in_strides[3];
  int64_t out_strides[3];
  int64_t heads;
  const void* weight;  // kAcrossHeads: (heads*head_dim,); kPerHead: (head_dim,); may be null
};

// A rotation's tables have strides of (batch, seq, head), which are 0 where they broadcast.
struct RopeTables {
  const void* cos;
  const void* sin;
  bool is_float32;   // else the dtype of the rotated tensor
  bool is_per_pair;  // head_dim/2 values, each for both elements of its pair; else one for each element
  bool is_complex;   // both are one table of float32 pairs (cos, sin), a value for each pair of elements; cos
                     // points to its first element, sin to the second; strides count floats
  int64_t cos_strides[3];
  int64_t sin_strides[3];
};

// n = x * rsqrt(mean(x^2) + eps) * weight over the norm's scope, then each pair (a, b) of n becomes
// (a*cos_a - b*sin_a, b*cos_b + a*sin_b).
struct QkNormRopeParams {
  int64_t batch;
  int64_t seq;
  int64_t head_dim;
  DType dtype;
  float eps;
  NormScope norm;
  RopeLayout layout;
  HeadsOperand q;
  HeadsOperand k;

  RopeTables tables;  // They give the rotation if tables.cos is not null.

  // Coordinates give the rotation if they are not null. Pair p of the heads*head_dim/2 pairs of a token
  // (head-major) is left alone for p < identity_pairs; otherwise, with i = p - identity_pairs, its angle is
  // frequencies[i / axes] * coordinates[batch, seq, i % axes], the product rounded to float32.
  const float* coordinates;
  int64_t coordinate_strides[2];  // (batch, seq)
  const float* frequencies;
  int32_t axes;
  int32_t identity_pairs;
};

// The key is absent where k.in is null. The elements of v, which is absent where v.in is null, are copied.
struct QkvNormRopeParams : QkNormRopeParams {
  HeadsOperand v;            // weight unused
  bool q_weight_is_float32;  // else dtype
  bool k_weight_is_float32;
};

void qk_norm_rope(const QkvNormRopeParams& params, Stream stream);

// Each pair (a, b) of a head of x becomes (a*cos_a - b*sin_a, b*cos_b + a*sin_b).
struct RopeParams {
  int64_t batch;
  int64_t seq;
  int64_t head_dim;
  DType dtype;
  RopeLayout layout;
  HeadsOperand x;  // weight unused
  RopeTables tables;
};

void rope(const RopeParams& params, Stream stream);

// The tables of one axis of a grid of tokens are (size, pairs), a value for each pair, with rows `stride`
// apart.
struct RopeAxis {
  const void* cos;
  const void* sin;
  int64_t cos_stride;
  int64_t sin_stride;
  int32_t size;
  int32_t pairs;
};

constexpr int kRope3dAxes = 3;

// Token s of the sequence stands at (s / (height*width), s / width % height, s % width) of the grid. The
// pairs of a head are divided among the axes in order: the first axes[0].pairs turn by the frame's row of the
// first tables, the next axes[1].pairs by the height's, the last axes[2].pairs by the width's.
struct Rope3dParams {
  int64_t batch;
  int64_t seq;
  int64_t head_dim;
  DType dtype;
  RopeLayout layout;
  HeadsOperand x;              // weight unused
  bool table_is_float32;       // else dtype
  RopeAxis axes[kRope3dAxes];  // frame, height, width
};

void rope_3d(const Rope3dParams& params, Stream stream);

// Each of a row's `hidden` outputs is activation(x + bias), or, if there is a gate,
// (x + bias) * activation(gate + gate_bias). With biases the gate is in the same rows as x, and gate_bias as
// far from bias as gate from x. `out` may be x or the gate, element for element.
struct ActivationParams {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  bool tanh_approximation;  // GELU only
  RowOperand x;
  RowOperand gate;
  RowOperand out;
  const void* bias;       // (hidden,), may be null
  const void* gate_bias;  // (hidden,), null where bias is
};

void gelu(const ActivationParams& params, Stream stream);
void silu(const ActivationParams& params, Stream stream);
void geglu(const ActivationParams& params, Stream stream);
void swiglu(const ActivationParams& params, Stream stream);

// out = exp(x - max(x)) / sum(exp(x - max(x))) over each row of `hidden` elements.
struct SoftmaxParams {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  RowOperand x;
  RowOperand out;
};

void softmax(const SoftmaxParams& params, Stream stream);

// A launch has at most so many queries of all heads and samples, and so many keys. Kernels count them in an
// int, with tiles beyond the last, so this is half of what that holds.
constexpr int64_t kMaxAttentionRows = int64_t{1} << 30;

// Query, key or value is (batch, seq, heads, head_dim); the strides are those of the first three, 0 where
// they broadcast.
struct AttentionOperand {
  const void* data;
  int64_t strides[3];
};

// The output is of the query's shape. No two of its elements are in one place.
struct AttentionOutput {
  void* data;
  int64_t strides[3];
};

// out = softmax(scale * q k^T + key_bias) v, over the keys before key_lengths[batch]. Query head h attends to
// key head h / (heads / key_heads) (grouped-query attention).
struct AttentionParams {
  int64_t batch;
  int64_t query_length;
  int64_t key_length;
  int64_t heads;
  int64_t key_heads;
  int64_t head_dim;  // 64 or 128
  DType dtype;       // float16 or bfloat16
  float scale;       // > 0
  AttentionOperand q, k, v;
  AttentionOutput out;
  const void* key_bias;        // (batch, key_length), rows key_bias_stride apart; may be null
  int64_t key_bias_stride;     // 0 where broadcast
  bool key_bias_is_float32;    // else dtype
  const int32_t* key_lengths;  // (batch,), clamped to 0 ... key_length; may be null
  void* workspace;             // of attention_workspace_bytes, at a multiple of 256 bytes
};

// Returns how much memory the launch needs beside its operands; params.workspace points to as much.
int64_t attention_workspace_bytes(const AttentionParams& params);
void attention(const AttentionParams& params, Stream stream);

}  // namespace h100_diffusers_kernels
