// Whether strided tensors overlap in memory, checked before one of them is written.
#pragma once

#include "boxing.h"

namespace h100_diffusers_kernels {

// Both are exact for practical layouts, and true if the search would take too many steps.
bool overlaps_itself(const Tensor& tensor);
bool overlap(const Tensor& a, const Tensor& b);

}  // namespace h100_diffusers_kernels
