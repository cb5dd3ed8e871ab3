// Runs a launch plan that tests/emulated_plans.py describes in a file of numbers:
//   late_reads late_writes backwards held folder; sizes of buffers; and for each launch the
//   kernel's number, grid, block, cluster, shared memory, repeats, and parameters.
// Buffers are read from files `0`, `1`, ... of the folder, and written back.
#pragma once

#include <fstream>
#include <iostream>
#include <string>

#include "instructions.h"

namespace emulation {

struct Plan {
  std::ifstream in;
  std::vector<char*> buffers;

  int64_t number() {
    int64_t value;
    if (!(in >> value)) fail("the plan ends too early");
    return value;
  }
  Dim3 dim3() {
    const auto x = static_cast<unsigned>(number()), y = static_cast<unsigned>(number());
    return {x, y, static_cast<unsigned>(number())};
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(number());
    for (int64_t& value : values) value = number();
    return values;
  }
};

// A parameter's bytes, and the step of its address, the first 8 of them, along each repeat.
struct Parameter {
  std::vector<char> bytes;
  std::vector<int64_t> steps;
};

inline Parameter read_parameter(Plan& plan) {
  enum { kBuffer, kScalars, kTensorMap };
  const int64_t kind = plan.number();
  Parameter result;
  if (kind == kScalars) {
    for (int64_t byte : plan.numbers()) result.bytes.push_back(static_cast<char>(byte));
    return result;
  }
  const int64_t index = plan.number();
  char* address = plan.buffers.at(index) + plan.number();
  result.steps = plan.numbers();
  if (kind == kBuffer) {
    result.bytes.resize(sizeof address);
    std::memcpy(result.bytes.data(), &address, sizeof address);
    return result;
  }
  TensorMap map = {};
  map.base = address;
  map.element_bytes = plan.number();
  map.swizzle = plan.number();
  map.is_tf32 = plan.number();
  map.fills_nan = plan.number();
  const auto sizes = plan.numbers(), strides = plan.numbers(), box = plan.numbers();
  map.rank = sizes.size();
  for (int dim = 0; dim < map.rank; ++dim) {
    map.sizes[dim] = sizes[dim];
    map.box[dim] = box[dim];
    if (dim > 0) map.strides[dim] = strides[dim - 1];
  }
  result.bytes.resize(128);
  std::memcpy(result.bytes.data(), &map, sizeof map);
  return result;
}

// `launch_kernel(number, grid, block, cluster, shared memory, parameters)` is the plan's own.
template <typename LaunchKernel>
int run_plan(const char* path, const LaunchKernel& launch_kernel) {
  Plan plan{std::ifstream(path)};
  late_reads = plan.number();
  late_writes = plan.number();
  backwards = plan.number();
  held = plan.number();
  std::string folder;
  plan.in >> folder;
  std::vector<int64_t> sizes = plan.numbers();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    // The addresses are aligned as XLA's. AddressSanitizer knows where a buffer ends.
    void* allocated = nullptr;
    if (posix_memalign(&allocated, 256, sizes[i]) != 0) fail("no memory for a buffer");
    char* const buffer = static_cast<char*>(allocated);
    plan.buffers.push_back(buffer);
    std::ifstream(folder + "/" + std::to_string(i), std::ios::binary).read(buffer, sizes[i]);
  }
  for (int64_t left = plan.number(); left > 0; --left) {
    const int64_t kernel = plan.number();
    const Dim3 grid = plan.dim3(), block = plan.dim3(), cluster = plan.dim3();
    const int64_t shared = plan.number();
    const std::vector<int64_t> repeats = plan.numbers();
    std::vector<Parameter> parameters(plan.number());
    for (Parameter& parameter : parameters) parameter = read_parameter(plan);
    int64_t times = 1;
    for (int64_t size : repeats) times *= size;
    for (int64_t time = 0; time < times; ++time) {
      std::vector<char> bytes;
      for (const Parameter& parameter : parameters) {
        std::vector<char> own = parameter.bytes;
        if (!parameter.steps.empty()) {
          char* address;
          std::memcpy(&address, own.data(), sizeof address);
          int64_t rest = time;
          for (std::size_t dim = repeats.size(); dim-- > 0; rest /= repeats[dim]) {
            address += rest % repeats[dim] * parameter.steps[dim];
          }
          std::memcpy(own.data(), &address, sizeof address);
        }
        bytes.insert(bytes.end(), own.begin(), own.end());
      }
      launch_kernel(kernel, grid, block, cluster, shared, bytes.data());
    }
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::ofstream(folder + "/" + std::to_string(i), std::ios::binary)
        .write(plan.buffers[i], sizes[i]);
    std::free(plan.buffers[i]);
  }
  return 0;
}

}  // namespace emulation
