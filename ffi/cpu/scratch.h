// Working memory that each thread keeps from call to call.
#pragma once

#include <cstddef>

namespace tilekern::cpu {

enum class ScratchUse { kLhs, kRhs, kSums };

// This thread's memory for one use, at least `bytes` long and aligned to 64; the next request for
// the same use invalidates it.
void* Scratch(ScratchUse use, size_t bytes);

}  // namespace tilekern::cpu
