#include "cpu/direct_product.h"

#include <algorithm>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMaxRhsBytes = kL2Bytes;
constexpr int64_t kMaxDepth = 2048;       // and so do the rows of lhs, if they are read again
constexpr int64_t kMaxVectorsCopied = 4;  // the limit of columns for operands of other types
// The limits of columns if rows of lhs are read in place: for two vectors of columns at a time,
// over so many elements of k that rhs stays in L2. A copy of rhs pays for many rows of lhs, or for
// fewer columns and a k above kMaxDepth.
constexpr int64_t kMaxVectorsInPlace = 16, kMaxVectorsDeep = 6;
constexpr int64_t kManyRows = 256;
constexpr int64_t kMaxDeepRhsBytes = kL2Bytes * 3 / 2;
constexpr int64_t kLeastDepth = 512;
constexpr int64_t kMaxSharedBytes = 1 << 24;  // of a copy of rhs, which a thread keeps
constexpr int64_t kMaxStridedRows = 256;      // beyond this an lhs in column-major order is copied
constexpr int64_t kRowsAtOnce = 96;           // of a copied operand

bool IsUnits(const GemmFamily& family, DType type) { return Bytes(type) == family.unit_bytes; }

// Whether rhs is read in place.
bool HasRowsOfRhs(const GemmFamily& family, const Product& p) {
  return IsUnits(family, p.rhs.type) && (p.rhs.col_stride == 1 || p.n <= 1);
}

// Whether rows of lhs are read in place and few times, so that their depth is of no matter.
bool IsReadInPlace(const GemmFamily& family, const Product& p) {
  if (p.lhs.col_stride != 1 || !IsUnits(family, p.lhs.type) || !IsUnits(family, p.out.type)) {
    return false;
  }
  const bool cheap = HasRowsOfRhs(family, p) || p.m >= kManyRows;
  if (!cheap && p.k <= kMaxDepth) return false;
  return p.n <= (cheap ? kMaxVectorsInPlace : kMaxVectorsDeep) * family.lanes &&
         p.n <= kMaxDeepRhsBytes / ((cheap ? kLeastDepth : kMaxDepth) * family.unit_bytes);
}

// Copies rhs to scratch memory of this thread, in rows of whole vectors.
const char* CopyRhs(const GemmFamily& family, const Product& p) {
  const int64_t width = RoundUp(p.n, family.lanes);
  auto* to = static_cast<char*>(
      Scratch(ScratchUse::kRhs, (p.k * width + family.lanes) * family.unit_bytes));
  family.pack_rhs[static_cast<int>(p.rhs.type)](
      {p.rhs.data, p.rhs.col_stride, p.rhs.row_stride, p.n, p.n, p.k}, width, 1, 0, to);
  return to;
}

// Computes a product, or adds it to what the output holds.
void Run(const GemmFamily& family, StoreFn store, const Product& p, bool accumulate) {
  const int64_t unit = family.unit_bytes;
  const bool along = p.lhs.col_stride == 1;
  const bool copy_lhs =
      !IsUnits(family, p.lhs.type) || (!along && p.lhs.row_stride == 1 && p.m > kMaxStridedRows);
  const bool convert_out = !IsUnits(family, p.out.type);
  const int64_t rows_at_once = copy_lhs || convert_out ? std::min(p.m, kRowsAtOnce) : p.m;
  const auto scratch = [&](ScratchUse use, int64_t units) {
    return static_cast<char*>(Scratch(use, (units + family.lanes) * unit));
  };

  DirectProduct direct;
  direct.accumulate = accumulate;
  direct.n = p.n;
  direct.k = p.k;
  direct.rhs = p.rhs.data;
  direct.rhs_k_stride = p.rhs.row_stride;
  if (!HasRowsOfRhs(family, p)) {
    direct.rhs = CopyRhs(family, p);
    direct.rhs_k_stride = RoundUp(p.n, family.lanes);
  }
  direct.lhs_row_stride = p.lhs.row_stride;
  direct.lhs_k_stride = p.lhs.col_stride;
  char* lhs = nullptr;
  if (copy_lhs) {  // in its own order: one panel per row, or one panel
    direct.lhs_row_stride = along ? RoundUp(p.k, family.lanes) + family.lanes : 1;
    direct.lhs_k_stride = along ? 1 : RoundUp(rows_at_once, family.lanes);
    lhs = scratch(ScratchUse::kLhs,
                  along ? rows_at_once * direct.lhs_row_stride : p.k * direct.lhs_k_stride);
  }
  direct.out_row_stride = convert_out ? RoundUp(p.n, family.lanes) : p.out.row_stride;
  char* sums = nullptr;
  if (convert_out) sums = scratch(ScratchUse::kSums, rows_at_once * direct.out_row_stride);

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
    if (convert_out) {
      store(sums, direct.out_row_stride, direct.m, p.n, out, p.out.row_stride, 1, false);
    }
  }
}

}  // namespace

bool IsDirectProduct(const GemmFamily& family, const Product& p) {
  if (family.direct == nullptr) return false;
  if (IsReadInPlace(family, p)) return true;
  if (p.k > kMaxDepth) return false;
  if (p.n > kMaxVectorsCopied * family.lanes && !IsUnits(family, p.lhs.type)) return false;
  return p.n <= kMaxRhsBytes / (p.k * family.unit_bytes);
}

Product WithRowsOfRhs(const GemmFamily& family, const Product& p) {
  const bool is_large = p.k * RoundUp(p.n, family.lanes) * family.unit_bytes > kMaxSharedBytes;
  if (HasRowsOfRhs(family, p) || !IsUnits(family, p.rhs.type) || is_large) return p;
  Product copied = p;
  copied.rhs.data = CopyRhs(family, p);
  copied.rhs.row_stride = RoundUp(p.n, family.lanes);
  copied.rhs.col_stride = 1;
  return copied;
}

void RunDirectProduct(const GemmFamily& family, StoreFn store, const Product& p) {
  // Sums go on where those of the part before end, so that the depth does not change them. Results
  // of another type than the sums have a k of one part.
  const int64_t row_bytes = std::max<int64_t>(p.n, 1) * family.unit_bytes;
  const int64_t most = std::clamp(kMaxDeepRhsBytes / row_bytes, kLeastDepth, kMaxDepth);
  const int64_t depth =
      std::max<int64_t>(CeilDiv(p.k, CeilDiv(std::max<int64_t>(p.k, 1), most)), 1);
  // A depth of 0 gives zeros.
  for (int64_t k = 0; k == 0 || k < p.k; k += depth) {
    Product part = p;
    part.k = std::min(depth, p.k - k);
    part.lhs.data = p.lhs.At(0, k);
    part.rhs.data = p.rhs.At(k, 0);
    Run(family, store, part, k > 0);
  }
}

}  // namespace tilekern::cpu
