// Division by a number that is known at launch, without a division instruction.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace h100_diffusers_kernels {

// Divides 0 <= n < 2^31 by a multiplication, an addition and a shift (Granlund and Montgomery, 1994, with
// ceil(log2(divisor)) as the shift).
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  __host__ void set(uint32_t value) {
    divisor = value;
    shift = 0;
    while ((uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - value)) / value + 1);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
};

// Divides 0 <= n < 2^16 by 2 <= divisor <= 2^16 with one multiplication, which needs fewer registers. Unless
// it is set, the quotient is 0.
struct ShortDivisor {
  uint32_t multiplier;

  __host__ void set(uint32_t value) {
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) + value - 1) / value);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return __umulhi(n, multiplier); }
};

constexpr int64_t kFastDivisionEnd = int64_t{1} << 31;

}  // namespace h100_diffusers_kernels
