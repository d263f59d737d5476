// FP8: quantization of rows or of blocks of rows.
#include <cstdint>
#include <memory>

#include "elements.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// `values` has room for a row.
void quantize_row(const QuantizeFp8Params& p, int64_t row, float* values) {
  load(p.dtype, p.x.data, row_offset(p.shape, p.x, row), p.hidden, values);
  store_fp8_row(p.shape, row, values, p.hidden, p.out, p.scale, p.is_blocked);
}

}  // namespace

void quantize_fp8(const QuantizeFp8Params& params, Stream stream) {
  parallel_for(stream, params.shape.rows, params.hidden + 1, [&](int64_t begin, int64_t end) {
    const auto values = std::make_unique_for_overwrite<float[]>(params.hidden);
    for (int64_t row = begin; row < end; ++row) quantize_row(params, row, values.get());
  });
}

}  // namespace h100_diffusers_kernels
