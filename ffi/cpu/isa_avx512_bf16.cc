// bfloat16 products by vdpbf16ps, two values of k at once.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "avx512_bf16";

#include "cpu/gemm_kernel.inc"
#include "cpu/pack.inc"

struct Bf16Pairs {
  using Element = uint16_t;
  using Unit = uint32_t;
  using Units = U32;
  using Accumulators = F32;
  static constexpr int kGroup = 2;
  static constexpr int kRowStep = 4;
  static constexpr int64_t kGroupsPerBlock = 384;
  static constexpr bool kRhsHeader = false;

  static TILEKERN_INLINE U32 Along(const uint16_t* p) { return Load<U32>(p); }
  static TILEKERN_INLINE U32 Across(const uint16_t* p, int64_t k_stride) {
    return Widen(Load<U16>(p)) | Widen(Load<U16>(p + k_stride)) << 16;
  }
  static TILEKERN_INLINE U32 Broadcast(uint32_t unit) { return unit + U32{}; }
  static TILEKERN_INLINE F32 Dot(F32 acc, U32 a, U32 b) {
    return (F32)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
};

constexpr GemmFamily MakeGemm() {
  GemmFamily family = MakeGemmFamily<Bf16Pairs>("bf16");
  constexpr int t = static_cast<int>(DType::kBF16);
  family.pack_lhs[t] = family.pack_rhs[t] = Pack<Bf16Pairs>;
  return family;
}

constexpr GemmFamily kGemm = MakeGemm();

}  // namespace

void AddAvx512Bf16Kernels(KernelTable& table) {
  table.gemm[static_cast<int>(DType::kBF16)] = &kGemm;
}

}  // namespace tilekern::cpu
