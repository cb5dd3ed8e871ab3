// Products that are too small to justify packing: each row of the left operand multiplies all of
// the right one, which L2 holds.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// Whether this path takes the product.
bool IsDirectProduct(const GemmFamily& family, const Product& product);

// `store` writes accumulators to the output's type. Needs out.col_stride == 1 or n == 1.
void RunDirectProduct(const GemmFamily& family, StoreFn store, const Product& product);

}  // namespace tilekern::cpu
