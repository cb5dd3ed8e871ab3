// Warp-level MMAs: 16 rows by 8 columns, over 32 bytes of k (64 for float64).
//
// An operand consists of core matrices of 8 rows (lhs) or columns (rhs). Lane 4 * g + t holds row
// or column g of each core matrix, in two registers that cover the two halves of k:
//
//     type      k in half 0          k in half 1
//     8-bit     4t .. 4t+3           16+4t .. 16+4t+3
//     16-bit    2t, 2t+1             8+2t, 8+2t+1
//     32-bit    t                    4+t
//     64-bit    t                    4+t
//
// The lhs has two core matrices, the rhs one. A lane's accumulators are elements of columns 2t,
// 2t+1: acc[0], acc[1] of row g and acc[2], acc[3] of row 8+g.
#pragma once

#include "types.cuh"

namespace tilekern {

template <typename Lhs, typename Rhs>
struct Mma;

// One specialisation for each pair of types with 32-bit registers; `kind` is the letter of the
// accumulator's register class in inline assembly.
#define TILEKERN_MMA(Lhs, Rhs, Sum, kind, instruction)                                       \
  template <>                                                                                \
  struct Mma<Lhs, Rhs> {                                                                     \
    using Accumulator = Sum;                                                                 \
    static void run(Sum (&acc)[4], const uint32 (&low)[2], const uint32 (&high)[2],          \
                    const uint32 (&rhs)[2]) {                                                \
      asm("mma.sync.aligned." instruction                                                    \
          " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
          : "+" kind(acc[0]), "+" kind(acc[1]), "+" kind(acc[2]), "+" kind(acc[3])           \
          : "r"(low[0]), "r"(high[0]), "r"(low[1]), "r"(high[1]), "r"(rhs[0]), "r"(rhs[1])); \
    }                                                                                        \
  };

TILEKERN_MMA(bfloat16, bfloat16, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
TILEKERN_MMA(float16, float16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
TILEKERN_MMA(float, float, float, "f", "m16n8k8.row.col.f32.tf32.tf32.f32")
TILEKERN_MMA(int8, int8, int32, "r", "m16n8k32.row.col.s32.s8.s8.s32")
TILEKERN_MMA(float8_e4m3fn, float8_e4m3fn, float, "f", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
TILEKERN_MMA(float8_e4m3fn, float8_e5m2, float, "f", "m16n8k32.row.col.f32.e4m3.e5m2.f32")
TILEKERN_MMA(float8_e5m2, float8_e4m3fn, float, "f", "m16n8k32.row.col.f32.e5m2.e4m3.f32")
TILEKERN_MMA(float8_e5m2, float8_e5m2, float, "f", "m16n8k32.row.col.f32.e5m2.e5m2.f32")

#undef TILEKERN_MMA

template <>
struct Mma<double, double> {
  using Accumulator = double;

  static void run(double (&acc)[4], const double (&low)[2], const double (&high)[2],
                  const double (&rhs)[2]) {
#if __CUDA_ARCH__ >= 900
    // Only the larger shape reaches the full rate here.
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(acc[0]), "+d"(acc[1]), "+d"(acc[2]), "+d"(acc[3])
        : "d"(low[0]), "d"(high[0]), "d"(low[1]), "d"(high[1]), "d"(rhs[0]), "d"(rhs[1]));
#else
    for (int half = 0; half < 2; ++half) {
      run_m8n8k4(acc[0], acc[1], low[half], rhs[half]);
      run_m8n8k4(acc[2], acc[3], high[half], rhs[half]);
    }
#endif
  }

 private:
  static void run_m8n8k4(double& even, double& odd, double lhs, double rhs) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(even), "+d"(odd)
        : "d"(lhs), "d"(rhs));
  }
};

}  // namespace tilekern
