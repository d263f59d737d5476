// Operands of inline assembly for the accumulators d of wgmma, 32 to 96 registers: their constraints, and
// their names in the instruction.
#pragma once

#define H100_OUT_8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define H100_OUT_32(d) H100_OUT_8(d, 0), H100_OUT_8(d, 8), H100_OUT_8(d, 16), H100_OUT_8(d, 24)
#define H100_OUT_36(d) H100_OUT_32(d), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define H100_OUT_40(d) H100_OUT_32(d), H100_OUT_8(d, 32)
#define H100_OUT_48(d) H100_OUT_40(d), H100_OUT_8(d, 40)
#define H100_OUT_56(d) H100_OUT_48(d), H100_OUT_8(d, 48)
#define H100_OUT_64(d) H100_OUT_56(d), H100_OUT_8(d, 56)

// Operands %0 to %n - 1, without braces.
#define H100_REGISTERS_32                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17," \
  " %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define H100_REGISTERS_36 H100_REGISTERS_32 ", %32, %33, %34, %35"
#define H100_REGISTERS_40 H100_REGISTERS_36 ", %36, %37, %38, %39"
#define H100_REGISTERS_48 H100_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define H100_REGISTERS_56 H100_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define H100_REGISTERS_64 H100_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define H100_OUT_96(d) \
  H100_OUT_64(d), H100_OUT_8(d, 64), H100_OUT_8(d, 72), H100_OUT_8(d, 80), H100_OUT_8(d, 88)
#define H100_REGISTERS_96                                                                                 \
  H100_REGISTERS_64                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83," \
  " %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
