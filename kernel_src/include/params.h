// Parameters of the launchers: raw pointers, sizes and strides. CUDA and CPU kernels share them, and they do
// not depend on a framework. Strides count elements; the last dimension always has stride 1.
#pragma once

#include <cstdint>

namespace h100_diffusers_kernels {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

constexpr int bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

#ifdef CPU_KERNEL
// A ParallelFor calls body(context, begin, end) on sub-ranges of [begin, end) from several threads and waits
// for them. Sub-ranges have at least `grain` items.
using RangeBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, RangeBody body, void* context);
struct Stream {
  ParallelFor parallel_for;
};
#else
struct Stream {
  void* handle;  // cudaStream_t, untyped so that this header does not need CUDA
  int device;    // the stream's device, which is the current device during a launch
};

// Returns ten times the compute capability of a GPU: 90 for 9.0.
int compute_capability(int device);
#endif

// Limits of one launch: leading dimensions, after dimensions with a common stride pattern have been merged,
// and rows. The binding splits larger operations into several launches.
constexpr int kMaxRowDims = 2;
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;

// The leading dimensions of an operation, outermost first. All operands of a launch share them.
struct RowShape {
  int64_t rows;  // product of sizes
  int32_t ndim;  // 1 to kMaxRowDims
  int64_t sizes[kMaxRowDims];
};

// Element (r0, r1, ..., column) of an operand is at data + r0*strides[0] + r1*strides[1] + ... + column.
// A stride of 0 broadcasts. If data is null, the operand is absent.
struct RowOperand {
  void* data;
  int64_t strides[kMaxRowDims];
};

// A scale, shift, gate, weight or bias. It may be float32 with rows of a 16-bit dtype.
struct Modulator : RowOperand {
  bool is_float32;  // otherwise it has the dtype of the rows
};

// Norm, modulation, residual and gate of rows of `hidden` elements:
//   h          = residual ? residual + gate * x : x   (gate absent: 1); stored to residual_out, rounded
//   n          = norm(h) * weight + bias              (each optional; h unrounded)
//   out        = n * (1 + scale) + shift              (each optional)
//   second_out = n * (1 + second_scale) + second_shift, if it is not null
// The branch of a residual may be more than gate * x:
//   x          = x + addend, if there is one; then rms_norm(x) * x_weight, if normalizes_x
//   gate       = gate + gate_row; then tanh(gate), if has_tanh_gate
// scale_row and shift_row are added to scale and shift. Rows are (hidden,).
// If `index` is given, an int32 for each row, gate, scale and shift are tables (table_rows, hidden):
// strides[i] is the stride of the table's rows, and a row takes row index[row], clamped to 0 ... table_rows
// - 1.
// With has_float32_residual, residual and residual_out are float32 and all other rows 16-bit. Only
// gated_residual and gated_residual_rms_norm_modulate take it, and the branch is gate * x then.
// If `row_scale` is given, out is quantized as by quantize_fp8, from the unrounded value. There is no
// second_out then.
struct RowNormParams {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  float eps;
  RowOperand x;
  RowOperand residual;
  RowOperand residual_out;
  bool has_float32_residual;
  RowOperand out;
  RowOperand second_out;
  Modulator gate;
  Modulator scale;
  Modulator shift;
  Modulator second_scale;
  Modulator second_shift;
  Modulator weight;  // (hidden,), with strides of 0
  Modulator bias;    // (hidden,), with strides of 0
  RowOperand addend;
  bool normalizes_x;
  float x_eps;
  Modulator x_weight;  // (hidden,), with strides of 0
  bool has_tanh_gate;
  Modulator gate_row, scale_row, shift_row;  // (hidden,), with strides of 0
  RowOperand index;
  int32_t table_rows;
  RowOperand row_scale;  // float32, one a row; out is then E4M3
};

// Returns whether the operation has parts that only branch_norm computes on CUDA.
inline bool has_branch(const RowNormParams& p) {
  return p.addend.data || p.normalizes_x || p.has_tanh_gate || p.gate_row.data || p.scale_row.data ||
         p.shift_row.data || p.index.data;
}

// Returns whether a modulator is float32 with rows of a 16-bit dtype.
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

// Group norm over groups of channels. Mean and variance are those of one group of one sample:
//   h   = x + channel_bias
//   n   = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias
//   out = silu ? n * sigmoid(n) : n
// weight, bias and channel_bias are each optional. All spatial dimensions are merged into `pixels`. Either
// pixels or channels have stride 1, the same ones in x and in out.
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
  int64_t out_strides[3];  // batch, channel, pixel; dense
  bool is_channels_last;   // channels have stride 1
  Modulator weight;        // (channels,), with strides of 0
  Modulator bias;          // (channels,), with strides of 0
  Modulator channel_bias;  // (batch, channels); strides[0] is the stride of the batch
  bool silu;
  void* workspace;  // group_norm_workspace_bytes long
};

// Returns the workspace size of a launch on the stream.
int64_t group_norm_workspace_bytes(const GroupNormParams& params, Stream stream);
void group_norm(const GroupNormParams& params, Stream stream);

// RMS norm over the channels of each position of an image or video, then a modulation:
//   n   = x / sqrt(mean(x^2) + eps) * weight + bias   (each optional)
//   m   = n * (1 + scale) + shift                     (each optional)
//   out = silu ? m * sigmoid(m) : m
// The spatial dimensions are merged into `frames` of `pixels`. Either pixels or channels have stride 1, the
// same ones in x and in out. out is dense: (batch, channels, frames * pixels), or with channels last (batch,
// frames * pixels, channels).
struct ChannelRmsNormParams {
  int64_t batch;
  int64_t channels;
  int64_t frames;
  int64_t pixels;
  DType dtype;
  float eps;
  const void* x;
  void* out;
  int64_t x_strides[4];   // batch, channel, frame, pixel
  bool is_channels_last;  // channels have stride 1
  Modulator weight;       // (channels,), with strides of 0
  Modulator bias;         // (channels,), with strides of 0
  Modulator scale;        // (batch, channels); strides[0] is the stride of the batch
  Modulator shift;        // (batch, channels); strides[0] is the stride of the batch
  bool silu;
};

void channel_rms_norm(const ChannelRmsNormParams& params, Stream stream);

// What a convolution reads beyond the first and last rows and columns. kReflect: the ones inside of these.
enum class Border : int32_t { kZeros, kReplicate, kReflect };

constexpr int64_t kMaxConvTaps = 3;  // of a dimension

// Convolution of videos (batch, channels, frames, height, width) whose channels have stride 1, in steps of 1.
// `previous`, if it is not null, has frames that come before those of x. `front` frames come before all,
// zeros or the first one again; behind the last one as many as out_frames need. out is dense, with channels
// last. The weight is a dense (out_channels, channels, taps...).
struct Conv3dParams {
  DType dtype;
  int64_t batch, channels, frames, height, width;  // of x
  int64_t previous_frames;                         // 0 without `previous`
  int64_t out_channels, out_frames, out_height, out_width;
  int64_t taps[3];     // frames, rows, columns: at most kMaxConvTaps
  int64_t front;       // less than taps[0]
  int64_t padding[2];  // before the first row and column: less than taps[1], taps[2]
  bool replicates_frames;
  Border border;
  const void* x;
  int64_t x_strides[4];  // batch, frame, row, column
  const void* previous;
  int64_t previous_strides[4];
  const void* weight;
  const void* bias;  // (out_channels,); may be null
  void* out;
  void* workspace;  // of conv3d_workspace_bytes

  // The frame that a tap of an output frame reads, counted from the first of `previous`; -1 for zeros.
  constexpr int64_t source_frame(int64_t out_frame, int64_t tap) const {
    const int64_t frame = out_frame + tap - front, count = previous_frames + frames;
    if (frame >= 0 && frame < count) return frame;
    if (!replicates_frames) return -1;
    return frame < 0 ? 0 : count - 1;
  }
};

int64_t conv3d_workspace_bytes(const Conv3dParams& params);
void conv3d(const Conv3dParams& params, Stream stream);

// RMS norm across the heads of a token or of each head, or LayerNorm of each head.
enum class NormScope : int32_t { kNone, kAcrossHeads, kPerHead, kLayerPerHead };

// Rotated pairs are the elements (2i, 2i+1) of a head (interleaved) or (i, i + head_dim/2) (half).
enum class RopeLayout : int32_t { kInterleaved, kHalf };

constexpr int64_t kMaxChunkedHeads = int64_t{1} << 16;

// Query or key is (batch, seq, heads, head_dim); the strides are those of the first three.
struct HeadsOperand {
  const void* in;
  void* out;  // may equal in
  int64_t in_strides[3];
  int64_t out_strides[3];
  // The heads of out may be in chunks that lie anywhere: head h is at
  // h * out_strides[2] + h / out_chunk_heads * out_chunk_gap. Only qk_norm_rope has them. Without chunks both
  // are 0. Otherwise there are at most kMaxChunkedHeads heads, and at least 2 in a chunk.
  int64_t out_chunk_heads;
  int64_t out_chunk_gap;
  int64_t heads;
  const void* weight;  // kAcrossHeads: (heads*head_dim,); per head: (head_dim,); may be null
};

// Tables of cosines and sines.
struct RopeTables {
  const void* cos;
  const void* sin;
  bool is_float32;   // otherwise they have the dtype of the rotated tensor
  bool is_per_pair;  // one value for each pair (head_dim/2 values); otherwise one for each element
  bool is_complex;  // one table of float32 pairs (cos, sin), one for each pair of elements: cos points to its
                    // first float, sin to its second, and strides count floats
  int64_t cos_strides[3];  // batch, seq, head; 0 broadcasts
  int64_t sin_strides[3];
};

// n = x * rsqrt(mean(x^2) + eps) * weight over the norm's scope, or as LayerNorm of a head; then each pair
// (a, b) of n becomes (a*cos_a - b*sin_a, b*cos_b + a*sin_b).
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

  // The rotation comes from tables if tables.cos is not null, or from coordinates if they are not null.
  RopeTables tables;

  // The heads*head_dim/2 pairs of a token are numbered head by head. Pairs p < identity_pairs do not rotate.
  // For the others, with i = p - identity_pairs, the angle is
  // frequencies[i / axes] * coordinates[batch, seq, i % axes], rounded to float32.
  const float* coordinates;
  int64_t coordinate_strides[2];  // (batch, seq)
  const float* frequencies;
  int32_t axes;
  int32_t identity_pairs;
};

// (head_dim,).
struct Bias {
  const void* values;  // may be null
  bool is_float32;     // otherwise it has the dtype
};

// k is absent if k.in is null, v if v.in is null. v is copied.
struct QkvNormRopeParams : QkNormRopeParams {
  HeadsOperand v;            // weight unused
  bool q_weight_is_float32;  // otherwise it has the dtype
  bool k_weight_is_float32;
  Bias q_bias, k_bias;  // only kLayerPerHead
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

// Tables of one axis of a grid of tokens: (size, pairs), one value for each pair.
struct RopeAxis {
  const void* cos;
  const void* sin;
  int64_t cos_stride;  // between rows
  int64_t sin_stride;
  int32_t size;
  int32_t pairs;
};

constexpr int kRope3dAxes = 3;

// Token s is at (s / (height*width), s / width % height, s % width) of the grid. The pairs of a head are
// split between the axes in order: the first axes[0].pairs use the frame's row of the first tables, the next
// axes[1].pairs the row of the height, the last axes[2].pairs the row of the width.
struct Rope3dParams {
  int64_t batch;
  int64_t seq;
  int64_t head_dim;
  DType dtype;
  RopeLayout layout;
  HeadsOperand x;              // weight unused
  bool table_is_float32;       // otherwise the tables have the dtype
  RopeAxis axes[kRope3dAxes];  // frame, height, width
};

void rope_3d(const Rope3dParams& params, Stream stream);

// out = activation(x + bias), or with a gate (x + bias) * activation(gate + gate_bias), for `hidden` elements
// a row. x and gate are two halves of the same rows, in either order, and bias and gate_bias two halves of
// one vector in the same order. Without a gate, `out` may be x. If there is a scale, out is quantized as by
// quantize_fp8, from the unrounded value.
struct ActivationParams {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  bool tanh_approximation;  // GELU only
  RowOperand x;
  RowOperand gate;
  RowOperand out;
  const void* bias;       // (hidden,), may be null
  const void* gate_bias;  // (hidden,), null if bias is null
  RowOperand scale;       // float32: one a row, or one a block
  bool is_blocked;        // swiglu only
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

// Largest number of queries (of all heads and samples) and of keys in one launch. Kernels count them in an
// int, beyond the last tile too, so this is half of an int's range.
constexpr int64_t kMaxAttentionRows = int64_t{1} << 30;
// With lists of key blocks a kernel keeps a byte for each 64 keys in shared memory.
constexpr int64_t kMaxListedKeys = int64_t{1} << 23;
constexpr int64_t kAttentionHeadDimStep = 8, kMaxAttentionHeadDim = 128;

// Query, key, value or addend, (batch, seq, heads, head_dim), or the gate, (batch, seq, heads). The strides
// are those of the first three dimensions; 0 broadcasts.
struct AttentionOperand {
  const void* data;
  int64_t strides[3];

  constexpr int64_t offset(int64_t batch, int64_t seq, int64_t head) const {
    return batch * strides[0] + seq * strides[1] + head * strides[2];
  }
};

// The output has the query's shape. Its elements do not overlap.
struct AttentionOutput {
  void* data;
  int64_t strides[3];

  constexpr int64_t offset(int64_t batch, int64_t seq, int64_t head) const {
    return batch * strides[0] + seq * strides[1] + head * strides[2];
  }
};

// The keys that each query attends to, by blocks: the layout of PyTorch's BlockMask. A block of query_rows
// queries has a list of blocks of key_rows keys; both sizes are 64 or 128. Values beyond the count of a list,
// and those that are no block, have no effect; counts are clamped to 0 ... columns.
struct KeyBlockList {
  const int32_t* counts;   // (batch or 1, heads or 1, query blocks), contiguous; may be null: no list
  const int32_t* indices;  // (batch or 1, heads or 1, query blocks, columns), contiguous
  int64_t columns;
  int64_t strides[2];  // of batch and head, in query blocks; 0 broadcasts
};
struct KeyBlocks {
  bool is_given;
  int32_t query_rows, key_rows;
  KeyBlockList bounded, full;  // without both lists all blocks are bounded ones
  // (batch or 1, heads or 1, query_length, 2), contiguous: in bounded blocks a query attends to the keys from
  // the first value up to, but not including, the second. Null: to all.
  const int32_t* bounds;
  int64_t bounds_strides[2];  // of batch and head, in queries; 0 broadcasts
};

// out = softmax(scale * q k^T + key_bias) v * gate + addend, over the first key_lengths[batch] keys. Query
// head h attends to key head h / (heads / key_heads) (grouped-query attention).
// lse = log(sum(exp(scale * q k^T + key_bias))) over the same keys; -infinity without keys.
struct AttentionParams {
  int64_t batch;
  int64_t query_length;
  int64_t key_length;
  int64_t heads;
  int64_t key_heads;
  int64_t head_dim;  // a multiple of 8, at most kMaxAttentionHeadDim
  DType dtype;       // float16 or bfloat16
  float scale;       // > 0
  AttentionOperand q, k, v;
  AttentionOutput out;
  const void* key_bias;        // (batch, key_length), rows key_bias_stride apart; may be null
  int64_t key_bias_stride;     // 0 broadcasts
  bool key_bias_is_float32;    // otherwise it has the dtype
  const int32_t* key_lengths;  // (batch,), clamped to 0 ... key_length; may be null
  AttentionOperand gate;       // data may be null
  bool gate_is_float32;        // otherwise it has the dtype
  AttentionOperand addend;     // data may be null
  float* lse;                  // (batch, query_length, heads), contiguous; may be null
  void* workspace;             // as long as the launcher asks for, aligned to 256 bytes
  KeyBlocks blocks;
};

// Returns the workspace size of the launch.
int64_t attention_workspace_bytes(const AttentionParams& params);
void attention(const AttentionParams& params, Stream stream);

// attention with rounded operands and probabilities, and float32 sums. There is no key_bias. Scales are the
// largest magnitude that shares them over the largest code, 0 if they would be subnormal, and NaN if a value
// is not finite. All are of one batch entry and head, of the keys before key_lengths[batch]:
//   query          INT8, a scale for each token
//   key - mean     INT8, a scale for the tokens of each tile of kInt8KeyTile with the same (token % 8) / 2;
//                  the mean is that of the tokens, or of a sample of at least 2048 of them
//   value          E4M3, a scale for each channel
//   probabilities  E4M3; their sums are of the rounded ones
// Query and key are multiplied by a Hadamard matrix of kMaxAttentionHeadDim columns before their rounding.
// lse is that of the given keys: scale * q mean^T is added, of the given query.
constexpr float kLargestInt8 = 127.0f;
constexpr int64_t kInt8KeyTile = 128;

int64_t attention_int8_workspace_bytes(const AttentionParams& params);
void attention_int8(const AttentionParams& params, Stream stream);

// FP8 is E4M3 (torch.float8_e4m3fn): 4 bits of exponent, 3 of mantissa, no infinity. Values are stored
// divided by a float32 scale, the largest magnitude that shares the scale over kLargestFp8.
constexpr float kLargestFp8 = 448.0f;
constexpr int64_t kFp8BlockSize = 128;

// scale = max(|x|) / kLargestFp8 of a row, or of each block of kFp8BlockSize elements of a row (the last one
// may be shorter); out = x / scale, rounded to nearest even. Both are 0 if the scale would be subnormal. A
// NaN or an infinity makes the scale, and all elements that share it, NaN.
struct QuantizeFp8Params {
  RowShape shape;
  int64_t hidden;
  DType dtype;
  RowOperand x;
  RowOperand out;    // E4M3
  RowOperand scale;  // float32: one a row, or one a block
  bool is_blocked;
};

void quantize_fp8(const QuantizeFp8Params& params, Stream stream);

// Largest number of rows of each matrix of a product. Kernels count them in an int, beyond the last tile too.
constexpr int64_t kMaxProductRows = int64_t{1} << 30;

// A linear layer: its weight (out_features, in_features), contiguous and aligned to 16 bytes, and its result.
// low up^T is added to the product if rank is not 0, with the columns of several ups next to each other. All
// are 16-bit and aligned to 16 bytes; ranks are multiples of 8.
struct LowRankUp {
  const void* data;  // (out_features, rank), contiguous
  int32_t rank;
  int32_t low_column;  // the first of its columns of low
};
constexpr int kMaxLowRankUps = 4;

struct LinearLayer {
  int64_t out_features;
  const void* weight;
  const float* scale;  // (out_features,), null with 16-bit operands
  bool has_one_scale;  // otherwise each row of the weight has one
  const void* bias;    // (out_features,), may be null
  DType bias_dtype;
  int64_t rank;        // of all ups
  const void* low;     // (rows, rank)
  int64_t low_stride;  // of low's rows, a multiple of 8
  LowRankUp ups[kMaxLowRankUps];
  int32_t up_count;
  void* out;           // (rows, out_features)
  int64_t out_stride;  // of out's rows
};

constexpr int kMaxLinearLayers = 3;

// GELU of a result.
enum class Gelu : int32_t { kNone, kErf, kTanh };

// out = (x * x_scale) (weight * scale)^T + low up^T + bias of each layer, for x (rows, in_features),
// contiguous and aligned to 16 bytes. in_features is a multiple of 16 bytes. x and the weights are E4M3, or
// 16-bit and without scales.
struct LinearParams {
  int64_t rows;
  int64_t in_features;
  const void* x;
  const float* x_scale;  // (rows,), or (rows, blocks of in_features), contiguous; null with 16-bit operands
  bool x_is_blocked;
  int32_t layer_count;  // 1 to kMaxLinearLayers
  LinearLayer layers[kMaxLinearLayers];
  DType dtype;  // of the results, and of 16-bit operands: float16 or bfloat16; unused with quantized results
  DType low_dtype;  // of low and up
  Gelu gelu;        // with quantized results and with 16-bit operands
  // Only with a quantized result, which has one layer:
  float* out_scale;  // (rows, blocks of out_features)
  int64_t out_scale_stride;
  // Only with a residual, which has one layer. The strides are those of rows; gate's 0 broadcasts.
  const void* residual;  // of the dtype
  int64_t residual_stride;
  const void* gate;  // may be null
  int64_t gate_stride;
  bool gate_is_float32;  // otherwise it has the dtype
};

void linear_fp8(const LinearParams& params, Stream stream);
// out = gelu(product), quantized in blocks as by quantize_fp8, from the unrounded value.
void linear_gelu_fp8(const LinearParams& params, Stream stream);
// out = residual + gate * product
void linear_gated_residual_fp8(const LinearParams& params, Stream stream);
// out = gelu(product), of 16-bit operands.
void linears_lora(const LinearParams& params, Stream stream);

// One of the matrices of LoRA's first products: (rows, in_features), contiguous and aligned to 16 bytes.
struct LoraDown {
  const void* data;
  int32_t rows;
  float scale;
};

constexpr int kMaxLoraDowns = 12;
constexpr int64_t kLoraColumnStep = 8, kMaxLoraColumns = 1024;

constexpr int64_t lora_columns(int64_t rows) {
  return (rows + kLoraColumnStep - 1) / kLoraColumnStep * kLoraColumnStep;
}

// out = scale (x * x_scale) down^T of each matrix, for x as in LinearParams. The columns of a matrix are next
// to each other and begin at a multiple of kLoraColumnStep; those after its last one are 0.
struct LoraDownParams {
  int64_t rows;
  int64_t in_features;
  const void* x;         // E4M3, or of the dtype
  const float* x_scale;  // (rows,), or (rows, blocks of in_features), contiguous; null with a 16-bit x
  bool x_is_blocked;
  int32_t down_count;  // 1 to kMaxLoraDowns
  LoraDown downs[kMaxLoraDowns];
  int32_t columns;  // of out: at most kMaxLoraColumns
  DType dtype;      // of downs and out: float16 or bfloat16
  void* out;        // (rows, columns), contiguous and aligned to 16 bytes
};

void lora_down(const LoraDownParams& params, Stream stream);

}  // namespace h100_diffusers_kernels
