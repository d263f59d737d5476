// The families of operations. Each file in operations/ is a family and lists its operations.
#pragma once

#include <span>

#include "arguments.h"
#include "operation.h"

#define H100_EACH_FAMILY(apply)                                                                           \
  apply(norm) apply(group_norm) apply(channel_rms_norm) apply(qk_norm_rope) apply(rope) apply(activation) \
      apply(softmax) apply(conv3d) apply(attention) apply(fp8) apply(linear) apply(lora_down)

namespace h100_diffusers_kernels {

#define H100_DECLARE(family) std::span<const Operation> family##_operations();
H100_EACH_FAMILY(H100_DECLARE)
#undef H100_DECLARE

}  // namespace h100_diffusers_kernels
