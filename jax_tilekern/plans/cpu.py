"""What is left to XLA on a CPU, and the features of the CPU that this depends on.

Ratios are XLA's time over ours on two cores of an AMD EPYC with AVX-512 (``docs/tuning-log.md``).
The C++ handlers detect the instruction sets that they need themselves.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.transpose.permutation import Permutation

# A call of a kernel for one dot product takes as long as XLA's loop for a vector of this length.
_SHORT_DOT = 128


@functools.cache
def has_amx() -> bool:
    """Whether the CPU has Intel AMX, which XLA's products use and this library's do not."""
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_tile" in processors.read_text().split()


def product_left_to_xla(geometry: MatmulGeometry) -> str | None:
    """Return why a product is XLA's, or ``None``."""
    if geometry.m == geometry.n == 1:
        if not geometry.lhs_strides[-1] == geometry.rhs_strides[-2] == 1:
            return "XLA is faster where the vectors of a dot product are not contiguous (0.01)"
        if math.prod(geometry.batch) > 1 and geometry.k < _SHORT_DOT:
            return f"XLA's batches of dot products of fewer than {_SHORT_DOT} are faster (0.2)"
    return None


def transpose_left_to_xla(permutation: Permutation) -> str | None:
    """Return why a transpose is XLA's, or ``None``."""
    return None
