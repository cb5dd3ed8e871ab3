#include "cpu/matmul_shape.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tilekern::cpu {
namespace {

constexpr int kRow = kMaxBatchRank, kCol = kMaxBatchRank + 1;

Strides ParseStrides(const char* name, ffi::Span<const int64_t> strides, int batch_rank) {
  if (strides.size() != static_cast<size_t>(batch_rank) + 2) {
    Refuse(std::string(name) + " " + ToString(strides) + " must have " +
           std::to_string(batch_rank + 2) + " entries to match sizes");
  }
  Strides parsed = {};
  for (size_t i = 0; i < strides.size(); ++i) {
    if (strides[i] < 0)
      Refuse(std::string(name) + " " + ToString(strides) + " has a negative stride");
    parsed[kMaxBatchRank - batch_rank + i] = strides[i];
  }
  return parsed;
}

// Returns the number of elements that a buffer needs for these strides.
int64_t Extent(const MatmulShape& shape, const Strides& strides, int64_t rows, int64_t cols,
               const char* what) {
  int64_t last = 0;
  const auto add = [&](int64_t size, int64_t stride) {
    last = CheckedAdd(last, CheckedMultiply(size - 1, stride, what), what);
  };
  for (int i = 0; i < kMaxBatchRank; ++i) add(shape.batch[i], strides[i]);
  add(rows, strides[kRow]);
  add(cols, strides[kCol]);
  return CheckedAdd(last, 1, what);
}

}  // namespace

MatmulShape ParseMatmulShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                             ffi::Span<const int64_t> rhs_strides,
                             ffi::Span<const int64_t> out_strides) {
  if (sizes.size() < 3 || sizes.size() > kMaxBatchRank + 3) {
    Refuse("sizes " + ToString(sizes) + " must hold 0 to 4 batch sizes, m, n and k");
  }
  const int batch_rank = static_cast<int>(sizes.size()) - 3;
  MatmulShape shape;
  shape.batch.fill(1);
  for (int i = 0; i < batch_rank; ++i) {
    if (sizes[i] < 0) Refuse("sizes " + ToString(sizes) + " has a negative size");
    shape.batch[kMaxBatchRank - batch_rank + i] = sizes[i];
  }
  shape.m = sizes[batch_rank];
  shape.n = sizes[batch_rank + 1];
  shape.k = sizes[batch_rank + 2];
  if (shape.m < 1 || shape.n < 1 || shape.k < 1) {
    Refuse("sizes " + ToString(sizes) + " must have m, n and k of at least 1");
  }
  shape.lhs = ParseStrides("lhs_strides", lhs_strides, batch_rank);
  shape.rhs = ParseStrides("rhs_strides", rhs_strides, batch_rank);
  shape.out = ParseStrides("out_strides", out_strides, batch_rank);
  for (const int64_t size : shape.batch) {
    shape.batch_size = CheckedMultiply(shape.batch_size, size, "the batch size");
  }
  if (shape.n > 1 && shape.out[kCol] != 1) {
    Refuse("out_strides " + ToString(out_strides) + " must end in 1");
  }
  if (shape.batch_size > 0) {
    shape.lhs_extent = Extent(shape, shape.lhs, shape.m, shape.k, "lhs_strides");
    shape.rhs_extent = Extent(shape, shape.rhs, shape.k, shape.n, "rhs_strides");
    shape.out_extent = Extent(shape, shape.out, shape.m, shape.n, "out_strides");
  }
  return shape;
}

bool OutputsOverlap(const MatmulShape& shape) {
  if (shape.batch_size == 0) return false;
  std::array<std::pair<int64_t, int64_t>, kMaxBatchRank + 2> dims;  // stride, size
  for (int i = 0; i < kMaxBatchRank; ++i) dims[i] = {shape.out[i], shape.batch[i]};
  dims[kRow] = {shape.out[kRow], shape.m};
  dims[kCol] = {shape.out[kCol], shape.n};
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // the extent of the dimensions so far, in elements
  for (const auto& [stride, size] : dims) {
    if (size == 1) continue;
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

Product ProductOfTypes(const MatmulShape& shape, DType lhs, DType rhs, DType out) {
  return {shape.m,
          shape.n,
          shape.k,
          {nullptr, lhs, shape.lhs[kRow], shape.lhs[kCol]},
          {nullptr, rhs, shape.rhs[kRow], shape.rhs[kCol]},
          {nullptr, out, shape.out[kRow], shape.out[kCol]}};
}

Product FirstProduct(const MatmulShape& shape, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                     ffi::AnyBuffer out) {
  const RealNumbers of_lhs = RealNumbersOf(lhs), of_rhs = RealNumbersOf(rhs);
  const RealNumbers of_out = RealNumbersOf(out);
  Product product = ProductOfTypes(shape, of_lhs.type, of_rhs.type, of_out.type);
  CheckFits("lhs", shape.lhs_extent, of_lhs.count);
  CheckFits("rhs", shape.rhs_extent, of_rhs.count);
  CheckFits("out", shape.out_extent, of_out.count);
  product.lhs.data = static_cast<const char*>(lhs.untyped_data());
  product.rhs.data = static_cast<const char*>(rhs.untyped_data());
  product.out.data = static_cast<char*>(out.untyped_data());
  return product;
}

Product ProductAt(const MatmulShape& shape, const Product& first, int64_t batch) {
  Product product = first;
  for (int i = kMaxBatchRank - 1; i >= 0 && batch > 0; --i) {
    const int64_t index = batch % shape.batch[i];
    batch /= shape.batch[i];
    product.lhs.data += index * shape.lhs[i] * Bytes(product.lhs.type);
    product.rhs.data += index * shape.rhs[i] * Bytes(product.rhs.type);
    product.out.data += index * shape.out[i] * Bytes(product.out.type);
  }
  return product;
}

void CheckFits(const char* name, int64_t extent, int64_t elements) {
  if (extent > elements) {
    Refuse(std::string(name) + " has " + std::to_string(elements) +
           " elements, its strides reach " + std::to_string(extent));
  }
}

}  // namespace tilekern::cpu
