#include "cpu/vector_product.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMinChunk = 128;
constexpr int64_t kMaxChunk = 1024;  // the sums of a chunk stay in the first-level cache

template <typename Matrix>
Matrix Transposed(Matrix m) {
  std::swap(m.row_stride, m.col_stride);
  return m;
}

}  // namespace

VectorProduct VectorProduct::From(const Product& p) {
  if (p.m <= p.n) return {p.m, p.n, p.k, p.lhs, Transposed(p.rhs), p.out};
  return {p.n, p.m, p.k, Transposed(p.rhs), p.lhs, Transposed(p.out)};
}

bool IsVectorProduct(const VectorProduct& p) {
  return p.smalls <= kMaxVectorRows && (p.big.row_stride == 1 || p.big.col_stride == 1);
}

int64_t VectorChunk(const VectorProduct& p, int64_t tasks) {
  return std::clamp(RoundUp(CeilDiv(p.outer, tasks), kMinChunk), kMinChunk, kMaxChunk);
}

void RunVectorProduct(const VectorFamily& family, StoreFn store, const VectorProduct& p,
                      int64_t first, int64_t count) {
  const int64_t groups = CeilDiv(p.k, family.group);
  const int64_t small_stride = RoundUp(groups, family.lanes) + family.lanes;
  char* small =
      static_cast<char*>(Scratch(ScratchUse::kLhs, p.smalls * small_stride * family.unit_bytes));
  const PackFn pack = family.pack_small[static_cast<int>(p.small.type)];
  pack({p.small.data, p.small.row_stride, p.small.col_stride, p.smalls, p.smalls, p.k}, 1, p.smalls,
       small_stride * family.unit_bytes, small);
  const bool along = p.big.col_stride == 1 && p.big.row_stride != 1;
  const auto& kernels = (along ? family.along : family.across)[static_cast<int>(p.big.type)];
  const int64_t end = first + count;
  const int64_t sums_stride = RoundUp(std::min(count, kMaxChunk), family.lanes);
  void* sums = Scratch(ScratchUse::kSums, p.smalls * sums_stride * family.unit_bytes);
  for (int64_t o = first; o < end; o += kMaxChunk) {
    const int64_t outer = std::min(kMaxChunk, end - o);
    const PanelSource big = {p.big.At(o, 0), p.big.row_stride, p.big.col_stride,
                             outer,          p.outer - o,      p.k};
    kernels[p.smalls - 1](big, small, small_stride, sums, sums_stride);
    store(sums, sums_stride, p.smalls, outer, p.out.At(0, o), p.out.row_stride, p.out.col_stride,
          false);
  }
}

}  // namespace tilekern::cpu
