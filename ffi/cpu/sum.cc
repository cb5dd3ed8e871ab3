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
// Contiguous rows of fewer columns are merged to rows of about so many.
constexpr int64_t kMergedColumns = 128;
// Where several tasks compute one output's sum: minimal elements and rows per task, and the maximal
// number of tasks.
constexpr int64_t kChunk = 256 << 10;
constexpr int64_t kChunkRows = 256;
constexpr int64_t kMaxChunks = 512;
// This many groups of outputs keep all threads busy without dividing sums.
constexpr int64_t kManyGroups = 64;

// Dimensions around a matrix, and their indices as one number.
struct Outer {
  struct Sized {
    int64_t size, stride;
  };
  std::vector<Sized> dims;  // innermost first
  int64_t count = 1;

  int64_t Offset(int64_t index) const {
    int64_t offset = 0;
    for (const Sized& dim : dims) {
      offset += index % dim.size * dim.stride;
      index /= dim.size;
    }
    return offset;
  }
};

// The sums of a custom call: matrices with one reduced and one kept dimension, enumerated by the
// outer dimensions. Strides are in elements.
class Sums {
 public:
  Sums(std::vector<Dim> dims, DType type, DType out_type, const char* from, char* to)
      : family_(*Kernels().sum[static_cast<int>(type)]),
        store_(Kernels().sum[static_cast<int>(out_type)]->store),
        bytes_(Bytes(type)),
        out_bytes_(Bytes(out_type)),
        from_(from),
        to_(to) {
    along_ = dims.back().reduced;
    cols_ = dims.back().size;
    dims.pop_back();
    rows_ = dims.empty() ? 1 : dims.back().size;
    if (!dims.empty()) dims.pop_back();
    for (int64_t stride = rows_ * cols_; !dims.empty(); dims.pop_back()) {
      Outer& outer = dims.back().reduced ? reduced_ : kept_;
      outer.dims.push_back({dims.back().size, stride});
      outer.count *= dims.back().size;
      stride *= dims.back().size;
    }
    const int64_t kept = along_ ? rows_ : cols_, deep = along_ ? cols_ : rows_;
    const int64_t enough = along_ ? kChunk / (cols_ * reduced_.count) : kMaxTotals;
    group_ = std::min({std::max<int64_t>(enough, 1), kept, kMaxTotals});
    groups_ = CeilDiv(kept, group_);
    // The partition of a sum depends on the sizes alone.
    const int64_t depth = deep * reduced_.count, elements = group_ * depth;
    const int64_t worthwhile =
        along_ ? elements / kChunk : std::min(elements / kChunk, depth / kChunkRows);
    const int64_t groups = kept_.count * groups_;
    const int64_t chunks =
        groups >= kManyGroups ? 1 : std::clamp<int64_t>(worthwhile, 1, kMaxChunks / groups);
    cuts_matrices_ = deep >= reduced_.count;
    const int64_t cut = cuts_matrices_ ? deep : reduced_.count;
    chunk_ = CeilDiv(cut, chunks);
    chunks_ = CeilDiv(cut, chunk_);
    chunk_bytes_ = CeilDiv(elements, chunks_) * bytes_;
  }

  void Run(const Workers& workers) const {
    const int64_t groups = kept_.count * groups_;
    if (chunks_ == 1) {
      workers.RunRanges(groups, chunk_bytes_, [&](int64_t first, int64_t last) {
        Total totals[kMaxTotals];
        for (int64_t g = first; g < last; ++g) {
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
        Total sums[kMaxTotals] = {};
        family_.fold(&totals[g * chunks_ * group_], group_, chunks_, group_, sums);
        StoreGroup(g, sums);
      }
    });
  }

 private:
  int64_t GroupSize(int64_t group) const {
    return std::min(group_, (along_ ? rows_ : cols_) - group % groups_ * group_);
  }

  void AddUp(int64_t group, int64_t chunk, Total* totals) const {
    const int64_t kept_first = group % groups_ * group_, kept = GroupSize(group);
    std::memset(totals, 0, kept * sizeof *totals);
    const int64_t first = chunk * chunk_;
    const int64_t deep = along_ ? cols_ : rows_;
    const int64_t cut = std::min(chunk_, (cuts_matrices_ ? deep : reduced_.count) - first);
    const int64_t deep_first = cuts_matrices_ ? first : 0, depth = cuts_matrices_ ? cut : deep;
    const int64_t matrix = cuts_matrices_ ? 0 : first;
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
    const int64_t wide = x.cols == x.row_stride ? kMergedColumns / x.cols : 1;
    const int64_t rows = wide > 1 ? x.rows / wide : 0, merged = rows * wide;
    if (rows > 0) {
      Total sums[kMergedColumns] = {};
      family_.columns({x.data, wide * x.cols, rows, wide * x.cols}, sums);
      family_.fold(sums, x.cols, wide, x.cols, totals);
    }
    const auto* rest = static_cast<const char*>(x.data) + merged * x.cols * bytes_;
    family_.columns({rest, x.row_stride, x.rows - merged, x.cols}, totals);
  }

  void StoreGroup(int64_t group, const Total* totals) const {
    const int64_t kept = along_ ? rows_ : cols_;
    const int64_t at = group / groups_ * kept + group % groups_ * group_;
    store_(totals, GroupSize(group), to_ + at * out_bytes_);
  }

  const SumFamily& family_;
  void (*const store_)(const void* totals, int64_t count, void* out);
  const int64_t bytes_, out_bytes_;
  const char* const from_;
  char* const to_;

  bool along_;  // sums run along rows, else down columns
  int64_t rows_, cols_;
  Outer kept_, reduced_;
  // Outputs of a matrix that are accumulated at once, and the number of such groups.
  int64_t group_, groups_;
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

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> reduced) {
  return Guarded("jax_tilekern_cpu_sum", [&] {
    DType type = TypeOf(x), out_type = TypeOf(*out);
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
        static_cast<int64_t>(out->element_count()) != results) {
      Refuse("sizes " + ToString(sizes) + " and reduced " + ToString(reduced) +
             " are not those of " + std::to_string(x.element_count()) + " elements and " +
             std::to_string(out->element_count()) + " sums");
    }
    const bool complex = type == DType::kC64 || type == DType::kC128;
    if (complex) type = out_type = type == DType::kC64 ? DType::kF32 : DType::kF64;
    if (Kernels().sum[static_cast<int>(type)] == nullptr) {
      Refuse(std::string("no kernel for ") + Name(type));
    }
    if (results == 0) return;
    AdviseNewResult(*out);
    if (count == 0) {
      std::memset(out->untyped_data(), 0, out->size_bytes());
      return;
    }
    Sums(Dims(sizes, reduced, complex), type, out_type, static_cast<const char*>(x.untyped_data()),
         static_cast<char*>(out->untyped_data()))
        .Run(WorkersOf(pool));
  });
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
