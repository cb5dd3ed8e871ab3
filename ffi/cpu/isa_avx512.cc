// Kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "avx512";

#include "cpu/int16_pairs.inc"

}  // namespace

void AddAvx512Kernels(KernelTable& table) { AddCommonKernels<S8Pairs, S8Pairs>(table); }

}  // namespace tilekern::cpu
