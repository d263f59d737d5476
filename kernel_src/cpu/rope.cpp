// One tensor is rotated by tables, or by those of the three axes of a grid (rotary embedding).
#include <cstdint>

#include "elements.h"
#include "params.h"
#include "rotation.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// load_tables(batch, seq, head, scratch) loads cosines and sines. All heads use the first head's, unless the
// tables differ between heads.
template <typename Params, typename LoadTables>
void launch(const Params& p, bool heads_differ, Stream stream, const LoadTables& load_tables) {
  const HeadsOperand& x = p.x;
  parallel_for(stream, p.batch * p.seq, x.heads * p.head_dim, [&](int64_t begin, int64_t end) {
    const HeadScratch scratch(p.head_dim);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token / p.seq, seq = token % p.seq;
      for (int64_t head = 0; head < x.heads; ++head) {
        if (head == 0 || heads_differ) load_tables(batch, seq, head, scratch);
        const int64_t in = head_offset(x.in_strides, batch, seq, head);
        const int64_t out = head_offset(x.out_strides, batch, seq, head);
        load(p.dtype, x.in, in, p.head_dim, scratch.values);
        rotate(p.layout, p.head_dim, scratch);
        store(p.dtype, x.out, out, p.head_dim, scratch.values);
      }
    }
  });
}

}  // namespace

void rope(const RopeParams& params, Stream stream) {
  launch(params, heads_differ(params.tables), stream,
         [&](int64_t batch, int64_t seq, int64_t head, const HeadScratch& scratch) {
           load_tables(params, params.tables, batch, seq, head, scratch);
         });
}

void rope_3d(const Rope3dParams& params, Stream stream) {
  const DType dtype = params.table_is_float32 ? DType::kFloat32 : params.dtype;
  const int64_t height = params.axes[1].size, width = params.axes[2].size;
  launch(params, false, stream, [&](int64_t, int64_t seq, int64_t, const HeadScratch& scratch) {
    const int64_t positions[kRope3dAxes] = {seq / (height * width), seq / width % height, seq % width};
    int64_t first_pair = 0;
    for (int a = 0; a < kRope3dAxes; ++a) {
      const RopeAxis& axis = params.axes[a];
      const auto load_axis = [&](const void* table, int64_t stride, float* values) {
        load(dtype, table, positions[a] * stride, axis.pairs, scratch.operand);
        repeat_pairs(params.layout, params.head_dim, first_pair, axis.pairs, scratch.operand, 1, values);
      };
      load_axis(axis.cos, axis.cos_stride, scratch.cosine);
      load_axis(axis.sin, axis.sin_stride, scratch.sine);
      first_pair += axis.pairs;
    }
  });
}

}  // namespace h100_diffusers_kernels
