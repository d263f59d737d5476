// Matrix products of a warp group for FP8 (wgmma), 64 rows and a depth of 32 at a time. Both matrices are in
// shared memory, with the inner dimension along rows of 128 bytes (warp_group.cuh has the other types, the
// layout of d and the matrix descriptors). The accumulator of an instruction keeps about 14 bits, so that
// sums over more than one box (128 values) belong into other registers.
#pragma once

#include "warp_group.cuh"
#include "wgmma_registers.cuh"

namespace h100_diffusers_kernels {

constexpr int kFp8Depth = 32;  // inner dimension of one instruction

// Adds the product of 64 rows of a and kColumns rows of b, transposed, to d, or sets d to it, asynchronously.
template <int kColumns>
struct Fp8Wgmma;

#define H100_FP8_PRODUCT(columns, values, a_operand, b_operand, flag)                               \
  template <>                                                                                       \
  struct Fp8Wgmma<columns> {                                                                        \
    __device__ __forceinline__ static void multiply(float (&d)[values], MatrixDescriptor a,         \
                                                    MatrixDescriptor b, bool accumulate) {          \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #flag                     \
                   ", 0;\n"                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #columns                                     \
                   "k32.f32.e4m3.e4m3 {" H100_REGISTERS_##values "}, %" #a_operand ", %" #b_operand \
                                                                 ", accumulate, 1, 1;\n}"           \
                   : H100_OUT_##values(d)                                                           \
                   : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));  \
    }                                                                                               \
  }
H100_FP8_PRODUCT(128, 64, 64, 65, 66);
H100_FP8_PRODUCT(192, 96, 96, 97, 98);
#undef H100_FP8_PRODUCT

}  // namespace h100_diffusers_kernels
