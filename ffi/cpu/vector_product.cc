#include "cpu/vector_product.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpu/scratch.h"

namespace tilekern::cpu {
namespace {

constexpr int64_t kMinOuter = 256;
constexpr int64_t kMinElements = 64 << 10;  // of a task that reads rows, or a part of k
constexpr int64_t kChunkStep = kLineBytes;  // a line of the cache of every type
constexpr int64_t kMaxOuter = 4096;         // the accumulators of a chunk stay in the cache
constexpr int64_t kDepth = 16384;  // elements of k at a time, which bounds the packed vectors
constexpr int64_t kShortK = 64;    // lanes are added up for each result, however few there are
constexpr int64_t kDotChunk = 64 << 10;  // elements of a dot product per task
constexpr int64_t kMaxParts = 16;        // of k, whose accumulators are added
constexpr int64_t kPartStep = 64;        // a part has whole groups, and whole unrolled loops

// Whether the large operand is read along k.
bool IsAlong(const VectorProduct& p) { return p.big.col_stride == 1 && p.big.row_stride != 1; }

template <typename Matrix>
Matrix Transposed(Matrix m) {
  std::swap(m.row_stride, m.col_stride);
  return m;
}

// Returns the entries of the large operand per task.
int64_t ChunkOf(const VectorProduct& p, int64_t threads) {
  if (threads == 1) return kMaxOuter;
  if (IsAlong(p)) {
    const int64_t least =
        std::clamp<int64_t>(kMinElements / std::max<int64_t>(p.k, 1), kRowsAlong, kMinOuter);
    return std::clamp(RoundUp(CeilDiv(p.outer, 2 * threads), kRowsAlong), least, kMaxOuter);
  }
  // Across, a task reads a part of every row, which should be long for the prefetcher.
  return std::clamp(RoundUp(CeilDiv(p.outer, threads), kChunkStep), kMinOuter, kMaxOuter);
}

// Returns the rows of k per task where the matrix is too narrow to divide it among threads. The
// order of the sums depends on it, so it depends on the sizes alone.
int64_t PartOf(const VectorProduct& p) {
  if (IsAlong(p) || p.outer >= 2 * kMinOuter) return p.k;
  const int64_t least = std::max(kMinElements / p.outer, CeilDiv(p.k, kMaxParts));
  return RoundUp(least, kPartStep);
}

// Adds the terms of `depth` rows of k to `count` entries of each result from `first` on.
void AddTerms(const VectorFamily& family, const VectorProduct& p, int64_t first, int64_t count,
              int64_t first_k, int64_t depth, char* sums, int64_t sums_stride) {
  const int64_t unit = family.unit_bytes;
  const int type = static_cast<int>(p.big.type);
  const VectorKernel kernel = (IsAlong(p) ? family.along : family.across)[type][p.smalls - 1];
  const int64_t small_stride =
      RoundUp(CeilDiv(std::min(depth, kDepth), family.group), family.lanes) + family.lanes;
  char* small = static_cast<char*>(Scratch(ScratchUse::kLhs, p.smalls * small_stride * unit));
  for (int64_t k = first_k; k < first_k + depth; k += kDepth) {
    const int64_t some = std::min(kDepth, first_k + depth - k),
                  groups = CeilDiv(some, family.group);
    family.pack_small[static_cast<int>(p.small.type)](
        {p.small.At(0, k), p.small.row_stride, p.small.col_stride, p.smalls, p.smalls, some}, 1,
        p.smalls, small_stride * unit, small);
    // Kernels read whole vectors of `small`, and the packer leaves the rest of the last one
    // undefined.
    for (int64_t s = 0; s < p.smalls; ++s) {
      std::memset(small + (s * small_stride + groups) * unit, 0,
                  (RoundUp(groups, family.lanes) - groups) * unit);
    }
    kernel({p.big.At(first, k), p.big.row_stride, p.big.col_stride, count, p.outer - first, some},
           small, small_stride, sums, sums_stride);
  }
}

// Computes `count` entries of each result from `first` on.
void RunChunk(const VectorFamily& family, StoreFn store, const VectorProduct& p, int64_t first,
              int64_t count) {
  const int64_t sums_stride = RoundUp(count, family.lanes);
  const int64_t bytes = p.smalls * sums_stride * family.unit_bytes;
  char* sums = static_cast<char*>(Scratch(ScratchUse::kSums, bytes));
  std::memset(sums, 0, bytes);
  AddTerms(family, p, first, count, 0, p.k, sums, sums_stride);
  store(sums, sums_stride, p.smalls, count, p.out.At(0, first), p.out.row_stride, p.out.col_stride,
        false);
}

// Computes the terms of each part of k, and adds them up in order.
void RunParts(const VectorFamily& family, StoreFn store, const VectorProduct& p, int64_t part,
              const Workers& workers) {
  const int64_t parts = CeilDiv(p.k, part), sums_stride = RoundUp(p.outer, family.lanes);
  const int64_t numbers = p.smalls * sums_stride, bytes = numbers * family.unit_bytes;
  char* sums = static_cast<char*>(Scratch(ScratchUse::kSums, parts * bytes));
  workers.Run(parts, [&](int64_t i) {
    std::memset(sums + i * bytes, 0, bytes);
    AddTerms(family, p, 0, p.outer, i * part, std::min(part, p.k - i * part), sums + i * bytes,
             sums_stride);
  });
  for (int64_t i = 1; i < parts; ++i) family.add(sums, sums + i * bytes, numbers);
  store(sums, sums_stride, p.smalls, p.outer, p.out.data, p.out.row_stride, p.out.col_stride,
        false);
}

}  // namespace

VectorProduct VectorProduct::From(const Product& p) {
  if (p.m <= p.n) return {p.m, p.n, p.k, p.lhs, Transposed(p.rhs), p.out};
  return {p.n, p.m, p.k, Transposed(p.rhs), p.lhs, Transposed(p.out)};
}

bool IsVectorProduct(const VectorFamily& family, const VectorProduct& p, bool direct) {
  if (p.smalls > kMaxVectorRows || (!IsAlong(p) && p.big.row_stride != 1)) return false;
  if (p.smalls == 1) return true;
  return !(IsAlong(p) ? p.k < kShortK : direct && p.outer < 2 * family.lanes);
}

bool IsDotProduct(const Product& p) {
  return p.m == 1 && p.n == 1 && p.lhs.type == p.rhs.type && p.lhs.col_stride == 1 &&
         p.rhs.row_stride == 1;
}

void RunVectorProduct(const VectorFamily& family, StoreFn store, const VectorProduct& p,
                      const Workers& workers) {
  if (const int64_t part = PartOf(p); part < p.k) return RunParts(family, store, p, part, workers);
  const int64_t chunk = ChunkOf(p, workers.threads());
  workers.Run(CeilDiv(p.outer, chunk), [&](int64_t task) {
    RunChunk(family, store, p, task * chunk, std::min(chunk, p.outer - task * chunk));
  });
}

void RunDotProduct(const KernelTable& kernels, const Product& p, const Workers& workers) {
  const DotKernel dot = kernels.dot[static_cast<int>(p.lhs.type)];
  const int64_t chunks = CeilDiv(p.k, kDotChunk);
  auto* parts = static_cast<Total*>(Scratch(ScratchUse::kSums, chunks * sizeof(Total)));
  const auto run = [&](int64_t i) {
    const int64_t first = i * kDotChunk;
    parts[i] = {};
    dot(p.lhs.At(0, first), p.rhs.At(first, 0), std::min(kDotChunk, p.k - first), &parts[i]);
  };
  workers.Run(chunks, run);
  Total sum = {};
  kernels.sum[static_cast<int>(p.lhs.type)]->fold(parts, 1, chunks, 1, &sum);
  kernels.sum[static_cast<int>(p.out.type)]->store(&sum, 1, p.out.data);
}

}  // namespace tilekern::cpu
