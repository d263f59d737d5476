// Norms of x with general operands (general_norm.cuh).
#include "general_policies.cuh"

namespace h100_diffusers_kernels {

template void launch_general<PlainInput, RmsNorm>(const char*, const RowNormParams&, Stream);
template void launch_general<PlainInput, LayerNorm>(const char*, const RowNormParams&, Stream);

}  // namespace h100_diffusers_kernels
