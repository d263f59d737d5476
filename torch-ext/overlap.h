// Whether strided tensors have elements in common: asked before any of them is written in place.
#pragma once

#include "boxing.h"

namespace h100_diffusers_kernels {

// Both are exact for all layouts that are met, and true where an answer would take too many steps.
bool overlaps_itself(const Tensor& tensor);
bool overlap(const Tensor& a, const Tensor& b);

}  // namespace h100_diffusers_kernels
