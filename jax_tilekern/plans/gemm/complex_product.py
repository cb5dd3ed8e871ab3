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
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gemm.arithmetic import F32, F64
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, copy_cycles
from jax_tilekern.plans.gemm.select import candidates, workload_of
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NOT_PREDICTED, NoKernel, PredictedUs
from jax_tilekern.plans.policy import choose, current_policy
from jax_tilekern.plans.policy.model import model_of
from jax_tilekern.plans.policy.workload import product_workload

REAL_PARTS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.complex64): F32,
    np.dtype(np.complex128): F64,
}


class Parts(NamedTuple):
    """The labels, of size 2, of real and imaginary parts.

    Attributes
    ----------
    contracted
        Those of an operand, which are contracted.
    result
        Those of the result.
    """

    contracted: int
    result: int


class Pairing(NamedTuple):
    """A complex contraction as a real one.

    Attributes
    ----------
    contraction
        Of pairs with 2x2 matrices, whose labels are in an order that merges with the others'.
    expanded
        The operand whose elements become 2x2 matrices.
    parts
        The labels of the parts.
    """

    contraction: Contraction
    expanded: int
    parts: Parts

    @property
    def has_innermost_parts(self) -> bool:
        """Whether pairs and results lie in memory as complex numbers do."""
        c = self.contraction
        return c.lhs[-1] == self.parts.contracted and c.out[-1] == self.parts.result


def pairing(contraction: Contraction, expanded: int, *, k_major: bool) -> Pairing:
    """Return the real contraction that a complex one with contracted labels is.

    Parameters
    ----------
    contraction
        The complex one, without groups.
    expanded
        The operand whose elements become 2x2 matrices.
    k_major
        Whether these have the contracted dimensions innermost.
    """
    c = contraction if expanded else contraction.swapped()
    label = max((*c.lhs, *c.rhs)) + 1
    parts = Parts(label, label + 1)
    contracted, columns = (*c.contracted, parts.contracted), (*c.columns, parts.result)
    inner = (*columns, *contracted) if k_major else (*contracted, *columns)
    real = Contraction(
        _after(c.lhs, c.contracted[-1], parts.contracted),
        (*c.batch, *inner),
        _after(c.out, c.columns[-1], parts.result) if c.columns else (*c.out, parts.result),
    )
    return Pairing(real, expanded, parts)


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
    in_place
        Whether a kernel reads and writes complex numbers where they lie.
    pairs, matrices, results
        Real numbers of each array.
    """

    pairing: Pairing
    real: Product
    in_place: bool
    pairs: int
    matrices: int
    results: int

    def copied(self, by_kernel: bool = True) -> tuple[int, ...]:
        """Return how many numbers are written in each array that only the real product needs."""
        if self.in_place and by_kernel:
            return (self.matrices,)
        return (self.pairs, self.matrices, self.results)


def complex_product(
    contraction: Contraction,
    lhs: Sequence[int],
    rhs: Sequence[int],
    dtype: np.dtype[Any],
    arithmetic: str,
    *,
    k_major: bool,
) -> ComplexProduct:
    """State the real product that a complex contraction is, the one that copies the least.

    Parameters
    ----------
    contraction
        The complex one, without groups.
    lhs, rhs
        Shapes of its operands.
    dtype, arithmetic
        Of the real product.
    k_major
        Whether 2x2 matrices have the contracted dimensions innermost.
    """
    sizes = dict(zip((*contraction.lhs, *contraction.rhs), (*lhs, *rhs), strict=True))

    def paired_product(found: Pairing) -> ComplexProduct:
        sizes_with_parts = sizes | dict.fromkeys(found.parts, 2)

        def geometry(c: Contraction) -> Oriented | str:
            return matmul_geometry(
                c, *(tuple(sizes_with_parts[x] for x in own) for own in c.operands)
            )

        c = found.contraction
        oriented = geometry(c) if found.has_innermost_parts else ""
        in_place = isinstance(oriented, Oriented)
        if not isinstance(oriented, Oriented):
            # XLA fuses the transposes that the order of labels requires with the copies.
            oriented = geometry(c.mergeable())
        assert isinstance(oriented, Oriented)
        assert isinstance(oriented.geometry, MatmulGeometry)
        return ComplexProduct(
            found,
            Product(oriented.geometry, dtype, dtype, dtype, arithmetic),
            in_place,
            *(math.prod(sizes_with_parts[x] for x in own) for own in (c.lhs, c.rhs, c.out)),
        )

    both = (paired_product(pairing(contraction, i, k_major=k_major)) for i in (1, 0))
    return min(both, key=lambda product: sum(product.copied()))


class Verdict(NamedTuple):
    """Whether a real product computes a complex one, and why."""

    is_real: bool
    reason: str
    predicted_us: PredictedUs = NOT_PREDICTED


_ASKED = Verdict(True, 'jax_tilekern.policy("kernels")')
_DOT = Verdict(False, "2x2 matrices are four reads for one of a vector in a dot product")


def _is_dot(product: ComplexProduct) -> bool:
    return (product.real.geometry.m, product.real.geometry.n) == (1, 2)


# Multiply-adds for each number that is copied from which the real product is faster on CPUs, also
# where there are so many bytes of copies that they are in new memory, whose pages are cleared.
_LEAST_WORK_OF_A_COPY, _LEAST_WORK_OF_NEW_MEMORY = 12, 64
_NEW_MEMORY = 16 << 20


def verdict_on_cpu(product: ComplexProduct) -> Verdict:
    """Return what computes a complex product on a CPU, where XLA multiplies them slowly."""
    if _is_dot(product):
        return _DOT
    if current_policy() == "kernels":
        return _ASKED
    work = product_workload(product.real)
    by_kernel = choose(work, [product.real], current_cpu()).candidate is not None
    copied = sum(product.copied(by_kernel))
    is_new = copied * product.real.out_dtype.itemsize > _NEW_MEMORY
    per_copy = work.operations / copied
    text = f"{per_copy:.2g} multiply-adds for each number that is copied to make it"
    if per_copy >= (_LEAST_WORK_OF_NEW_MEMORY if is_new else _LEAST_WORK_OF_A_COPY):
        return Verdict(True, text)
    return Verdict(False, f"a real product has {text}, which does not pay")


# One size was measured for each rate of XLA's complex products, so the margin is wide.
_MARGIN = 1.25


def verdict_on_gpu(product: ComplexProduct, gpu: Gpu) -> Verdict:
    """Return what computes a complex product on a GPU."""
    if _is_dot(product):
        return _DOT
    if current_policy() == "kernels":
        return _ASKED
    real, work = product.real, product_workload(product.real)
    known = model_of(gpu.name)
    rate = known.complex_operations.get(real.arithmetic) if known else None
    if rate is None:
        return Verdict(
            False,
            f"no times of complex products in {real.arithmetic} on {gpu.name} are recorded, so "
            'XLA computes it (jax_tilekern.policy("kernels") takes a real product)',
        )
    found = candidates(real, gpu)
    if isinstance(found, NoKernel):
        return Verdict(False, found.reason)
    choice = choose(workload_of(real, found), found, gpu)
    kernel, real_by_xla = choice.predicted_us
    if kernel is None or real_by_xla is None:
        return Verdict(False, choice.reason)
    by_kernel = choice.candidate is not None
    copies = sum(
        copy_cycles(count * real.out_dtype.itemsize, gpu) for count in product.copied(by_kernel)
    )
    ours = copies / gpu.rates.cycles_per_microsecond + (kernel if by_kernel else real_by_xla)
    xla = work.operations / rate
    if _MARGIN * ours <= xla:
        return Verdict(True, f"predicted {ours:.4g} us, XLA's complex product {xla:.4g} us")
    return Verdict(False, "XLA's complex product is as fast", PredictedUs(ours, xla))
