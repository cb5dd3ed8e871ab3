// The one CUDA handler: it executes the launch plan that a custom call carries.
//
// XLA instantiates a call site once, before there is a device, and shares its state between all
// devices and threads that run the executable. It then calls initialize before each run, outside
// of any graph capture, and execute within the run, maybe during a capture. So modules are loaded
// in initialize, and execute only encodes and launches.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cuda_module.h"
#include "handlers.h"
#include "launch_plan.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern {
namespace {

namespace ffi = xla::ffi;

// Without opting in, a function has this much dynamic shared memory.
constexpr unsigned kSharedMemoryWithoutOptIn = 48 << 10;

// A call site: its plan, and the plan's functions in each context it has run in.
class CallSite {
 public:
  static XLA_FFI_TypeId id;

  explicit CallSite(LaunchPlan plan) : plan_(std::move(plan)), cubin_(Cubin::Share(plan_.cubin)) {
    plan_.cubin = {};  // the attribute it views is not ours
  }

  const LaunchPlan& plan() const { return plan_; }

  // The functions of the plan's launches in `context`, which is current. The pointer stays valid.
  Or<const std::vector<CUfunction>*> Functions(const Driver& driver, CUcontext context) {
    std::lock_guard lock(mutex_);
    const auto known = functions_.find(context);
    if (known != functions_.end()) return &known->second;
    // A function may be loaded as late as it is looked up.
    RelaxedCapture relaxed(driver);
    Or<CUmodule> module = cubin_->Load(driver, context);
    if (auto* why = std::get_if<std::string>(&module)) return *why;
    std::vector<CUfunction> functions;
    for (const Launch& launch : plan_.launches) {
      Or<CUfunction> function = Function(driver, std::get<CUmodule>(module), launch);
      if (auto* why = std::get_if<std::string>(&function)) return *why;
      functions.push_back(std::get<CUfunction>(function));
    }
    return &functions_.emplace(context, std::move(functions)).first->second;
  }

 private:
  static Or<CUfunction> Function(const Driver& driver, CUmodule module, const Launch& launch) {
    CUfunction function;
    if (CUresult error = driver.cuModuleGetFunction(&function, module, launch.entry.c_str())) {
      return "cuModuleGetFunction of " + launch.entry + ": " + driver.Text(error);
    }
    if (launch.shared_memory_bytes <= kSharedMemoryWithoutOptIn) return function;
    // All that the device has, for the function may be shared with a call site that wants more.
    CUdevice device;
    int most = 0, taken = 0;
    CUresult error = driver.cuCtxGetDevice(&device);
    if (!error) {
      error = driver.cuDeviceGetAttribute(
          &most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
    }
    if (!error) {
      error = driver.cuFuncGetAttribute(&taken, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function);
    }
    if (!error) {
      error = driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        most - taken);
    }
    if (error) return launch.Text() + ": shared memory: " + driver.Text(error);
    return function;
  }

  LaunchPlan plan_;
  const std::shared_ptr<Cubin> cubin_;
  std::mutex mutex_;
  std::map<CUcontext, std::vector<CUfunction>> functions_;
};

XLA_FFI_TypeId CallSite::id = {};

// The thread's current context, or the stream's made current for as long as this lives. XLA
// activates the right one before it calls a handler.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUstream stream) : driver_(driver) {
    error_ = driver_.cuCtxGetCurrent(&context_);
    if (error_ || context_ != nullptr) return;
    error_ = driver_.cuStreamGetCtx(stream, &context_);
    if (!error_) error_ = driver_.cuCtxPushCurrent(context_);
    pushed_ = !error_;
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  CUresult error() const { return error_; }
  CUcontext get() const { return context_; }

 private:
  const Driver& driver_;
  CUcontext context_ = nullptr;
  CUresult error_;
  bool pushed_ = false;
};

struct DeviceBuffer {
  char* address;
  uint64_t bytes;
};

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

// The buffers of a call, operands then results, checked against what the plan relies on.
ffi::ErrorOr<std::vector<DeviceBuffer>> Buffers(const LaunchPlan& plan,
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
    buffers.push_back({static_cast<char*>(buffer->untyped_data()), SizeInMemory(*buffer)});
  }
  return buffers;
}

// A launch's parameters as the driver takes them: a pointer to the value of each.
class Parameters {
 public:
  // Sized in advance, for pointers into them are taken.
  explicit Parameters(size_t count) : addresses_(count), maps_(count), pointers_(count) {}

  // Adds the next parameter; returns what is wrong with it, or nothing.
  std::string Add(const Driver&, const ScalarsParameter& scalars,
                  const std::vector<DeviceBuffer>&) {
    pointers_[size_++] = const_cast<char*>(scalars.bytes.data());
    return {};
  }

  std::string Add(const Driver&, const BufferParameter& parameter,
                  const std::vector<DeviceBuffer>& buffers) {
    const DeviceBuffer& buffer = buffers[parameter.buffer];
    if (parameter.offset_bytes > buffer.bytes) {
      return "offset " + std::to_string(parameter.offset_bytes) + " into " +
             std::to_string(buffer.bytes) + " bytes of buffer " + std::to_string(parameter.buffer);
    }
    addresses_[size_] = buffer.address + parameter.offset_bytes;
    pointers_[size_] = &addresses_[size_];
    ++size_;
    return {};
  }

  std::string Add(const Driver& driver, const TensorMapParameter& map,
                  const std::vector<DeviceBuffer>& buffers) {
    const DeviceBuffer& buffer = buffers[map.buffer];
    if (map.extent_bytes > buffer.bytes) {
      return "a tensor map reaches " + std::to_string(map.extent_bytes) + " bytes into " +
             std::to_string(buffer.bytes) + " of buffer " + std::to_string(map.buffer);
    }
    CUresult error = driver.cuTensorMapEncodeTiled(
        &maps_[size_], map.dtype, map.sizes.size(), buffer.address, map.sizes.data(),
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

// Launches one kernel; returns what went wrong, or nothing.
std::string Run(const Driver& driver, const Launch& launch, CUfunction function, CUstream stream,
                const std::vector<DeviceBuffer>& buffers) {
  Parameters parameters(launch.parameters.size());
  for (size_t i = 0; i < launch.parameters.size(); ++i) {
    const std::string problem = std::visit(
        [&](const auto& p) { return parameters.Add(driver, p, buffers); }, launch.parameters[i]);
    if (!problem.empty()) return "parameter " + std::to_string(i) + ": " + problem;
  }

  CUlaunchAttribute cluster = {};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  CUlaunchConfig config = {};
  config.gridDimX = launch.grid[0];
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0];
  config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = launch.shared_memory_bytes;
  config.hStream = stream;
  config.attrs = &cluster;
  // Architectures before 9.0 know no clusters, not even of one block.
  config.numAttrs = launch.cluster == Dim3{1, 1, 1} ? 0 : 1;
  if (CUresult error = driver.cuLaunchKernelEx(&config, function, parameters.pointers(), nullptr)) {
    return "cuLaunchKernelEx: " + driver.Text(error);
  }
  return {};
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<LaunchPlan> plan = ReadLaunchPlan(attributes);
  if (!plan.has_value()) return ffi::Unexpected(plan.error());
  return std::make_unique<CallSite>(std::move(*plan));
}

// Calls `then(driver, functions)` with the context of `stream` current.
template <typename Then>
ffi::Error WithFunctions(CallSite* site, CUstream stream, Then then) {
  const LaunchPlan& plan = site->plan();
  const Or<Driver>& found = GetDriver();
  if (const auto* why = std::get_if<std::string>(&found)) {
    return ffi::Error(ffi::ErrorCode::kUnavailable, plan.Text() + ": " + *why);
  }
  const Driver& driver = std::get<Driver>(found);
  CurrentContext context(driver, stream);
  if (context.error()) {
    return ffi::Error::Internal(plan.Text() +
                                ": the stream's context: " + driver.Text(context.error()));
  }
  auto functions = site->Functions(driver, context.get());
  if (auto* why = std::get_if<std::string>(&functions)) {
    return ffi::Error::Internal(plan.Text() + ": " + *why);
  }
  return then(driver, *std::get<const std::vector<CUfunction>*>(functions));
}

ffi::Error Initialize(CUstream stream, CallSite* site, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return WithFunctions(site, stream, [](const Driver&, const std::vector<CUfunction>&) {
    return ffi::Error::Success();
  });
}

ffi::Error Execute(CUstream stream, CallSite* site, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  return WithFunctions(
      site, stream, [&](const Driver& driver, const std::vector<CUfunction>& functions) {
        const LaunchPlan& plan = site->plan();
        const auto buffers = Buffers(plan, operands, results);
        if (!buffers.has_value()) return buffers.error();
        for (size_t i = 0; i < functions.size(); ++i) {
          const Launch& launch = plan.launches[i];
          const std::string problem = Run(driver, launch, functions[i], stream, *buffers);
          if (!problem.empty()) {
            return ffi::Error::Internal(plan.Text() + ", " + launch.Text() + ": " + problem);
          }
        }
        return ffi::Error::Success();
      });
}

// Every stage but instantiate sees the same things. FFI rejects a handler that leaves operands,
// results or attributes unnamed.
template <ffi::ExecutionStage stage>
auto StageBinding() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::PlatformStream<CUstream>>()
      .template Ctx<ffi::State<CallSite>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace
}  // namespace tilekern

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLaunchInstantiate, tilekern::Instantiate,
                              xla::ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLaunchInitialize, tilekern::Initialize,
                              tilekern::StageBinding<xla::ffi::ExecutionStage::kInitialize>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLaunchExecute, tilekern::Execute,
                              tilekern::StageBinding<xla::ffi::ExecutionStage::kExecute>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

XLA_FFI_TypeId* CudaLaunchStateId() { return &tilekern::CallSite::id; }

XLA_FFI_TypeInfo* CudaLaunchStateInfo() {
  static XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<tilekern::CallSite>();
  return &info;
}
