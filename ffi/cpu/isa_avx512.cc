// Kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "avx512";

#include "cpu/int16_pairs.inc"

}  // namespace

void AddAvx512Kernels(KernelTable& table) {
  AddCommonKernels(table);
  table.gemm[static_cast<int>(DType::kS8)] = &kGemmS8;
  table.vector[static_cast<int>(DType::kS8)] = &kVectorS8;
  table.dot[static_cast<int>(DType::kS8)] = Dot<S8Pairs, S8Pairs, uint64_t>;
}

}  // namespace tilekern::cpu
