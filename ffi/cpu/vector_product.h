// Products with a few rows or columns: the large operand is streamed once, unpacked.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/parallel.h"
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

// Whether this path takes the product: few vectors, and a large operand with a unit stride. Several
// vectors over a short k, or with few results, are left to the matrix product's kernels, which are
// faster where they read operands in place, as `direct` says.
bool IsVectorProduct(const VectorFamily& family, const VectorProduct& product, bool direct);

bool IsDotProduct(const Product& product);

void RunVectorProduct(const VectorFamily& family, StoreFn store, const VectorProduct& product,
                      const Workers& workers);

void RunDotProduct(const KernelTable& kernels, const Product& product, const Workers& workers);

}  // namespace tilekern::cpu
