// The instruction set in use, chosen once from those that the CPU supports.
#pragma once

#include "cpu/kernel_table.h"

namespace tilekern::cpu {

const KernelTable& Kernels();

}  // namespace tilekern::cpu
