"""How operands and outputs lie in memory, as far as the kernels of ``gemm/sm80`` depend on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.plans.gemm.geometry import MatmulGeometry

# Of a copy, in bytes.
WIDEST_LOAD = 16


@dataclass(frozen=True)
class Operand:
    """How an operand lies in memory, as far as a kernel's code depends on it.

    Attributes
    ----------
    k_major
        Whether its unit stride is along ``k``.
    load_bytes
        Bytes of a copy: what every row's address and length are multiples of (16, 8 or 4), or 1
        for copies that take any address and length.
    """

    k_major: bool
    load_bytes: int


def lhs_operand(geometry: MatmulGeometry, itemsize: int) -> Operand:
    """Return how ``lhs`` lies in memory."""
    *batch, m, k = geometry.lhs_strides
    # With k of size 1 either order is right, and along m there is more to load at once.
    k_major = m != 1 or (k == 1 and geometry.k > 1)
    outer = (geometry.m, m) if k_major else (geometry.k, k)
    strides = (outer, *zip(geometry.batch, batch, strict=True))
    return Operand(k_major, _load_bytes(geometry.k if k_major else geometry.m, strides, itemsize))


def rhs_operand(geometry: MatmulGeometry, itemsize: int) -> Operand:
    """Return how ``rhs`` lies in memory."""
    *batch, k, n = geometry.rhs_strides
    k_major = n != 1 or (k == 1 and geometry.k > 1)
    outer = (geometry.n, n) if k_major else (geometry.k, k)
    strides = (outer, *zip(geometry.batch, batch, strict=True))
    return Operand(k_major, _load_bytes(geometry.k if k_major else geometry.n, strides, itemsize))


def _load_bytes(length: int, strides: tuple[tuple[int, int], ...], itemsize: int) -> int:
    """Return the widest copy that divides rows of `length` elements and the steps between them."""
    steps = [length, *(stride for size, stride in strides if size > 1)]
    common = math.gcd(WIDEST_LOAD, *(step * itemsize for step in steps))
    return common if common >= 4 else 1


def has_vector_rows(geometry: MatmulGeometry, itemsize: int) -> bool:
    """Whether every row of the output is a whole number of aligned 16-byte vectors."""
    *batch, m, _ = geometry.out_strides
    strides = ((geometry.m, m), *zip(geometry.batch, batch, strict=True))
    return _load_bytes(geometry.n, strides, itemsize) == WIDEST_LOAD
