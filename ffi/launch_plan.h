// The launch plan of one custom call, read from its attributes. jax_tilekern/plans/launch.py makes
// it; the fields have the same names and meanings there.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

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

// What the devices along a mesh axis send each other while they run a plan. The plan multiplies a
// part of a matrix `lhs`. A device has a shard of it, which it sends to all others (a gather); or
// it has all rows, and sends a term of the result to the device that owns its rows (a scatter).
struct Exchange {
  bool scatters;
  std::string axis;
  uint64_t size,
      stride;  // devices along the axis, and the distance between two neighbours' numbers
  std::vector<uint64_t> rows;  // of each part of a device's rows
  // Buffers: what is multiplied, the number of the device, the result, and the rows or terms of the
  // other devices. A scatter computes the terms for others in `send`, and reads `addend`, a further
  // term of all rows, if there is one.
  uint32_t lhs, device, out, receive, send;
  std::optional<uint32_t> addend;
  // Where the launches of each part end: those of a gather multiply a part; those of a scatter
  // compute a term for another device or, after these, a part of this device's result.
  std::vector<uint64_t> ends;
  bool keeps;  // whether a gather completes `receive` by this device's own rows
};

struct LaunchPlan {
  std::string name;
  std::string arch;
  std::vector<std::string_view> cubins;  // views of attributes
  std::vector<uint64_t> alignments;
  std::vector<Launch> launches;
  std::optional<Exchange> exchange;

  // Describes the plan and its target in errors.
  std::string Text() const;
};

// Reads a plan and checks that it is complete and consistent.
xla::ffi::ErrorOr<LaunchPlan> ReadLaunchPlan(const xla::ffi::Dictionary& attributes);

}  // namespace tilekern
