// Branches with a layer norm after them (branch_norm.cuh).
#include "branch_norm.cuh"

namespace h100_diffusers_kernels {

template void launch_branch_norm<LayerNorm>(const char*, const RowNormParams&, Stream);

}  // namespace h100_diffusers_kernels
