// A warp group multiplies matrices (wgmma), 64 rows at a time, and says how many registers its warps have.
//
// One instruction in full, that of Product<__nv_bfloat16, 64>::of_registers, computes d += a b, or d = a b,
// of a 64 x 16 and a 16 x 64 matrix:
//
//   wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
//       {d0, d1, ..., d31},   64 x 64 floats, 32 registers of each of the 128 threads
//       {a0, a1, a2, a3},     64 x 16 bfloat16, two of them a register
//       b,                    16 x 64 bfloat16 in shared memory, by a descriptor of 64 bits
//       accumulate,           a predicate: d += a b if it is true, d = a b if not (scale-d)
//       1, 1,                 a and b are not negated (imm-scale-a, imm-scale-b)
//       1;                    b is stored with its columns along the rows of 128 bytes (imm-trans-b)
//
// A thread holds, of d, columns 8j + 2 (lane % 4) and the next one of row 16 warp + lane / 4 in d[4j] and
// d[4j + 1], and of the row 8 below in d[4j + 2] and d[4j + 3]. Of a it holds the same places, two values a
// register: a0 and a1 are columns 2 (lane % 4) and the next one of these two rows, a2 and a3 those 8 columns
// on. The descriptor of b says (PTX, "Matrix descriptor"):
//
//   bits 0 to 13    the address in shared memory, / 16
//   bits 16 to 29   where b has more columns than a box, how far the next box is (leading dimension), / 16
//   bits 32 to 45   how far the next 8 rows of a box are (stride dimension), / 16: kSwizzleBytes
//   bits 62 to 63   1: the pieces of 16 bytes are in the order of the 128-byte swizzle (tensor_copy.cuh)
//
// As inline assembly, whose operands are numbered by position (outputs, then inputs), this is
//
//   asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
//                "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
//                "{%0, %1, ..., %31}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, 1;\n}"
//                : "+f"(d[0]), "+f"(d[1]), ..., "+f"(d[31])
//                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(accumulate));
//
// The macros below write the others: of 72 and 128 columns, where the operands after d are numbered from 36
// and 64 on, of float16, and with a in shared memory, by a descriptor, too (of_shared), where one more number
// says how a is stored (imm-trans-a).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "tensor_copy.cuh"

namespace h100_diffusers_kernels {

constexpr int kWarpGroupThreads = 128;
constexpr int kWarpGroupWarps = kWarpGroupThreads / 32;
constexpr int kWarpGroupRows = 64;
constexpr int kProductDepth = 16;  // One instruction adds up so many products.

// An operand lies in shared memory, in boxes of tensor_copy.cuh. This is the lower half of its descriptor;
// the upper half is the same for all. Additions go by multiples of 16 bytes.
struct Operand {
  uint32_t address_and_next_box;

  // The depth runs along the rows of 128 bytes.
  __device__ __forceinline__ static Operand along_rows(uint32_t address) { return of(address, 0); }
  // The depth runs from row to row. Columns from kBoxColumns on are at next_box, and the next ones as far
  // from there again.
  __device__ __forceinline__ static Operand across_rows(uint32_t address, uint32_t next_box) {
    return of(address, next_box - address);
  }
  __device__ __forceinline__ Operand plus(int bytes) const {
    return {address_and_next_box + static_cast<uint32_t>(bytes / 16)};
  }
  // The same, with the next box staying where it is.
  __device__ __forceinline__ Operand first_box_plus(int bytes) const {
    return {address_and_next_box + static_cast<uint32_t>(bytes / 16 * (1 - (1 << kNextBoxBit)))};
  }

  __device__ __forceinline__ uint32_t address() const {
    return address_and_next_box % (1 << kNextBoxBit) * 16;
  }
  __device__ __forceinline__ uint64_t descriptor() const {
    constexpr uint32_t kSwizzle128 = 1 << 30, kRowsOfSwizzle = kSwizzleBytes / 16;
    return uint64_t{kSwizzle128 | kRowsOfSwizzle} << 32 | address_and_next_box;
  }

 private:
  static constexpr int kNextBoxBit = 16;

  __device__ __forceinline__ static Operand of(uint32_t address, uint32_t next_box_bytes) {
    return {address / 16 | next_box_bytes / 16 << kNextBoxBit};
  }
};

#define H100_OUT_8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define H100_OUT_32(d, i) H100_OUT_8(d, i), H100_OUT_8(d, i + 8), H100_OUT_8(d, i + 16), H100_OUT_8(d, i + 24)
#define H100_REGISTERS_32                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17," \
  " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define H100_REGISTERS_36                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17," \
  " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33," \
  " %34, %35}"
#define H100_REGISTERS_64                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17,"      \
  " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34," \
  " %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51," \
  " %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// Adds the product of 64 rows of a and kColumns columns of b to d, or sets d to it, asynchronously. The
// operands must stay as they are, and d must not be touched, until wait_for_products has let the thread
// through.
template <typename T, int kColumns>
struct Product;

// of_registers has a in registers, and the depth of b across its rows. The macro takes as text the PTX type,
// how many columns, and the numbered operands: registers of d, a and b, accumulate; as C++ how many values d
// has and, last, d as output operands.
#define H100_OF_REGISTERS(type, columns, values, registers, a_and_b, flag, ...)                              \
  __device__ __forceinline__ static void of_registers(float (&d)[values], const uint32_t (&a)[4], Operand b, \
                                                      bool accumulate) {                                     \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " flag                                  \
                 ", 0;\n"                                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " registers          \
                 ", " a_and_b ", accumulate, 1, 1, 1;\n}"                                                    \
                 : __VA_ARGS__                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()),                          \
                   "r"(static_cast<int>(accumulate)));                                                       \
  }
// of_shared has a and b in shared memory, and the depth along their rows.
#define H100_PRODUCT(T, type)                                                                 \
  template <>                                                                                 \
  struct Product<T, 64> {                                                                     \
    H100_OF_REGISTERS(type, "64", 32, H100_REGISTERS_32, "{%32, %33, %34, %35}, %36", "%37",  \
                      H100_OUT_32(d, 0))                                                      \
  };                                                                                          \
  template <>                                                                                 \
  struct Product<T, 72> {                                                                     \
    H100_OF_REGISTERS(type, "72", 36, H100_REGISTERS_36, "{%36, %37, %38, %39}, %40", "%41",  \
                      H100_OUT_32(d, 0), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]))  \
  };                                                                                          \
  template <>                                                                                 \
  struct Product<T, 128> {                                                                    \
    H100_OF_REGISTERS(type, "128", 64, H100_REGISTERS_64, "{%64, %65, %66, %67}, %68", "%69", \
                      H100_OUT_32(d, 0), H100_OUT_32(d, 32))                                  \
    __device__ __forceinline__ static void of_shared(float (&d)[64], Operand a, Operand b,    \
                                                     bool accumulate) {                       \
      asm volatile(                                                                           \
          "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"                      \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " H100_REGISTERS_64  \
          ", %64, %65, accumulate, 1, 1, 0, 0;\n}"                                            \
          : H100_OUT_32(d, 0), H100_OUT_32(d, 32)                                             \
          : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));     \
    }                                                                                         \
  }
H100_PRODUCT(__nv_bfloat16, "bf16");
H100_PRODUCT(__half, "f16");
#undef H100_PRODUCT
#undef H100_OF_REGISTERS
#undef H100_REGISTERS_64
#undef H100_REGISTERS_36
#undef H100_REGISTERS_32
#undef H100_OUT_32
#undef H100_OUT_8

// Orders the products that follow after what has written their registers. All threads of the group call it.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes one group of the products issued since the last time.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until all groups of products but the last kGroups have come to their end.
template <int kGroups = 0>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Has the compiler compute the values before the asm that follows, and what is made of them after it. Without
// this it moves waits to the front, and rounds into registers that products are still reading (NOTES, "Peaked
// scores: rescaling where float16 would overflow").
template <int kSize>
__device__ __forceinline__ void compute_now(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// From here on each thread of the warp group has kRegisters registers. What one group gives up others can
// take.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores 16 rows by 16 columns of 16 bits, at the places of a left operand in registers, to shared memory.
// Each lane addresses the 16 bytes of row lane % 16 that begin at column 8 (lane / 16).
__device__ __forceinline__ void store_fragment(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace h100_diffusers_kernels
