// Caches that every CPU has; limits of what should stay in one follow from these.
#pragma once

#include <cstdint>

namespace tilekern::cpu {

inline constexpr int64_t kLineBytes = 64;
inline constexpr int64_t kL1Bytes = 32 << 10;
inline constexpr int64_t kL2Bytes = 256 << 10;

}  // namespace tilekern::cpu
