"""Facts about this machine and environment: what ``doctor`` shows and measurements record.

Each function looks at one thing and may raise; the callers guard them.
"""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
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

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# What the CPU kernels of this package and of XLA make use of.
_INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip
_SMI_FIELDS = (
    "index", "name", "compute_cap", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm",
    "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part; ``None`` for what is not installed."""
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


def backends() -> dict[str, Any]:
    """Return JAX's default backend and its devices by platform."""
    devices = {
        name: [device.device_kind for device in client.devices()]
        for name, client in jax.extend.backend.backends().items()
    }
    return {
        "default": jax.default_backend(),
        "devices": devices,
        # What JAX_PLATFORMS or the configuration restricts JAX to.
        "restricted_to": jax.config.jax_platforms or None,
    }


def cpu() -> dict[str, Any]:
    """Return the CPU's model, how many threads this process may use, and instruction sets."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "threads": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's fields; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    processor = file.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in processor.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_kernels() -> dict[str, str]:
    """Return the CPU kernel that a product of each type takes here, or why none does."""
    kernels = {}
    for name in ("float32", "float64", "bfloat16", "float16", "int8"):
        with jax.enable_x64(name == "float64"):
            operand = jnp.zeros((256, 256), name)
            result = "int32" if name == "int8" else None
            kernels[name] = _kernel(operand, platform="cpu", preferred_element_type=result)
    return kernels


def _kernel(operand: Any, *, platform: str | None = None, **options: Any) -> str:
    choices = jax_tilekern.explain(
        lambda x: jax_tilekern.matmul(x, x, **options), operand, platform=platform
    )
    return next((c.kernel for c in choices if c.kernel), f"XLA: {choices[0].reason}")


def driver() -> dict[str, Any]:
    """Return what the CUDA driver says: its CUDA version and the GPUs, or why there are none."""
    version, devices = _core.cuda_driver_version(), _core.cuda_devices()
    return {
        "cuda": None if isinstance(version, str) else ".".join(map(str, version)),
        "gpus": []
        if isinstance(devices, str)
        else [
            {
                "name": device.name,
                "compute_capability": list(device.compute_capability),
                "multiprocessors": device.multiprocessors,
                "l2_bytes": device.l2_bytes,
            }
            for device in devices
        ],
        "why_none": devices if isinstance(devices, str) else None,
    }


def nvidia_smi() -> list[dict[str, str]]:
    """Return versions, clocks, power and temperature as ``nvidia-smi`` has them; may be empty."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    finished = subprocess.run(
        [command, query, "--format=csv,noheader"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        return []  # The program is there, and no driver or no GPU.
    rows = csv.reader(finished.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(_SMI_FIELDS, row, strict=True)) for row in rows]


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
    """Return where compiled kernels are kept, how many, and whether more can be."""
    info = compiler.cache_info()
    return {
        "location": str(info.location),
        "entries": info.entries,
        "bytes": info.bytes,
        "writable": _writable(info.location),
    }


def _writable(folder: Path) -> bool:
    """Say whether a file can be made in ``folder``, which need not exist yet."""
    # The folder itself is not made: looking leaves no trace.
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def registered_targets() -> dict[str, list[str]]:
    """Return the FFI handlers that importing the package registered, by platform."""
    return {name: sorted(targets) for name, targets in _core.registrations().items()}


def trial_product() -> dict[str, Any]:
    """Multiply two matrices on the default backend, and compare with float64."""
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal((128, 128)).astype(np.float32) for _ in range(2))
    exact = lhs.astype(np.float64) @ rhs
    result = np.asarray(jax.jit(jax_tilekern.matmul)(lhs, rhs))
    return {
        "kernel": _kernel(jnp.asarray(lhs)),
        "error": float(np.linalg.norm(result - exact) / np.linalg.norm(exact)),
    }


PROBES: dict[str, Callable[[], Any]] = {
    "versions": versions,
    "backends": backends,
    "cpu": cpu,
    "cpu_kernels": cpu_kernels,
    "driver": driver,
    "nvidia_smi": nvidia_smi,
    "nvrtc": nvrtc,
    "cache": cache,
    "registered_targets": registered_targets,
    "trial_product": trial_product,
    "source_digests": source_digests,
}


def facts(*names: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the probes of ``names`` found, and the errors of those that failed."""
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name in names:
        try:
            found[name] = PROBES[name]()
        # A broken installation breaks in any way, and that is what is to be reported.
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return found, errors
