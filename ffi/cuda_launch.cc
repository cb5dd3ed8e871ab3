// The CUDA handlers: they execute the launch plan that a custom call carries.
//
// XLA instantiates a call site once, before there is a device, and shares its state among all
// devices and threads that run the executable. It calls initialize before each run, outside of any
// graph capture, and execute within the run, possibly during a capture. So initialize loads
// modules, and execute only encodes and launches, besides opening a stream at the first branch.

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_call.h"
#include "cuda_driver.h"
#include "cuda_module.h"
#include "cuda_overlap.h"
#include "handlers.h"
#include "launch_plan.h"
#include "xla/ffi/api/ffi.h"

namespace tilekern {
namespace {

namespace ffi = xla::ffi;

// A function may use this much dynamic shared memory without opting in.
constexpr unsigned kSharedMemoryWithoutOptIn = 48 << 10;

// A call site: its plan, and the plan's functions in each context in which it has run.
class CallSite {
 public:
  static XLA_FFI_TypeId id;

  // The plan drops its cubins, which view attributes that XLA owns.
  CallSite(LaunchPlan plan, std::vector<std::shared_ptr<Cubin>> cubins)
      : plan_(std::move(plan)), cubins_(std::move(cubins)) {
    plan_.cubins.clear();
  }

  const LaunchPlan& plan() const { return plan_; }

  // Returns the functions of the plan's launches in `context`, which is current. The pointer stays
  // valid.
  Or<const std::vector<CUfunction>*> Functions(const Driver& driver, CUcontext context) {
    std::lock_guard lock(mutex_);
    const auto known = functions_.find(context);
    if (known != functions_.end()) return &known->second;
    // The driver may load a function lazily, when it is looked up.
    RelaxedCapture relaxed(driver);
    std::vector<CUfunction> functions;
    for (const Launch& launch : plan_.launches) {
      Or<CUmodule> module = cubins_[launch.cubin]->Load(driver, context);
      if (auto* why = std::get_if<std::string>(&module)) return *why;
      Or<CUfunction> function = Function(driver, std::get<CUmodule>(module), launch);
      if (auto* why = std::get_if<std::string>(&function)) return *why;
      functions.push_back(std::get<CUfunction>(function));
    }
    return &functions_.emplace(context, std::move(functions)).first->second;
  }

  // Returns the number of the device of `context`, which is the same in each execution. The first
  // call reads it at `address`, when everything before it on `stream` has ended.
  Or<uint32_t> DeviceNumber(const Driver& driver, CUcontext context, CUstream stream,
                            const char* address) {
    {
      std::lock_guard lock(mutex_);
      const auto known = devices_.find(context);
      if (known != devices_.end()) return known->second;
    }
    // The mutex is not held meanwhile, because the stream may wait for other devices' threads.
    uint32_t number = 0;
    CUresult error = driver.cuMemcpyDtoHAsync(&number, address, sizeof(number), stream);
    if (!error) error = driver.cuStreamSynchronize(stream);
    if (error) return "the number of the device: " + driver.Text(error);
    std::lock_guard lock(mutex_);
    return devices_[context] = number;
  }

 private:
  static Or<CUfunction> Function(const Driver& driver, CUmodule module, const Launch& launch) {
    CUfunction function;
    if (CUresult error = driver.cuModuleGetFunction(&function, module, launch.entry.c_str())) {
      return "cuModuleGetFunction of " + launch.entry + ": " + driver.Text(error);
    }
    int taken = 0;
    CUresult error =
        driver.cuFuncGetAttribute(&taken, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function);
    const unsigned all = launch.shared_memory_bytes + static_cast<unsigned>(taken);
    if (!error && all <= kSharedMemoryWithoutOptIn) return function;
    // The limit is the device's maximum, because another call site may need more of the same
    // function.
    CUdevice device;
    int most = 0;
    if (!error) error = driver.cuCtxGetDevice(&device);
    if (!error) {
      error = driver.cuDeviceGetAttribute(
          &most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device);
    }
    if (!error) {
      error = driver.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        most - taken);
    }
    if (error) return launch.Text() + ": shared memory: " + driver.Text(error);
    return function;
  }

  LaunchPlan plan_;
  std::vector<std::shared_ptr<Cubin>> cubins_;
  std::mutex mutex_;
  std::map<CUcontext, std::vector<CUfunction>> functions_;
  std::map<CUcontext, uint32_t> devices_;
};

XLA_FFI_TypeId CallSite::id = {};

// Makes the stream's context current during its lifetime, unless the thread has one. XLA activates
// the right context before it calls a handler.
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

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<LaunchPlan> plan = ReadLaunchPlan(attributes);
  if (!plan.has_value()) return ffi::Unexpected(plan.error());
  std::vector<std::shared_ptr<Cubin>> cubins;
  for (const std::string_view image : plan->cubins) cubins.push_back(Cubin::Share(image));
  return std::make_unique<CallSite>(std::move(*plan), std::move(cubins));
}

// Calls `then(driver, functions, context)` with the context of `stream` current.
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
  return then(driver, *std::get<const std::vector<CUfunction>*>(functions), context.get());
}

ffi::Error Initialize(CUstream stream, CallSite* site, ffi::RemainingArgs, ffi::RemainingRets,
                      ffi::Dictionary) {
  return WithFunctions(site, stream, [](const Driver&, const std::vector<CUfunction>&, CUcontext) {
    return ffi::Error::Success();
  });
}

ffi::Error Execute(CUstream stream, CallSite* site, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  return WithFunctions(
      site, stream,
      [&](const Driver& driver, const std::vector<CUfunction>& functions, CUcontext context) {
        const LaunchPlan& plan = site->plan();
        const auto buffers = CallBuffers(plan, operands, results);
        if (!buffers.has_value()) return buffers.error();
        const std::string problem = RunPlan(driver, plan, functions, context, stream, *buffers);
        if (!problem.empty()) return ffi::Error::Internal(plan.Text() + ", " + problem);
        return ffi::Error::Success();
      });
}

// The handler for debugging waits for every launch, and finds the unwritten elements of the first
// "checked_results" results.
ffi::Error ExecuteChecked(CUstream stream, CallSite* site, ffi::RemainingArgs operands,
                          ffi::RemainingRets results, ffi::Dictionary attributes) {
  return WithFunctions(
      site, stream, [&](const Driver& driver, const std::vector<CUfunction>& functions, CUcontext) {
        const LaunchPlan& plan = site->plan();
        const auto buffers = CallBuffers(plan, operands, results);
        if (!buffers.has_value()) return buffers.error();
        const auto checked = attributes.get<int64_t>("checked_results");
        if (!checked.has_value()) return checked.error();
        const std::string problem = RunChecked(driver, plan, functions, stream, *buffers,
                                               operands.size(), static_cast<size_t>(*checked));
        if (!problem.empty()) return ffi::Error::Internal(plan.Text() + ": " + problem);
        return ffi::Error::Success();
      });
}

ffi::Error ExecuteOverlapped(CUstream stream, CallSite* site, ffi::RunId run,
                             ffi::RemainingArgs operands, ffi::RemainingRets results,
                             ffi::Dictionary) {
  return WithFunctions(
      site, stream,
      [&](const Driver& driver, const std::vector<CUfunction>& functions, CUcontext context) {
        const LaunchPlan& plan = site->plan();
        if (!plan.exchange) return ffi::Error::InvalidArgument(plan.Text() + " has no exchange");
        const auto buffers = CallBuffers(plan, operands, results);
        if (!buffers.has_value()) return buffers.error();
        const DeviceBuffer& number = (*buffers)[plan.exchange->device];
        if (number.bytes != sizeof(uint32_t)) {
          return ffi::Error::InvalidArgument(plan.Text() + ": the number of a device has " +
                                             std::to_string(number.bytes) + " bytes");
        }
        Or<uint32_t> device = site->DeviceNumber(driver, context, stream, number.address);
        if (auto* why = std::get_if<std::string>(&device)) {
          return ffi::Error::Internal(plan.Text() + ": " + *why);
        }
        const std::string problem =
            RunOverlapped(driver, plan, functions, context, stream, *buffers,
                          {run.run_id, std::get<uint32_t>(device)});
        if (!problem.empty()) return ffi::Error::Internal(plan.Text() + ", " + problem);
        return ffi::Error::Success();
      });
}

// All stages but instantiate have the same arguments. FFI rejects a handler that does not bind
// operands, results or attributes.
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
// The handler waits, so it cannot be a command of a graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLaunchExecuteChecked, tilekern::ExecuteChecked,
                              tilekern::StageBinding<xla::ffi::ExecutionStage::kExecute>());

// The handler waits for other devices' threads, so it cannot be a command of a graph either.
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaLaunchExecuteOverlapped, tilekern::ExecuteOverlapped,
                              xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kExecute>()
                                  .Ctx<xla::ffi::PlatformStream<tilekern::CUstream>>()
                                  .Ctx<xla::ffi::State<tilekern::CallSite>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_TypeId* CudaLaunchStateId() { return &tilekern::CallSite::id; }

XLA_FFI_TypeInfo* CudaLaunchStateInfo() {
  static XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<tilekern::CallSite>();
  return &info;
}
