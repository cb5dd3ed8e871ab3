// Scratch memory that each thread keeps between calls.
#pragma once

#include <cstddef>

namespace tilekern::cpu {

enum class ScratchUse { kLhs, kRhs, kSums };

// Returns this thread's memory for one use, at least `bytes` long and aligned to 64. The next
// request for the same use invalidates it.
void* Scratch(ScratchUse use, size_t bytes);

}  // namespace tilekern::cpu
