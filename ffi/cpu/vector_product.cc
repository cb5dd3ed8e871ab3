#include "cpu/vector_product.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMinOuter = 256;
constexpr int64_t kMinElements = 64 << 10;  // of a task that reads rows, which may be few
constexpr int64_t kChunkStep = kLineBytes;  // a line of the cache of every type
constexpr int64_t kMaxOuter = 4096;         // the accumulators of a chunk stay in the cache
constexpr int64_t kDepth = 16384;  // elements of k at a time, which bounds the packed vectors
constexpr int64_t kMaxSmalls = 8;  // exceeds a kernel's number if rows can stay in the cache
constexpr int64_t kCachedRows = 8;
// Columns whose accumulators stay in L1.
constexpr int64_t kCachedColumns = kL1Bytes / (4 * kMaxVectorsAcross);
constexpr int64_t kShortK = 64;     // lanes are added up for each result, however few there are
constexpr int64_t kSeveral = 4;     // vectors that justify packing
constexpr int64_t kFewVectors = 2;  // of a row, the last of which is put together by element

// Whether the large operand is read along k.
bool IsAlong(const VectorProduct& p) { return p.big.col_stride == 1 && p.big.row_stride != 1; }

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
  return p.smalls <= kMaxSmalls && (IsAlong(p) || p.big.row_stride == 1);
}

bool IsSmall(const VectorFamily& family, const VectorProduct& p, bool direct) {
  if (p.smalls == 1) return false;
  if (IsAlong(p)) return p.k < kShortK && (direct || p.smalls >= kSeveral);
  if (p.smalls > kMaxVectorRows) return direct || p.k < kShortK;
  return direct && Bytes(p.big.type) == family.unit_bytes && p.outer < kFewVectors * family.lanes;
}

int64_t VectorChunk(const VectorProduct& p, int64_t threads) {
  if (IsAlong(p)) {
    const int64_t least =
        std::clamp<int64_t>(kMinElements / std::max<int64_t>(p.k, 1), kRowsAlong, kMinOuter);
    return std::clamp(RoundUp(CeilDiv(p.outer, 2 * threads), kRowsAlong), least, kMaxOuter);
  }
  // Across, a task reads a part of every row, which should be long for the prefetcher.
  return std::clamp(RoundUp(CeilDiv(p.outer, threads), kChunkStep), kMinOuter, kMaxOuter);
}

void RunVectorProduct(const VectorFamily& family, StoreFn store, const VectorProduct& p,
                      int64_t first, int64_t count) {
  const int64_t unit = family.unit_bytes;
  const PackFn pack = family.pack_small[static_cast<int>(p.small.type)];
  const int type = static_cast<int>(p.big.type);
  const VectorKernel* kernels = IsAlong(p) ? family.along[type] : family.across[type];
  const int64_t smalls_at_once = IsAlong(p) ? kMaxVectorRows : kMaxVectorsAcross;
  const int64_t max_groups = CeilDiv(std::min(p.k, kDepth), family.group);
  const int64_t small_stride = RoundUp(max_groups, family.lanes) + family.lanes;
  const int64_t sums_stride = RoundUp(std::min(count, kMaxOuter), family.lanes);
  char* small = static_cast<char*>(Scratch(ScratchUse::kLhs, p.smalls * small_stride * unit));
  char* sums = static_cast<char*>(Scratch(ScratchUse::kSums, p.smalls * sums_stride * unit));
  // Along, what is read for some of the vectors stays in the cache for the others.
  const bool several = p.smalls > kMaxVectorRows;
  const int64_t rows_at_once = !several ? kMaxOuter : IsAlong(p) ? kCachedRows : kCachedColumns;
  const int64_t end = first + count;
  for (int64_t chunk = first; chunk < end; chunk += kMaxOuter) {
    const int64_t chunk_end = std::min(chunk + kMaxOuter, end);
    std::memset(sums, 0, p.smalls * sums_stride * unit);
    for (int64_t k = 0; k < p.k; k += kDepth) {
      const int64_t depth = std::min(kDepth, p.k - k);
      const int64_t groups = CeilDiv(depth, family.group);
      pack({p.small.At(0, k), p.small.row_stride, p.small.col_stride, p.smalls, p.smalls, depth}, 1,
           p.smalls, small_stride * unit, small);
      // Kernels read whole vectors of `small`, and the packer leaves the rest of the last one
      // undefined.
      for (int64_t s = 0; s < p.smalls; ++s) {
        std::memset(small + (s * small_stride + groups) * unit, 0,
                    (RoundUp(groups, family.lanes) - groups) * unit);
      }
      for (int64_t o = chunk; o < chunk_end; o += rows_at_once) {
        const PanelSource big = {p.big.At(o, k),   p.big.row_stride,
                                 p.big.col_stride, std::min(rows_at_once, chunk_end - o),
                                 p.outer - o,      depth};
        for (int64_t s = 0; s < p.smalls; s += smalls_at_once) {
          kernels[std::min(p.smalls - s, smalls_at_once) - 1](
              big, small + s * small_stride * unit, small_stride,
              sums + (s * sums_stride + o - chunk) * unit, sums_stride);
        }
      }
    }
    store(sums, sums_stride, p.smalls, chunk_end - chunk, p.out.At(0, chunk), p.out.row_stride,
          p.out.col_stride, false);
  }
}

}  // namespace tilekern::cpu
