// The Python module _core: the FFI handlers as capsules, and the driver's description of its
// devices.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "cpu/matmul.h"
#include "cuda_driver.h"
#include "handlers.h"

namespace nb = nanobind;
namespace tk = tilekern;

namespace {

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// The arguments of jax.ffi.register_ffi_target, by platform and target.
nb::dict Registrations() {
  nb::dict cpu;
  cpu["jax_tilekern_cpu_matmul"] = Handler(CpuMatmul);
  cpu["jax_tilekern_cpu_ragged_matmul"] = Handler(CpuRaggedMatmul);
  cpu["jax_tilekern_cpu_transpose"] = Handler(CpuTranspose);
  cpu["jax_tilekern_cpu_sum"] = Handler(CpuSum);
  cpu["jax_tilekern_cpu_add"] = Handler(CpuAdd);
  cpu["jax_tilekern_cpu_order_by_key"] = Handler(CpuOrderByKey);
  cpu["jax_tilekern_cpu_segment_reduce"] = Handler(CpuSegmentReduce);
  cpu["jax_tilekern_cpu_update_rows"] = Handler(CpuUpdateRows);
  cpu["jax_tilekern_cpu_matrix_inverse"] = Handler(CpuMatrixInverse);
  cpu["jax_tilekern_cpu_matrix_lu"] = Handler(CpuMatrixLu);
  cpu["jax_tilekern_cpu_matrix_cholesky"] = Handler(CpuMatrixCholesky);
  cpu["jax_tilekern_cpu_matrix_solve"] = Handler(CpuMatrixSolve);
  cpu["jax_tilekern_cpu_matrix_svd"] = Handler(CpuMatrixSvd);
  cpu["jax_tilekern_cpu_matrix_eigh"] = Handler(CpuMatrixEigh);
  cpu["jax_tilekern_cpu_matrix_qr"] = Handler(CpuMatrixQr);

  nb::dict launch;
  launch["instantiate"] = Handler(CudaLaunchInstantiate);
  launch["initialize"] = Handler(CudaLaunchInitialize);
  launch["execute"] = Handler(CudaLaunchExecute);
  nb::dict cuda;
  cuda["jax_tilekern_cuda_launch"] = launch;

  nb::dict checked;
  checked["instantiate"] = Handler(CudaLaunchInstantiate);
  checked["initialize"] = Handler(CudaLaunchInitialize);
  checked["execute"] = Handler(CudaLaunchExecuteChecked);
  cuda["jax_tilekern_cuda_launch_checked"] = checked;

  nb::dict overlapped;
  overlapped["instantiate"] = Handler(CudaLaunchInstantiate);
  overlapped["initialize"] = Handler(CudaLaunchInitialize);
  overlapped["execute"] = Handler(CudaLaunchExecuteOverlapped);
  cuda["jax_tilekern_cuda_launch_overlapped"] = overlapped;

  nb::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

// The arguments of jax.ffi.register_ffi_type, by platform and type.
nb::dict TypeRegistrations() {
  nb::dict state;
  state["type_id"] = nb::capsule(CudaLaunchStateId());
  state["type_info"] = nb::capsule(CudaLaunchStateInfo());
  nb::dict cuda;
  cuda["jax_tilekern_cuda_launch_state"] = state;
  nb::dict platforms;
  platforms["CUDA"] = cuda;
  return platforms;
}

tk::cpu::DType CpuType(const std::string& name) {
  using tk::cpu::DType;
  static const std::unordered_map<std::string, DType> types = {{"float32", DType::kF32},
                                                               {"float64", DType::kF64},
                                                               {"bfloat16", DType::kBF16},
                                                               {"float16", DType::kF16},
                                                               {"float8_e4m3fn", DType::kF8E4M3FN},
                                                               {"float8_e5m2", DType::kF8E5M2},
                                                               {"int8", DType::kS8},
                                                               {"int32", DType::kS32}};
  const auto type = types.find(name);
  if (type == types.end()) throw std::invalid_argument("CPU kernels have no type " + name);
  return type->second;
}

std::string CpuMatmulKernel(const std::string& lhs, const std::string& rhs, const std::string& out,
                            std::vector<int64_t> sizes, std::vector<int64_t> lhs_strides,
                            std::vector<int64_t> rhs_strides, std::vector<int64_t> out_strides) {
  return tk::cpu::CpuMatmulKernelName(
      CpuType(lhs), CpuType(rhs), CpuType(out),
      {std::move(sizes), std::move(lhs_strides), std::move(rhs_strides), std::move(out_strides)});
}

// Returns the newest CUDA version that the driver supports, or why there is no driver.
tk::Or<std::pair<int, int>> DriverVersion() {
  const tk::Or<tk::Driver>& found = tk::GetDriver();
  if (const auto* why = std::get_if<std::string>(&found)) return *why;
  const int version = std::get<tk::Driver>(found).version;
  return std::pair(version / 1000, version % 1000 / 10);
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The compiled part of jax_tilekern: FFI handlers and queries of the CUDA driver.";

  nb::class_<tk::CudaDevice>(m, "CudaDevice", "A GPU as the driver describes it.")
      .def_ro("name", &tk::CudaDevice::name)
      .def_ro("compute_capability", &tk::CudaDevice::compute_capability)
      .def_ro("sm_count", &tk::CudaDevice::sm_count)
      .def_ro("shared_memory_bytes", &tk::CudaDevice::shared_memory_bytes,
              "Maximal shared memory per CTA, static and dynamic.")
      .def_ro("l2_bytes", &tk::CudaDevice::l2_bytes);

  m.def("registrations", &Registrations,
        nb::sig("def registrations() -> dict[str, dict[str, typing.Any]]"),
        "The arguments of jax.ffi.register_ffi_target, by platform and target.");
  m.def("type_registrations", &TypeRegistrations,
        nb::sig("def type_registrations() -> dict[str, dict[str, typing.Any]]"),
        "The arguments of jax.ffi.register_ffi_type, by platform and name; types precede targets.");
  m.def("cuda_devices", &tk::GetDevices,
        "The GPUs that this process may use, or why there is none. Makes no context.");
  m.def("cuda_driver_version", &DriverVersion,
        "The newest CUDA version that the driver supports, or why there is no driver.");
  m.def("why_no_peer_access", &tk::WhyNoPeerAccess,
        "Why not every GPU of this process can access the memory of every other, or nothing.");

  m.def("cpu_matmul_kernel", &CpuMatmulKernel, nb::arg("lhs"), nb::arg("rhs"), nb::arg("out"),
        nb::kw_only(), nb::arg("sizes"), nb::arg("lhs_strides"), nb::arg("rhs_strides"),
        nb::arg("out_strides"),
        "The kernel of a CPU product, from its types and the custom call's attributes.");
  m.def("cpu_instruction_set", &tk::cpu::CpuInstructionSet,
        "The instruction set that CPU kernels use.");
  m.def("cpu_instruction_sets", &tk::cpu::CpuInstructionSets,
        "The instruction sets that this CPU has kernels for, from low to high.");
  m.def("set_cpu_instruction_set", &tk::cpu::SetCpuInstructionSet, nb::arg("name"),
        "Make CPU kernels use another instruction set; for tests.");
}
