// Queries about the strided batched matrix product on CPUs, for tests and tools.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/dtype.h"

namespace tilekern::cpu {

// The custom call's attributes, as documented in matmul.cc.
struct MatmulAttributes {
  std::vector<int64_t> sizes;
  std::vector<int64_t> lhs_strides;
  std::vector<int64_t> rhs_strides;
  std::vector<int64_t> out_strides;
};

// Returns the kernel and instruction set of such a call, e.g. "avx512_vnni s8 packed 12x32".
// Throws std::invalid_argument if the call would be refused.
std::string CpuMatmulKernelName(DType lhs, DType rhs, DType out,
                                const MatmulAttributes& attributes);

// The level in use, the levels this CPU can run from low to high, and a switch for tests.
std::string CpuInstructionSet();
std::vector<std::string> CpuInstructionSets();
void SetCpuInstructionSet(const std::string& name);  // throws std::invalid_argument

}  // namespace tilekern::cpu
