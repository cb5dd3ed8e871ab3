"""Find the elementwise equations of a jaxpr that each of its products takes as its epilogue.

A product takes the equations that read it, and those that read these, up to the first other use of
any of their values. The kernel then stores the fewest arrays from which everything else can be
computed: the values that something other than a fusion of XLA's reads, and, if other values are
used, one array from which they follow, which may be the product itself. Other elementwise equations
are computed from those by XLA, or by the epilogues that read them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_tilekern.epilogue.understood import absent, all_of, is_understood
from jax_tilekern.fusion.elementwise import Reading, Shape, readings
from jax_tilekern.interop import compat
from jax_tilekern.plans.contraction import Contraction

# An operand of an epilogue is computed in the kernel if it follows from so few arrays of the
# product's shape, by so few equations; otherwise the kernel reads it.
_MAX_ARRAYS = 2
_MAX_EQUATIONS = 32

# Products, and their parameters.
_PRODUCTS = {
    "dot_general": {
        **all_of("dimension_numbers precision preferred_element_type"),
        "out_sharding": absent,
    },
    "tilekern_contract": {
        **all_of("contraction precision out_dtype contexts"),
        "out_sharding": absent,
    },
}

# XLA computes the operands of these in the same kernel.
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")


@dataclass(frozen=True)
class TracedProduct:
    """A product among a jaxpr's equations."""

    contraction: Contraction
    precision: Any
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Group:
    """A product and the equations that are its epilogue."""

    product: TracedProduct
    eqn: Any
    # The epilogue's, in their order, and how each reads its operands.
    equations: tuple[tuple[Any, list[Reading]], ...]
    last: int  # position of the last of them, where the fused product is computed
    results: tuple[Any, ...]  # variables that it computes, which may include the product itself
    operands: tuple[Reading, ...]  # arrays that the epilogue reads


def product_of(eqn: Any) -> TracedProduct | None:
    """Return the product that an equation is, if it can have an epilogue."""
    name, params = eqn.primitive.name, eqn.params
    if name not in _PRODUCTS or not is_understood(eqn, _PRODUCTS[name]):
        return None
    if name == "dot_general":
        lhs, rhs = eqn.invars
        contraction = Contraction.from_dot_general(
            lhs.aval.ndim, rhs.aval.ndim, params["dimension_numbers"]
        )
    else:
        contraction = params["contraction"]
    # Rows of no group are zeros after an epilogue too, even if its function of zero is not zero.
    if contraction.group is not None:
        return None
    (out,) = eqn.outvars
    sizes = [size for x in eqn.invars for size in x.aval.shape]
    if (
        not contraction.contracted
        or not all(isinstance(size, int) for size in sizes)
        or jnp.issubdtype(out.aval.dtype, jnp.complexfloating)
        or any(compat.explicit_sharding(x.aval) is not None for x in (*eqn.invars, out))
    ):
        return None
    return TracedProduct(contraction, params["precision"], np.dtype(out.aval.dtype))


def find_groups(jaxpr: compat.Jaxpr) -> tuple[list[Group], set[int]]:
    """Return the products of a jaxpr with an epilogue, and the positions of the other equations.

    Equations that only epilogues need are among neither.
    """
    finder = _Finder(jaxpr)
    for position, eqn in enumerate(jaxpr.eqns):
        product = product_of(eqn)
        if product is not None:
            finder.add_group(position, product)
    return finder.groups, finder.remaining


class _Use(NamedTuple):
    position: float
    # The equation's, unless a group or the jaxpr's result is what uses the value.
    eqn: int | None
    # Whether the value must be in memory.
    stored: bool


class _Finder:
    def __init__(self, jaxpr: compat.Jaxpr) -> None:
        self.groups: list[Group] = []
        self.remaining = set(range(len(jaxpr.eqns)))
        self._eqns = list[Any](jaxpr.eqns)
        self._defined = {x: i for i, eqn in enumerate(self._eqns) for x in eqn.outvars}
        self._readings = [
            readings(eqn, eqn.outvars[0].aval.shape) if eqn.outvars else None for eqn in self._eqns
        ]
        # The values that groups compute, and the equations that are parts of epilogues.
        self._given, self._fused = set[Any](), set[int]()
        self._uses: dict[Any, set[_Use]] = defaultdict(set)
        self._add_use(jaxpr.outvars, _Use(math.inf, None, stored=True))
        for position, eqn in enumerate(self._eqns):
            self._add_use(eqn.invars, self._use_by(position))

    def add_group(self, position: int, product: TracedProduct) -> None:
        """Make the group of the product at a position, if it has an epilogue."""
        eqn = self._eqns[position]
        (source,) = eqn.outvars
        values, taken = self._reached(position)
        results = self._results(source, values, taken)
        if set(results) <= {source}:
            return
        chosen = self._needed(results, source, taken)
        equations = tuple((self._eqns[i], chosen[i]) for i in sorted(chosen))
        internal = {source, *(x for each, _ in equations for x in each.outvars)}
        operands = dict.fromkeys(
            reading
            for _, read in equations
            for reading in read
            if not compat.is_literal(reading.array) and reading.array not in internal
        )
        last = max(chosen)
        self.groups.append(Group(product, eqn, equations, last, results, tuple(operands)))

        self._remove(position)
        read = (*eqn.invars, *(reading.array for reading in operands))
        self._add_use(read, _Use(last, None, stored=True))
        self._given |= set(results)
        self._fused |= set(chosen)
        self._remove_unused(chosen)

    def _use_by(self, position: int) -> _Use:
        eqn = self._eqns[position]
        stored = self._readings[position] is None and eqn.primitive.name not in _REDUCTIONS
        return _Use(position, position, stored)

    def _add_use(self, atoms: Iterable[Any], use: _Use) -> None:
        for atom in atoms:
            if not compat.is_literal(atom):
                self._uses[atom].add(use)

    def _remove(self, position: int) -> None:
        self.remaining.discard(position)
        for atom in self._eqns[position].invars:
            if not compat.is_literal(atom):
                self._uses[atom].discard(self._use_by(position))

    def _remove_unused(self, positions: Iterable[int]) -> None:
        """Remove equations of epilogues whose values nothing else uses."""
        waiting = list(positions)
        while waiting:
            position = waiting.pop()
            eqn = self._eqns[position]
            used = any(self._uses[x] and x not in self._given for x in eqn.outvars)
            if position in self._fused and position in self.remaining and not used:
                self._remove(position)
                read = compat.variables(eqn.invars)
                waiting += [self._defined[x] for x in read if x in self._defined]

    def _read_by(self, position: int, shape: Shape) -> list[Reading] | None:
        """Return how an equation reads its operands if it computes every element of a shape."""
        own = self._eqns[position].outvars[0].aval.shape
        return self._readings[position] if own == shape else None

    def _reached(self, position: int) -> tuple[list[Any], dict[int, list[Reading]]]:
        """Return the values that a product's epilogue may compute, and its equations."""
        (source,) = self._eqns[position].outvars
        shape = source.aval.shape
        values, taken = [source], dict[int, list[Reading]]()
        waiting = self._later_uses(source)
        while waiting:
            use = waiting.pop(0)
            if use.eqn in taken:
                continue
            read = None if use.eqn is None else self._read_by(use.eqn, shape)
            if use.eqn is None or read is None:
                break
            taken[use.eqn] = read
            for x in self._eqns[use.eqn].outvars:
                values.append(x)
                waiting += self._later_uses(x)
            waiting.sort(key=lambda use: use.position)
        return values, taken

    def _later_uses(self, value: Any) -> list[_Use]:
        """Return a value's uses by equations and groups in their order, without the result's."""
        uses = (use for use in self._uses[value] if math.isfinite(use.position))
        return sorted(uses, key=lambda use: use.position)

    def _results(
        self, source: Any, values: Sequence[Any], taken: dict[int, list[Reading]]
    ) -> tuple[Any, ...]:
        other_uses = {
            x: [use for use in self._uses[x] if use.eqn is None or use.eqn not in taken]
            for x in values
        }
        stored = [x for x in values if any(use.stored for use in other_uses[x])]
        rest = [x for x in values if other_uses[x] and x not in stored]

        def follow_from(given: Sequence[Any]) -> bool:
            """Whether the rest is computed from these values, without the product."""
            missing, seen = list(rest), set(given)
            while missing:
                x = missing.pop()
                if x in seen:
                    continue
                if x is source:
                    return False
                seen.add(x)
                eqn = self._eqns[self._defined[x]]
                missing += [y for y in eqn.invars if not compat.is_literal(y) and y in known]
            return True

        known = set(values)
        if follow_from(stored):
            return tuple(stored)
        latest = reversed(values)
        candidates = (x for x in latest if x is source or follow_from([*stored, x]))
        chosen = min(candidates, key=lambda x: x.aval.dtype.itemsize)
        return (*stored, chosen)

    def _needed(
        self, results: Sequence[Any], source: Any, taken: dict[int, list[Reading]]
    ) -> dict[int, list[Reading]]:
        """Return the equations that compute the results from the product."""
        shape = source.aval.shape
        chosen = dict[int, list[Reading]]()
        missing = list(results)
        while missing:
            x = missing.pop()
            position = self._defined.get(x)
            if x is source or position is None or position in chosen:
                continue
            if position in taken:
                chosen[position] = taken[position]
                missing += [r.array for r in taken[position] if not compat.is_literal(r.array)]
            elif x.aval.shape == shape:
                chosen |= self._computed_in_the_kernel(x, shape)
        return chosen

    def _computed_in_the_kernel(self, operand: Any, shape: Shape) -> dict[int, list[Reading]]:
        """Return the equations from which the kernel computes an operand, none to read it."""
        found, arrays = dict[int, list[Reading]](), set[Any]()
        missing = [operand]
        while missing:
            x = missing.pop()
            position = self._defined.get(x)
            if position in found:
                continue
            read = None if position is None or x in self._given else self._read_by(position, shape)
            if read is None or position is None:
                arrays |= {x} if x.aval.shape == shape else set()
            else:
                found[position] = read
                missing += [r.array for r in read if not compat.is_literal(r.array)]
            if len(arrays) > _MAX_ARRAYS or len(found) > _MAX_EQUATIONS:
                return {}
        return found
