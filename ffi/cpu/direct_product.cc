#include "cpu/direct_product.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMaxDepth = 2048;
constexpr int64_t kMaxVectorsCopied = 4;  // the limit of columns for an lhs that is converted
constexpr int64_t kMaxStridedRows = 256;  // beyond this an lhs in column-major order is copied
constexpr int64_t kRowsAtOnce = 96;       // of a copied operand

bool IsUnits(const GemmFamily& family, DType type) { return Bytes(type) == family.unit_bytes; }

}  // namespace

bool IsDirectProduct(const GemmFamily& family, const Product& p) {
  if (family.direct == nullptr || p.k > kMaxDepth) return false;
  if (p.n > kMaxVectorsCopied * family.lanes && !IsUnits(family, p.lhs.type)) return false;
  return p.n <= kL2Bytes / (p.k * family.unit_bytes);
}

void RunDirectProduct(const GemmFamily& family, StoreFn store, const Product& p) {
  const int64_t unit = family.unit_bytes, width = RoundUp(p.n, family.lanes);
  const bool along = p.lhs.col_stride == 1;
  const bool copy_lhs =
      !IsUnits(family, p.lhs.type) || (!along && p.lhs.row_stride == 1 && p.m > kMaxStridedRows);
  const bool copy_rhs = !IsUnits(family, p.rhs.type) || (p.rhs.col_stride != 1 && p.n > 1);
  const bool convert_out = !IsUnits(family, p.out.type);
  const int64_t rows_at_once = copy_lhs || convert_out ? std::min(p.m, kRowsAtOnce) : p.m;
  const auto scratch = [&](ScratchUse use, int64_t units) {
    return static_cast<char*>(Scratch(use, (units + family.lanes) * unit));
  };

  DirectProduct direct = {p.m,
                          p.n,
                          p.k,
                          nullptr,
                          p.lhs.row_stride,
                          p.lhs.col_stride,
                          p.rhs.data,
                          p.rhs.row_stride,
                          nullptr,
                          p.out.row_stride};
  if (copy_rhs) {
    char* rhs = scratch(ScratchUse::kRhs, p.k * width);
    family.pack_rhs[static_cast<int>(p.rhs.type)](
        {p.rhs.data, p.rhs.col_stride, p.rhs.row_stride, p.n, p.n, p.k}, width, 1, 0, rhs);
    direct.rhs = rhs;
    direct.rhs_k_stride = width;
  }
  char *lhs = nullptr, *sums = nullptr;
  if (copy_lhs) {  // in its own order: one panel per row, or one panel
    direct.lhs_row_stride = along ? RoundUp(p.k, family.lanes) + family.lanes : 1;
    direct.lhs_k_stride = along ? 1 : RoundUp(rows_at_once, family.lanes);
    lhs = scratch(ScratchUse::kLhs,
                  along ? rows_at_once * direct.lhs_row_stride : p.k * direct.lhs_k_stride);
  }
  if (convert_out) {
    direct.out_row_stride = width;
    sums = scratch(ScratchUse::kSums, rows_at_once * width);
  }
  for (int64_t row = 0; row < p.m; row += rows_at_once) {
    const char* rows = p.lhs.At(row, 0);
    char* out = p.out.At(row, 0);
    direct.m = std::min(rows_at_once, p.m - row);
    if (copy_lhs) {
      family.pack_lhs[static_cast<int>(p.lhs.type)](
          {rows, p.lhs.row_stride, p.lhs.col_stride, direct.m, p.m - row, p.k}, direct.lhs_k_stride,
          along ? direct.m : 1, direct.lhs_row_stride * unit, lhs);
    }
    direct.lhs = copy_lhs ? lhs : rows;
    direct.out = convert_out ? sums : out;
    family.direct(direct);
    if (convert_out) store(sums, width, direct.m, p.n, out, p.out.row_stride, 1, false);
  }
}

}  // namespace tilekern::cpu
