// The launch plan of one custom call, read from its attributes. jax_tilekern/plans/launch.py makes
// it; the fields have the same names and meanings there.
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

// The address of a buffer, plus an offset, plus a step for each dimension of a launch's
// repetitions.
struct BufferParameter {
  uint32_t buffer;
  uint64_t offset_bytes;
  std::vector<uint64_t> steps_bytes;  // empty, or one for each of the repeats
};

// Bytes passed by value.
struct ScalarsParameter {
  std::string bytes;
};

// A tensor map of a buffer from an offset; enumerations have the driver's values.
struct TensorMapParameter {
  uint32_t buffer;
  uint64_t offset_bytes;
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
  bool overlaps;  // with the launch before (programmatic dependent launch)
  bool branches;  // on a second stream, beside the launches after it until one that joins
  bool joins;     // begins after those that branched

  // Describes the kernel and its launch in errors.
  std::string Text() const;
};

struct LaunchPlan {
  std::string name;
  std::string arch;
  std::vector<PackedCubin> cubins;  // their texts are views of attributes
  std::vector<uint64_t> alignments;
  std::vector<Launch> launches;

  // Describes the plan and its target in errors.
  std::string Text() const;
};

// Reads a plan and checks that it is complete and consistent.
xla::ffi::ErrorOr<LaunchPlan> ReadLaunchPlan(const xla::ffi::Dictionary& attributes);

}  // namespace tilekern
