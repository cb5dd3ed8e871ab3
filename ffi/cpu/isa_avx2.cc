// Kernels for x86-64 with AVX2, FMA and F16C.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "avx2";

#include "cpu/int16_pairs.inc"

}  // namespace

void AddAvx2Kernels(KernelTable& table) { AddCommonKernels<S8Pairs, S8Pairs>(table); }

}  // namespace tilekern::cpu
