"""The CPU that a program runs on, and words for its kernels.

The C++ handlers detect the instruction sets that they need themselves.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from jax_tilekern import _core
from jax_tilekern.plans.transpose.permutation import Permutation

# Why a product takes a kernel, by a word of the kernel's name.
_PRODUCT_REASONS = {
    "direct": "rhs is small, so operands are read in place",
    "packed": "large or narrow operands are packed for the caches first",
    "vector-matrix": "a product with a vector reads the matrix once, as it lies",
    "dot": "a dot product reads both vectors once, as they lie",
}


@dataclass(frozen=True)
class Cpu:
    """A family of CPUs."""

    instruction_set: str  # the one that kernels use
    has_amx: bool = False  # Intel AMX, which XLA's products use and the library's do not

    @property
    def name(self) -> str:
        """By which recorded times are found."""
        return f"CPU with {self.instruction_set}{' and AMX' if self.has_amx else ''}"

    @property
    def vector_bytes(self) -> int:
        families = (("avx512", 64), ("avx2", 32))
        return next((size for name, size in families if self.instruction_set.startswith(name)), 16)


def current_cpu() -> Cpu:
    return Cpu(_core.cpu_instruction_set(), _has_amx())


@functools.cache
def _has_amx() -> bool:
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_tile" in processors.read_text().split()


@functools.cache
def _last_cache_bytes() -> int:
    """Return the size of the last-level cache, or of a small one where it is unknown."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    text = size.read_text().strip() if size.exists() else ""
    return int(text[:-1]) << 10 if text.endswith("K") else 32 << 20


def is_streamed(permutation: Permutation) -> bool:
    """Return whether a transpose writes past the caches, where its result would not stay."""
    nbytes = math.prod(permutation.sizes) * permutation.itemsize
    return nbytes > _last_cache_bytes() // 2


def product_reason(kernel: str, arithmetic: str) -> str:
    """Return why a product takes a kernel, by the kernel's name."""
    form = next(form for form in _PRODUCT_REASONS if form in kernel)
    return f"{_PRODUCT_REASONS[form]}; computes in {arithmetic}"
