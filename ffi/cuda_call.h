// What the handler of a launch plan does with one call's buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "launch_plan.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern {

struct DeviceBuffer {
  char* address;
  uint64_t bytes;
  uint64_t elements;
};

// The buffers of a call, operands then results, checked against what the plan relies on.
xla::ffi::ErrorOr<std::vector<DeviceBuffer>> CallBuffers(const LaunchPlan& plan,
                                                         const xla::ffi::RemainingArgs& operands,
                                                         const xla::ffi::RemainingRets& results);

// Launches one kernel, as often as it is repeated; returns what went wrong, or nothing.
std::string Run(const Driver& driver, const Launch& launch, CUfunction function, CUstream stream,
                const std::vector<DeviceBuffer>& buffers);

// Runs a plan twice over results filled with different bytes, waiting for every launch. Returns
// what went wrong, naming the kernel, or which of the first `checked` results has elements that
// were not written. A result that shares an operand's buffer holds that instead of a filling.
std::string RunChecked(const Driver& driver, const LaunchPlan& plan,
                       const std::vector<CUfunction>& functions, CUstream stream,
                       const std::vector<DeviceBuffer>& buffers, size_t operands, size_t checked);

}  // namespace tilekern
