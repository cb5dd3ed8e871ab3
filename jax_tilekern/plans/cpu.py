"""What planners know of the CPU, beyond what the C++ finds out when a product runs."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def has_amx() -> bool:
    """Say whether the CPU has Intel's matrix units, which XLA's products use and ours do not."""
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_tile" in processors.read_text().split()
