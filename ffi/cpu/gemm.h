// The packed, cache-blocked matrix product.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/parallel.h"
#include "cpu/product.h"

namespace tilekern::cpu {

// `store` writes accumulators to the output's type. Needs out.col_stride == 1 or n == 1.
void RunGemm(const GemmFamily& family, StoreFn store, const Product& product);
void RunGemm(const GemmFamily& family, StoreFn store, const Product& product,
             const Workers& workers);

}  // namespace tilekern::cpu
