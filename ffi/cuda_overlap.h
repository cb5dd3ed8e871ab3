// Products that are computed in parts while copies send parts between devices.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_call.h"
#include "cuda_driver.h"
#include "launch_plan.h"

namespace tilekern {

// One device's part in an execution of a program.
struct Execution {
  int64_t run;      // XLA's identifier of the execution, the same on all devices
  uint64_t device;  // its number in the program's mesh
  std::chrono::milliseconds patience = std::chrono::seconds(60);  // with the other devices
};

// Runs a plan that has an exchange; returns an error message, or nothing.
std::string RunOverlapped(const Driver& driver, const LaunchPlan& plan,
                          const std::vector<CUfunction>& functions, CUcontext context,
                          CUstream stream, const std::vector<DeviceBuffer>& buffers,
                          const Execution& execution);

}  // namespace tilekern
