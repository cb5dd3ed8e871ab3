// Products that are too small to justify packing: each row of the left operand multiplies all of
// the right one, which L2 holds. Operands and results have the type of the accumulators.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/product.h"

namespace tilekern::cpu {

bool IsDirectProduct(const GemmFamily& family, const Product& product);

// Needs out.col_stride == 1 or n == 1.
void RunDirectProduct(const GemmFamily& family, const Product& product);

}  // namespace tilekern::cpu
