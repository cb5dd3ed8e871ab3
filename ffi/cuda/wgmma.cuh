// Warpgroup MMA (wgmma, sm_90a): four warps multiply 64 rows by kN columns over 32 bytes of k.
// Operands are read from shared memory, or lhs from registers.
//
// MMAs run asynchronously: warpgroup_fence_operand() and warpgroup_arrive(), then multiply() any
// number of times, then warpgroup_commit_batch(). warpgroup_wait() waits until batches have
// retired; until then the accumulators, and registers that hold lhs, must not be touched.
//
// Warp w of the warpgroup holds rows 16w to 16w+15. As with mma.sync, lane 4g + t holds, of columns
// 8j to 8j+7, the accumulators of rows g and 8+g in columns 2t and 2t+1: accumulators[4j] and
// [4j+1] are of row g, [4j+2] and [4j+3] of row 8+g.
#pragma once

#include "types.cuh"

namespace tilekern {

// Matrix descriptors hold addresses in units of 16 bytes, with room for all of a CTA's shared
// memory, so distances can be added to a descriptor.
inline constexpr int kDescriptorUnit = 16;

// The matrix descriptor of an operand in shared memory, in rows of 128 bytes with TMA's 128-byte
// swizzle. Groups of eight rows are 1024 bytes apart. Where rows run along M or N rather than along
// k, chunks of 128 bytes of M or N are `chunk_bytes` apart. In a cluster, shared addresses have the
// CTA's rank above the bits of its own memory; the mask removes it.
inline uint64 matrix_descriptor(uint32 address, int chunk_bytes) {
  constexpr uint64 kSwizzle128 = 1ull << 62;
  constexpr uint64 kRowGroup = 1024ull / kDescriptorUnit << 32;
  return kSwizzle128 | kRowGroup | static_cast<uint64>(chunk_bytes / kDescriptorUnit) << 16 |
         (address & 0x3FFFF) / kDescriptorUnit;
}

// Keeps the compiler from moving accesses to the accumulators across this point, since it does not
// know that wgmma writes them asynchronously.
template <typename Accumulator, int kCount>
inline void warpgroup_fence_operand(Accumulator (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kSame<Accumulator, float>) {
      asm volatile("" : "+f"(accumulators[i])::"memory");
    } else {
      asm volatile("" : "+r"(accumulators[i])::"memory");
    }
  }
}

// Orders the warpgroup's accesses to registers and shared memory before the MMAs that follow.
inline void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

inline void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the committed batches of MMAs are still in flight.
template <int kPending>
inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Lowers or raises the warpgroup's registers per thread to kRegisters.
template <int kRegisters>
inline void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
inline void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The MMA's types, and how the instruction spells them.
template <typename Lhs, typename Rhs>
struct WgmmaTypes;

#define TILEKERN_WGMMA_TYPES(Lhs, Rhs, AccumulatorType, spelling) \
  template <>                                                     \
  struct WgmmaTypes<Lhs, Rhs> {                                   \
    using Accumulator = AccumulatorType;                          \
    static constexpr char kSpelling[] = spelling;                 \
  };

TILEKERN_WGMMA_TYPES(bfloat16, bfloat16, float, "k16.f32.bf16.bf16")
TILEKERN_WGMMA_TYPES(float16, float16, float, "k16.f32.f16.f16")
TILEKERN_WGMMA_TYPES(float, float, float, "k8.f32.tf32.tf32")
TILEKERN_WGMMA_TYPES(int8, int8, int32, "k32.s32.s8.s8")
TILEKERN_WGMMA_TYPES(float8_e4m3fn, float8_e4m3fn, float, "k32.f32.e4m3.e4m3")
TILEKERN_WGMMA_TYPES(float8_e4m3fn, float8_e5m2, float, "k32.f32.e4m3.e5m2")
TILEKERN_WGMMA_TYPES(float8_e5m2, float8_e4m3fn, float, "k32.f32.e5m2.e4m3")
TILEKERN_WGMMA_TYPES(float8_e5m2, float8_e5m2, float, "k32.f32.e5m2.e5m2")

#undef TILEKERN_WGMMA_TYPES

// The instruction's last operands: signs where accumulators are floats, and for 16-bit types which
// operands in shared memory are not k-major.
struct NoFlags {
  static constexpr char kShared[] = "", kRegisters[] = "";
};
struct Signs {
  static constexpr char kShared[] = ", 1, 1", kRegisters[] = ", 1, 1";
};
template <bool kLhsKMajor, bool kRhsKMajor>
struct SignsAndOrders;
template <>
struct SignsAndOrders<true, true> {
  static constexpr char kShared[] = ", 1, 1, 0, 0", kRegisters[] = ", 1, 1, 0";
};
template <>
struct SignsAndOrders<true, false> {
  static constexpr char kShared[] = ", 1, 1, 0, 1", kRegisters[] = ", 1, 1, 1";
};
template <>
struct SignsAndOrders<false, true> {
  static constexpr char kShared[] = ", 1, 1, 1, 0";
};
template <>
struct SignsAndOrders<false, false> {
  static constexpr char kShared[] = ", 1, 1, 1, 1";
};

// The instruction's operands are written out for each size: R lists registers %0, %1, ... as text,
// and B binds them to the array `accumulators`. Both go by tens, whose leading digits are given.
#define TILEKERN_R2(t) "%" #t "0, %" #t "1"
#define TILEKERN_R4(t) TILEKERN_R2(t) ", %" #t "2, %" #t "3"
#define TILEKERN_R6(t) TILEKERN_R4(t) ", %" #t "4, %" #t "5"
#define TILEKERN_R8(t) TILEKERN_R6(t) ", %" #t "6, %" #t "7"
#define TILEKERN_R10(t) TILEKERN_R8(t) ", %" #t "8, %" #t "9"
#define TILEKERN_B2(k, t) k(accumulators[t##0]), k(accumulators[t##1])
#define TILEKERN_B4(k, t) TILEKERN_B2(k, t), k(accumulators[t##2]), k(accumulators[t##3])
#define TILEKERN_B6(k, t) TILEKERN_B4(k, t), k(accumulators[t##4]), k(accumulators[t##5])
#define TILEKERN_B8(k, t) TILEKERN_B6(k, t), k(accumulators[t##6]), k(accumulators[t##7])
#define TILEKERN_B10(k, t) TILEKERN_B8(k, t), k(accumulators[t##8]), k(accumulators[t##9])
#define TILEKERN_R_10 TILEKERN_R10()
#define TILEKERN_B_10(k) TILEKERN_B10(k, )
#define TILEKERN_R_20 TILEKERN_R_10 ", " TILEKERN_R10(1)
#define TILEKERN_B_20(k) TILEKERN_B_10(k), TILEKERN_B10(k, 1)
#define TILEKERN_R_30 TILEKERN_R_20 ", " TILEKERN_R10(2)
#define TILEKERN_B_30(k) TILEKERN_B_20(k), TILEKERN_B10(k, 2)
#define TILEKERN_R_40 TILEKERN_R_30 ", " TILEKERN_R10(3)
#define TILEKERN_B_40(k) TILEKERN_B_30(k), TILEKERN_B10(k, 3)
#define TILEKERN_R_50 TILEKERN_R_40 ", " TILEKERN_R10(4)
#define TILEKERN_B_50(k) TILEKERN_B_40(k), TILEKERN_B10(k, 4)
#define TILEKERN_R_60 TILEKERN_R_50 ", " TILEKERN_R10(5)
#define TILEKERN_B_60(k) TILEKERN_B_50(k), TILEKERN_B10(k, 5)
#define TILEKERN_R_70 TILEKERN_R_60 ", " TILEKERN_R10(6)
#define TILEKERN_B_70(k) TILEKERN_B_60(k), TILEKERN_B10(k, 6)
#define TILEKERN_R_80 TILEKERN_R_70 ", " TILEKERN_R10(7)
#define TILEKERN_B_80(k) TILEKERN_B_70(k), TILEKERN_B10(k, 7)
#define TILEKERN_R_90 TILEKERN_R_80 ", " TILEKERN_R10(8)
#define TILEKERN_B_90(k) TILEKERN_B_80(k), TILEKERN_B10(k, 8)
#define TILEKERN_R_100 TILEKERN_R_90 ", " TILEKERN_R10(9)
#define TILEKERN_B_100(k) TILEKERN_B_90(k), TILEKERN_B10(k, 9)
#define TILEKERN_R_110 TILEKERN_R_100 ", " TILEKERN_R10(10)
#define TILEKERN_B_110(k) TILEKERN_B_100(k), TILEKERN_B10(k, 10)
#define TILEKERN_R_120 TILEKERN_R_110 ", " TILEKERN_R10(11)
#define TILEKERN_B_120(k) TILEKERN_B_110(k), TILEKERN_B10(k, 11)
#define TILEKERN_R_4 TILEKERN_R4()
#define TILEKERN_B_4(k) TILEKERN_B4(k, )
#define TILEKERN_R_8 TILEKERN_R8()
#define TILEKERN_B_8(k) TILEKERN_B8(k, )
#define TILEKERN_R_16 TILEKERN_R_10 ", " TILEKERN_R6(1)
#define TILEKERN_B_16(k) TILEKERN_B_10(k), TILEKERN_B6(k, 1)
#define TILEKERN_R_32 TILEKERN_R_30 ", " TILEKERN_R2(3)
#define TILEKERN_B_32(k) TILEKERN_B_30(k), TILEKERN_B2(k, 3)
#define TILEKERN_R_48 TILEKERN_R_40 ", " TILEKERN_R8(4)
#define TILEKERN_B_48(k) TILEKERN_B_40(k), TILEKERN_B8(k, 4)
#define TILEKERN_R_64 TILEKERN_R_60 ", " TILEKERN_R4(6)
#define TILEKERN_B_64(k) TILEKERN_B_60(k), TILEKERN_B4(k, 6)
#define TILEKERN_R_96 TILEKERN_R_90 ", " TILEKERN_R6(9)
#define TILEKERN_B_96(k) TILEKERN_B_90(k), TILEKERN_B6(k, 9)
#define TILEKERN_R_112 TILEKERN_R_110 ", " TILEKERN_R2(11)
#define TILEKERN_B_112(k) TILEKERN_B_110(k), TILEKERN_B2(k, 11)
#define TILEKERN_R_128 TILEKERN_R_120 ", " TILEKERN_R8(12)
#define TILEKERN_B_128(k) TILEKERN_B_120(k), TILEKERN_B8(k, 12)

// One MMA over 32 bytes of k: adds to the accumulators, or overwrites them unless `accumulate`. `r`
// is the number of accumulators, and p0 to p7 are the numbers of the instruction's operands after
// them.
#define TILEKERN_WGMMA(n, r, Accumulator, k, p0, p1, p2, p3, p4, p5, p6, p7)                       \
  template <class Types, class Flags>                                                              \
  inline void multiply(Accumulator(&accumulators)[r], uint64 lhs, uint64 rhs, int accumulate) {    \
    asm volatile(                                                                                  \
        "{ .reg .pred p; setp.ne.b32 p, %" #p2 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "%" #p3 \
        " {" TILEKERN_R_##r "}, %" #p0 ", %" #p1 ", p%" #p4 "; }"                                  \
        : TILEKERN_B_##r(k)                                                                        \
        : "l"(lhs), "l"(rhs), "r"(accumulate), "C"(Types::kSpelling), "C"(Flags::kShared));        \
  }                                                                                                \
  template <class Types, class Flags>                                                              \
  inline void multiply(Accumulator(&accumulators)[r], const uint32(&lhs)[4], uint64 rhs,           \
                       int accumulate) {                                                           \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p5                                            \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #n "%" #p6 " {" TILEKERN_R_##r           \
                 "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p%" #p7 "; }"             \
                 : TILEKERN_B_##r(k)                                                               \
                 : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs), "r"(accumulate),  \
                   "C"(Types::kSpelling), "C"(Flags::kRegisters));                                 \
  }

TILEKERN_WGMMA(8, 4, float, "+f", 4, 5, 6, 7, 8, 9, 10, 11)
TILEKERN_WGMMA(16, 8, float, "+f", 8, 9, 10, 11, 12, 13, 14, 15)
TILEKERN_WGMMA(32, 16, float, "+f", 16, 17, 18, 19, 20, 21, 22, 23)
TILEKERN_WGMMA(64, 32, float, "+f", 32, 33, 34, 35, 36, 37, 38, 39)
TILEKERN_WGMMA(96, 48, float, "+f", 48, 49, 50, 51, 52, 53, 54, 55)
TILEKERN_WGMMA(128, 64, float, "+f", 64, 65, 66, 67, 68, 69, 70, 71)
TILEKERN_WGMMA(160, 80, float, "+f", 80, 81, 82, 83, 84, 85, 86, 87)
TILEKERN_WGMMA(192, 96, float, "+f", 96, 97, 98, 99, 100, 101, 102, 103)
TILEKERN_WGMMA(224, 112, float, "+f", 112, 113, 114, 115, 116, 117, 118, 119)
TILEKERN_WGMMA(256, 128, float, "+f", 128, 129, 130, 131, 132, 133, 134, 135)
TILEKERN_WGMMA(8, 4, int32, "+r", 4, 5, 6, 7, 8, 9, 10, 11)
TILEKERN_WGMMA(16, 8, int32, "+r", 8, 9, 10, 11, 12, 13, 14, 15)
TILEKERN_WGMMA(32, 16, int32, "+r", 16, 17, 18, 19, 20, 21, 22, 23)
TILEKERN_WGMMA(64, 32, int32, "+r", 32, 33, 34, 35, 36, 37, 38, 39)
TILEKERN_WGMMA(96, 48, int32, "+r", 48, 49, 50, 51, 52, 53, 54, 55)
TILEKERN_WGMMA(128, 64, int32, "+r", 64, 65, 66, 67, 68, 69, 70, 71)
TILEKERN_WGMMA(160, 80, int32, "+r", 80, 81, 82, 83, 84, 85, 86, 87)
TILEKERN_WGMMA(192, 96, int32, "+r", 96, 97, 98, 99, 100, 101, 102, 103)
TILEKERN_WGMMA(224, 112, int32, "+r", 112, 113, 114, 115, 116, 117, 118, 119)
TILEKERN_WGMMA(256, 128, int32, "+r", 128, 129, 130, 131, 132, 133, 134, 135)

#undef TILEKERN_WGMMA

}  // namespace tilekern
