"""Candidates for a product that a row calls: compiled, and checked against XLA's product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from benchmarks.calls.case import Case, types_enabled
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.tuned import XLA
from jax_tilekern.tuning.product_timing import (
    ArrayProduct,
    Side,
    faults,
    plan_of,
    tolerance_of,
)
from jax_tilekern.tuning.random_operands import Operands
from jax_tilekern.tuning.tuner import products_of

# XLA's product here only says what is right: its speed is that of the row's own peer.
_UNTUNED = {"xla_gpu_autotune_level": 0}


@dataclass
class ProductCandidates:
    """The candidates of one product.

    Attributes
    ----------
    product
        The product that the row's call makes.
    gpu
        The GPU of this machine.
    found
        The candidates.
    sides
        Those that have a plan, by key.
    failures
        Why the others have none.
    by_xla
        XLA's product, which says what is right.
    """

    product: Product
    gpu: Gpu
    found: list[CostedCandidate]
    sides: dict[str, Side] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    by_xla: Any = None

    @classmethod
    def of(cls, case: Case, count: int, gpu: Gpu) -> ProductCandidates | None:
        """Return so many candidates for a row, or ``None`` where there are none."""
        with types_enabled(case.row):
            products = products_of(case.ours, *case.row.structs)
        if len(products) != 1:
            return None
        found = candidates(products[0], gpu)
        return None if isinstance(found, NoKernel) else cls(products[0], gpu, _spread(found, count))

    @property
    def problem(self) -> ArrayProduct:
        """The product over arrays of JAX."""
        return ArrayProduct.of(self.product)

    def programs(self) -> Iterator[Callable[[], Any]]:
        """Return what compiles the check, and each candidate's kernel and program."""
        yield self._compile_check
        yield from (partial(self._compile, candidate) for candidate in self.found)

    def _compile_check(self) -> None:
        with jax.enable_x64(self._is_wide):
            problem = self.problem
            problem.compile_ahead()
            by_xla = jax.jit(problem.by_xla).lower(*problem.structs)
            self.by_xla = by_xla.compile(compiler_options=_UNTUNED)

    def _compile(self, candidate: CostedCandidate) -> None:
        plan = plan_of(candidate, self.gpu)
        if isinstance(plan, str):
            self.failures[candidate.key] = plan
            return
        with jax.enable_x64(self._is_wide):
            problem = self.problem
            lowered = jax.jit(partial(problem.by_plan, plan)).lower(*problem.structs)
            # A bug in one candidate must not keep the others from being measured.
            try:
                self.sides[candidate.key] = lowered.compile()
            except RuntimeError as error:
                self.failures[candidate.key] = f"does not compile: {error}"

    @property
    def _is_wide(self) -> bool:
        return any(dtype.itemsize == 8 for dtype in self.product.dtypes)

    def check(self, operands: Operands) -> None:
        """Drop the sides that fail or whose result is not XLA's."""
        with jax.enable_x64(self._is_wide):
            if self.by_xla is None:
                self._compile_check()  # It failed in its thread, and raises here.
            wrong = faults({XLA: self.by_xla} | self.sides, operands, tolerance_of(self.product))
        self.failures |= wrong
        self.sides = {key: side for key, side in self.sides.items() if key not in wrong}


def _spread(found: Sequence[CostedCandidate], count: int) -> list[CostedCandidate]:
    """Return the best by the cost model, and others spread over the rest of twice its time."""
    best = list(found[: (count + 1) // 2])
    rest = [x for x in found[len(best) :] if x.cycles <= 2 * found[0].cycles]
    wanted = count - len(best)
    step = max(1, len(rest) // max(1, wanted))
    return [*best, *rest[::step][:wanted]]
