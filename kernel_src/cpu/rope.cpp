// One tensor is rotated by tables, or by those of the three axes of a grid (rotary embedding).
//
// An item is a token; those of the same position in the sequence follow each other, as they may share their
// rotation.
#include <cstdint>
#include <memory>
#include <type_traits>

#include "multiversion.h"
#include "params.h"
#include "rotation.h"
#include "rows.h"
#include "vector.h"

namespace h100_diffusers_kernels {
namespace {

template <typename T>
struct Head {
  const T* in;

  template <int n>
  ALWAYS_INLINE Floats<n> load_at(int64_t column) const {
    return load<n>(in + column);
  }
};

template <int kLanes, typename T, typename Rotation, typename Table>
ALWAYS_INLINE void rotate_token(const HeadsOperand& x, int64_t head_dim, int64_t batch, int64_t seq,
                                TokenTables<Table> tables) {
  const T* in = static_cast<const T*>(x.in) + batch * x.in_strides[0] + seq * x.in_strides[1];
  T* out = static_cast<T*>(x.out) + batch * x.out_strides[0] + seq * x.out_strides[1];
  for (int64_t h = 0; h < x.heads; ++h) {
    Rotation::template apply<kLanes>(Head<T>{in}, head_dim, tables.cosine, tables.sine, out);
    in += x.in_strides[2];
    out += x.out_strides[2];
    tables.cosine += tables.cosine_stride;
    tables.sine += tables.sine_stride;
  }
}

template <typename T, typename Table, typename Rotation>
struct RopeKernel {
  const RopeParams& params;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    CallTables<T, Table> tables(params.tables, params.layout, params.head_dim, params.x.heads);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token % params.batch, seq = token / params.batch;
      rotate_token<kLanes, T, Rotation>(params.x, params.head_dim, batch, seq,
                                        tables.template at<kLanes>(batch, seq));
    }
  }
};

// The tables of one token, by element, are put together from those of the axes. The part of an axis is kept
// while the position on it stays the same.
template <typename Table>
class GridTables {
 public:
  explicit GridTables(const Rope3dParams& params)
      : params_(params),
        cosine_(std::make_unique<float[]>(params.head_dim)),
        sine_(std::make_unique<float[]>(params.head_dim)) {}

  template <int kLanes>
  ALWAYS_INLINE TokenTables<float> at(int64_t seq) {
    const int64_t height = params_.axes[1].size, width = params_.axes[2].size;
    const int64_t positions[kRope3dAxes] = {seq / (height * width), seq / width % height, seq % width};
    int64_t first_pair = 0;
    for (int a = 0; a < kRope3dAxes; ++a) {
      const RopeAxis& axis = params_.axes[a];
      if (positions[a] != current_[a]) {
        current_[a] = positions[a];
        const Table* cosine = static_cast<const Table*>(axis.cos) + positions[a] * axis.cos_stride;
        const Table* sine = static_cast<const Table*>(axis.sin) + positions[a] * axis.sin_stride;
        const int64_t half = params_.head_dim / 2;
        repeat_pairs<kLanes>(params_.layout, half, cosine_.get(), first_pair, cosine, axis.pairs);
        repeat_pairs<kLanes>(params_.layout, half, sine_.get(), first_pair, sine, axis.pairs);
      }
      first_pair += axis.pairs;
    }
    return {cosine_.get(), sine_.get(), 0, 0};
  }

 private:
  const Rope3dParams& params_;
  std::unique_ptr<float[]> cosine_;
  std::unique_ptr<float[]> sine_;
  int64_t current_[kRope3dAxes] = {-1, -1, -1};
};

template <typename T, typename Table, typename Rotation>
struct Rope3dKernel {
  const Rope3dParams& params;

  template <int kLanes>
  ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    GridTables<Table> tables(params);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t batch = token % params.batch, seq = token / params.batch;
      rotate_token<kLanes, T, Rotation>(params.x, params.head_dim, batch, seq,
                                        tables.template at<kLanes>(seq));
    }
  }
};

template <template <typename, typename, typename> class Kernel, typename Params>
void launch(const Params& params, bool is_float_table, Stream stream) {
  const int64_t tokens = params.batch * params.seq, token_size = params.x.heads * params.head_dim;
  dispatch_dtype(params.dtype, [&]<typename T>(std::type_identity<T>) {
    dispatch_layout(params.layout, [&]<typename Rotation>(std::type_identity<Rotation>) {
      if (is_float_table)
        parallel_run(stream, tokens, token_size, Kernel<T, float, Rotation>{params});
      else
        parallel_run(stream, tokens, token_size, Kernel<T, T, Rotation>{params});
    });
  });
}

}  // namespace

void rope(const RopeParams& params, Stream stream) {
  launch<RopeKernel>(params, are_read_as_float(params.tables), stream);
}

void rope_3d(const Rope3dParams& params, Stream stream) {
  launch<Rope3dKernel>(params, params.table_is_float32, stream);
}

}  // namespace h100_diffusers_kernels
