// Matrix products of a warp group (wgmma), 64 rows at a time, and its number of registers (setmaxnreg).
//
// The instruction of Wgmma<__nv_bfloat16, 64>::a_from_registers computes d += a b or d = a b for a 64 x 16
// and a 16 x 64 matrix:
//
//   wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
//       {d0, d1, ..., d31},   64 x 64 floats, 32 registers of each of the 128 threads
//       {a0, a1, a2, a3},     64 x 16 bfloat16, two in a register
//       b,                    64-bit descriptor of 16 x 64 bfloat16 in shared memory
//       accumulate,           predicate scale-d: d += a b if true, d = a b if false
//       1, 1,                 imm-scale-a, imm-scale-b: a and b are not negated
//       1;                    imm-trans-b: the columns of b are along the 128-byte rows
//
// d[4j] and d[4j + 1] are columns 8j + 2 (lane % 4) and the next one of row 16 warp + lane / 4; d[4j + 2] and
// d[4j + 3] are the same columns 8 rows below. a0 and a1 hold columns 2 (lane % 4) and the next one of the
// same two rows, a2 and a3 the columns 8 to the right. The descriptor of b (PTX, "Matrix descriptor"):
//
//   bits 0 to 13    address in shared memory / 16
//   bits 16 to 29   leading dimension byte offset / 16: the distance to the next box, if b has more columns
//   bits 32 to 45   stride dimension byte offset / 16: the distance to the next 8 rows of a box,
//   kSwizzleBytes bits 62 to 63   1: 128-byte swizzle (tensor_copy.cuh)
//
// As inline assembly, with operands numbered in order (outputs, then inputs):
//
//   asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %37, 0;\n"
//                "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
//                "{%0, %1, ..., %31}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, 1;\n}"
//                : "+f"(d[0]), "+f"(d[1]), ..., "+f"(d[31])
//                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(accumulate));
//
// The macros below generate the other instructions: 72 to 128 columns, where the operands after d start at 36
// to 64; float16; and a in shared memory (a_from_shared, 128 to 256 columns), where a has a descriptor too
// and imm-trans-a is added.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "tensor_copy.cuh"

// Operands of inline assembly for the accumulators d of wgmma, 32 to 128 registers: their constraints, and
// their names in the instruction.
#define H100_OUT_8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define H100_OUT_16(d) H100_OUT_8(d, 0), H100_OUT_8(d, 8)
#define H100_OUT_32(d) H100_OUT_16(d), H100_OUT_8(d, 16), H100_OUT_8(d, 24)
#define H100_OUT_36(d) H100_OUT_32(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define H100_OUT_40(d) H100_OUT_32(d), H100_OUT_8(d, 32)
#define H100_OUT_48(d) H100_OUT_40(d), H100_OUT_8(d, 40)
#define H100_OUT_56(d) H100_OUT_48(d), H100_OUT_8(d, 48)
#define H100_OUT_64(d) H100_OUT_56(d), H100_OUT_8(d, 56)

// Operands %0 to %n - 1, without braces.
#define H100_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define H100_REGISTERS_16 H100_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define H100_REGISTERS_32 \
  H100_REGISTERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define H100_REGISTERS_36 H100_REGISTERS_32 ", %32, %33, %34, %35"
#define H100_REGISTERS_40 H100_REGISTERS_36 ", %36, %37, %38, %39"
#define H100_REGISTERS_48 H100_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define H100_REGISTERS_56 H100_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define H100_REGISTERS_64 H100_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define H100_OUT_80(d) H100_OUT_64(d), H100_OUT_8(d, 64), H100_OUT_8(d, 72)
#define H100_OUT_96(d) H100_OUT_80(d), H100_OUT_8(d, 80), H100_OUT_8(d, 88)
#define H100_OUT_128(d) \
  H100_OUT_96(d), H100_OUT_8(d, 96), H100_OUT_8(d, 104), H100_OUT_8(d, 112), H100_OUT_8(d, 120)
#define H100_REGISTERS_80 \
  H100_REGISTERS_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define H100_REGISTERS_96 \
  H100_REGISTERS_80       \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define H100_REGISTERS_128                                                                              \
  H100_REGISTERS_96                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112," \
  " %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

namespace h100_diffusers_kernels {

constexpr int kWarpGroupThreads = 128;
constexpr int kWarpGroupWarps = kWarpGroupThreads / 32;
constexpr int kWarpGroupRows = 64;
constexpr int kWgmmaDepth = 16;  // inner dimension of one instruction

// Descriptor of a matrix in shared memory, in boxes of tensor_copy.cuh. Only the lower half is stored,
// because the upper half is the same for all. Offsets are multiples of 16 bytes.
struct MatrixDescriptor {
  uint32_t address_and_next_box;

  // The inner dimension is along the 128-byte rows.
  __device__ __forceinline__ static MatrixDescriptor along_rows(uint32_t address) { return of(address, 0); }
  // The inner dimension is across the rows. Columns from kBoxColumns on are at next_box, further boxes at the
  // same distance from each other.
  __device__ __forceinline__ static MatrixDescriptor across_rows(uint32_t address, uint32_t next_box) {
    return of(address, next_box - address);
  }
  __device__ __forceinline__ MatrixDescriptor plus(int bytes) const {
    return {address_and_next_box + static_cast<uint32_t>(bytes / 16)};
  }
  // Moves the first box; the next box stays.
  __device__ __forceinline__ MatrixDescriptor first_box_plus(int bytes) const {
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

  __device__ __forceinline__ static MatrixDescriptor of(uint32_t address, uint32_t next_box_bytes) {
    return {address / 16 | next_box_bytes / 16 << kNextBoxBit};
  }
};

// Adds the product of 64 rows of a and kColumns columns of b to d, or sets d to it, asynchronously. The
// operands must not change, and d must not be accessed, until wgmma_wait_group returns.
template <typename T, int kColumns>
struct Wgmma;

// a_from_registers has a in registers, and the inner dimension of b across its rows. The macro's arguments
// are the columns, the number of values of d, and the numbers of the operands after d: four of a, b,
// accumulate.
#define H100_OF_REGISTERS(type, columns, values, a0, a1, a2, a3, b0, flag)                            \
  __device__ __forceinline__ static void a_from_registers(float (&d)[values], const uint32_t (&a)[4], \
                                                          MatrixDescriptor b, bool accumulate) {      \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #flag                         \
                 ", 0;\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                \
                 " {" H100_REGISTERS_##values "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0    \
                                              ", accumulate, 1, 1, 1;\n}"                             \
                 : H100_OUT_##values(d)                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()),                   \
                   "r"(static_cast<int>(accumulate)));                                                \
  }
#define H100_PRODUCT(T, type, columns, ...)       \
  template <>                                     \
  struct Wgmma<T, columns> {                      \
    H100_OF_REGISTERS(type, columns, __VA_ARGS__) \
  }
// a_from_shared has a and b in shared memory, and the inner dimension along their rows. The numbers are those
// of a, b and accumulate.
#define H100_OF_SHARED(type, columns, values, a0, b0, flag)                                            \
  template <class Descriptor>                                                                          \
  __device__ __forceinline__ static void a_from_shared(float (&d)[values], Descriptor a, Descriptor b, \
                                                       bool accumulate) {                              \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #flag                          \
                 ", 0;\n"                                                                              \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                 \
                 " {" H100_REGISTERS_##values "}, %" #a0 ", %" #b0 ", accumulate, 1, 1, 0, 0;\n}"      \
                 : H100_OUT_##values(d)                                                                \
                 : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));       \
  }
#define H100_PRODUCTS(T, type)                               \
  template <>                                                \
  struct Wgmma<T, 32> {                                      \
    H100_OF_SHARED(type, 32, 16, 16, 17, 18)                 \
  };                                                         \
  H100_PRODUCT(T, type, 64, 32, 32, 33, 34, 35, 36, 37);     \
  H100_PRODUCT(T, type, 72, 36, 36, 37, 38, 39, 40, 41);     \
  H100_PRODUCT(T, type, 80, 40, 40, 41, 42, 43, 44, 45);     \
  template <>                                                \
  struct Wgmma<T, 96> {                                      \
    H100_OF_REGISTERS(type, 96, 48, 48, 49, 50, 51, 52, 53)  \
    H100_OF_SHARED(type, 96, 48, 48, 49, 50)                 \
  };                                                         \
  H100_PRODUCT(T, type, 112, 56, 56, 57, 58, 59, 60, 61);    \
  template <>                                                \
  struct Wgmma<T, 128> {                                     \
    H100_OF_REGISTERS(type, 128, 64, 64, 65, 66, 67, 68, 69) \
    H100_OF_SHARED(type, 128, 64, 64, 65, 66)                \
  };                                                         \
  template <>                                                \
  struct Wgmma<T, 160> {                                     \
    H100_OF_SHARED(type, 160, 80, 80, 81, 82)                \
  };                                                         \
  template <>                                                \
  struct Wgmma<T, 192> {                                     \
    H100_OF_SHARED(type, 192, 96, 96, 97, 98)                \
  };                                                         \
  template <>                                                \
  struct Wgmma<T, 256> {                                     \
    H100_OF_SHARED(type, 256, 128, 128, 129, 130)            \
  }
H100_PRODUCTS(__nv_bfloat16, "bf16");
H100_PRODUCTS(__half, "f16");
#undef H100_PRODUCTS
#undef H100_PRODUCT
#undef H100_OF_SHARED
#undef H100_OF_REGISTERS

// c += a b for 16 x 16 and 16 x 8 matrices. Unlike wgmma it is synchronous and takes one warp.
template <typename T>
__device__ __forceinline__ void multiply_16x8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
#define H100_MULTIPLY(type)                                                  \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<T, __half>)
    H100_MULTIPLY("f16");
  else
    H100_MULTIPLY("bf16");
#undef H100_MULTIPLY
}

// Orders register accesses before the next wgmma. All threads of the warp group call it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Makes one wgmma group of the products issued since the previous commit.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the kGroups newest wgmma groups are pending.
template <int kGroups = 0>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving the computation of the values, and their uses, across this point. Without it
// the compiler moves waits to the front, and rounds into registers that a wgmma still reads
// (notes/attention.md, "128 columns: S before P V").
template <int kSize>
__device__ __forceinline__ void compiler_fence(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kSize>
__device__ __forceinline__ void compiler_fence(int (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Set the number of registers of each thread of the warp group. Registers that one group releases can be
// allocated by others.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The first warp group of a block loads, the others compute.
struct WarpRole {
  int group;               // of the computing groups; -1 for the loading group
  int thread, warp, lane;  // in the group

  __device__ __forceinline__ WarpRole()
      : group(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroupThreads, 0) - 1),
        thread(static_cast<int>(threadIdx.x) % kWarpGroupThreads),
        warp(thread / 32),
        lane(thread % 32) {}

  __device__ __forceinline__ bool is_loader() const { return group < 0; }
  // One lane of each warp.
  __device__ __forceinline__ bool is_elected() const { return lane == 0; }
  // The row, of the group's 64, whose address this lane passes to stmatrix.
  __device__ __forceinline__ int fragment_row() const { return warp * 16 + lane % 16; }
  // The first (i = 0) or second (i = 1) row, of the group's 64, whose scores and outputs this thread has.
  __device__ __forceinline__ int output_row(int i) const { return warp * 16 + lane / 4 + 8 * i; }
  // Synchronizes the threads of this group only.
  __device__ __forceinline__ void sync_group() const { bar_sync(1 + group, kWarpGroupThreads); }
};

// Address of the block's dynamic shared memory, rounded up to the alignment of a swizzled tile.
constexpr uint32_t kTileAlignment = kSwizzleBytes;
__device__ __forceinline__ uint32_t shared_tiles() {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  return (shared_address(shared_memory) + kTileAlignment - 1) & ~(kTileAlignment - 1);
}

// Stores 16 x 16 elements of 16 bits, in the register layout of wgmma's a, to shared memory. Each lane passes
// the address of the 16 bytes of row lane % 16 that start at column 8 (lane / 16).
__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// Loads what stmatrix with the same addresses stores.
__device__ __forceinline__ void ldmatrix(uint32_t address, uint32_t (&fragment)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

// Products for FP8 have a depth of 32 at a time. Both matrices are in shared memory, with the inner dimension
// along rows of 128 bytes. The accumulator of an instruction keeps about 14 bits, so that sums over more than
// one box (128 values) belong into other registers.
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

// The products of attention in 8 bits. scores: a and b are INT8 in shared memory, d is integers. outputs: a
// is E4M3 in registers, four values in each; a0 and a1 hold columns 4 (lane % 4) to 4 (lane % 4) + 3 of the
// two rows, a2 and a3 the columns 16 to the right. b has 128 columns of values and 8 of ones.
#define H100_OUT_68(d) H100_OUT_64(d), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define H100_REGISTERS_68 H100_REGISTERS_64 ", %64, %65, %66, %67"
#define H100_INTEGERS_8(d, i)                                                                 \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
      "+r"(d[i + 6]), "+r"(d[i + 7])
struct Int8Wgmma {
  __device__ __forceinline__ static void scores(int (&d)[64], MatrixDescriptor a, MatrixDescriptor b,
                                                bool accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" H100_REGISTERS_64 "}, %64, %65, accumulate;\n}"
        : H100_INTEGERS_8(d, 0), H100_INTEGERS_8(d, 8), H100_INTEGERS_8(d, 16), H100_INTEGERS_8(d, 24),
          H100_INTEGERS_8(d, 32), H100_INTEGERS_8(d, 40), H100_INTEGERS_8(d, 48), H100_INTEGERS_8(d, 56)
        : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));
  }
  __device__ __forceinline__ static void outputs(float (&d)[68], const uint32_t (&a)[4], MatrixDescriptor b,
                                                 bool accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %73, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" H100_REGISTERS_68
        "}, {%68, %69, %70, %71}, %72, accumulate, 1, 1;\n}"
        : H100_OUT_68(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "r"(static_cast<int>(accumulate)));
  }
};
#undef H100_INTEGERS_8
#undef H100_REGISTERS_68
#undef H100_OUT_68

// As Wgmma's a_from_registers, with the inner dimension of b along the 128-byte rows (imm-trans-b is 0) and
// fewer columns.
template <typename T, int kColumns>
struct WgmmaAlongRows;

#define H100_PRODUCT(T, type, columns, values, out, a0, a1, a2, a3, b_operand, flag)                        \
  template <>                                                                                               \
  struct WgmmaAlongRows<T, columns> {                                                                       \
    __device__ __forceinline__ static void a_from_registers(float (&d)[values], const uint32_t (&a)[4],     \
                                                            MatrixDescriptor b, bool accumulate) {          \
      asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #flag                             \
                   ", 0;\n"                                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type                    \
                   " {" H100_REGISTERS_##values "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_operand \
                                                ", accumulate, 1, 1, 0;\n}"                                 \
                   : out                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()),                       \
                     "r"(static_cast<int>(accumulate)));                                                    \
    }                                                                                                       \
  }
#define H100_PRODUCTS(T, type)                                           \
  H100_PRODUCT(T, type, 16, 8, H100_OUT_8(d, 0), 8, 9, 10, 11, 12, 13);  \
  H100_PRODUCT(T, type, 32, 16, H100_OUT_16(d), 16, 17, 18, 19, 20, 21); \
  H100_PRODUCT(T, type, 64, 32, H100_OUT_32(d), 32, 33, 34, 35, 36, 37); \
  H100_PRODUCT(T, type, 128, 64, H100_OUT_64(d), 64, 65, 66, 67, 68, 69)
H100_PRODUCTS(__nv_bfloat16, "bf16");
H100_PRODUCTS(__half, "f16");
#undef H100_PRODUCTS
#undef H100_PRODUCT

}  // namespace h100_diffusers_kernels
