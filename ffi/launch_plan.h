// What one custom call does, read from its attributes. The Python side, which decides all of it,
// is jax_tilekern/plans/launch.py; the fields have the same names and meaning there.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace tilekern {

// The address of a buffer, plus an offset.
struct BufferParameter {
  uint32_t buffer;
  uint64_t offset_bytes;
};

// Bytes passed by value.
struct ScalarsParameter {
  std::string bytes;
};

// A tensor map of a buffer; the numbers of enumerations are the driver's.
struct TensorMapParameter {
  uint32_t buffer;
  uint64_t extent_bytes;
  int dtype, interleave, swizzle, l2_promotion, oob_fill;
  std::vector<uint64_t> sizes, strides_bytes;
  std::vector<uint32_t> box, element_strides;
};

using Parameter = std::variant<BufferParameter, ScalarsParameter, TensorMapParameter>;
using Dim3 = std::array<unsigned, 3>;

struct Launch {
  std::string entry;
  Dim3 grid, block, cluster;
  unsigned shared_memory_bytes;
  std::vector<Parameter> parameters;

  // For errors: the kernel, and how it is launched.
  std::string Text() const;
};

struct LaunchPlan {
  std::string name;
  std::string arch;
  std::string_view cubin;  // views the attribute
  std::vector<uint64_t> alignments;
  std::vector<Launch> launches;

  // For errors: the plan, and what it was compiled for.
  std::string Text() const;
};

// Reads a plan and checks that it is whole and consistent in itself.
xla::ffi::ErrorOr<LaunchPlan> ReadLaunchPlan(const xla::ffi::Dictionary& attributes);

}  // namespace tilekern
