// The execution of a launch plan with one call's buffers.
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

// The buffers of a call, operands and then results, checked against the plan's requirements.
xla::ffi::ErrorOr<std::vector<DeviceBuffer>> CallBuffers(const LaunchPlan& plan,
                                                         const xla::ffi::RemainingArgs& operands,
                                                         const xla::ffi::RemainingRets& results);

// Launches the kernels of a plan from `first` to before `last`, of which some branch; returns an
// error message, or nothing.
std::string RunLaunches(const Driver& driver, const LaunchPlan& plan, size_t first, size_t last,
                        const std::vector<CUfunction>& functions, CUcontext context,
                        CUstream stream, const std::vector<DeviceBuffer>& buffers);

// Launches all kernels of a plan.
inline std::string RunPlan(const Driver& driver, const LaunchPlan& plan,
                           const std::vector<CUfunction>& functions, CUcontext context,
                           CUstream stream, const std::vector<DeviceBuffer>& buffers) {
  return RunLaunches(driver, plan, 0, functions.size(), functions, context, stream, buffers);
}

// Launches one kernel with all its repetitions; returns an error message, or nothing.
std::string Run(const Driver& driver, const Launch& launch, CUfunction function, CUstream stream,
                const std::vector<DeviceBuffer>& buffers);

// Runs a plan twice over results filled with different bytes, and waits for every launch. Returns
// an error message that names the kernel, or the one of the first `checked` results with unwritten
// elements. A result that shares an operand's buffer holds the operand instead of a filling.
std::string RunChecked(const Driver& driver, const LaunchPlan& plan,
                       const std::vector<CUfunction>& functions, CUstream stream,
                       const std::vector<DeviceBuffer>& buffers, size_t operands, size_t checked);

}  // namespace tilekern
