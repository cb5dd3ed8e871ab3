// The CUDA driver, loaded at run time: this module builds and imports where there is none.
//
// The header declares only the functions in use, under the driver's own names, so that NVIDIA's
// documentation applies; cuda.h is not needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;

namespace tilekern {

using CUresult = int;
using CUdevice = int;
using CUcontext = CUctx_st*;
using CUmodule = CUmod_st*;
using CUfunction = CUfunc_st*;
using CUstream = CUstream_st*;
using CUevent = CUevent_st*;

inline constexpr CUresult CUDA_SUCCESS = 0;

inline constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
inline constexpr int CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
inline constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
inline constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;
inline constexpr int CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
inline constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
inline constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;
inline constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
inline constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
inline constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;

// 128 opaque bytes that a kernel takes as a __grid_constant__ parameter. The alignment is that of
// CUDA 13; CUDA 12 needs 64.
struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

struct CUlaunchAttribute {
  int id;
  uint32_t padding;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
    char size_of_value[64];
  } value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

// Graphs have programmatic dependencies since CUDA 12.3.
inline constexpr int kGraphsOfOverlappingLaunches = 12030;

// The driver, whose members `GetDriver` fills all or none.
struct Driver {
  int version;  // of CUDA, 12030 for 12.3

  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int length, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDeviceCanAccessPeer)(int* can, CUdevice device, CUdevice peer);
  CUresult (*cuDevicePrimaryCtxGetState)(CUdevice device, unsigned* flags, int* active);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuModuleLoadData)(CUmodule* module, const void* image);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncGetAttribute)(int* value, int attribute, CUfunction function);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** parameters,
                               void** extra);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest);
  CUresult (*cuStreamCreateWithPriority)(CUstream* stream, unsigned flags, int priority);
  CUresult (*cuStreamWaitEvent)(CUstream stream, CUevent event, unsigned flags);
  CUresult (*cuEventCreate)(CUevent* event, unsigned flags);
  CUresult (*cuEventRecord)(CUevent event, CUstream stream);
  CUresult (*cuMemsetD8Async)(void* address, unsigned char byte, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyAsync)(void* to, const void* from, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyDtoHAsync)(void* to, const void* from, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyHtoDAsync)(void* to, const void* from, size_t bytes, CUstream stream);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, int dtype, uint32_t rank, void* address,
                                     const uint64_t* sizes, const uint64_t* strides,
                                     const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int oob_fill);

  // Returns the driver's name and text of an error, as in "CUDA_ERROR_X (its meaning)".
  std::string Text(CUresult error) const;
};

// A value, or the reason for its absence.
template <typename T>
using Or = std::variant<T, std::string>;

// Returns the driver, which the first call loads and initialises, or why there is none.
const Or<Driver>& GetDriver();

struct CudaDevice {
  std::string name;
  std::pair<int, int> compute_capability;
  int sm_count;
  int shared_memory_bytes;  // the maximum per CTA
  int l2_bytes;
};

// Lists the devices that this process may use, without creating a context on any of them.
Or<std::vector<CudaDevice>> GetDevices();

// Returns why not every GPU of this process can access the memory of every other, or nothing.
std::string WhyNoPeerAccess();

// Allows the calling thread to load and unload modules while another thread captures a CUDA graph.
// By default such a call fails and invalidates the capture. Neither enqueues work on a stream.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace tilekern
