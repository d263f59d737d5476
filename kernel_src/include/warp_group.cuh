// Matrix products of a warp group (wgmma), 64 rows at a time, and the registers that its warps have.
//
// A thread of the group holds, of the 64 x N result, columns 8j + 2 (lane % 4) and the next one of rows
// 16 warp + lane / 4 (values 4j, 4j + 1) and 8 below (4j + 2, 4j + 3). A left operand in registers has the
// same places, two values a register.
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
constexpr int kProductDepth = 16;  // of one instruction

// Where an operand lies in shared memory, in boxes of tensor_copy.cuh: the half of its descriptor that is not
// the same for all. Additions go by multiples of 16 bytes.
struct Operand {
  uint32_t address_and_next_box;

  // The depth runs along the rows of 128 bytes.
  __device__ __forceinline__ static Operand along_rows(uint32_t address) { return of(address, 0); }
  // The depth runs from row to row; columns from kBoxColumns on are at next_box, as far from there again the
  // next ones.
  __device__ __forceinline__ static Operand across_rows(uint32_t address, uint32_t next_box) {
    return of(address, next_box - address);
  }
  __device__ __forceinline__ Operand plus(int bytes) const {
    return {address_and_next_box + static_cast<uint32_t>(bytes / 16)};
  }
  // With the next box staying where it is.
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

// d += a b, or d = a b, asynchronously: of 64 rows of a and kColumns of b. The operands must stay as they
// are, and d must not be touched, until wait_for_products has let the thread through.
template <typename T, int kColumns>
struct Product;

// of_registers: a in registers, the depth of b across its rows. As text: how many columns, and the operands,
// which are numbered by position: d, a and b, accumulate. Then d once more, as output.
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
// of_shared: a and b in shared memory, the depth along their rows.
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

// Before the products that follow what has written their registers.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products issued since the last time are one group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all groups but the last kGroups have come to their end.
template <int kGroups = 0>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// The compiler computes the values before the asm that follows, and what is made of them after it. Without
// this it moves waits to the front, and rounds into registers that products are still reading.
template <int kSize>
__device__ __forceinline__ void compute_now(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// How many registers each thread of the warp group has from here on. What one group gives up others can take.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 16 rows by 16 columns of 16 bits, at the places of a left operand, to shared memory. Each lane addresses
// the 16 bytes of row lane % 16, columns 8 (lane / 16) on.
__device__ __forceinline__ void store_fragment(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace h100_diffusers_kernels
