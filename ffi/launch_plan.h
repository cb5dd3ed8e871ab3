// What one custom call does, read from its attributes. The Python side, which decides all of it,
// is jax_tilekern/plans/launch.py; the fields have the same names and meaning there.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "packed_cubin.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern {

// The address of a buffer, plus an offset, plus so much for each step along a launch's repeats.
struct BufferParameter {
  uint32_t buffer;
  uint64_t offset_bytes;
  std::vector<uint64_t> steps_bytes;  // empty, or one for each of the repeats
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
  std::vector<uint64_t> sizes, strides_bytes, steps_bytes;
  std::vector<uint32_t> box, element_strides;
};

using Parameter = std::variant<BufferParameter, ScalarsParameter, TensorMapParameter>;
using Dim3 = std::array<unsigned, 3>;

struct Launch {
  size_t cubin;  // which of the plan's
  std::string entry;
  Dim3 grid, block, cluster;
  unsigned shared_memory_bytes;
  std::vector<Parameter> parameters;
  std::vector<uint64_t> repeats;

  // For errors: the kernel, and how it is launched.
  std::string Text() const;
};

struct LaunchPlan {
  std::string name;
  std::string arch;
  std::vector<PackedCubin> cubins;  // their texts are views of attributes
  std::vector<uint64_t> alignments;
  std::vector<Launch> launches;

  // For errors: the plan, and what it was compiled for.
  std::string Text() const;
};

// Reads a plan and checks that it is whole and consistent in itself.
xla::ffi::ErrorOr<LaunchPlan> ReadLaunchPlan(const xla::ffi::Dictionary& attributes);

}  // namespace tilekern
