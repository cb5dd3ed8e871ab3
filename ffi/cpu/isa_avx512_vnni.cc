// int8 products by vpdpbusd, which multiplies unsigned by signed bytes, four values of k at once.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernel_table.h"

namespace tilekern::cpu {
namespace {

constexpr char kInstructionSet[] = "avx512_vnni";

#include "cpu/gemm_kernel.inc"
#include "cpu/pack.inc"

struct S8Quads {
  using Element = int8_t;
  using Unit = uint32_t;
  using Units = U32;
  using Accumulators = U32;
  static constexpr int kGroup = 4;
  static constexpr int kRowStep = 4;
  static constexpr int64_t kGroupsPerBlock = 384;
  static constexpr bool kRhsHeader = true;

  static TILEKERN_INLINE U32 Along(const int8_t* p) { return Load<U32>(p); }
  static TILEKERN_INLINE U32 Across(const int8_t* p, int64_t k_stride) {
    return Widen(Load<U8>(p)) | Widen(Load<U8>(p + k_stride)) << 8 |
           Widen(Load<U8>(p + 2 * k_stride)) << 16 | Widen(Load<U8>(p + 3 * k_stride)) << 24;
  }
  static TILEKERN_INLINE U32 Broadcast(uint32_t unit) { return unit + U32{}; }
  static TILEKERN_INLINE U32 Dot(U32 acc, U32 a, U32 b) {
    return (U32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
  }
};

// The unsigned operand: each value plus 128.
struct S8QuadsPlus128 : S8Quads {
  static TILEKERN_INLINE U32 Along(const int8_t* p) { return S8Quads::Along(p) ^ 0x80808080u; }
  static TILEKERN_INLINE U32 Across(const int8_t* p, int64_t k_stride) {
    return S8Quads::Across(p, k_stride) ^ 0x80808080u;
  }
};

// Prefixes each panel with -128 times its columns' sums, which cancels the offset.
void PackRhs(const PanelSource& source, int64_t width, int64_t panels, int64_t panel_bytes,
             void* to) {
  auto* first = static_cast<char*>(to);
  Pack<S8Quads>(source, width, panels, panel_bytes, first + width * sizeof(uint32_t));
  const int64_t groups = (source.k + S8Quads::kGroup - 1) / S8Quads::kGroup;
  const U32 ones = U32{} + 0x01010101u;
  for (int64_t p = 0; p < panels; ++p) {
    auto* header = reinterpret_cast<uint32_t*>(first + p * panel_bytes);
    for (int64_t c = 0; c < width; c += kLanes) {
      U32 sums = {};
      for (int64_t g = 1; g <= groups; ++g) {
        sums = S8Quads::Dot(sums, ones, Load<U32>(header + g * width + c));
      }
      Store(header + c, sums * (uint32_t)-128);
    }
  }
}

constexpr GemmFamily MakeGemm() {
  GemmFamily family = MakeGemmFamily<S8Quads>("s8");
  constexpr int t = static_cast<int>(DType::kS8);
  family.pack_lhs[t] = Pack<S8QuadsPlus128>;
  family.pack_rhs[t] = PackRhs;
  return family;
}

constexpr GemmFamily kGemm = MakeGemm();

}  // namespace

void AddAvx512VnniKernels(KernelTable& table) { table.gemm[static_cast<int>(DType::kS8)] = &kGemm; }

}  // namespace tilekern::cpu
