#include "cuda_call.h"

#include <optional>

#include "cuda_branch.h"

namespace tilekern {
namespace {

namespace ffi = xla::ffi;

// Bytes of a buffer in memory; AnyBuffer::size_bytes counts a byte for each packed element.
uint64_t SizeInMemory(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::S4:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return (buffer.element_count() + 1) / 2;
    case ffi::DataType::S2:
    case ffi::DataType::U2:
      return (buffer.element_count() + 3) / 4;
    default:
      return buffer.size_bytes();
  }
}

// The index of a repetition of a launch, in each dimension.
using Indices = std::vector<uint64_t>;

// Advances to the next repetition; returns whether there is one.
bool Advance(Indices& indices, const std::vector<uint64_t>& repeats) {
  for (size_t i = repeats.size(); i-- > 0;) {
    if (++indices[i] < repeats[i]) return true;
    indices[i] = 0;
  }
  return false;
}

uint64_t Shift(const std::vector<uint64_t>& steps_bytes, const Indices& indices) {
  uint64_t shift = 0;
  for (size_t i = 0; i < steps_bytes.size(); ++i) shift += steps_bytes[i] * indices[i];
  return shift;
}

// A launch's parameters in the driver's form: a pointer to the value of each.
class Parameters {
 public:
  // The vectors have their final size, because the addresses point into them.
  explicit Parameters(size_t count) : addresses_(count), maps_(count), pointers_(count) {}

  // Adds the next parameter; returns an error message, or nothing.
  std::string Add(const Driver&, const ScalarsParameter& scalars, const std::vector<DeviceBuffer>&,
                  const Indices&) {
    pointers_[size_++] = const_cast<char*>(scalars.bytes.data());
    return {};
  }

  std::string Add(const Driver&, const BufferParameter& parameter,
                  const std::vector<DeviceBuffer>& buffers, const Indices& indices) {
    const DeviceBuffer& buffer = buffers[parameter.buffer];
    const uint64_t offset = parameter.offset_bytes + Shift(parameter.steps_bytes, indices);
    if (offset > buffer.bytes) {
      return "offset " + std::to_string(offset) + " into " + std::to_string(buffer.bytes) +
             " bytes of buffer " + std::to_string(parameter.buffer);
    }
    addresses_[size_] = buffer.address + offset;
    pointers_[size_] = &addresses_[size_];
    ++size_;
    return {};
  }

  std::string Add(const Driver& driver, const TensorMapParameter& map,
                  const std::vector<DeviceBuffer>& buffers, const Indices& indices) {
    const DeviceBuffer& buffer = buffers[map.buffer];
    const uint64_t offset = map.offset_bytes + Shift(map.steps_bytes, indices);
    // Two comparisons avoid a sum that may wrap around.
    if (offset > buffer.bytes || map.extent_bytes > buffer.bytes - offset) {
      return "a tensor map reaches " + std::to_string(offset + map.extent_bytes) + " bytes into " +
             std::to_string(buffer.bytes) + " of buffer " + std::to_string(map.buffer);
    }
    CUresult error = driver.cuTensorMapEncodeTiled(
        &maps_[size_], map.dtype, map.sizes.size(), buffer.address + offset, map.sizes.data(),
        map.strides_bytes.data(), map.box.data(), map.element_strides.data(), map.interleave,
        map.swizzle, map.l2_promotion, map.oob_fill);
    if (error) {
      return "cuTensorMapEncodeTiled of buffer " + std::to_string(map.buffer) + ": " +
             driver.Text(error);
    }
    pointers_[size_] = &maps_[size_];
    ++size_;
    return {};
  }

  void** pointers() { return pointers_.data(); }

 private:
  size_t size_ = 0;
  std::vector<char*> addresses_;
  std::vector<CUtensorMap> maps_;
  std::vector<void*> pointers_;
};

// Launches one kernel once; returns an error message, or nothing.
std::string RunOnce(const Driver& driver, const Launch& launch, CUfunction function,
                    CUstream stream, const std::vector<DeviceBuffer>& buffers,
                    const Indices& indices) {
  Parameters parameters(launch.parameters.size());
  for (size_t i = 0; i < launch.parameters.size(); ++i) {
    const std::string problem =
        std::visit([&](const auto& p) { return parameters.Add(driver, p, buffers, indices); },
                   launch.parameters[i]);
    if (!problem.empty()) return "parameter " + std::to_string(i) + ": " + problem;
  }

  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};
  config.attrs = attributes;
  // Architectures before 9.0 support neither attribute, not even a cluster of one CTA.
  if (launch.cluster != Dim3{1, 1, 1}) {
    CUlaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  }
  // Without the attribute the launch begins when the one before has ended. A stream may be captured
  // as a graph.
  if (launch.overlaps && driver.version >= kGraphsOfOverlappingLaunches) {
    CUlaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDimX = launch.grid[0];
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0];
  config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = launch.shared_memory_bytes;
  config.hStream = stream;
  if (CUresult error = driver.cuLaunchKernelEx(&config, function, parameters.pointers(), nullptr)) {
    return "cuLaunchKernelEx: " + driver.Text(error);
  }
  return {};
}

}  // namespace

ffi::ErrorOr<std::vector<DeviceBuffer>> CallBuffers(const LaunchPlan& plan,
                                                    const ffi::RemainingArgs& operands,
                                                    const ffi::RemainingRets& results) {
  const size_t count = operands.size() + results.size();
  if (count != plan.alignments.size()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        plan.Text() + " takes " + std::to_string(plan.alignments.size()) +
        " buffers, the call has " + std::to_string(count)));
  }
  std::vector<DeviceBuffer> buffers;
  buffers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const bool is_operand = i < operands.size();
    std::optional<ffi::AnyBuffer> buffer;
    if (is_operand) {
      if (auto operand = operands.get<ffi::AnyBuffer>(i)) buffer = *operand;
    } else if (auto result = results.get<ffi::AnyBuffer>(i - operands.size())) {
      buffer = **result;
    }
    if (!buffer) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(plan.Text() + ": buffer " +
                                                         std::to_string(i) + " is no array"));
    }
    const auto address = reinterpret_cast<uintptr_t>(buffer->untyped_data());
    if (address % plan.alignments[i] != 0) {
      return ffi::Unexpected(
          ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                     plan.Text() + ": the address of buffer " + std::to_string(i) + " is " +
                         std::to_string(address % plan.alignments[i]) +
                         " bytes past a multiple of " + std::to_string(plan.alignments[i])));
    }
    buffers.push_back({static_cast<char*>(buffer->untyped_data()), SizeInMemory(*buffer),
                       buffer->element_count()});
  }
  return buffers;
}

std::string RunLaunches(const Driver& driver, const LaunchPlan& plan, size_t first, size_t last,
                        const std::vector<CUfunction>& functions, CUcontext context,
                        CUstream stream, const std::vector<DeviceBuffer>& buffers) {
  Branch branch(driver, context, stream);
  std::string problem;
  for (size_t i = first; i < last && problem.empty(); ++i) {
    const Launch& launch = plan.launches[i];
    const bool follows_branch = i > first && plan.launches[i - 1].branches;
    if (launch.branches && !follows_branch) problem = branch.Fork();
    if (launch.joins) problem = branch.Join();
    if (problem.empty()) {
      problem =
          Run(driver, launch, functions[i], launch.branches ? branch.stream() : stream, buffers);
    }
    if (!problem.empty()) problem = launch.Text() + ": " + problem;
  }
  // The memory of the buffers is free once the main stream has come this far, and a graph is
  // complete only then.
  const std::string unjoined = branch.Join();
  return problem.empty() ? unjoined : problem;
}

std::string Run(const Driver& driver, const Launch& launch, CUfunction function, CUstream stream,
                const std::vector<DeviceBuffer>& buffers) {
  Indices indices(launch.repeats.size());
  do {
    const std::string problem = RunOnce(driver, launch, function, stream, buffers, indices);
    if (!problem.empty()) return problem;
  } while (Advance(indices, launch.repeats));
  return {};
}

}  // namespace tilekern
