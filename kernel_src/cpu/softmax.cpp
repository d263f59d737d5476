// Softmax over rows. The float32 values of a row are kept between its passes.
#include <cstdint>
#include <limits>
#include <memory>

#include "elements.h"
#include "functions.h"
#include "params.h"
#include "rows.h"

namespace h100_diffusers_kernels {
namespace {

// Returns the largest value that is not NaN.
float largest(const float* values, int64_t count) {
  float result = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : result)
  for (int64_t i = 0; i < count; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

// `e` has room for a row. NaN, infinity (infinity - infinity) and a row of -infinity alone make the sum NaN,
// and thereby the whole row.
void softmax_row(const SoftmaxParams& p, int64_t row, float* e) {
  load(p.dtype, p.x.data, row_offset(p.shape, p.x, row), p.hidden, e);
  const float subtrahend = largest(e, p.hidden);
  for (int64_t i = 0; i < p.hidden; ++i) e[i] = exp_nonpositive(e[i] - subtrahend);
  const double factor = 1.0 / sum(e, p.hidden);
  for (int64_t i = 0; i < p.hidden; ++i) e[i] = static_cast<float>(e[i] * factor);
  store(p.dtype, p.out.data, row_offset(p.shape, p.out, row), p.hidden, e);
}

}  // namespace

void softmax(const SoftmaxParams& params, Stream stream) {
  parallel_for(stream, params.shape.rows, params.hidden, [&](int64_t begin, int64_t end) {
    const auto e = std::make_unique_for_overwrite<float[]>(params.hidden);
    for (int64_t row = begin; row < end; ++row) softmax_row(params, row, e.get());
  });
}

}  // namespace h100_diffusers_kernels
