// The element types of CPU kernels. It has no includes, because the instruction-set files read it
// too.
#pragma once

namespace tilekern::cpu {

// clang-format off
enum class DType {
  kF32, kF64, kBF16, kF16, kF8E4M3FN, kF8E5M2,
  kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64,
  kC64, kC128,
};
// clang-format on
inline constexpr int kNumDTypes = 16;

inline int Bytes(DType type) {
  switch (type) {
    case DType::kC128:
      return 16;
    case DType::kF64:
    case DType::kS64:
    case DType::kU64:
    case DType::kC64:
      return 8;
    case DType::kF32:
    case DType::kS32:
    case DType::kU32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kS16:
    case DType::kU16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace tilekern::cpu
