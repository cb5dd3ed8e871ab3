"""Features of the CPU that planners need; the C++ handlers detect the others."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def has_amx() -> bool:
    """Whether the CPU has Intel AMX, which XLA's products use and this library's do not."""
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_tile" in processors.read_text().split()
