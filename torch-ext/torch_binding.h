// The operations by family: each file of operations/ has one list. Included by those files and by the
// registration.
#pragma once

#include <span>

#include "arguments.h"
#include "operation.h"

namespace h100_diffusers_kernels {

std::span<const Operation> norm_operations();
std::span<const Operation> qk_norm_rope_operations();
std::span<const Operation> rope_operations();
std::span<const Operation> activation_operations();
std::span<const Operation> softmax_operations();
std::span<const Operation> attention_operations();

}  // namespace h100_diffusers_kernels
