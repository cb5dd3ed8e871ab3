// Products that overlap with copies between devices, on simulated streams: operations run late and
// in a random order that events allow. Threads of several devices make the same calls, reuse their
// buffers, and overwrite them as soon as the stream of the call allows it.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_overlap.h"

namespace {

using tilekern::CUcontext;
using tilekern::CUevent;
using tilekern::CUfunction;
using tilekern::CUresult;
using tilekern::CUstream;
using tilekern::DeviceBuffer;

constexpr CUresult kFailure = 700;

// -- Streams and events ---------------------------------------------------------------------------

struct Operation {
  std::function<void()> run;
  std::shared_ptr<bool> after;  // an event's occurrence that it waits for
};

struct Gpus {
  std::mutex mutex;
  std::map<CUstream, std::deque<Operation>> streams;
  std::map<CUevent, std::shared_ptr<bool>> occurrences;
  uintptr_t opened = 1000;
  int copies = 0, failing_copy = 0, waits_for_nothing = 0, wrong = 0;
} gpus;

void Enqueue(CUstream stream, Operation operation) {
  std::lock_guard lock(gpus.mutex);
  gpus.streams[stream].push_back(std::move(operation));
}

// Runs the operations at the front of random streams until none is left or none can run. Returns
// whether none is left.
bool Drain(unsigned seed) {
  std::mt19937 random(seed);
  for (;;) {
    std::lock_guard lock(gpus.mutex);
    std::vector<std::deque<Operation>*> ready;
    bool is_empty = true;
    for (auto& [_, queue] : gpus.streams) {
      if (queue.empty()) continue;
      is_empty = false;
      if (queue.front().after == nullptr || *queue.front().after) ready.push_back(&queue);
    }
    if (ready.empty()) return is_empty;
    std::deque<Operation>& queue = *ready[random() % ready.size()];
    if (queue.front().run) queue.front().run();
    queue.pop_front();
  }
}

template <typename Handle>
Handle Open() {
  std::lock_guard lock(gpus.mutex);
  return reinterpret_cast<Handle>(++gpus.opened);
}

// -- Kernels: rows of k numbers times one number, and the terms of other devices ------------------

constexpr size_t kWidth = 3;

struct Shape {
  uint64_t rows, terms;
};

void Multiply(const float* lhs, const float* rhs, float* out, const std::vector<float*>& terms,
              const Shape& shape) {
  for (size_t i = 0; i < shape.rows * kWidth; ++i) {
    out[i] = lhs[i] * *rhs;
    for (const float* term : terms) out[i] += term[i];
  }
}

tilekern::Driver SimulatedDriver() {
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
    *least = *greatest = 0;
    return 0;
  };
  driver.cuStreamCreateWithPriority = [](CUstream* stream, unsigned, int) -> CUresult {
    *stream = Open<CUstream>();
    return 0;
  };
  driver.cuEventCreate = [](CUevent* event, unsigned) -> CUresult {
    *event = Open<CUevent>();
    return 0;
  };
  driver.cuEventRecord = [](CUevent event, CUstream stream) -> CUresult {
    std::lock_guard lock(gpus.mutex);
    const auto happened = std::make_shared<bool>(false);
    gpus.occurrences[event] = happened;
    gpus.streams[stream].push_back({[happened] { *happened = true; }, nullptr});
    return 0;
  };
  driver.cuStreamWaitEvent = [](CUstream stream, CUevent event, unsigned) -> CUresult {
    std::lock_guard lock(gpus.mutex);
    const auto found = gpus.occurrences.find(event);
    if (found == gpus.occurrences.end()) {
      ++gpus.waits_for_nothing;
    } else {
      gpus.streams[stream].push_back({nullptr, found->second});
    }
    return 0;
  };
  driver.cuMemcpyAsync = [](void* to, const void* from, size_t bytes, CUstream stream) -> CUresult {
    std::lock_guard lock(gpus.mutex);
    if (++gpus.copies == gpus.failing_copy) return kFailure;
    gpus.streams[stream].push_back({[=] { std::memcpy(to, from, bytes); }, nullptr});
    return 0;
  };
  driver.cuLaunchKernelEx = [](const tilekern::CUlaunchConfig* config, CUfunction,
                               void** parameters, void**) -> CUresult {
    const Shape shape = *static_cast<Shape*>(parameters[0]);
    std::vector<float*> pointers;
    for (size_t i = 0; i < 3 + shape.terms; ++i) {
      pointers.push_back(*static_cast<float**>(parameters[1 + i]));
    }
    Enqueue(config->hStream, {[=] {
                                Multiply(pointers[0], pointers[1], pointers[2],
                                         {pointers.begin() + 3, pointers.end()}, shape);
                              },
                              nullptr});
    return 0;
  };
  return driver;
}

const tilekern::Driver driver = SimulatedDriver();

// -- Calls ----------------------------------------------------------------------------------------

using Rows = std::vector<uint64_t>;

constexpr size_t kMostRows = 24;  // of all devices
constexpr size_t kRowBytes = kWidth * sizeof(float);
constexpr uint32_t kAddend = 6;

uint64_t Sum(const Rows& rows) { return std::accumulate(rows.begin(), rows.end(), uint64_t{0}); }

// Buffers: lhs, rhs, the number of the device, out, receive, send, a further term.
tilekern::LaunchPlan Plan(bool scatters, bool adds, uint64_t size, uint64_t stride,
                          const Rows& rows) {
  const auto launch = [&](uint64_t of_part, uint64_t terms) {
    tilekern::Launch launch = {};
    launch.entry = "kernel";
    launch.grid = launch.block = launch.cluster = {1, 1, 1};
    const Shape shape = {of_part, terms + adds};
    std::string bytes(sizeof(shape), '\0');
    std::memcpy(bytes.data(), &shape, sizeof(shape));
    launch.parameters = {tilekern::ScalarsParameter{bytes}};
    for (const uint32_t buffer : {0u, 1u, 3u}) {
      launch.parameters.push_back(tilekern::BufferParameter{buffer, 0, {}});
    }
    for (uint64_t i = 0; i < terms; ++i) {
      launch.parameters.push_back(tilekern::BufferParameter{4, i * Sum(rows) * kRowBytes, {}});
    }
    if (adds) launch.parameters.push_back(tilekern::BufferParameter{kAddend, 0, {}});
    return launch;
  };
  tilekern::LaunchPlan plan;
  std::vector<uint64_t> ends;
  for (const uint64_t terms : scatters ? Rows{0, size - 1} : Rows{0}) {
    for (uint64_t of_part : rows) {
      plan.launches.push_back(launch(of_part, terms));
      ends.push_back(plan.launches.size());
    }
  }
  plan.exchange = tilekern::Exchange{scatters,           "x", size, stride,   rows, 0, 2, 3, 4,
                                     scatters ? 5u : 4u, {},  ends, !scatters};
  if (adds) plan.exchange->addend = kAddend;
  return plan;
}

struct Device {
  explicit Device(uint64_t number)
      : number(number),
        context(Open<CUcontext>()),
        stream(Open<CUstream>()),
        arrays(7, std::vector<float>(kMostRows * kWidth)) {
    arrays[1][0] = Weight();
  }

  float Weight() const { return static_cast<float>(number + 2); }

  // An element of lhs in a run.
  static float Element(uint64_t number, int64_t run, size_t i) {
    return static_cast<float>((number * 7 + static_cast<uint64_t>(run) * 5 + i) % 64);
  }

  // Enqueues the call, what makes its operand, a check of its result, and what overwrites all.
  std::string Call(const tilekern::LaunchPlan& plan, int64_t run,
                   std::chrono::milliseconds patience = std::chrono::seconds(20)) {
    const tilekern::Exchange& x = *plan.exchange;
    const size_t shard = Sum(x.rows) * kWidth, all = x.size * shard;
    const size_t lhs = x.scatters ? all : shard, out = x.scatters ? shard : all;
    const size_t exchanged = x.scatters ? all - shard : all;
    const std::vector<size_t> counts = {lhs, 1, 1, out, exchanged, exchanged, all};
    std::vector<DeviceBuffer> buffers;
    for (size_t i = 0; i < counts.size(); ++i) {
      buffers.push_back(
          {reinterpret_cast<char*>(arrays[i].data()), counts[i] * sizeof(float), counts[i]});
    }
    Enqueue(stream, {[this, run, lhs, all] {
                       for (size_t i = 0; i < lhs; ++i) arrays[0][i] = Element(number, run, i);
                       for (size_t i = 0; i < all; ++i) {
                         arrays[kAddend][i] = Element(number + 1, run, i);
                       }
                     },
                     nullptr});
    const std::vector<CUfunction> functions(plan.launches.size());
    const std::string problem = tilekern::RunOverlapped(driver, plan, functions, context, stream,
                                                        buffers, {run, number, patience});
    if (problem.empty()) Enqueue(stream, {[=] { Check(x, run, shard); }, nullptr});
    Enqueue(stream, {[this] {
                       for (const size_t i : {0, 3, 4, 5, 6}) {
                         std::fill(arrays[i].begin(), arrays[i].end(), -1e6f);
                       }
                     },
                     nullptr});
    return problem;
  }

  void Check(const tilekern::Exchange& x, int64_t run, size_t shard) {
    const uint64_t member = number / x.stride % x.size, base = number - member * x.stride;
    for (uint64_t other = 0; other < x.size; ++other) {
      for (size_t i = 0; i < shard && !x.scatters; ++i) {
        const float element = Element(base + other * x.stride, run, i);
        gpus.wrong += arrays[3][other * shard + i] != element * Weight();
        gpus.wrong += arrays[4][other * shard + i] != element;
      }
    }
    for (size_t i = 0; i < shard && x.scatters; ++i) {
      float sum = 0;
      for (uint64_t other = 0; other < x.size; ++other) {
        const uint64_t from = base + other * x.stride;
        sum += Element(from, run, member * shard + i) * static_cast<float>(from + 2);
        if (x.addend) sum += Element(from + 1, run, member * shard + i);
      }
      gpus.wrong += arrays[3][i] != sum;
    }
  }

  const uint64_t number;
  const CUcontext context;
  const CUstream stream;
  std::vector<std::vector<float>> arrays;
};

// The devices that exchange rows: `size` of them, `stride` apart.
struct Axis {
  uint64_t size, stride;
  Rows rows;
};

// Calls along axes on all devices, each by a thread of its own; returns what was wrong.
std::string Executions(uint64_t count, const std::vector<Axis>& axes, int runs, unsigned seed) {
  gpus.wrong = gpus.waits_for_nothing = 0;
  std::vector<std::unique_ptr<Device>> devices;
  for (uint64_t i = 0; i < count; ++i) devices.push_back(std::make_unique<Device>(i));
  std::vector<std::string> problems(count);
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      std::vector<tilekern::LaunchPlan> plans;
      // A loop calls a plan several times in one run.
      for (const auto& [scatters, adds] : std::vector<std::pair<bool, bool>>{
               {false, false}, {true, false}, {true, true}, {false, false}}) {
        for (const Axis& x : axes) {
          plans.push_back(Plan(scatters, adds, x.size, x.stride, x.rows));
        }
      }
      for (int run = 0; run < runs; ++run) {
        for (const tilekern::LaunchPlan& plan : plans) {
          if (problems[i].empty()) problems[i] = devices[i]->Call(plan, run);
        }
      }
    });
  }
  // Some operations run while others are still enqueued.
  Drain(seed);
  for (std::thread& thread : threads) thread.join();
  const bool ended = Drain(seed + 1);
  gpus.streams.clear();
  for (const std::string& problem : problems) {
    if (!problem.empty()) return problem;
  }
  if (!ended) return "streams wait for each other";
  if (gpus.waits_for_nothing > 0) return "a stream waits for an event before it is recorded";
  return gpus.wrong == 0 ? "" : std::to_string(gpus.wrong) + " wrong elements";
}

void CheckFailures(Counts& counts) {
  Device first(0), second(1);
  const tilekern::LaunchPlan plan = Plan(false, false, 2, 1, {2});
  using std::chrono::milliseconds;
  const std::string alone = first.Call(plan, 5, milliseconds(30));
  counts.Check(alone.find("device 0 of axis x, of 2, waited") != std::string::npos &&
                   alone.find("for device 1 to arrive in run 5") != std::string::npos,
               "a device that never comes is named: " + alone);
  const std::string late = second.Call(plan, 5);
  counts.Check(late == alone, "a device that comes too late gets the same error: " + late);
  counts.Check(Drain(1), "nothing is left to wait for after a failure");

  std::string problems[2];
  const auto both = [&](int64_t run) {
    std::thread other([&] { problems[1] = second.Call(plan, run); });
    problems[0] = first.Call(plan, run);
    other.join();
    return Drain(2);
  };
  gpus.wrong = 0;
  counts.Check(both(5) && problems[0].empty() && problems[1].empty() && gpus.wrong == 0,
               "a run may have the number of an earlier one: " + problems[0] + problems[1]);
  gpus.failing_copy = gpus.copies + 1;
  counts.Check(both(6) && !(problems[0] + problems[1]).empty(),
               "a copy that fails is an error, and nobody waits");
  counts.Check((problems[0] + problems[1]).find("CUDA_ERROR_EXAMPLE") != std::string::npos,
               "the error is the driver's: " + problems[0] + problems[1]);
  gpus.streams.clear();
  gpus.failing_copy = 0;
  const std::vector<DeviceBuffer> uneven(6, {nullptr, 25, 25});
  const std::string refused =
      tilekern::RunOverlapped(driver, Plan(true, false, 2, 1, {1, 1}), {}, first.context,
                              first.stream, uneven, {8, 0, milliseconds(1)});
  counts.Check(refused == "buffer 0 of 25 bytes is not divisible into 4 rows",
               "rows that do not divide are refused: " + refused);
  gpus.streams.clear();
}

}  // namespace

void CheckOverlap(Counts& counts) {
  unsigned seed = 0;
  const std::vector<std::pair<uint64_t, std::vector<Axis>>> cases = {
      {2, {{2, 1, {2}}}},
      {2, {{2, 1, {2, 2, 2, 2}}}},
      {2, {{2, 1, {1, 3}}, {2, 1, {5, 2, 1}}}},
      {3, {{3, 1, {2, 1}}}},
      {8, {{2, 2, {2, 2}}}},
      {4, {{4, 1, {1, 2}}, {2, 2, {2, 2, 3}}, {2, 1, {2}}}}};
  for (const auto& [count, axes] : cases) {
    for (int repeat = 0; repeat < 5; ++repeat, seed += 2) {
      const std::string wrong = Executions(count, axes, 6, seed);
      counts.Check(wrong.empty(), std::to_string(count) + " devices, " +
                                      std::to_string(axes.size()) + " axes: " + wrong);
    }
  }
  CheckFailures(counts);
  std::printf("products that overlap with copies between devices\n");
}
