"""Facts about this machine and environment, which ``doctor`` shows and measurements record.

Each function probes one thing and may raise; the callers catch its errors.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from jax_tilekern import _core
from jax_tilekern.compilation import compiler
from jax_tilekern.compilation.source_digests import source_digests
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.policy.model import SCALED, model_of

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# The instruction sets that the CPU kernels of this package and of XLA use.
_INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip


def installation() -> dict[str, str]:
    """Return what ``pip install`` takes to install the package again."""
    try:
        record = importlib.metadata.distribution("jax_tilekern").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"from": str(Path(jax_tilekern.__file__).parents[1])}
    # A package from an index has no such record.
    if record is None:
        return {"from": "jax_tilekern"}
    source = json.loads(record)
    repository = source.get("vcs_info", {}).get("vcs")
    return {"from": f"{repository}+{source['url']}" if repository else source["url"]}


def versions() -> dict[str, str | None]:
    """Return the versions of the software involved; ``None`` for a missing package."""
    return {
        "python": platform.python_version(),
        "os": platform.platform(),
        "jax_tilekern": jax_tilekern.__version__,
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "numpy": np.__version__,
        **{plugin: _version(plugin) for plugin in _PLUGINS},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class NoBackend(RuntimeError):
    """JAX has no backend, so that nothing can be computed."""


def backends() -> dict[str, Any]:
    """Return JAX's default backend and its devices by platform; no default if none starts."""
    # JAX_PLATFORMS or the configuration may restrict JAX to some platforms.
    platforms: dict[str, Any] = {"restricted_to": jax.config.jax_platforms or None}
    try:
        _require_backend()
    except NoBackend as error:
        return {"default": None, "devices": {}, **platforms, "why_none": str(error)}
    devices = {
        name: [device.device_kind for device in client.devices()]
        for name, client in jax.extend.backend.backends().items()
    }
    return {"default": jax.default_backend(), "devices": devices, **platforms, "why_none": None}


def _require_backend() -> None:
    try:
        jax.devices()
    # JAX asserts that one of the platforms that JAX_PLATFORMS names has a plugin.
    except (RuntimeError, AssertionError) as error:
        raise NoBackend(str(error) or "no installed plugin serves it") from error


def cpu() -> dict[str, Any]:
    """Return the CPU's model, how many threads this process may use, and instruction sets."""
    file = Path("/proc/cpuinfo")
    processor = file.read_text().split("\n\n")[0] if file.exists() else ""
    pairs = (line.partition(":") for line in processor.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    may_use = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": len(may_use(0)),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
    }


def cpu_kernels() -> dict[str, str]:
    """Return the CPU kernel that a product of each type takes here, or why none does."""
    _require_backend()
    kernels = {}
    for name in ("float32", "float64", "bfloat16", "float16", "int8"):
        with jax.enable_x64(name == "float64"):
            operand = jnp.zeros((256, 256), name)
            result = "int32" if name == "int8" else None
            kernels[name] = _kernel(operand, platform="cpu", preferred_element_type=result)
    return kernels


def decided_by() -> dict[str, str]:
    """Return what decides between kernels and XLA's operations on each device."""
    names = dict.fromkeys([current_cpu().name, *(gpu["name"] for gpu in driver()["gpus"])])
    return {name: _decided_by(name) for name in names}


def _decided_by(device: str) -> str:
    known = model_of(device)
    if known is None:
        return "no recorded times: XLA computes dense products, sums, transposes and additions"
    source = f" ({known.device})" if device in SCALED and known.device != device else ""
    return f"recorded times of {', '.join(f'{name}s' for name in known.models)}{source}"


def _kernel(operand: Any, *, platform: str | None = None, **options: Any) -> str:
    choices = jax_tilekern.explain(
        lambda x: jax_tilekern.matmul(x, x, **options), operand, platform=platform
    )
    return next((c.kernel for c in choices if c.kernel), f"XLA: {choices[0].reason}")


def driver() -> dict[str, Any]:
    """Return the CUDA driver's CUDA version and GPUs, or why there are none."""
    version, devices = _core.cuda_driver_version(), _core.cuda_devices()
    # A text says why there are none.
    why_none = devices if isinstance(devices, str) else None
    gpus = [
        {
            "name": device.name,
            "compute_capability": list(device.compute_capability),
            "sm_count": device.sm_count,
            "l2_bytes": device.l2_bytes,
        }
        for device in ([] if isinstance(devices, str) else devices)
    ]
    cuda = None if isinstance(version, str) else ".".join(map(str, version))
    return {"cuda": cuda, "gpus": gpus, "why_none": why_none}


def nvidia_smi() -> list[dict[str, str]]:
    """Return each GPU's versions, clocks, power and temperature under ``nvidia-smi``'s names.

    They come from NVML, which ``nvidia-smi`` prints too. The list is empty without nvidia-ml-py,
    without a driver, and without a GPU.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_nvml_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(nvml: Any, index: int) -> dict[str, str]:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    clock, max_clock = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
    queries: dict[str, tuple[str, Callable[[], Any]]] = {
        "name": ("{}", lambda: nvml.nvmlDeviceGetName(gpu)),
        "compute_cap": ("{0[0]}.{0[1]}", lambda: nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
        "driver_version": ("{}", nvml.nvmlSystemGetDriverVersion),
        "clocks.sm": ("{} MHz", lambda: clock(gpu, nvml.NVML_CLOCK_SM)),
        "clocks.mem": ("{} MHz", lambda: clock(gpu, nvml.NVML_CLOCK_MEM)),
        "clocks.max.sm": ("{} MHz", lambda: max_clock(gpu, nvml.NVML_CLOCK_SM)),
        "clocks.max.mem": ("{} MHz", lambda: max_clock(gpu, nvml.NVML_CLOCK_MEM)),
        "power.draw": ("{:.2f} W", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "power.limit": ("{:.2f} W", lambda: nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1000),
        "temperature.gpu": (
            "{}",
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        ),
    }
    found = {"index": str(index)}
    for name, (form, query) in queries.items():
        try:
            found[name] = form.format(query())
        # A virtual GPU, for one, does not tell its power.
        except nvml.NVMLError_NotSupported:
            found[name] = "[N/A]"
    return found


def nvrtc() -> dict[str, Any]:
    """Return NVRTC's file and version, or the message that says how to get one."""
    try:
        library = compiler.nvrtc()
    except compiler.NvrtcNotFound as error:
        return {"path": None, "version": None, "why_none": str(error)}
    return {
        "path": _within_packages(library.path),
        "version": ".".join(map(str, library.version)),
        "why_none": None,
    }


def _within_packages(path: str) -> str:
    """Return a file's path from the folder of packages that it is in, which records can share."""
    folders = [folder for folder in sys.path if folder and Path(path).is_relative_to(folder)]
    return str(Path(path).relative_to(max(folders, key=len))) if folders else path


def cache() -> dict[str, Any]:
    """Return the kernel cache's location and size, and whether it is writable."""
    info = compiler.cache_info()
    folders = (info.location, *info.location.parents)
    # The folder need not exist yet.
    existing = next(folder for folder in folders if folder.exists())
    return {
        "location": str(info.location),
        "entries": info.entries,
        "bytes": info.bytes,
        "writable": os.access(existing, os.W_OK | os.X_OK),
    }


def registered_targets() -> dict[str, list[str]]:
    """Return the FFI handlers that importing the package registered, by platform."""
    return {name: sorted(targets) for name, targets in _core.registrations().items()}


def trial_product() -> dict[str, Any]:
    """Multiply two matrices on the default backend, and compare with float64."""
    _require_backend()
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(2))
    exact = lhs.astype(np.float64) @ rhs
    result = np.asarray(jax.jit(jax_tilekern.matmul)(lhs, rhs))
    return {
        "kernel": _kernel(jnp.asarray(lhs)),
        "error": float(np.linalg.norm(result - exact) / np.linalg.norm(exact)),
    }


PROBES: dict[str, Callable[[], Any]] = {
    probe.__name__: probe
    for probe in (
        installation, versions, backends, cpu, cpu_kernels, decided_by, driver, nvidia_smi, nvrtc,
        cache, registered_targets, trial_product, source_digests,
    )
}  # fmt: skip


def probe_results(*names: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the results of the probes ``names``, and the errors of those that failed."""
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            found[name] = PROBES[name]()
        # A broken installation may raise anything, and the error is the result.
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return found, errors
