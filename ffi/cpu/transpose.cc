// The custom call jax_tilekern_cpu_transpose: dimension i of the result is dimension permutation[i]
// of the operand; both are dense and row-major.
//
// Attributes:
//   sizes        the operand's dimensions
//   permutation  the permutation of the dimensions
// Items are moved as bytes, 1, 2, 4, 8 or 16 at once, whatever their type.
#include <algorithm>
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

// Results larger than this do not stay in L2 anyway, and are written with non-temporal stores.
constexpr int64_t kStreamBytes = 2 << 20;
// The size of a block, and of each of the result's rows in it.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kBlockRowBytes = 1024;

// A dimension divided into blocks of equal size, of which the last also has the remainder.
struct Cut {
  int64_t size, block, blocks;

  Cut(int64_t size, int64_t block)
      : size(size), block(block), blocks(std::max<int64_t>(size / block, 1)) {}

  int64_t First(int64_t index) const { return index * block; }
  int64_t Count(int64_t index) const { return index == blocks - 1 ? size - First(index) : block; }
};

// Advances both pointers to an index over the dimensions, outermost first.
void Locate(const std::vector<Dim>& dims, int64_t index, const char*& from, char*& to) {
  for (size_t i = dims.size(); i-- > 0 && index > 0;) {
    from += index % dims[i].size * dims[i].from_stride;
    to += index % dims[i].size * dims[i].to_stride;
    index /= dims[i].size;
  }
}

// Moves items of any size: `row` is innermost in the result, `col` in the operand, and `dims` are
// the others. Items whose size is not a power of two up to 16 bytes are copied one by one.
void MoveItems(const Workers& workers, const std::vector<Dim>& dims, const Dim& row, const Dim& col,
               int64_t item, const char* from, char* to) {
  const bool copied = item > 16 || (item & (item - 1)) != 0;
  const TransposeKernel transpose = copied ? nullptr : Kernels().transpose[__builtin_ctzll(item)];
  const CopyKernel copy = Kernels().copy;
  int64_t matrices = 1;
  for (const Dim& dim : dims) matrices *= dim.size;
  const bool stream = matrices * row.size * col.size * item > kStreamBytes;
  const Cut rows(row.size, std::max<int64_t>(kBlockRowBytes / item, 1));
  const int64_t row_bytes = std::min(rows.block, rows.size) * item;
  const Cut cols(col.size, std::max<int64_t>(kBlockBytes / row_bytes, 1));
  const int64_t block_bytes = row_bytes * std::min(cols.block, cols.size);
  const auto move = [&](int64_t index) {
    const int64_t r = index % rows.blocks, c = index / rows.blocks % cols.blocks;
    const char* source = from + rows.First(r) * row.from_stride + cols.First(c) * item;
    char* dest = to + rows.First(r) * item + cols.First(c) * col.to_stride;
    Locate(dims, index / rows.blocks / cols.blocks, source, dest);
    if (copied) {
      for (int64_t i = 0; i < rows.Count(r); ++i) {
        copy({source + i * row.from_stride, item, dest + i * item, col.to_stride, cols.Count(c),
              item, stream});
      }
    } else {
      transpose(
          {source, row.from_stride, dest, col.to_stride, rows.Count(r), cols.Count(c), stream});
    }
  };
  workers.RunRanges(matrices * cols.blocks * rows.blocks, block_bytes,
                    [&](int64_t first, int64_t last) {
                      for (int64_t i = first; i < last; ++i) move(i);
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
             ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation) {
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
  MoveItems(workers, dims, row, col, item, static_cast<const char*>(x.untyped_data()),
            static_cast<char*>(out.untyped_data()));
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> permutation) {
  return Guarded("jax_tilekern_cpu_transpose",
                 [&] { RunCall(WorkersOf(pool), x, *out, sizes, permutation); });
}

}  // namespace
}  // namespace tilekern::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(CpuTranspose, tilekern::cpu::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("sizes")
                                  .Attr<xla::ffi::Span<const int64_t>>("permutation"));
