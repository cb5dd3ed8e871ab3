#include "cpu/dot_product.h"

#include <algorithm>
#include <vector>

namespace tilekern::cpu {
namespace {

constexpr int64_t kDotChunk = 64 << 10;  // elements of k per task

}  // namespace

bool IsDotProduct(const Product& p) {
  return p.m == 1 && p.n == 1 && p.lhs.type == p.rhs.type && p.lhs.col_stride == 1 &&
         p.rhs.row_stride == 1;
}

void RunDotProduct(const KernelTable& kernels, const Product& p, const Workers& workers) {
  const DotKernel dot = kernels.dot[static_cast<int>(p.lhs.type)];
  const auto add = kernels.sum[static_cast<int>(p.lhs.type)]->add;
  const int64_t chunks = CeilDiv(p.k, kDotChunk);
  const auto chunk = [&](int64_t i, Total* total) {
    const int64_t first = i * kDotChunk;
    dot(p.lhs.At(0, first), p.rhs.At(first, 0), std::min(kDotChunk, p.k - first), total);
  };
  Total sum = {};
  if (workers.threads() == 1) {
    for (int64_t i = 0; i < chunks; ++i) {
      Total part = {};
      chunk(i, &part);
      add(&sum, &part, 1);
    }
  } else {
    std::vector<Total> parts(chunks);
    workers.Run(chunks, [&](int64_t i) { chunk(i, &parts[i]); });
    for (const Total& part : parts) add(&sum, &part, 1);
  }
  kernels.sum[static_cast<int>(p.out.type)]->store(&sum, 1, p.out.data);
}

}  // namespace tilekern::cpu
