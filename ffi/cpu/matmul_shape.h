// Sizes and strides of a batch of products, from the attributes of a custom call.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/call.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// The strides of each batch dimension, then of the matrix's two.
using Strides = std::array<int64_t, kMaxBatchRank + 2>;

// A checked shape; unused batch dimensions come first, with size 1 and stride 0.
struct MatmulShape {
  std::array<int64_t, kMaxBatchRank> batch;
  int64_t m, n, k;
  Strides lhs, rhs, out;

  int64_t batch_size = 1;
  // The extent of the strides in elements, where there is a batch.
  int64_t lhs_extent = 0, rhs_extent = 0, out_extent = 0;
};

// Refuses invalid sizes and strides, but not overlapping outputs.
MatmulShape ParseMatmulShape(ffi::Span<const int64_t> sizes, ffi::Span<const int64_t> lhs_strides,
                             ffi::Span<const int64_t> rhs_strides,
                             ffi::Span<const int64_t> out_strides);

// Whether two elements of the output may share an address. Threads write different elements.
bool OutputsOverlap(const MatmulShape& shape);

// Returns a product of the batch, without data.
Product ProductOfTypes(const MatmulShape& shape, DType lhs, DType rhs, DType out);

// Returns the product of the first batch; refuses buffers smaller than the strides' extent.
Product FirstProduct(const MatmulShape& shape, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                     ffi::AnyBuffer out);

// Returns the product of another batch.
Product ProductAt(const MatmulShape& shape, const Product& first, int64_t batch);

// Refuses a buffer of fewer elements than `extent`.
void CheckFits(const char* name, int64_t extent, int64_t elements);

}  // namespace tilekern::cpu
