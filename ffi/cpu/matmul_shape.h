// Sizes and strides of a batch of products, as the attributes of a custom call give them.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/call.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// Of each batch dimension, then of the matrix's two.
using Strides = std::array<int64_t, kMaxBatchRank + 2>;

// Checked; unused batch dimensions come first, with size 1 and stride 0.
struct MatmulShape {
  std::array<int64_t, kMaxBatchRank> batch;
  int64_t m, n, k;
  Strides lhs, rhs, out;

  int64_t batch_size = 1;
  // Elements that the strides reach over, where there is a batch.
  int64_t lhs_extent = 0, rhs_extent = 0, out_extent = 0;
};

// Refuses sizes and strides that no call may have, but not outputs that overlap.
MatmulShape ParseMatmulShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                             ffi::Span<const int64_t> rhs_strides,
                             ffi::Span<const int64_t> out_strides);

// Whether two elements of the output may share an address. Threads write different elements.
bool OutputsOverlap(const MatmulShape& shape);

// A product of the batch, without data.
Product ProductOfTypes(const MatmulShape& shape, DType lhs, DType rhs, DType out);

// The product of the first batch; refuses buffers that end before the strides do.
Product FirstProduct(const MatmulShape& shape, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                     ffi::AnyBuffer out);

// The product of another batch than the first.
Product ProductAt(const MatmulShape& shape, const Product& first, int64_t batch);

// Refuses a buffer of fewer elements than `extent`.
void CheckFits(const char* name, int64_t extent, int64_t elements);

}  // namespace tilekern::cpu
