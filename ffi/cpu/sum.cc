// The custom call jax_tilekern_cpu_sum: sums over some dimensions of a dense row-major array.
//
// Attributes:
//   sizes    the operand's dimensions
//   reduced  1 for each dimension that is summed over, 0 for one that is kept
// Operand and result have the same type, or 16-bit floats are summed to float32. Floating-point
// numbers are added in blocks, in float32 or float64, and the blocks' sums in float64; the result
// is rounded once. Integers wrap. The result does not depend on the number of threads.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

struct Dim {
  int64_t size;
  bool reduced;
};

// Outputs that are accumulated at once, in L1.
constexpr int64_t kMaxTotals = kL1Bytes / sizeof(Total);
// Fewer, beside which rows stay in L1, where so few numbers make a sum.
constexpr int64_t kFewTotals = kMaxTotals / 4;
constexpr int64_t kFewTerms = 32;
// Runs of up to so many elements are summed as columns, where there are several to a sum.
constexpr int64_t kFolded = 512;
// Longer runs than this are not, where a row of them has more bytes than kFoldedBytes, since the
// kernel would read parts of distant rows.
constexpr int64_t kFoldedLong = 128;
constexpr int64_t kFoldedBytes = kL1Bytes / 2;
// Runs of at least kFoldedFew elements are summed as rows, where a sum has fewer than kFewRuns: to
// fold the totals would take longer.
constexpr int64_t kFoldedFew = 16;
constexpr int64_t kFewRuns = 8;
// Sums of fewer columns than this accumulate several rows side by side.
constexpr int64_t kNarrowSums = 128;
// Rows of at least kNarrowSums / 8 columns are merged only if so many rows result.
constexpr int64_t kMerged = 32;
// Where several tasks compute one output's sum: minimal elements per task, and the maximal number
// of tasks.
constexpr int64_t kSumChunk = 256 << 10;
constexpr int64_t kMaxChunks = 512;
// Adjacent rows of this size are added up together, where a sum has several rows.
constexpr int64_t kAdjacentBytes = kL2Bytes / 4;
// Minimal rows per task where several tasks sum the same columns, because each writes a total per
// column.
constexpr int64_t kRowsOfChunk = 256;
// Sums of at most so many rows are made in registers.
constexpr int64_t kFewRows = 8;
// This many groups of outputs keep all threads busy without dividing sums.
constexpr int64_t kManyGroups = 64;

// The sums of a custom call: matrices with one reduced and one kept dimension, enumerated by the
// outer dimensions. Strides are in elements.
class Sums {
 public:
  Sums(std::vector<Dim> dims, DType type, DType out_type, const char* from, char* to)
      : family_(*Kernels().sum[static_cast<int>(type)]),
        store_(Kernels().sum[static_cast<int>(out_type)]->store),
        few_rows_(type == out_type ? family_.few_rows : nullptr),
        bytes_(Bytes(type)),
        out_bytes_(Bytes(out_type)),
        from_(from),
        to_(to) {
    FoldShortRuns(dims);
    along_ = dims.back().reduced;
    const Dim inner = dims.back();
    const Dim middle = dims.size() > 1 ? dims[dims.size() - 2] : Dim{1, !along_};
    rows_ = middle.size;
    cols_ = inner.size;
    int64_t stride = rows_ * cols_;
    for (size_t i = dims.size() < 2 ? 0 : dims.size() - 2; i-- > 0; stride *= dims[i].size) {
      Outer& outer = dims[i].reduced ? reduced_ : kept_;
      outer.dims.insert(outer.dims.begin(), {dims[i].size, stride});
      outer.count *= dims[i].size;
    }
    const int64_t kept = along_ ? rows_ : cols_;
    const int64_t deep = along_ ? cols_ : rows_;
    group_ = std::min(kept, deep * reduced_.count <= kFewTerms ? kFewTotals : kMaxTotals);
    group_ -= group_ % (fold_ * fold_step_);
    if (along_) {
      // For each outer reduced index a task reads adjacent rows, and not one row far from the next.
      const int64_t enough = kSumChunk / cols_ / reduced_.count;
      const int64_t adjacent = reduced_.count > 1 ? kAdjacentBytes / (cols_ * bytes_) : 1;
      group_ = std::clamp<int64_t>(std::max(enough, adjacent), 1, group_);
    }
    groups_ = CeilDiv(kept, group_);
    // The partition of a sum depends on the sizes alone.
    const int64_t depth = deep * reduced_.count, elements = group_ * depth;
    const int64_t most = kMaxChunks / (kept_.count * groups_);
    const int64_t worthwhile =
        along_ ? elements / kSumChunk : std::min(elements / kSumChunk, depth / kRowsOfChunk);
    const int64_t chunks =
        kept_.count * groups_ >= kManyGroups ? 1 : std::clamp<int64_t>(worthwhile, 1, most);
    cuts_matrices_ = deep >= reduced_.count && (!along_ || group_ == 1 || reduced_.count == 1);
    const int64_t cut = cuts_matrices_ ? deep : reduced_.count;
    chunk_ = CeilDiv(cut, chunks);
    if (cuts_matrices_ && chunk_ > kAligned) chunk_ = RoundUp(chunk_, kAligned);
    chunks_ = CeilDiv(cut, chunk_);
    chunk_bytes_ = CeilDiv(elements, chunks_) * bytes_;
  }

  void Run(const Workers& workers) const {
    if (HasSmallMatrices()) return RunMatrices(workers);
    if (HasFewRows()) return RunFewRows(workers);
    const int64_t groups = kept_.count * groups_;
    if (chunks_ == 1) {
      workers.RunRanges(groups, chunk_bytes_, [&](int64_t first, int64_t last) {
        for (int64_t g = first; g < last; ++g) {
          Total totals[kMaxTotals];
          AddUp(g, 0, totals);
          StoreGroup(g, totals);
        }
      });
      return;
    }
    std::vector<Total> totals(groups * chunks_ * group_);
    workers.RunRanges(groups * chunks_, chunk_bytes_, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) AddUp(i / chunks_, i % chunks_, &totals[i * group_]);
    });
    workers.RunRanges(groups, chunks_ * group_ * sizeof(Total), [&](int64_t first, int64_t last) {
      for (int64_t g = first; g < last; ++g) {
        Total* sum = &totals[g * chunks_ * group_];
        for (int64_t p = 1; p < chunks_; ++p) family_.add(sum, sum + p * group_, group_);
        StoreGroup(g, sum);
      }
    });
  }

 private:
  static constexpr int64_t kAligned = 1024;

  struct Outer {
    struct Sized {
      int64_t size, stride;
    };
    std::vector<Sized> dims;
    int64_t count = 1;

    int64_t Offset(int64_t index) const {
      int64_t offset = 0;
      for (size_t i = dims.size(); i-- > 0 && index > 0; index /= dims[i].size) {
        offset += index % dims[i].size * dims[i].stride;
      }
      return offset;
    }
  };

  // Whether columns of small matrices are summed, which lie one after the other.
  bool HasSmallMatrices() const {
    return !along_ && fold_ == 1 && kept_.count > 1 && reduced_.dims.empty() &&
           rows_ * cols_ <= kSmallMatrix;
  }

  void RunMatrices(const Workers& workers) const {
    const int64_t each = kFewTotals / cols_, size = rows_ * cols_;
    workers.RunRanges(
        CeilDiv(kept_.count, each), each * size * bytes_, [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            const int64_t first = task * each;
            const int64_t count = std::min(each, kept_.count - first);
            Total totals[kFewTotals];
            std::memset(totals, 0, count * cols_ * sizeof *totals);
            family_.matrices({from_ + first * size * bytes_, cols_, rows_, cols_}, count, totals);
            store_(totals, count * cols_, to_ + first * cols_ * out_bytes_);
          }
        });
  }

  // Whether each sum has so few elements that accumulators in memory would cost more than the
  // additions.
  bool HasFewRows() const {
    return few_rows_ != nullptr && !along_ && fold_ == 1 && reduced_.dims.empty() &&
           rows_ <= kFewRows && cols_ >= kLeastColumns;
  }

  void RunFewRows(const Workers& workers) const {
    const int64_t groups = CeilDiv(cols_, kMaxTotals);
    const int64_t bytes = cols_ / groups * (rows_ * bytes_ + out_bytes_);
    workers.RunRanges(kept_.count * groups, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t matrix = i / groups, group = i % groups;
        // Groups of about the same size, so that none has fewer than kLeastColumns.
        const int64_t first = group * cols_ / groups, last = (group + 1) * cols_ / groups;
        few_rows_({from_ + (kept_.Offset(matrix) + first) * bytes_, cols_, rows_, last - first},
                  to_ + (matrix * cols_ + first) * out_bytes_);
      }
    });
  }

  // Where a sum has several short runs, of single elements or of `fold_step_` neighbours, they are
  // kept as columns while whole rows are added, and folded at last.
  void FoldShortRuns(std::vector<Dim>& dims) {
    const size_t kept = dims.back().reduced ? 0 : 1;
    if (dims.size() < kept + 3) return;
    const int64_t step = kept ? dims.back().size : 1;
    const int64_t length = dims[dims.size() - 1 - kept].size;
    if (step > kFolded / length) return;
    const int64_t row_bytes = dims[dims.size() - 2 - kept].size * length * step * bytes_;
    if (!kept && length > kFoldedLong && row_bytes > kFoldedBytes) return;
    int64_t runs = 1;
    for (size_t i = 0; i + 1 < dims.size(); ++i) runs *= dims[i].reduced ? dims[i].size : 1;
    if (!kept && length >= kFoldedFew && runs < kFewRuns) return;
    fold_ = length;
    fold_step_ = step;
    dims.resize(dims.size() - 1 - kept);
    dims.back().size *= length * step;
  }

  int64_t GroupSize(int64_t group) const {
    return std::min(group_, (along_ ? rows_ : cols_) - group % groups_ * group_);
  }

  void AddUp(int64_t group, int64_t chunk, Total* totals) const {
    std::memset(totals, 0, group_ * sizeof *totals);
    const int64_t kept_first = group % groups_ * group_, kept = GroupSize(group);
    const int64_t deep = along_ ? cols_ : rows_;
    const int64_t cut_first = chunk * chunk_;
    const int64_t cut = std::min(chunk_, (cuts_matrices_ ? deep : reduced_.count) - cut_first);
    const int64_t deep_first = cuts_matrices_ ? cut_first : 0, depth = cuts_matrices_ ? cut : deep;
    const int64_t matrix = cuts_matrices_ ? 0 : cut_first;
    const int64_t matrices = cuts_matrices_ ? reduced_.count : cut;
    const int64_t start =
        kept_.Offset(group / groups_) +
        (along_ ? kept_first * cols_ + deep_first : deep_first * cols_ + kept_first);
    for (int64_t m = matrix; m < matrix + matrices; ++m) {
      const void* data = from_ + (start + reduced_.Offset(m)) * bytes_;
      if (along_) {
        family_.runs({data, cols_, kept, depth}, totals);
      } else {
        SumColumns({data, cols_, depth, kept}, totals);
      }
    }
  }

  // Short contiguous rows are merged to longer ones.
  void SumColumns(const SumSource& x, Total* totals) const {
    const int64_t wide = x.cols < kNarrowSums && x.cols == x.row_stride ? kNarrowSums / x.cols : 1;
    const int64_t rows = x.rows / wide;
    const bool merged = wide > 1 && rows >= (x.cols < kNarrowSums / 8 ? 1 : kMerged);
    if (!merged) return family_.columns(x, totals);
    Total sums[kNarrowSums] = {};
    family_.columns({x.data, wide * x.cols, rows, wide * x.cols}, sums);
    for (int64_t i = 0; i < wide; ++i) family_.add(totals, sums + i * x.cols, x.cols);
    const auto* rest = static_cast<const char*>(x.data) + rows * wide * x.cols * bytes_;
    family_.columns({rest, x.row_stride, x.rows - rows * wide, x.cols}, totals);
  }

  void StoreGroup(int64_t group, Total* totals) const {
    const int64_t kept = along_ ? rows_ : cols_;
    const int64_t at = (group / groups_ * kept + group % groups_ * group_) / fold_;
    const int64_t count = GroupSize(group) / fold_;
    if (fold_ > 1) family_.fold(totals, count, fold_, fold_step_);
    store_(totals, count, to_ + at * out_bytes_);
  }

  const SumFamily& family_;
  void (*const store_)(const void* totals, int64_t count, void* out);
  void (*const few_rows_)(const SumSource& x, void* out);  // null if types differ
  const int64_t bytes_, out_bytes_;
  const char* const from_;
  char* const to_;

  int64_t fold_ = 1, fold_step_ = 1;  // totals that are added up at last, and their distance
  bool along_;                        // sums run along rows, else down columns
  int64_t rows_, cols_;
  Outer kept_, reduced_;
  int64_t group_,
      groups_;  // outputs of a matrix that are accumulated at once, and the number of such groups
  bool cuts_matrices_;  // chunks are parts of matrices, else of the reduced outer dimensions
  int64_t chunk_, chunks_, chunk_bytes_;
};

// Merges neighbours of one kind and drops those of size 1, so that the kinds alternate.
std::vector<Dim> Dims(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> reduced,
                      bool complex) {
  std::vector<Dim> dims;
  const auto append = [&](Dim dim) {
    if (dim.size == 1) return;
    if (!dims.empty() && dims.back().reduced == dim.reduced) {
      dims.back().size *= dim.size;
    } else {
      dims.push_back(dim);
    }
  };
  for (size_t i = 0; i < sizes.size(); ++i) append({sizes[i], reduced[i] != 0});
  // Real and imaginary parts are summed as two columns.
  if (complex) append({2, false});
  if (dims.empty()) dims.push_back({1, false});
  return dims;
}

void RunCall(const Workers& workers, ffi::AnyBuffer x, ffi::AnyBuffer out,
             ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> reduced) {
  DType type = TypeOf(x), out_type = TypeOf(out);
  const bool widened = out_type == DType::kF32 && (type == DType::kBF16 || type == DType::kF16);
  if (type != out_type && !widened) Refuse("operand and result are of different types");
  if (reduced.size() != sizes.size()) {
    Refuse("reduced " + ToString(reduced) + " does not fit sizes " + ToString(sizes));
  }
  const int64_t count = CheckedCount(sizes);
  std::vector<int64_t> kept_sizes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (reduced[i] != 0 && reduced[i] != 1) {
      Refuse("reduced " + ToString(reduced) + " is not of zeros and ones");
    }
    if (reduced[i] == 0) kept_sizes.push_back(sizes[i]);
  }
  const int64_t results = CheckedCount({kept_sizes.data(), kept_sizes.size()});
  if (static_cast<int64_t>(x.element_count()) != count ||
      static_cast<int64_t>(out.element_count()) != results) {
    Refuse("sizes " + ToString(sizes) + " and reduced " + ToString(reduced) + " are not those of " +
           std::to_string(x.element_count()) + " elements and " +
           std::to_string(out.element_count()) + " sums");
  }
  const bool complex = type == DType::kC64 || type == DType::kC128;
  if (complex) type = out_type = type == DType::kC64 ? DType::kF32 : DType::kF64;
  if (Kernels().sum[static_cast<int>(type)] == nullptr) {
    Refuse(std::string("no kernel for ") + Name(type));
  }
  if (results == 0) return;
  AdviseNewResult(out);
  if (count == 0) {
    std::memset(out.untyped_data(), 0, out.size_bytes());
    return;
  }
  Sums(Dims(sizes, reduced, complex), type, out_type, static_cast<const char*>(x.untyped_data()),
       static_cast<char*>(out.untyped_data()))
      .Run(workers);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> reduced) {
  return Guarded("jax_tilekern_cpu_sum",
                 [&] { RunCall(WorkersOf(pool), x, *out, sizes, reduced); });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuSum, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("reduced"));
