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
// The same of the operand's rows, where neighbouring matrices share the result's lines.
constexpr int64_t kSharedBytes = 8 * kLineBytes;
// Lines of so many rows of the result stay in L1, even if they are in one set.
constexpr int64_t kMostRowsWritten = 12;

// A dimension divided into blocks of equal size, of which the last also has the remainder.
struct Cut {
  Dim dim;
  int64_t block, blocks;

  Cut(Dim dim, int64_t most)
      : dim(dim),
        block(std::clamp<int64_t>(most, 1, dim.size)),
        blocks(std::max<int64_t>(dim.size / block, 1)) {}

  Dim Blocks() const { return {blocks, block * dim.from_stride, block * dim.to_stride}; }
  int64_t Count(int64_t index) const {
    return index == blocks - 1 ? dim.size - index * block : block;
  }
};

// Moves matrices of items: `row` is innermost in the result, `col` in the operand, and `dims` are
// the others, outermost first in the result.
void Move(const Workers& workers, std::vector<Dim> dims, Dim row, Dim col, int64_t item,
          const char* from, char* to, bool stream) {
  const bool copied = item > 16 || (item & (item - 1)) != 0;
  const Cut rows(row, (copied ? kCopiedRowBytes : kBlockRowBytes) / item);
  const int64_t row_bytes = rows.block * item;
  // Matrices that share the result's lines are moved together, a few columns of each.
  const bool share = row_bytes < kLineBytes && !dims.empty() && dims.back().to_stride == row_bytes;
  const Cut cols(col, share ? kSharedBytes / item : kBlockBytes / row_bytes);
  Dim matrix = {1, 0, 0};
  if (!copied && !dims.empty()) {
    matrix = dims.back();
    dims.pop_back();
  }
  // Others are whole blocks, or are moved one after the other.
  const bool together = share || rows.blocks * cols.blocks == 1;
  const Cut matrices(matrix, together ? kBlockBytes / (row_bytes * cols.block) : 1);
  for (const Cut& cut : {matrices, cols, rows}) dims.push_back(cut.Blocks());
  int64_t blocks = 1;
  for (const Dim& dim : dims) blocks *= dim.size;
  const auto move = [&](int64_t block) {
    const char* block_from = from;
    char* block_to = to;
    int64_t index[3];  // of rows, cols and matrices
    for (size_t i = 0; i < dims.size(); ++i) {
      const Dim& dim = dims[dims.size() - 1 - i];
      const int64_t at = block % dim.size;
      block /= dim.size;
      if (i < 3) index[i] = at;
      block_from += at * dim.from_stride;
      block_to += at * dim.to_stride;
    }
    const int64_t row_count = rows.Count(index[0]), col_count = cols.Count(index[1]);
    if (copied) {
      const RunCopy::Dim inner = {col_count, item, col.to_stride};
      const RunCopy::Dim outer = {row_count, row.from_stride, item};
      // Runs of several lines are read one after the other, if few rows are written or no line of
      // the result is in two runs.
      const bool along =
          item >= 2 * kLineBytes && (col_count <= kMostRowsWritten || item % kLineBytes == 0);
      Kernels().copy(
          {block_from, block_to, item, along ? outer : inner, along ? inner : outer, stream});
    } else {
      Kernels().transpose[__builtin_ctzll(item)](
          {block_from, row.from_stride, matrix.from_stride, block_to, col.to_stride,
           matrix.to_stride, matrices.Count(index[2]), row_count, col_count, stream});
    }
  };
  workers.RunRanges(blocks, row_bytes * cols.block * matrices.block,
                    [&](int64_t first, int64_t end) {
                      for (int64_t block = first; block < end; ++block) move(block);
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

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation,
                  int64_t stream) {
  return Guarded("jax_tilekern_cpu_transpose", [&] {
    if (x.element_type() != out->element_type()) {
      Refuse("operand and result are of different types");
    }
    int64_t item = static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
    if (item == 0) Refuse("elements of no size");
    const int64_t count = CheckedCount(sizes);
    for (const ffi::AnyBuffer& buffer : {x, *out}) {
      if (static_cast<int64_t>(buffer.element_count()) != count) {
        Refuse("sizes " + ToString(sizes) + " are not those of " +
               std::to_string(buffer.element_count()) + " elements");
      }
    }
    CheckPermutation(sizes, permutation);
    if (count == 0) return;
    AdviseNewResult(*out);
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
    Move(WorkersOf(pool), std::move(dims), row, col, item,
         static_cast<const char*>(x.untyped_data()), static_cast<char*>(out->untyped_data()),
         stream != 0);
  });
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
