// qk_norm_rope: norm and rotation of query and key in one pass over both. The kernels of each dtype are in a
// file of their own, because they compile longest.
#include <type_traits>

#include "launch.cuh"
#include "params.h"

namespace h100_diffusers_kernels {

// Defined in qk_norm_rope_launch.cuh.
template <typename T>
void launch_qk_norm_rope(const QkvNormRopeParams& params, Stream stream);

namespace {

// Returns whether the heads of one tensor can be split into a query and a key, so that a group loads a
// rotation once for two heads: all heads of a token have the same rotation, no norm spans them, and no chunk
// of the output has heads of both.
bool can_split_heads(const QkvNormRopeParams& p) {
  const bool share_rotation =
      !p.coordinates && p.tables.cos_strides[2] == 0 && (p.tables.is_complex || p.tables.sin_strides[2] == 0);
  if (p.k.in || p.v.in || p.norm == NormScope::kAcrossHeads || p.q.heads % 2 != 0 || !share_rotation)
    return false;
  return p.q.out_chunk_heads == 0 || p.q.heads / 2 % p.q.out_chunk_heads == 0;
}

void split_heads(QkvNormRopeParams& p) {
  p.q.heads /= 2;
  p.k = p.q;
  p.k_weight_is_float32 = p.q_weight_is_float32;
  p.k_bias = p.q_bias;
  const int64_t bytes = p.q.heads * bytes_of(p.dtype);
  p.k.in = static_cast<const char*>(p.q.in) + p.q.in_strides[2] * bytes;
  p.k.out = static_cast<char*>(p.q.out) + p.q.out_strides[2] * bytes;
  if (p.q.out_chunk_heads > 0)
    p.k.out = static_cast<char*>(p.k.out) + p.q.out_chunk_gap * bytes / p.q.out_chunk_heads;
}

}  // namespace

void qk_norm_rope(const QkvNormRopeParams& params, Stream stream) {
  QkvNormRopeParams p = params;
  if (can_split_heads(p)) split_heads(p);
  dispatch_dtype(p.dtype, [&]<typename T>(std::type_identity<T>) { launch_qk_norm_rope<T>(p, stream); });
}

}  // namespace h100_diffusers_kernels
