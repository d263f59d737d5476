// Branches without a norm after them, or with an RMS norm (branch_norm.cuh).
#include "branch_norm.cuh"

namespace h100_diffusers_kernels {

template void launch_branch_norm<NoNorm>(const char*, const RowNormParams&, Stream);
template void launch_branch_norm<RmsNorm>(const char*, const RowNormParams&, Stream);

}  // namespace h100_diffusers_kernels
