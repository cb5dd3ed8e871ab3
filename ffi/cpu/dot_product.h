// The product of two vectors: both are streamed once, and threads divide k.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/parallel.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// Whether there is one output, and both operands are contiguous and of one type.
bool IsDotProduct(const Product& product);

// The order of the sum depends on k alone. With one thread nothing is allocated, so that a task may
// call it.
void RunDotProduct(const KernelTable& kernels, const Product& product, const Workers& workers);

}  // namespace tilekern::cpu
