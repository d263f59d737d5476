// Copies an output that TMA cannot write.
#include "attention_output.cuh"
#include "launch.cuh"

namespace h100_diffusers_kernels {
namespace {

struct OutputKernelParams {
  const uint16_t* in;  // (batch, seq, heads, head_dim), contiguous
  AttentionOutput out;
  FastDivisor heads, query_length;
  int rows, head_dim;
};

constexpr int kOutputThreads = 256;
static_assert(kOutputThreads >= kMaxAttentionHeadDim);  // a block has whole rows
constexpr int kOutputRows = 8;                          // A thread copies one column of these rows.

__global__ void __launch_bounds__(kOutputThreads)
    scalar_attention_output_kernel(const __grid_constant__ OutputKernelParams params) {
  const int thread = static_cast<int>(threadIdx.x), step = kOutputThreads / params.head_dim;
  const int column = thread % params.head_dim;
  if (thread >= step * params.head_dim) return;
  const int first = static_cast<int>(blockIdx.x) * step * kOutputRows + thread / params.head_dim;
  griddepcontrol_wait();
#pragma unroll
  for (int i = 0; i < kOutputRows; ++i) {
    const int row = first + i * step;
    if (row >= params.rows) break;
    const uint32_t token = params.heads.divide(static_cast<uint32_t>(row));
    const uint32_t batch = params.query_length.divide(token);
    const uint32_t head = static_cast<uint32_t>(row) - token * params.heads.divisor;
    const uint32_t seq = token - batch * params.query_length.divisor;
    const int64_t* strides = params.out.strides;
    static_cast<uint16_t*>(
        params.out.data)[batch * strides[0] + seq * strides[1] + head * strides[2] + column] =
        params.in[int64_t{row} * params.head_dim + column];
  }
}

}  // namespace

void write_output(const char* operation, const AttentionParams& args, const void* in, Stream stream) {
  OutputKernelParams params{static_cast<const uint16_t*>(in), args.out, {}, {}, 0, 0};
  params.heads.set(static_cast<uint32_t>(args.heads));
  params.query_length.set(static_cast<uint32_t>(args.query_length));
  params.rows = static_cast<int>(args.batch * args.query_length * args.heads);
  params.head_dim = static_cast<int>(args.head_dim);
  const int block_rows = kOutputThreads / params.head_dim * kOutputRows;
  launch_kernel(operation, scalar_attention_output_kernel, dim3(ceil_divide(params.rows, block_rows)),
                kOutputThreads, params, stream);
}

}  // namespace h100_diffusers_kernels
