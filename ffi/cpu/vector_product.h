// Products with a few rows or columns: the large operand is streamed once, unpacked.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// The large operand's view of the product: out[s, o] = sum_k small[s, k] big[o, k].
struct VectorProduct {
  int64_t smalls, outer, k;
  ConstMatrix small;  // a row for each s
  ConstMatrix big;    // a row for each o
  MutableMatrix out;  // likewise

  static VectorProduct From(const Product& product);
};

// Whether this path supports the product: few vectors, and a large operand with a unit stride.
bool IsVectorProduct(const VectorProduct& product);

// Whether several products with vectors are so short, or have so few results, that a matrix
// product's kernel is faster. Without `direct`, that kernel packs both operands.
bool IsSmall(const VectorFamily& family, const VectorProduct& product, bool direct);

// Returns the entries of the large operand per task, for `threads` threads.
int64_t VectorChunk(const VectorProduct& product, int64_t threads);

// Computes `count` entries of each result from `first` on.
void RunVectorProduct(const VectorFamily& family, StoreFn store, const VectorProduct& product,
                      int64_t first, int64_t count);

}  // namespace tilekern::cpu
