// The order of the launches of a plan on two streams, and what happens when a call fails, with a
// driver that writes down what it is asked for.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "cuda_call.h"

namespace {

using tilekern::CUevent;
using tilekern::CUfunction;
using tilekern::CUresult;
using tilekern::CUstream;

constexpr CUresult kFailure = 700;

// What the driver was asked for, and which call of which kind fails, counted from 1.
struct Recorded {
  std::vector<std::string> calls;
  uintptr_t opened = 100;
  int launches = 0, failing_launch = 0;
  bool streams_fail = false;
} recorded;

template <typename Handle>
std::string Number(Handle* handle) {
  return std::to_string(reinterpret_cast<uintptr_t>(handle));
}

template <typename Handle>
Handle Open() {
  return reinterpret_cast<Handle>(++recorded.opened);
}

tilekern::Driver RecordingDriver() {
  tilekern::Driver driver = {};
  driver.cuGetErrorName = [](CUresult, const char** name) -> CUresult {
    *name = "CUDA_ERROR_EXAMPLE";
    return 0;
  };
  driver.cuGetErrorString = [](CUresult, const char** text) -> CUresult {
    *text = "an example";
    return 0;
  };
  driver.cuThreadExchangeStreamCaptureMode = [](int*) -> CUresult { return 0; };
  driver.cuCtxGetStreamPriorityRange = [](int* least, int* greatest) -> CUresult {
    *least = 0;
    *greatest = -5;
    return 0;
  };
  driver.cuStreamCreateWithPriority = [](CUstream* stream, unsigned, int priority) -> CUresult {
    if (recorded.streams_fail) return kFailure;
    *stream = Open<CUstream>();
    recorded.calls.push_back("open " + Number(*stream) + " at " + std::to_string(priority));
    return 0;
  };
  driver.cuEventCreate = [](CUevent* event, unsigned) -> CUresult {
    *event = Open<CUevent>();
    return 0;
  };
  driver.cuEventRecord = [](CUevent event, CUstream stream) -> CUresult {
    recorded.calls.push_back("record " + Number(event) + " on " + Number(stream));
    return 0;
  };
  driver.cuStreamWaitEvent = [](CUstream stream, CUevent event, unsigned) -> CUresult {
    recorded.calls.push_back(Number(stream) + " waits for " + Number(event));
    return 0;
  };
  driver.cuLaunchKernelEx = [](const tilekern::CUlaunchConfig* config, CUfunction function, void**,
                               void**) -> CUresult {
    if (++recorded.launches == recorded.failing_launch) return kFailure;
    recorded.calls.push_back("launch " + Number(function) + " on " + Number(config->hStream));
    return 0;
  };
  return driver;
}

// Runs launches on `stream`: 'm' on the main stream, 'b' on the branch, 'j' joining. The first has
// function 1. Returns the error.
std::string Run(const std::string& kinds, uintptr_t stream) {
  tilekern::LaunchPlan plan;
  std::vector<CUfunction> functions;
  for (const char kind : kinds) {
    tilekern::Launch launch = {};
    launch.entry = "kernel";
    launch.grid = launch.block = launch.cluster = {1, 1, 1};
    launch.branches = kind == 'b';
    launch.joins = kind == 'j';
    plan.launches.push_back(launch);
    functions.push_back(reinterpret_cast<CUfunction>(functions.size() + 1));
  }
  static const tilekern::Driver driver = RecordingDriver();
  return tilekern::RunPlan(driver, plan, functions, nullptr, reinterpret_cast<CUstream>(stream),
                           {});
}

}  // namespace

void CheckBranches(Counts& counts) {
  using Calls = std::vector<std::string>;
  recorded = {};
  counts.Check(Run("mm", 7).empty() && recorded.calls == Calls{"launch 1 on 7", "launch 2 on 7"},
               "a plan without branches opens no stream");

  recorded = {};
  const Calls branched = {"launch 1 on 7",     "open 101 at -5",    "record 102 on 7",
                          "101 waits for 102", "launch 2 on 101",   "launch 3 on 101",
                          "launch 4 on 7",     "record 102 on 7",   "101 waits for 102",
                          "launch 5 on 101",   "record 103 on 101", "7 waits for 103",
                          "launch 6 on 7",     "record 102 on 7",   "101 waits for 102",
                          "launch 7 on 101",   "record 103 on 101", "7 waits for 103"};
  counts.Check(Run("mbbmbjb", 7).empty() && recorded.calls == branched,
               "launches that branch wait for those before, and are joined at last");

  recorded = {};
  recorded.opened = 200;
  const std::string other = Run("b", 8);
  counts.Check(other.empty() && recorded.calls.front() == "open 201 at -5",
               "another main stream has a branch of its own");

  recorded = {};
  recorded.failing_launch = 3;
  const std::string failed = Run("mbbmj", 7);
  counts.Check(failed.find("CUDA_ERROR_EXAMPLE") != std::string::npos &&
                   failed.find("kernel") != std::string::npos && recorded.launches == 3 &&
                   recorded.calls.back() == "7 waits for 103",
               "a launch that fails ends the plan, whose branch is joined: " + failed);

  recorded = {};
  recorded.streams_fail = true;
  const std::string closed = Run("mbm", 9);
  counts.Check(closed.find("a second stream") != std::string::npos && recorded.launches == 1,
               "a stream that cannot be opened ends the plan: " + closed);
  std::printf("launches on two streams\n");
}
