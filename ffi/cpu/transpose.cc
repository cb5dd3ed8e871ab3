// The custom call jax_tilekern_cpu_transpose: dimension i of the result is dimension permutation[i]
// of the operand; both are dense and row-major.
//
// Attributes:
//   sizes        the operand's dimensions
//   permutation  the permutation of the dimensions
//   stream       whether the result is written past the caches
// Items are moved as bytes, 1, 2, 4, 8 or 16 at once, whatever their type.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/call.h"
#include "cpu/dispatch.h"
#include "cpu/product.h"
#include "handlers.h"

namespace tilekern::cpu {
namespace {

// A dimension of both arrays; strides are in bytes.
struct Dim {
  int64_t size;
  int64_t from_stride;
  int64_t to_stride;
};

// The size of a block, and of each of the result's rows in it, also of items that are copied whole.
constexpr int64_t kBlockBytes = 2 * kL2Bytes;
constexpr int64_t kBlockRowBytes = 1024;
constexpr int64_t kCopiedRowBytes = 16384;
// Lines of so many rows of the result stay in L1, even if they are in one set.
constexpr int64_t kMostRowsWritten = 12;
// The most matrices that are moved together because they share the result's lines.
constexpr int64_t kMostTogether = 256;

// The distance of the prefetch of small matrices.
constexpr int64_t kMatricesAhead = 4;

// A dimension divided into blocks of equal size, of which the last also has the remainder.
struct Cut {
  int64_t size, block, blocks;

  Cut(int64_t size, int64_t block)
      : size(size), block(block), blocks(std::max<int64_t>(size / block, 1)) {}

  int64_t First(int64_t index) const { return index * block; }
  int64_t Count(int64_t index) const { return index == blocks - 1 ? size - First(index) : block; }
};

// A place in both arrays, which moves over all indices of some dimensions, outermost first.
class Place {
 public:
  Place(const std::vector<Dim>& dims, int64_t index, const char* from, char* to)
      : dims_(dims), indices_(dims.size()), from_(from), to_(to) {
    for (size_t i = dims.size(); i-- > 0 && index > 0; index /= dims[i].size) {
      indices_[i] = index % dims[i].size;
      from_ += indices_[i] * dims[i].from_stride;
      to_ += indices_[i] * dims[i].to_stride;
    }
  }

  const char* from() const { return from_; }
  char* to() const { return to_; }
  // The index of a dimension, counted from the innermost one.
  int64_t FromLast(size_t dim) const { return indices_[dims_.size() - 1 - dim]; }

  void Advance() {
    for (size_t i = dims_.size(); i-- > 0;) {
      from_ += dims_[i].from_stride;
      to_ += dims_[i].to_stride;
      if (++indices_[i] < dims_[i].size) return;
      from_ -= dims_[i].size * dims_[i].from_stride;
      to_ -= dims_[i].size * dims_[i].to_stride;
      indices_[i] = 0;
    }
  }

 private:
  const std::vector<Dim>& dims_;
  std::vector<int64_t> indices_;
  const char* from_;
  char* to_;
};

// A matrix of items in both arrays: `row` is innermost in the result, `col` in the operand, and
// `dims` are the others.
struct Matrices {
  std::vector<Dim> dims;
  Dim row, col;
  int64_t item;
  const char* from;
  char* to;
};

// Calls move(from, to, rows, cols) for blocks of the matrices, on all threads.
template <typename Move>
void ForEachBlock(const Workers& workers, Matrices m, int64_t row_bytes, int64_t bytes,
                  const Move& move) {
  const Cut rows(m.row.size, std::max<int64_t>(row_bytes / m.item, 1));
  const int64_t bytes_of_row = std::min(rows.block, rows.size) * m.item;
  int64_t most_cols = std::max<int64_t>(bytes / bytes_of_row, 1);
  // The matrices of which a few columns are moved one after the other: those whose rows are next to
  // each other in the result, if a row is less than a line of the cache.
  Dim together = {1, 0, 0};
  if (bytes_of_row < kLineBytes && !m.dims.empty() && m.dims.back().to_stride == bytes_of_row) {
    together = m.dims.back();
    m.dims.pop_back();
    most_cols = std::max<int64_t>(kLineBytes / m.item, 1);
  }
  const Cut cols(m.col.size, most_cols), groups(together.size, kMostTogether);
  const int64_t block_bytes =
      bytes_of_row * std::min(cols.block, cols.size) * std::min(groups.block, groups.size);
  std::vector<Dim> blocks = std::move(m.dims);
  blocks.push_back({groups.blocks, groups.First(1) * together.from_stride,
                    groups.First(1) * together.to_stride});
  blocks.push_back({cols.blocks, cols.First(1) * m.item, cols.First(1) * m.col.to_stride});
  blocks.push_back({rows.blocks, rows.First(1) * m.row.from_stride, rows.First(1) * m.item});
  int64_t count = 1;
  for (const Dim& dim : blocks) count *= dim.size;
  workers.RunRanges(count, block_bytes, [&](int64_t first, int64_t last) {
    Place place(blocks, first, m.from, m.to);
    for (int64_t index = first; index < last; ++index, place.Advance()) {
      const char* from = place.from();
      char* to = place.to();
      const int64_t matrices = groups.Count(place.FromLast(2));
      for (int64_t i = 0; i < matrices; ++i) {
        // A matrix has a line in each row of the operand.
        for (int64_t r = 0; i + kMatricesAhead < matrices && r < rows.size; ++r) {
          __builtin_prefetch(from + kMatricesAhead * together.from_stride + r * m.row.from_stride);
        }
        move(from, to, rows.Count(place.FromLast(0)), cols.Count(place.FromLast(1)));
        from += together.from_stride;
        to += together.to_stride;
      }
    }
  });
}

// Moves items of a power of two up to 16 bytes.
void TransposeItems(const Workers& workers, const Matrices& m, bool stream) {
  const TransposeKernel transpose = Kernels().transpose[__builtin_ctzll(m.item)];
  ForEachBlock(workers, m, kBlockRowBytes, kBlockBytes,
               [&](const char* from, char* to, int64_t rows, int64_t cols) {
                 transpose({from, m.row.from_stride, to, m.col.to_stride, rows, cols, stream});
               });
}

// Moves items of any size as runs of bytes.
void CopyItems(const Workers& workers, const Matrices& m, bool stream) {
  const CopyKernel copy = Kernels().copy;
  ForEachBlock(workers, m, kCopiedRowBytes, kBlockBytes,
               [&](const char* from, char* to, int64_t rows, int64_t cols) {
                 const RunCopy::Dim col = {cols, m.item, m.col.to_stride};
                 const RunCopy::Dim row = {rows, m.row.from_stride, m.item};
                 // Runs of several lines are read one after the other, if few rows are written or
                 // no line of the result is in two runs.
                 const bool along = m.item >= 2 * kLineBytes &&
                                    (cols <= kMostRowsWritten || m.item % kLineBytes == 0);
                 copy({from, to, m.item, along ? row : col, along ? col : row, stream});
               });
}

void CheckPermutation(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation) {
  const auto rank = static_cast<int64_t>(sizes.size());
  std::vector<bool> seen(rank);
  for (const int64_t dim : permutation) {
    if (dim < 0 || dim >= rank || seen[dim]) {
      Refuse(ToString(permutation) + " is not a permutation of " + std::to_string(rank) +
             " dimensions");
    }
    seen[dim] = true;
  }
  if (static_cast<int64_t>(permutation.size()) != rank) {
    Refuse("permutation " + ToString(permutation) + " does not fit sizes " + ToString(sizes));
  }
}

// Returns the dimensions in the result's order, without those of size 1.
std::vector<Dim> Dims(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation,
                      int64_t item) {
  std::vector<Dim> dims(sizes.size());
  int64_t stride = item;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i]) {
    const size_t place =
        std::find(permutation.begin(), permutation.end(), static_cast<int64_t>(i)) -
        permutation.begin();
    dims[place] = {sizes[i], stride, 0};
  }
  stride = item;
  for (size_t i = dims.size(); i-- > 0; stride *= dims[i].size) dims[i].to_stride = stride;
  dims.erase(std::remove_if(dims.begin(), dims.end(), [](const Dim& d) { return d.size == 1; }),
             dims.end());
  return dims;
}

void RunCall(const Workers& workers, ffi::AnyBuffer x, ffi::AnyBuffer out,
             ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation, bool stream) {
  if (x.element_type() != out.element_type()) {
    Refuse("operand and result are of different types");
  }
  int64_t item = static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
  if (item == 0) Refuse("elements of no size");
  const int64_t count = CheckedCount(sizes);
  for (const ffi::AnyBuffer& buffer : {x, out}) {
    if (static_cast<int64_t>(buffer.element_count()) != count) {
      Refuse("sizes " + ToString(sizes) + " are not those of " +
             std::to_string(buffer.element_count()) + " elements");
    }
  }
  CheckPermutation(sizes, permutation);
  if (count == 0) return;
  AdviseNewResult(out);
  std::vector<Dim> dims = Dims(sizes, permutation, item);
  // An innermost dimension that stays in place becomes part of the item.
  while (!dims.empty() && dims.back().from_stride == item && dims.back().to_stride == item) {
    item *= dims.back().size;
    dims.pop_back();
  }
  // An identity permutation is a matrix of one item.
  if (dims.empty()) dims = {{1, item, item}, {1, item, item}};
  const Dim row = dims.back();
  dims.pop_back();
  const auto found = std::find_if(dims.begin(), dims.end(),
                                  [&](const Dim& dim) { return dim.from_stride == item; });
  const Dim col = *found;
  dims.erase(found);
  const Matrices matrices = {std::move(dims),
                             row,
                             col,
                             item,
                             static_cast<const char*>(x.untyped_data()),
                             static_cast<char*>(out.untyped_data())};
  if (item > 16 || (item & (item - 1)) != 0) {
    CopyItems(workers, matrices, stream);
  } else {
    TransposeItems(workers, matrices, stream);
  }
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation,
                  int64_t stream) {
  return Guarded("jax_tilekern_cpu_transpose",
                 [&] { RunCall(WorkersOf(pool), x, *out, sizes, permutation, stream != 0); });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuTranspose, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("permutation")
                                  .Attr<int64_t>("stream"));
