#include "cpu/direct_product.h"

#include "cpu/scratch.h"

namespace tilekern::cpu {

constexpr int64_t kMaxDepth = 2048;

bool IsDirectProduct(const GemmFamily& family, const Product& p) {
  if (family.direct == nullptr || p.k > kMaxDepth) return false;
  const auto is_units = [&](DType type) { return Bytes(type) == family.unit_bytes; };
  if (!is_units(p.lhs.type) || !is_units(p.rhs.type) || !is_units(p.out.type)) return false;
  return p.n <= kL2Bytes / (p.k * family.unit_bytes);
}

void RunDirectProduct(const GemmFamily& family, const Product& p) {
  DirectProduct direct = {p.m,
                          p.n,
                          p.k,
                          p.lhs.data,
                          p.lhs.row_stride,
                          p.lhs.col_stride,
                          p.rhs.data,
                          p.rhs.row_stride,
                          p.out.data,
                          p.out.row_stride};
  if (p.rhs.col_stride != 1 && p.n > 1) {
    direct.rhs_k_stride = RoundUp(p.n, family.lanes);
    const int64_t units = p.k * direct.rhs_k_stride + family.lanes;
    void* rhs = Scratch(ScratchUse::kRhs, units * family.unit_bytes);
    family.pack_rhs[static_cast<int>(p.rhs.type)](
        {p.rhs.data, p.rhs.col_stride, p.rhs.row_stride, p.n, p.n, p.k}, direct.rhs_k_stride, 1, 0,
        rhs);
    direct.rhs = rhs;
  }
  family.direct(direct);
}

}  // namespace tilekern::cpu
