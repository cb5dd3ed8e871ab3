"""A score as ``outer * function(inner * s)``, of which kernels have the numbers beside others.

They multiply a product by its scale, and a score by the logarithm that makes its exponential a
power of two, so ``inner`` and ``outer`` cost nothing there. ``30 * jnp.tanh(s / 30)`` leaves
``tanh`` alone, whose derivative needs no factor either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tilekern.epilogue.scalar_function import evaluate_without_names
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.index_functions import closed

# Factors of float32 whose products with each other and with usual scales are normal.
_LARGEST = 2.0**60
# Functions of results between -1 and 1.
_UP_TO_ONE = {"tanh", "erf", "sin", "cos", "logistic"}


class FactoredScore(NamedTuple):
    """``score(s, *others)`` as ``outer * function(inner * s, *others)``, with a positive ``outer``.

    Attributes
    ----------
    function
        A jaxpr.
    inner, outer
        Numbers.
    is_up_to_one
        Whether results of the function are known to be between -1 and 1.
    """

    function: Any
    inner: float = 1.0
    outer: float = 1.0
    is_up_to_one: bool = False

    def with_outer_inside(self) -> FactoredScore:
        """Return the same with ``outer`` as a part of the function."""
        if self.outer == 1:
            return self
        jaxpr = self.function.jaxpr

        def score(*given: Any) -> Any:
            found = evaluate_without_names(jaxpr, len(jaxpr.invars), *given)[0]
            return found * np.asarray(self.outer, found.dtype)

        return FactoredScore(closed(score, *self.function.in_avals), self.inner)

    def with_slope(self) -> Any:
        """Return the function with its derivative by its first operand, as a jaxpr."""
        jaxpr = self.function.jaxpr

        def both(s: Any, *others: Any) -> Any:
            def of_score(s: Any) -> Any:
                return evaluate_without_names(jaxpr, len(jaxpr.invars), s, *others)[0]

            return jax.jvp(of_score, [s], [jnp.ones_like(s)])

        return closed(both, *self.function.in_avals)


def factored(score: Any) -> FactoredScore:
    """Take the numbers out of a jaxpr ``(s, *others) -> score``."""
    jaxpr = score.jaxpr
    made_by = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
    inner, multiples = _inner(jaxpr)
    outer, out = _outer(jaxpr.outvars[0], made_by, multiples)
    last = None if compat.is_literal(out) else made_by.get(out)
    is_up_to_one = last is not None and last.primitive.name in _UP_TO_ONE
    if (inner, outer) == (1, 1):
        return FactoredScore(score, is_up_to_one=is_up_to_one)

    def function(s: Any, *others: Any) -> Any:
        values = dict(zip(jaxpr.invars, (s, *others), strict=True)) | dict.fromkeys(multiples, s)

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            if multiples.isdisjoint(eqn.outvars):
                results = compat.bind_equation(eqn, [value(x) for x in eqn.invars])
                values.update(zip(eqn.outvars, results, strict=True))
        return value(out)

    return FactoredScore(closed(function, *score.in_avals), inner, outer, is_up_to_one)


def _inner(jaxpr: Any) -> tuple[float, set[Any]]:
    """Return the factor of all reads of the first operand; with it and what is its multiple."""
    inner, latest = 1.0, {jaxpr.invars[0]}
    multiples = set(latest)
    while latest.isdisjoint(compat.variables(jaxpr.outvars)):
        reads = [eqn for eqn in jaxpr.eqns if not latest.isdisjoint(compat.variables(eqn.invars))]
        factors = {_factor(eqn) for eqn in reads}
        if len(factors) != 1 or not _is_usual(product := inner * factors.pop()):
            break
        inner, latest = product, {eqn.outvars[0] for eqn in reads}
        multiples |= latest
    return inner, multiples


def _outer(out: Any, made_by: Mapping[Any, Any], multiples: set[Any]) -> tuple[float, Any]:
    """Return the positive factor of a result, and what it is a multiple of."""
    outer, of, found = 1.0, out, (1.0, out)
    while not compat.is_literal(of) and of in made_by and of not in multiples:
        eqn = made_by[of]
        if not _is_usual(outer * _factor(eqn)):
            break
        outer *= _factor(eqn)
        (of,) = compat.variables(eqn.invars)
        if outer > 0:
            found = outer, of
    return found


def _factor(eqn: Any) -> float:
    """Return the number that an equation multiplies its operand by; zero if it does not."""
    name, literals = eqn.primitive.name, [compat.is_literal(x) for x in eqn.invars]
    if name not in ("mul", "div") or sum(literals) != 1:
        return 0.0
    number = float(eqn.invars[literals.index(True)].val)
    if name == "mul":
        return number
    return 1 / number if literals[1] and number else 0.0


def _is_usual(factor: float) -> bool:
    return 1 / _LARGEST <= abs(factor) <= _LARGEST
