"""Gradients by arrays that a score reads by indices of the batch and the head alone.

Such a score is a function of numbers of each element of the batch and head: a slope, a temperature,
a gate. A kernel adds up the gradients by these numbers, and the transpose of the function from the
arrays to the numbers gives those by the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.index_functions import IndexFunction, closed
from jax_tilekern.ops.attention.scores import (
    Element,
    Scores,
    of_whole,
    score_as_jaxpr,
    score_of,
)

# Numbers, whose sums a kernel has in registers.
_MOST_NUMBERS = 4
# Elements of an array's gradients by each element of the batch and head.
_MOST_ELEMENTS = 1 << 22
_F32 = np.dtype(np.float32)
_SCALARS = 5


@dataclass(frozen=True, eq=False)
class ScoreNumbers:
    """A ``score_mod`` as a function of numbers, and the numbers as one of indices and arrays."""

    function: IndexFunction
    moving: tuple[int, ...]  # positions of the arrays that the gradients are by
    numbers: tuple[Any, ...]  # variables that depend on them, but on no score, query or key
    of_numbers: frozenset[int]  # equations before them, by their position
    axes: tuple[bool, bool]  # whether the numbers depend on the element of the batch, and the head

    def values(self, b: Any, h: Any, *arrays: Any) -> list[Any]:
        """Return the numbers of an element of the batch and a head, of the whole call."""
        return self._evaluated([None, b, h, None, None, *arrays], {}, self.of_numbers, self.numbers)

    def score(self, numbers: Sequence[Any], *operands: Any) -> Any:
        """Return the score of numbers, and of the operands of ``score_mod``."""
        jaxpr = self.function.jaxpr.jaxpr
        others = frozenset(range(len(jaxpr.eqns))) - self.of_numbers
        known = dict(zip(self.numbers, numbers, strict=True))
        return self._evaluated(operands, known, others, jaxpr.outvars)[0]

    def _evaluated(
        self,
        operands: Sequence[Any],
        known: dict[Any, Any],
        positions: frozenset[int],
        results: Sequence[Any],
    ) -> list[Any]:
        jaxpr = self.function.jaxpr.jaxpr
        values = dict(zip(jaxpr.invars, operands, strict=True)) | known

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else values[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            if i in positions:
                found = compat.bind_equation(eqn, [value(x) for x in eqn.invars])
                values.update(zip(eqn.outvars, found, strict=True))
        return [value(x) for x in results]

    def derivatives_jaxpr(self, scores: Scores, arrays: Sequence[Any]) -> Any:
        """Return the score with its derivatives by the product and by the numbers, as a jaxpr."""

        def derivatives(scores: Scores, own: Any, s: Any, place: Element) -> list[Any]:
            b, h, *_ = of_whole(own.origins, *place)
            given = [s, *self.values(b, h, *own.of_score)]

            def along(i: int) -> list[Any]:
                def of_one(x: Any) -> Any:
                    moved = [*given[:i], x, *given[i + 1 :]]
                    function: Any = functools.partial(self.score, moved[1:])
                    moving = dataclasses.replace(scores, score_mod=function)
                    return score_of(moving, own, moved[0], place)

                return [*jax.jvp(of_one, [given[i]], [jnp.ones_like(given[i])])]

            return [*along(0), *(along(i)[1] for i in range(1, len(given)))]

        return score_as_jaxpr(derivatives, scores, _F32, arrays)

    def as_array(
        self, scores: Scores, arrays: Sequence[Array], sizes: tuple[int, int]
    ) -> tuple[Scores, list[Array], int]:
        """Return a call whose ``score_mod`` reads the numbers as an array.

        It is of shape ``(batch, heads, numbers)``; with its position among the arrays.
        """
        own = scores.by_use(arrays)
        origins = jnp.zeros(3, np.int32) if own.origins is None else own.origins
        of_heads = jax.vmap(self.values, (None, 0, *[None] * len(own.of_score)))
        of_all = jax.vmap(of_heads, (0, None, *[None] * len(own.of_score)))
        b, h = (jnp.arange(n, dtype=np.int32) + origins[i] for i, n in enumerate(sizes))
        shape = (*sizes, 1)
        numbers = [
            jnp.broadcast_to(x.astype(_F32).reshape(*x.shape, *[1] * (3 - x.ndim)), shape)
            for x in of_all(b, h, *own.of_score)
        ]
        read = [*own.of_score, jnp.concatenate(numbers, -1), origins]

        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, *read: Any) -> Any:
            *others, array, first = read
            found = array[b - first[0], h - first[1]]
            given = [found[i].astype(x.aval.dtype) for i, x in enumerate(self.numbers)]
            return self.score(given, s, b, h, q, k, *others)

        avals = [*self.function.jaxpr.in_avals[:_SCALARS], *map(jax.typeof, read)]
        function = IndexFunction(self.function.name, closed(score_mod, *avals), _SCALARS)
        scores = dataclasses.replace(scores, score_mod=function)
        given = scores.in_order(own._asdict(), read, own.of_mask)
        if own.origins is not None:
            given.append(own.origins)
        return scores, given, scores.score_arrays - 2

    def gradients(self, of_numbers: Array, scores: Scores, arrays: Sequence[Array]) -> list[Array]:
        """Return those by the moving arrays, from those by the numbers ``(batch, heads, number)``.

        Those of each element of the batch and head are added in their order.
        """
        own = scores.by_use(arrays)
        summed = tuple(i for i, has_axis in enumerate(self.axes) if not has_axis)
        of_numbers = of_numbers.sum(summed, keepdims=True)

        def pulled(b: Any, h: Any, cotangents: Array) -> list[Array]:
            def values(*moving: Array) -> list[Array]:
                given = dict(zip(self.moving, moving, strict=True))
                return self.values(b, h, *(given.get(i, x) for i, x in enumerate(own.of_score)))

            found, pull = jax.vjp(values, *(own.of_score[i] for i in self.moving))
            return [*pull([x.astype(y.dtype) for x, y in zip(cotangents, found, strict=True)])]

        over_heads = jax.vmap(pulled, (None, 0, 0))
        indices = [jnp.arange(n, dtype=np.int32) for n in of_numbers.shape[:2]]
        batch, heads, *_ = of_whole(own.origins, *indices, np.int32(0), np.int32(0))
        parts = jax.vmap(over_heads, (0, None, 0))(batch, heads, of_numbers)
        return [
            x.astype(jnp.promote_types(x.dtype, _F32)).sum((0, 1)).astype(x.dtype) for x in parts
        ]


def score_numbers(
    scores: Scores, arrays: Sequence[Any], moving: Sequence[int], sizes: tuple[int, int]
) -> ScoreNumbers | None:
    """Return the numbers that ``score_mod`` reads of its arrays ``moving``.

    ``None`` if it reads them by other indices, or as too many numbers. ``sizes`` are those of the
    batch and of the heads.
    """
    function = scores.score_mod
    if function is None:
        return None
    jaxpr = function.jaxpr.jaxpr
    s, b, h, q, k, *read = jaxpr.invars
    depends = {s: {"score"}, q: {"score"}, k: {"score"}, b: {"batch"}, h: {"head"}}
    depends |= {read[i]: {"moving"} for i in moving}
    numbers: dict[Any, None] = {}
    of_numbers = set()
    for i, eqn in enumerate(jaxpr.eqns):
        given = [x for x in eqn.invars if not compat.is_literal(x)]
        found = set().union(*(depends.get(x, set()) for x in given))
        depends |= dict.fromkeys(eqn.outvars, found)
        if "score" in found:
            on_each = [(x, depends.get(x, set())) for x in given]
            numbers |= {x: None for x, on in on_each if "moving" in on and "score" not in on}
        else:
            of_numbers.add(i)
    on = set().union(*(depends[x] for x in numbers))
    axes = "batch" in on, "head" in on
    of_score = scores.by_use(arrays).of_score
    parts = math.prod(n for n, has_axis in zip(sizes, axes, strict=True) if has_axis)
    is_covered = (
        "score" in depends.get(jaxpr.outvars[0], set())
        and 0 < len(numbers) <= _MOST_NUMBERS
        and all(x.aval.shape == () and jnp.issubdtype(x.aval.dtype, jnp.floating) for x in numbers)
        and parts * max(of_score[i].size for i in moving) <= _MOST_ELEMENTS
    )
    if not is_covered:
        return None
    return ScoreNumbers(function, tuple(moving), tuple(numbers), frozenset(of_numbers), axes)
