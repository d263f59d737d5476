// qk_norm_rope for heads of any size and alignment: read twice, one element at a time. One kernel a dtype
// serves all operands and rotations, which it reads at run time. No model has such heads.
#pragma once

#include "qk_norm_rope.cuh"

namespace h100_diffusers_kernels {

constexpr int kScalarThreads = 256;
static_assert(kMultiprocessorThreads % kScalarThreads == 0);

using ScalarOperands = LayerNormOperands;  // with the most operands

// The norm span of a block: a token or a head of one tensor. blockIdx.y is the number of the tensor.
template <typename T>
struct ScalarSpan {
  const QkvNormRopeParams& params;
  const HeadsOperand& tensor;
  int head_dim, first_head, heads;
  int64_t batch, seq;

  __device__ __forceinline__ explicit ScalarSpan(const QkvNormRopeParams& p)
      : params(p), tensor(operand_of<ScalarOperands>(p, blockIdx.y)), head_dim(static_cast<int>(p.head_dim)) {
    const bool spans_heads = p.norm == NormScope::kAcrossHeads;
    const int max_heads = max_heads_of<ScalarOperands>(p);
    const int64_t token = spans_heads ? blockIdx.x : blockIdx.x / max_heads;
    first_head = spans_heads ? 0 : static_cast<int>(blockIdx.x - token * max_heads);
    heads = spans_heads ? static_cast<int>(tensor.heads) : 1;
    batch = token / p.seq;
    seq = token - batch * p.seq;
  }

  __device__ __forceinline__ bool is_present() const { return first_head < tensor.heads; }
  __device__ __forceinline__ int size() const { return heads * head_dim; }

  __device__ __forceinline__ UnitPosition position(int head) const {
    UnitPosition position;
    position.batch = batch;
    position.seq = seq;
    position.head = first_head + head;
    return position;
  }

  __device__ __forceinline__ T in(int i) const {
    return static_cast<const T*>(
        tensor.in)[head_offset(tensor.in_strides, position(i / head_dim)) + i % head_dim];
  }
  __device__ __forceinline__ T& out(int i) const {
    const UnitPosition at = position(i / head_dim);
    int64_t offset = head_offset(tensor.out_strides, at) + i % head_dim;
    if (tensor.out_chunk_heads > 0)
      offset += at.head / static_cast<int>(tensor.out_chunk_heads) * tensor.out_chunk_gap;
    return static_cast<T*>(tensor.out)[offset];
  }

  // Calls body with the thread's elements. The counter is unsigned because the last step may exceed an int.
  template <class Body>
  __device__ __forceinline__ void for_each_element(const Body& body) const {
    for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(size()); i += kScalarThreads)
      body(static_cast<int>(i));
  }

  // Calls body(first, second, position) with the elements of the thread's pairs.
  template <class Body>
  __device__ __forceinline__ void for_each_pair(const Body& body) const {
    const int half = head_dim / 2;
    const bool is_half = params.layout == RopeLayout::kHalf;
    for (int pair = threadIdx.x; pair < size() / 2; pair += kScalarThreads) {
      const int head = pair / half, within = pair - head * half;
      UnitPosition at = position(head);
      at.pair = within;
      at.first = is_half ? within : 2 * within;
      at.second = is_half ? within + half : 2 * within + 1;
      body(head * head_dim + at.first, head * head_dim + at.second, at);
    }
  }
};

template <class Rope, typename T>
__device__ __forceinline__ void look_up_pair(const QkvNormRopeParams& p, const UnitPosition& position,
                                             UnitRotation<1>& rotation) {
  // A pair is two packs of one element, as in the half layout.
  typename Rope::template Lookup<T, RopeLayout::kHalf, 1> lookup;
  lookup.fetch(p, position);
  lookup.rotation(rotation);
}

template <typename T>
__global__ void __launch_bounds__(kScalarThreads)
    scalar_qk_norm_rope_kernel(const __grid_constant__ QkvNormRopeParams p) {
  const ScalarSpan<T> span(p);
  griddepcontrol_wait();
  if (!span.is_present()) return;
  const int tensor = blockIdx.y;
  if (tensor == kValues) return span.for_each_element([&](int i) { span.out(i) = span.in(i); });

  RowStatistics<T> row;
  const auto read = [&](int i) { return row.mean.subtracted_from(to_float(span.in(i))); };
  if (p.norm != NormScope::kNone) {
    // Its barriers also separate these reads from in-place writes.
    const GroupReduce<Sum, RowSum<T>, kScalarThreads, 1, 2> reduce;
    if (p.norm == NormScope::kLayerPerHead) {
      RowSum<T> sum[1] = {0};
      span.for_each_element([&](int i) { sum[0] += read(i); });
      reduce(sum, 0);
      row.mean = Statistic<T>::from(divide<T>(sum[0], static_cast<RowSum<T>>(span.size())));
    }
    RowSum<T> squares[1] = {0};
    span.for_each_element([&](int i) {
      const float x = read(i);
      squares[0] += x * x;
    });
    reduce(squares, 1);
    row.scale = rms_scale_of<T>(squares[0], span.size(), p.eps);
  }
  const auto normalized = [&](int i) {
    float n = read(i);
    if (p.norm != NormScope::kNone) n = row.scale.times(n);
    with_weight<ScalarOperands, T>(p, tensor, [&](const auto* weight) { n *= to_float(weight[i]); });
    with_bias<ScalarOperands, T>(p, tensor, [&](const auto* bias) { n += to_float(bias[i]); });
    return n;
  };

  if (!p.coordinates && !p.tables.cos)
    return span.for_each_element([&](int i) { span.out(i) = from_float<T>(normalized(i)); });
  span.for_each_pair([&](int first, int second, const UnitPosition& position) {
    UnitRotation<1> rotation;
    if (p.coordinates)
      look_up_pair<CoordinateRope, T>(p, position, rotation);
    else
      look_up_pair<AnyTableRope, T>(p, position, rotation);
    float a[1] = {normalized(first)}, b[1] = {normalized(second)};
    rotate<RopeLayout::kHalf>(a, b, rotation);
    span.out(first) = from_float<T>(a[0]);
    span.out(second) = from_float<T>(b[0]);
  });
}

}  // namespace h100_diffusers_kernels
