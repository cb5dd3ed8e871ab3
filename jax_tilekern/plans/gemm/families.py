"""Families of kernels, and the candidates of all families that can compute a product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.problem import TypedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel

_Product = TypeVar("_Product", bound=TypedProduct[Any])


class Family(NamedTuple, Generic[_Product]):
    """Kernels of one design.

    Attributes
    ----------
    arithmetics
        Those that it computes in.
    candidates
        The candidates for a product in one of them, or why there is none.
    """

    arithmetics: Collection[str]
    candidates: Callable[[_Product, Gpu], Sequence[CostedCandidate] | NoKernel]


def ranked_candidates(
    families: Sequence[Family[_Product]], product: _Product, gpu: Gpu
) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model.

    Each family decides by itself what it takes. If none takes the product, the reason is that of
    the last family that computes in its arithmetic, so the most widely usable family comes last.
    """
    answers = [
        family.candidates(product, gpu)
        for family in families
        if product.arithmetic in family.arithmetics
    ]
    refusal = NoKernel(f"no kernel computes in {product.arithmetic}")
    found: list[CostedCandidate] = []
    for answer in answers:
        if isinstance(answer, NoKernel):
            refusal = answer
        else:
            found.extend(answer)
    # sorted() keeps the order of equals.
    return sorted(found, key=lambda candidate: candidate.cycles) if found else refusal
