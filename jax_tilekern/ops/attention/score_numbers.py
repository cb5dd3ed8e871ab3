"""Gradients by arrays that a score reads by the batch, the head, or how far a key is from a query.

Such a score is a function of numbers of each element of the batch and head: a slope, a temperature,
a gate. Or it is one of a number of each difference of query and key, too: what a table of relative
positions has. A kernel adds up the gradients by these numbers, and the transpose of the function
from the arrays to the numbers gives those by the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.primitives import has_translation, translation
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

# An estimate, of an index and a load. T5's buckets, of some hundred instructions, are the one
# function that was timed.
_INSTRUCTIONS_OF_A_READ = 8
# Numbers, whose sums a kernel has in registers.
_MOST_NUMBERS = 4
# Elements of an array's gradients by each element of the batch and head.
_MOST_ELEMENTS = 1 << 22
# Those by each difference, of which chunks of as many as above are in memory.
_MOST_ELEMENTS_BY_DIFFERENCE = 1 << 30
_F32 = np.dtype(np.float32)
_SCALARS = 5


class Sizes(NamedTuple):
    """Sizes of a call, or of a device's part."""

    batch: int
    heads: int
    queries: int
    keys: int

    def differences(self) -> Array:
        """Return the differences of query and key, from the lowest."""
        return jnp.arange(1 - self.keys, max(self.queries, 1 - self.keys), dtype=np.int32)


class Axes(NamedTuple):
    """Whether numbers depend on the element of the batch, the head, and the difference."""

    batch: bool
    head: bool
    difference: bool  # of the indices of query and key


@dataclass(frozen=True, eq=False)
class ScoreNumbers:
    """A ``score_mod`` as a function of numbers, and the numbers as one of indices and arrays."""

    function: IndexFunction
    moving: tuple[int, ...]  # positions of the arrays that the gradients are by
    numbers: tuple[Any, ...]  # variables that depend on them, but on no score
    of_numbers: frozenset[int]  # equations before them, by their position
    axes: Axes

    def values(self, b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> list[Any]:
        """Return the numbers at indices of the whole call, of which ``q - k`` matters alone."""
        return self._evaluated([None, b, h, q, k, *arrays], {}, self.of_numbers, self.numbers)

    def score(self, numbers: Sequence[Any], *operands: Any) -> Any:
        """Return the score of numbers, and of the operands of ``score_mod``."""
        jaxpr = self.function.jaxpr.jaxpr
        known = dict(zip(self.numbers, numbers, strict=True))
        others = frozenset(
            i for i, eqn in enumerate(jaxpr.eqns) if known.keys().isdisjoint(eqn.outvars)
        )
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
            given = [s, *self.values(*of_whole(own.origins, *place), *own.of_score)]

            def along(i: int) -> list[Any]:
                def of_one(x: Any) -> Any:
                    moved = [*given[:i], x, *given[i + 1 :]]
                    function: Any = functools.partial(self.score, moved[1:])
                    moving = dataclasses.replace(scores, score_mod=function)
                    return score_of(moving, own, moved[0], place)

                return [*jax.jvp(of_one, [given[i]], [jnp.ones_like(given[i])])]

            return [*along(0), *(along(i)[1] for i in range(1, len(given)))]

        return score_as_jaxpr(derivatives, scores, _F32, arrays)

    def _over_indices(
        self, own: Any, sizes: Sizes, axes: Axes, differences: Array
    ) -> Callable[..., list[Array]]:
        """Return the numbers as arrays ``(batch, heads, differences)``; axes that are not are 1."""
        batch, heads = (
            jnp.arange(size if has_axis else 1, dtype=np.int32)
            for size, has_axis in zip(sizes[:2], axes[:2], strict=True)
        )
        indices = of_whole(own.origins, batch, heads, differences, np.int32(0))
        values: Callable[..., Any] = self.values
        for axis in (2, 1, 0):
            mapped = [0 if i == axis else None for i in range(4)]
            values = jax.vmap(values, (*mapped, *[None] * len(own.of_score)))
        return functools.partial(values, *indices)

    def has_gradients(self, arrays: Sequence[Any], sizes: Sizes) -> bool:
        """Whether :meth:`gradients` by the moving arrays of a score take little memory and time."""
        size: int = max(arrays[i].size for i in self.moving)
        if self.axes.difference:
            return (sizes.queries + sizes.keys) * size <= _MOST_ELEMENTS_BY_DIFFERENCE
        parts = math.prod(n for n, has_axis in zip(sizes, self.axes, strict=False) if has_axis)
        return parts * size <= _MOST_ELEMENTS

    def as_array(
        self, scores: Scores, arrays: Sequence[Array], sizes: Sizes
    ) -> tuple[Scores, list[Array], int]:
        """Return a call whose ``score_mod`` reads the numbers as an array.

        It is of shape ``(batch, heads, numbers)``, or ``(batch, heads, differences)`` of the one
        number; with its position among the arrays.
        """
        own = scores.by_use(arrays)
        by_difference = self.axes.difference
        differences = sizes.differences() if by_difference else jnp.zeros(1, np.int32)
        axes = Axes(True, True, by_difference)
        numbers = self._over_indices(own, sizes, axes, differences)(*own.of_score)
        # Numbers of float64 may exceed float32.
        dtype = functools.reduce(jnp.promote_types, (x.dtype for x in numbers), _F32)
        array = jnp.concatenate(
            [jnp.broadcast_to(x.astype(dtype), (*sizes[:2], x.shape[2])) for x in numbers], -1
        )
        read = [*own.of_score, array, *([] if own.origins is None else [own.origins])]
        count = len(own.of_score)

        def score_mod(s: Any, *operands: Any) -> Any:
            indices, read = operands[:4], operands[4:]
            b, h, q, k = indices
            others, array, first = read[:count], read[count], [*read[count + 1 :]]
            difference = q - k
            if first:
                b, h, difference = (x - first[0][i] for i, x in enumerate((b, h, difference)))
            # The lowest difference is the first one.
            position = difference + (sizes.keys - 1) if by_difference else np.int32(0)
            places = [(b, h, position + np.int32(i)) for i in range(len(self.numbers))]
            in_bounds = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
            found = [array.at[place].get(**in_bounds) for place in places]
            given = [x.astype(y.aval.dtype) for x, y in zip(found, self.numbers, strict=True)]
            return self.score(given, s, *indices, *others)

        avals = [*self.function.jaxpr.in_avals[:_SCALARS], *map(jax.typeof, read)]
        function = IndexFunction(self.function.name, closed(score_mod, *avals), _SCALARS)
        scores = dataclasses.replace(scores, score_mod=function)
        given = scores.in_order(own._asdict(), read, own.of_mask)
        if own.origins is not None:
            given.append(own.origins)
        return scores, given, scores.kinds.count("bias") + count

    def gradients(
        self, of_numbers: Array, scores: Scores, arrays: Sequence[Array], sizes: Sizes
    ) -> list[Array]:
        """Return those by the moving arrays, from those by the numbers as in ``as_array``.

        Those of each element of the batch and head, or of each difference, are added in their
        order.
        """
        own = scores.by_use(arrays)
        summed = tuple(i for i, has_axis in enumerate(self.axes[:2]) if not has_axis)
        of_numbers = of_numbers.sum(summed, keepdims=True)
        if self.axes.difference:
            return self._gradients_by_differences(of_numbers, own, sizes)

        def pulled(b: Any, h: Any, cotangents: Array) -> list[Array]:
            index = np.int32(0)
            return self._pulled(own, functools.partial(self.values, b, h, index, index), cotangents)

        over_heads = jax.vmap(pulled, (None, 0, 0))
        indices = [jnp.arange(n, dtype=np.int32) for n in of_numbers.shape[:2]]
        batch, heads, *_ = of_whole(own.origins, *indices, np.int32(0), np.int32(0))
        parts = jax.vmap(over_heads, (0, None, 0))(batch, heads, of_numbers)
        return [
            x.astype(jnp.promote_types(x.dtype, _F32)).sum((0, 1)).astype(x.dtype) for x in parts
        ]

    def _gradients_by_differences(self, of_numbers: Array, own: Any, sizes: Sizes) -> list[Array]:
        """Return gradients that are sums over chunks of differences, whose arrays are in memory."""
        moving = [own.of_score[i] for i in self.moving]
        count = of_numbers.shape[2]
        chunk = max(1, min(count, _MOST_ELEMENTS // max(1, *(x.size for x in moving))))
        steps = math.ceil(count / chunk)

        def in_chunks(x: Array) -> Array:
            x = jnp.pad(x, [(0, steps * chunk - count), *[(0, 0)] * (x.ndim - 1)])
            return x.reshape(steps, chunk, *x.shape[1:])

        def pulled(difference: Array, cotangent: Array) -> list[Array]:
            numbers = self._over_indices(own, sizes, self.axes, difference[None])
            return self._pulled(own, numbers, [cotangent])

        def add(sums: list[Array], part: tuple[Array, Array]) -> tuple[list[Array], None]:
            found = jax.vmap(pulled)(*part)
            return [x + y.astype(x.dtype).sum(0) for x, y in zip(sums, found, strict=True)], None

        parts = in_chunks(sizes.differences()), in_chunks(jnp.moveaxis(of_numbers, 2, 0)[..., None])
        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, _F32)) for x in moving]
        sums, _ = jax.lax.scan(add, zeros, parts)
        return [x.astype(y.dtype) for x, y in zip(sums, moving, strict=True)]

    def _pulled(
        self, own: Any, numbers: Callable[..., Any], cotangents: Sequence[Array] | Array
    ) -> list[Array]:
        """Return the gradients by the moving arrays, of numbers as a function of all arrays."""

        def of_moving(*moving: Array) -> list[Array]:
            given = dict(zip(self.moving, moving, strict=True))
            values: list[Array] = numbers(*(given.get(i, x) for i, x in enumerate(own.of_score)))
            return values

        found, pull = jax.vjp(of_moving, *(own.of_score[i] for i in self.moving))
        return [*pull([x.astype(y.dtype) for x, y in zip(cotangents, found, strict=True)])]


def score_numbers(scores: Scores, moving: Sequence[int]) -> ScoreNumbers | None:
    """Return the numbers that ``score_mod`` reads of its arrays ``moving``.

    ``None`` if it reads them by other indices, or as too many numbers.
    """
    found = _numbers(scores, moving, by_difference=False)
    return found or _numbers(scores, moving, by_difference=True)


def number_of_difference(scores: Scores) -> ScoreNumbers | None:
    """Return what ``score_mod`` has of each difference of query and key, as one number.

    ``None`` if it takes no more instructions than a read of an array.
    """
    found = _numbers(scores, (), by_difference=True)
    if found is None:
        return None
    equations = found.function.jaxpr.jaxpr.eqns
    of_difference = {*found.function.jaxpr.jaxpr.invars[3:_SCALARS]}
    for i in sorted(found.of_numbers):
        if not of_difference.isdisjoint(compat.variables(equations[i].invars)):
            of_difference |= {*equations[i].outvars}
    instructions, needed = 0, {*found.numbers}
    for i in sorted(found.of_numbers, reverse=True):
        eqn = equations[i]
        if needed.isdisjoint(eqn.outvars):
            continue
        needed |= {*compat.variables(eqn.invars)}
        name = eqn.primitive.name
        if not of_difference.isdisjoint(eqn.outvars) and has_translation(name):
            instructions += translation(name, eqn.params).instructions
    return found if instructions > _INSTRUCTIONS_OF_A_READ else None


def _numbers(scores: Scores, moving: Sequence[int], *, by_difference: bool) -> ScoreNumbers | None:
    """Return numbers that depend on arrays ``moving``, or if there are none on a difference."""
    function = scores.score_mod
    if function is None:
        return None
    jaxpr = function.jaxpr.jaxpr
    s, b, h, q, k, *read = jaxpr.invars
    depends = {s: {"score"}, q: {"score"}, k: {"score"}, b: {"batch"}, h: {"head"}}
    depends |= {read[i]: {"moving"} for i in moving}
    numbers: dict[Any, None] = {}
    of_numbers = set()
    wanted = "moving" if moving else "difference"
    for i, eqn in enumerate(jaxpr.eqns):
        given = compat.variables(eqn.invars)
        found = set().union(*(depends.get(x, set()) for x in given))
        if by_difference and eqn.primitive.name == "sub" and {*given} == {q, k}:
            found = {"difference"}
        depends |= dict.fromkeys(eqn.outvars, found)
        if "score" in found:
            on_each = [(x, depends.get(x, set())) for x in given]
            numbers |= {x: None for x, on in on_each if wanted in on and "score" not in on}
        else:
            of_numbers.add(i)
    on = set().union(*(depends[x] for x in numbers))
    is_covered = (
        "score" in depends.get(jaxpr.outvars[0], set())
        and 0 < len(numbers) <= (1 if by_difference else _MOST_NUMBERS)
        and all(x.aval.shape == () and jnp.issubdtype(x.aval.dtype, jnp.floating) for x in numbers)
        # Derivatives by numbers are float32, which has not the range of float64.
        and not (moving and any(x.aval.dtype == np.float64 for x in numbers))
    )
    if not is_covered:
        return None
    axes = Axes("batch" in on, "head" in on, "difference" in on)
    return ScoreNumbers(function, tuple(moving), tuple(numbers), frozenset(of_numbers), axes)
