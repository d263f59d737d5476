// The kernels of qk_norm_rope for float16.
#include "qk_norm_rope_launch.cuh"

namespace h100_diffusers_kernels {

template void launch_qk_norm_rope<__half>(const QkvNormRopeParams&, Stream);

}  // namespace h100_diffusers_kernels
