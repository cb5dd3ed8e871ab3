"""What XLA compiles for GPUs, on any machine: its plugin for CUDA needs no GPU for that.

The programs are those that such a GPU runs, but for the choices that XLA makes by timing.
"""

import functools
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk

# Limits of compute capabilities in the CUDA C++ Programming Guide. Clock and memory are those of an
# H100 in NVIDIA's data sheet, and decide nothing here.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads_per_core}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block_optin: {gpu.shared_memory_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  core_count: {gpu.sm_count} fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 l2_cache_size: {gpu.l2_bytes} device_memory_size: 84942979072
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  name: "{gpu.name}" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""
_THREADS_PER_CORE = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 9): 1536,
    (11, 0): 1536,
    (12, 0): 1536,
    (12, 1): 1536,
}


@functools.cache
def _devices(count, gpu):
    """Return as many GPUs of the model that :func:`jax_tilekern.gpu_target` takes for a name."""
    with jtk.gpu_target(gpu) as known:
        major, minor = known.compute_capability
    description = _DESCRIPTION.format(
        gpu=known,
        major=major,
        minor=minor,
        features="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
        threads_per_core=_THREADS_PER_CORE.get(known.compute_capability, 2048),
        shared_memory_per_core=known.shared_memory_bytes + 1024,
    )
    topology = topologies.get_topology_desc(
        known.arch, "cuda", target_config=description, topology=f"1x1x{count}"
    )
    return topology.devices


def mesh_of(shape, names):
    """Return a mesh of as many H100s."""
    found = np.array(_devices(int(np.prod(shape)), "H100")).reshape(shape)
    return Mesh(found, names, axis_types=(AxisType.Auto,) * len(names))


def compiled(function, *avals, mesh=None, specs=(), out=None, gpu="H100"):
    """Compile a function for one GPU, or for those of a mesh with the specs of its arguments."""
    if mesh is None:
        shardings, results = [SingleDeviceSharding(_devices(1, gpu)[0])] * len(avals), None
    else:
        shardings, results = ([NamedSharding(mesh, x) for x in specs], None)
        if out is not None:
            is_spec = functools.partial(lambda x: isinstance(x, P))
            results = jax.tree.map(lambda x: NamedSharding(mesh, x), out, is_leaf=is_spec)
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(avals, shardings, strict=True)
    ]
    jitted = jax.jit(function) if results is None else jax.jit(function, out_shardings=results)
    with jtk.gpu_target(gpu):
        return jitted.trace(*args).lower(lowering_platforms=("cuda",)).compile()


def kernels(program):
    """Names of this package's kernels that a compiled program launches, without their numbers."""
    called = re.findall(
        r'^ +(?:ROOT )?%([\w.\-]+) = .*custom_call_target="jax_tilekern', program.as_text(), re.M
    )
    return sorted(re.sub(r"[.\d]+$", "", name) for name in called)


def moved(program):
    """Opcodes of a compiled program that move elements: copies and transposes."""
    return re.findall(r" = \S+ (transpose|copy|copy-start)\(", program.as_text())


def temporary_bytes(program):
    """Bytes of a compiled program beside those of its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes
