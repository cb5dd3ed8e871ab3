"""Complex products as real ones, and where these are faster than XLA's own complex products.

One operand becomes pairs of its real and imaginary parts, the other a 2x2 matrix for each of its
elements. The product of both, of twice the contracted size and twice the columns, has the pairs of
the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.plans.contraction import Contraction, Labels, Oriented, matmul_geometry
from jax_tilekern.plans.gemm.arithmetic import F32, F64
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, copy_cycles
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.policy import choose, current_policy
from jax_tilekern.plans.policy.workload import of_product

REAL_PARTS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): F32,
    np.dtype(np.complex128): F64,
}


class Pairing(NamedTuple):
    """A complex contraction as a real one.

    Attributes
    ----------
    contraction
        Of the real arrays. The expanded operand has its labels in an order that merges with those
        of the other arrays.
    expanded
        The operand whose elements become 2x2 matrices.
    contracted_part, result_part
        The labels, of size 2, of the parts that are contracted and of those of the result.
    """

    contraction: Contraction
    expanded: int
    contracted_part: int
    result_part: int

    @property
    def pairs(self) -> Labels:
        """Labels of the operand of pairs."""
        return self.contraction.operands[1 - self.expanded]

    @property
    def matrices(self) -> Labels:
        """Labels of the expanded operand."""
        return self.contraction.operands[self.expanded]


def pairing(contraction: Contraction, expanded: int, *, k_major: bool) -> Pairing:
    """Return the real contraction that a complex one with contracted labels is.

    Parameters
    ----------
    contraction
        The complex one, without groups.
    expanded
        The operand whose elements become 2x2 matrices, best the smaller one.
    k_major
        Whether these have the contracted dimensions innermost.
    """
    c = contraction if expanded else contraction.swapped()
    part = max((*c.lhs, *c.rhs)) + 1
    contracted = (*c.contracted, part)
    columns = (*c.columns, part + 1)
    inner = (*columns, *contracted) if k_major else (*contracted, *columns)
    real = Contraction(
        _after(c.lhs, c.contracted[-1], part),
        (*c.batch, *inner),
        _after(c.out, c.columns[-1], part + 1) if c.columns else (*c.out, part + 1),
    )
    return Pairing(real if expanded else real.swapped(), expanded, part, part + 1)


def _after(labels: Labels, label: int, new: int) -> Labels:
    at = labels.index(label) + 1
    return (*labels[:at], new, *labels[at:])


@dataclass(frozen=True)
class ComplexProduct:
    """A complex product, and the real one that computes it.

    Attributes
    ----------
    pairing
        The contraction that the real product is.
    real
        The product of pairs and 2x2 matrices.
    pairs, matrices, results
        Real numbers of each array.
    """

    pairing: Pairing
    real: Product
    pairs: int
    matrices: int
    results: int

    @property
    def copied(self) -> int:
        """Real numbers that are written to make the real operands and the complex result."""
        return self.pairs + self.matrices + self.results


def complex_product(
    contraction: Contraction,
    lhs: Sequence[int],
    rhs: Sequence[int],
    dtype: np.dtype[Any],
    arithmetic: str,
    *,
    k_major: bool,
) -> ComplexProduct:
    """State the real product that a complex contraction is.

    Parameters
    ----------
    contraction
        The complex one, without groups.
    lhs, rhs
        Shapes of its operands.
    dtype, arithmetic
        Of the real product.
    k_major
        Whether the expanded operand, which is the smaller one, has ``k`` innermost.
    """
    expanded = int(math.prod(rhs) <= math.prod(lhs))
    found = pairing(contraction, expanded, k_major=k_major)
    sizes = {found.contracted_part: 2, found.result_part: 2}
    for labels, shape in zip(contraction.operands, (lhs, rhs), strict=True):
        sizes |= zip(labels, shape, strict=True)
    # What is in the way of a kernel is transposed, and XLA fuses that with the copies.
    real = found.contraction.mergeable()
    shapes = [tuple(map(sizes.__getitem__, x)) for x in (*real.operands, real.out)]
    oriented = matmul_geometry(real, *shapes[:2])
    assert isinstance(oriented, Oriented)
    assert isinstance(oriented.geometry, MatmulGeometry)
    counts = list(map(math.prod, shapes))
    return ComplexProduct(
        found,
        Product(oriented.geometry, dtype, dtype, dtype, arithmetic),
        pairs=counts[1 - expanded],
        matrices=counts[expanded],
        results=counts[2],
    )


class Verdict(NamedTuple):
    """Whether a real product computes a complex one, and why."""

    is_real: bool
    reason: str


_ASKED = Verdict(True, 'jax_tilekern.policy("kernels")')

# Multiply-adds for each number that is copied from which the real product is faster on CPUs, and the
# bytes of copies from which these are in new memory, whose pages are cleared at each call.
_LEAST_WORK_OF_A_COPY, _LEAST_WORK_OF_NEW_MEMORY = 12, 64
_NEW_MEMORY = 16 << 20


def verdict_on_cpu(product: ComplexProduct) -> Verdict:
    """Return what computes a complex product on a CPU, where XLA multiplies them slowly."""
    if current_policy() == "kernels":
        return _ASKED
    work = of_product(product.real).operations / product.copied
    is_new = product.copied * product.real.out_dtype.itemsize > _NEW_MEMORY
    text = f"{work:.2g} multiply-adds for each number that is copied to make it"
    if work >= (_LEAST_WORK_OF_NEW_MEMORY if is_new else _LEAST_WORK_OF_A_COPY):
        return Verdict(True, text)
    return Verdict(False, f"a real product has {text}, which does not pay")


# The multiply-adds of real numbers that XLA's complex products do in a microsecond, by the device
# and the arithmetic of the real product. One size was measured for each, so the margin is wide.
_XLA_RATES = {("NVIDIA H100 80GB HBM3", "tf32"): 88.5e6, ("NVIDIA H100 80GB HBM3", "f32"): 27e6}
_MARGIN = 1.25


def verdict_on_gpu(product: ComplexProduct, gpu: Gpu) -> Verdict:
    """Return what computes a complex product on a GPU."""
    if current_policy() == "kernels":
        return _ASKED
    real, work = product.real, of_product(product.real)
    rate = _XLA_RATES.get((gpu.name, real.arithmetic))
    if rate is None:
        return Verdict(
            False,
            f"no times of complex products in {real.arithmetic} on {gpu.name} are recorded, so "
            'XLA computes it (jax_tilekern.policy("kernels") takes a real product)',
        )
    found = candidates(real, gpu)
    if isinstance(found, NoKernel):
        return Verdict(False, found.reason)
    choice = choose(work, found, gpu)
    if choice.ours is None or choice.xla is None:
        return Verdict(False, choice.reason)
    itemsize = real.out_dtype.itemsize
    copies = sum(
        copy_cycles(x * itemsize, gpu) for x in (product.pairs, product.matrices, product.results)
    )
    product_time = choice.xla if choice.candidate is None else choice.ours
    ours = product_time + copies / gpu.rates.cycles_per_microsecond
    xla = work.operations / rate
    text = f"predicted {ours:.4g} us, XLA's complex product {xla:.4g} us"
    if _MARGIN * ours <= xla:
        return Verdict(True, text)
    return Verdict(False, f"XLA's complex product is as fast: {text}")
