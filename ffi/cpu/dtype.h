// The element types a CPU kernel may meet. No includes: the instruction-set files read it too.
#pragma once

namespace tilekern::cpu {

enum class DType { kF32, kF64, kBF16, kF16, kF8E4M3FN, kF8E5M2, kS8, kS32 };
inline constexpr int kNumDTypes = 8;

}  // namespace tilekern::cpu
