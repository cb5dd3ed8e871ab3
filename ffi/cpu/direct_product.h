// Products that are too small, or have too few columns, to justify packing: each row of the left
// operand multiplies all of the right one, which L2 holds.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// Whether this path takes the product.
bool IsDirectProduct(const GemmFamily& family, const Product& product);

// Returns the product with an rhs whose rows are contiguous, which may be a copy in scratch memory
// of this thread. Threads that share it need not copy it themselves.
Product WithRowsOfRhs(const GemmFamily& family, const Product& product);

// `store` writes accumulators to the output's type. Needs out.col_stride == 1 or n == 1.
void RunDirectProduct(const GemmFamily& family, StoreFn store, const Product& product);

}  // namespace tilekern::cpu
