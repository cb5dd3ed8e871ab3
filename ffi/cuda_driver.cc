#include "cuda_driver.h"

#include <dlfcn.h>

namespace tilekern {
namespace {

template <typename Function>
bool Find(void* library, const char* symbol, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr) missing = symbol;
  return function != nullptr;
}

Or<Driver> LoadDriver() {
  // The library is never closed, because its functions are used until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::string("no NVIDIA driver: ") + dlerror();

  Driver driver;
  std::string missing;
  // cuda.h defines the plain name as the _v2 version.
  const bool complete =
      Find(library, "cuInit", driver.cuInit, missing) &&
      Find(library, "cuDriverGetVersion", driver.cuDriverGetVersion, missing) &&
      Find(library, "cuGetErrorName", driver.cuGetErrorName, missing) &&
      Find(library, "cuGetErrorString", driver.cuGetErrorString, missing) &&
      Find(library, "cuDeviceGetCount", driver.cuDeviceGetCount, missing) &&
      Find(library, "cuDeviceGet", driver.cuDeviceGet, missing) &&
      Find(library, "cuDeviceGetName", driver.cuDeviceGetName, missing) &&
      Find(library, "cuDeviceGetAttribute", driver.cuDeviceGetAttribute, missing) &&
      Find(library, "cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer, missing) &&
      Find(library, "cuDevicePrimaryCtxGetState", driver.cuDevicePrimaryCtxGetState, missing) &&
      Find(library, "cuCtxGetCurrent", driver.cuCtxGetCurrent, missing) &&
      Find(library, "cuCtxGetDevice", driver.cuCtxGetDevice, missing) &&
      Find(library, "cuCtxPushCurrent_v2", driver.cuCtxPushCurrent, missing) &&
      Find(library, "cuCtxPopCurrent_v2", driver.cuCtxPopCurrent, missing) &&
      Find(library, "cuStreamGetCtx", driver.cuStreamGetCtx, missing) &&
      Find(library, "cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode,
           missing) &&
      Find(library, "cuModuleLoadData", driver.cuModuleLoadData, missing) &&
      Find(library, "cuModuleUnload", driver.cuModuleUnload, missing) &&
      Find(library, "cuModuleGetFunction", driver.cuModuleGetFunction, missing) &&
      Find(library, "cuFuncGetAttribute", driver.cuFuncGetAttribute, missing) &&
      Find(library, "cuFuncSetAttribute", driver.cuFuncSetAttribute, missing) &&
      Find(library, "cuLaunchKernelEx", driver.cuLaunchKernelEx, missing) &&
      Find(library, "cuStreamSynchronize", driver.cuStreamSynchronize, missing) &&
      Find(library, "cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange, missing) &&
      Find(library, "cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority, missing) &&
      Find(library, "cuStreamWaitEvent", driver.cuStreamWaitEvent, missing) &&
      Find(library, "cuEventCreate", driver.cuEventCreate, missing) &&
      Find(library, "cuEventRecord", driver.cuEventRecord, missing) &&
      Find(library, "cuMemsetD8Async", driver.cuMemsetD8Async, missing) &&
      Find(library, "cuMemcpyAsync", driver.cuMemcpyAsync, missing) &&
      Find(library, "cuMemcpyDtoHAsync_v2", driver.cuMemcpyDtoHAsync, missing) &&
      Find(library, "cuMemcpyHtoDAsync_v2", driver.cuMemcpyHtoDAsync, missing) &&
      Find(library, "cuTensorMapEncodeTiled", driver.cuTensorMapEncodeTiled, missing);
  if (!complete) return "the NVIDIA driver is too old: libcuda.so.1 has no " + missing;
  if (CUresult error = driver.cuInit(0)) return "cuInit: " + driver.Text(error);
  if (CUresult error = driver.cuDriverGetVersion(&driver.version)) {
    return "cuDriverGetVersion: " + driver.Text(error);
  }
  return driver;
}

}  // namespace

std::string Driver::Text(CUresult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(error, &name);
  cuGetErrorString(error, &text);
  if (name == nullptr || text == nullptr) return "CUDA error " + std::to_string(error);
  return std::string(name) + " (" + text + ")";
}

const Or<Driver>& GetDriver() {
  // The driver is never destroyed, because executables may outlive this module's static objects.
  static const auto* driver = new Or<Driver>(LoadDriver());
  return *driver;
}

Or<std::vector<CudaDevice>> GetDevices() {
  const Or<Driver>& found = GetDriver();
  if (const auto* why = std::get_if<std::string>(&found)) return *why;
  const Driver& driver = std::get<Driver>(found);

  int count = 0;
  if (CUresult error = driver.cuDeviceGetCount(&count)) {
    return "cuDeviceGetCount: " + driver.Text(error);
  }
  if (count == 0) return "the NVIDIA driver shows no GPU";
  std::vector<CudaDevice> devices(count);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaDevice& result = devices[ordinal];
    CUdevice device;
    CUresult error = driver.cuDeviceGet(&device, ordinal);
    auto attribute = [&](int attribute, int& value) {
      if (!error) error = driver.cuDeviceGetAttribute(&value, attribute, device);
    };
    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, result.compute_capability.first);
    attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, result.compute_capability.second);
    attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, result.sm_count);
    attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, result.shared_memory_bytes);
    attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, result.l2_bytes);
    char name[256] = "";
    if (!error) error = driver.cuDeviceGetName(name, sizeof(name), device);
    if (error) return "GPU " + std::to_string(ordinal) + ": " + driver.Text(error);
    result.name = name;
  }
  return devices;
}

std::string WhyNoPeerAccess() {
  const Or<Driver>& found = GetDriver();
  if (const auto* why = std::get_if<std::string>(&found)) return *why;
  const Driver& driver = std::get<Driver>(found);
  int count = 0;
  if (CUresult error = driver.cuDeviceGetCount(&count)) {
    return "cuDeviceGetCount: " + driver.Text(error);
  }
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < count; ++j) {
      if (i == j) continue;
      CUdevice device, peer;
      int can = 0;
      CUresult error = driver.cuDeviceGet(&device, i);
      if (!error) error = driver.cuDeviceGet(&peer, j);
      if (!error) error = driver.cuDeviceCanAccessPeer(&can, device, peer);
      const std::string pair = "GPU " + std::to_string(i) + " and GPU " + std::to_string(j);
      if (error) return "cuDeviceCanAccessPeer of " + pair + ": " + driver.Text(error);
      if (can == 0) return pair + " have no peer access";
    }
  }
  return {};
}

}  // namespace tilekern
