// Kernels for any CPU: the compiler's baseline, SSE2 on x86-64 and NEON on arm64.
#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "portable";

#include "cpu/families.inc"

// int8 is widened to unsigned 32 bits, so that sums wrap.
struct AsU32 {
  using Element = int8_t;
  using Unit = uint32_t;
  using Units = U32;
  static constexpr int kGroup = 1;
  static TILEKERN_INLINE U32 Along(const int8_t* p) {
    return (U32) __builtin_convertvector(Load<Vec<int8_t, kLanes>>(p), S32);
  }
  static TILEKERN_INLINE U32 Across(const int8_t* p, int64_t) { return Along(p); }
};

using MultiplyAddU32 = MultiplyAdd<uint32_t, U32, 384>;

}  // namespace

void AddPortableKernels(KernelTable& table) { AddCommonKernels<MultiplyAddU32, AsU32>(table); }

}  // namespace tilekern::cpu
