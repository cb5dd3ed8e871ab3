// The instruction set in use, chosen once by what the CPU can run.
#pragma once

#include "cpu/kernel_table.h"

namespace tilekern::cpu {

const KernelTable& Kernels();

}  // namespace tilekern::cpu
