// Matrix products of a warp group for FP8 (wgmma), 64 rows and a depth of 32 at a time. Both matrices are in
// shared memory, with the inner dimension along rows of 128 bytes (warp_group.cuh has the other types, the
// layout of d and the matrix descriptors). The accumulator of an instruction keeps about 14 bits, so that
// sums over more than one box (128 values) belong into other registers.
#pragma once

#include "warp_group.cuh"

namespace h100_diffusers_kernels {

constexpr int kFp8Depth = 32;  // inner dimension of one instruction

// Adds the product of 64 rows of a and kColumns rows of b, transposed, to d, or sets d to it, asynchronously.
template <int kColumns>
struct Fp8Wgmma;

#define H100_OUT_8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define H100_OUT_32(d, i) H100_OUT_8(d, i), H100_OUT_8(d, i + 8), H100_OUT_8(d, i + 16), H100_OUT_8(d, i + 24)
#define H100_OUT_64(d) H100_OUT_32(d, 0), H100_OUT_32(d, 32)
#define H100_OUT_96(d) H100_OUT_64(d), H100_OUT_32(d, 64)
#define H100_REGISTERS_64                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,"  \
  " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41," \
  " %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61," \
  " %62, %63"
#define H100_REGISTERS_96                                                                                 \
  H100_REGISTERS_64                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83," \
  " %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
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
#undef H100_REGISTERS_96
#undef H100_REGISTERS_64
#undef H100_OUT_96
#undef H100_OUT_64
#undef H100_OUT_32
#undef H100_OUT_8

}  // namespace h100_diffusers_kernels
