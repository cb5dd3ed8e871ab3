"""The scores of a call of attention, and which keys a query sees, as functions of scalars.

Everything that a call does to the products of queries and keys is one description,
:class:`Scores`, a parameter of the primitives. A call means, for each element ``b`` of the batch,
head ``h``, query ``q`` and key ``k``,

    score(scale * <query, key>, b, h, q, k, *arrays)    in float32, or float64
    visible(b, h, q, k, *arrays)                        a bool

:func:`score_jaxpr` and :func:`visible_jaxpr` give them as jaxprs of scalars, for kernels. The
arrays that they read are operands of the primitives, in the order of :class:`Arrays`.

Indices count from the first element of a device's part, and so do ``bias``, ``mask`` and lengths.
The user's functions get indices of the whole call: ``origins``, the first element of the batch, the
first head and the first query of the part, are the last operand where devices share a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax

from jax_tilekern.ops.attention.index_functions import INDEX, IndexFunction, closed


class Arrays(NamedTuple):
    """The arrays of a call by their use, in the order of the operands; ``None`` if it has none.

    Attributes
    ----------
    bias, mask
        Of shape ``(batch, heads, queries, keys)``, in which any dimension may be 1.
    of_score, of_mask
        Those that the user's functions read.
    query_lengths, key_lengths
        Integers of shape ``(batch,)``.
    origins
        Of a device's part: an array of shape ``(3,)``.
    """

    bias: Any
    of_score: Sequence[Any]
    mask: Any
    query_lengths: Any
    key_lengths: Any
    of_mask: Sequence[Any]
    origins: Any


@dataclass(frozen=True)
class Scores:
    """What a call computes of the products, without the arrays.

    Attributes
    ----------
    scale
        Factor of the products.
    named
        Those of ``bias``, ``mask``, ``query_lengths`` and ``key_lengths`` that the call has. With
        each is ``None`` if its first dimension is 1 or that of the batch, and otherwise ``d``: the
        element ``b`` of the whole batch has the row ``(b // d) % rows``.
    score_mod, mask_mod
        The user's functions, the score after ``bias``.
    is_causal
        Whether a query sees no key of a larger index.
    window
        By how much the index of a key may be smaller, and larger, than that of the query.
    precision
        Of the products of queries and keys, and of all others.
    """

    scale: float
    named: tuple[tuple[str, int | None], ...] = ()
    score_mod: IndexFunction | None = None
    mask_mod: IndexFunction | None = None
    is_causal: bool = False
    window: tuple[int, int] | None = None
    precision: Any = None

    @property
    def dtypes(self) -> frozenset[Any]:
        """Types of values in the functions, which decide the modes of rules."""
        functions = [x for x in (self.score_mod, self.mask_mod) if x is not None]
        return frozenset().union(*(x.dtypes for x in functions))

    @property
    def kinds(self) -> tuple[str, ...]:
        """For each array what it is to the call: a name of :class:`Arrays`."""
        names = [name for name, _ in self.named]
        of_score = ["of_score"] * (self.score_mod.arrays if self.score_mod else 0)
        of_mask = ["of_mask"] * (self.mask_mod.arrays if self.mask_mod else 0)
        first = [x for x in names if x == "bias"]
        return (*first, *of_score, *(x for x in names if x != "bias"), *of_mask)

    @property
    def score_arrays(self) -> int:
        """How many arrays the score reads, the first ones."""
        return sum(x in ("bias", "of_score") for x in self.kinds)

    @property
    def has_score(self) -> bool:
        """Whether scores are anything but scaled products."""
        return self.score_arrays > 0 or self.score_mod is not None

    @property
    def has_mask(self) -> bool:
        """Whether a query may not see all keys."""
        own = [x for x in self.kinds if x not in ("bias", "of_score")]
        return bool(own or self.is_causal or self.window or self.mask_mod)

    @property
    def is_plain(self) -> bool:
        """Whether no function of the user's takes part."""
        return self.score_mod is None and self.mask_mod is None

    def reads_origins(self, *, batch: bool, queries: bool, heads: bool) -> bool:
        """Whether indices of the whole call matter where devices divide these dimensions."""
        divided = any(d is not None for _, d in self.named)
        rows = self.is_causal or self.window or "query_lengths" in self.kinds
        functions = [x for x in (self.score_mod, self.mask_mod) if x is not None]
        of_batch, of_heads, of_queries = (any(f.reads(i) for f in functions) for i in range(3))
        return bool(
            (batch and (divided or of_batch))
            or (heads and of_heads)
            or (queries and (rows or of_queries))
        )

    def divisor(self, name: str) -> int | None:
        """Return how an array's first dimension depends on the element of the batch."""
        return dict(self.named)[name]

    def in_order(
        self, named: Mapping[str, Any], of_score: Sequence[Any], of_mask: Sequence[Any]
    ) -> list[Any]:
        """Return the arrays of a call as operands."""
        users = {"of_score": iter(of_score), "of_mask": iter(of_mask)}
        return [next(users[x]) if x in users else named[x] for x in self.kinds]

    def by_use(self, arrays: Sequence[Any]) -> Arrays:
        """Return the arrays by their use."""
        found: dict[str, Any] = dict.fromkeys(Arrays._fields)
        found |= {"of_score": [], "of_mask": []}
        for kind, x in zip((*self.kinds, "origins"), arrays, strict=False):
            if kind in ("of_score", "of_mask"):
                found[kind].append(x)
            else:
                found[kind] = x
        return Arrays(**found)

    def __str__(self) -> str:
        words = [name.replace("_", " ") for name, _ in self.named]
        words += ["causal"] if self.is_causal else []
        words += [f"window {self.window[0]}, {self.window[1]}"] if self.window else []
        words += [x.name for x in (self.score_mod, self.mask_mod) if x is not None]
        return ", ".join(words)


# What the description means, at an element and in a block.


class Place(Protocol):
    """Where scores are computed. Indices are those in the whole call if there are ``origins``."""

    def query_and_key(self, origins: Any) -> tuple[Any, Any]:
        """Return the indices of queries and keys, which broadcast to scores."""

    def part(self, x: Any, divisor: int | None, origins: Any) -> Any:
        """Return what an array of the call has for the scores; see ``Scores.named``."""

    def values(
        self, function: IndexFunction, origins: Any, score: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        """Return a function of the user's of a score, if it has one, the indices, and arrays."""


class Element(NamedTuple):
    """The place of one score."""

    batch: Any
    head: Any
    query: Any
    key: Any

    def query_and_key(self, origins: Any) -> tuple[Any, Any]:
        _, _, query, key = of_whole(origins, *self)
        return query, key

    def part(self, x: Any, divisor: int | None, origins: Any) -> Any:
        first = self.batch
        if divisor is not None:
            first = lax.div(first if origins is None else first + origins[0], np.int32(divisor))
            first = lax.rem(first, np.int32(x.shape[0]))
        indices = zip(x.shape, (first, *self[1 : x.ndim]), strict=True)
        position = tuple(0 if size == 1 else index for size, index in indices)
        return x.at[position].get(mode="promise_in_bounds")

    def values(
        self, function: IndexFunction, origins: Any, score: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        return function(*score, *of_whole(origins, *self), *arrays)


def of_whole(origins: Any, *indices: Any) -> list[Any]:
    """Return the indices in the whole call."""
    if origins is None:
        return list(indices)
    return [*(x + origins[i] for i, x in enumerate(indices[:3])), indices[3]]


def score_of(scores: Scores, arrays: Arrays, s: Any, place: Place) -> Any:
    """Return scores from scaled products."""
    if arrays.bias is not None:
        bias = place.part(arrays.bias, scores.divisor("bias"), arrays.origins)
        s = s + bias.astype(s.dtype)
    if scores.score_mod is not None:
        s = place.values(scores.score_mod, arrays.origins, [s], arrays.of_score)
    return s


def visible_of(scores: Scores, arrays: Arrays, place: Place) -> Any:
    """Return which keys queries see; ``None`` for all."""

    def part(name: str) -> Any:
        return place.part(getattr(arrays, name), scores.divisor(name), arrays.origins)

    q, k = place.query_and_key(arrays.origins)
    found = []
    if arrays.mask is not None:
        found.append(part("mask"))
    if arrays.query_lengths is not None:
        found.append(q < part("query_lengths"))
    if arrays.key_lengths is not None:
        found.append(k < part("key_lengths"))
    if scores.is_causal:
        found.append(k <= q)
    if scores.window is not None:
        before, after = scores.window
        found.append(q - before <= k)
        if not scores.is_causal:
            found.append(k <= q + after)
    if scores.mask_mod is not None:
        found.append(place.values(scores.mask_mod, arrays.origins, [], arrays.of_mask))
    return functools.reduce(lambda x, y: x & y, found) if found else None


# As jaxprs of scalars, for kernels.


def score_jaxpr(scores: Scores, score: np.dtype[Any], arrays: Sequence[Any]) -> Any:
    """Return ``(s, b, h, q, k, *score_arrays) -> score``, ``None`` if it is the identity.

    ``score`` is the type of both. ``arrays`` are all of the call, arrays or types; those that the
    score reads are the first ``scores.score_arrays``, and the origins if there are any.
    """
    return score_as_jaxpr(score_of, scores, score, arrays)


def score_as_jaxpr(
    function: Callable[..., Any], scores: Scores, score: np.dtype[Any], arrays: Sequence[Any]
) -> Any:
    """Return ``function(scores, arrays by their use, s, place)`` as ``score_jaxpr`` is."""
    if not scores.has_score:
        return None
    n = scores.score_arrays
    others = [None] * (len(scores.kinds) - n)

    def of_read(s: Any, *values: Any) -> Any:
        indices, read = values[:4], values[4:]
        own = scores.by_use([*read[:n], *others, *read[n:]])
        return function(scores, own, s, Element(*indices))

    read = [*arrays[:n], *arrays[len(scores.kinds) :]]
    avals = [jax.core.ShapedArray((), score), *[INDEX] * 4, *map(_type, read)]
    return closed(of_read, *avals)


def visible_jaxpr(scores: Scores, arrays: Sequence[Any]) -> Any:
    """Return ``(b, h, q, k, *mask_arrays) -> bool``, ``None`` if a query sees all keys.

    ``arrays`` are all of the call; the mask reads those after the score's, origins included.
    """
    if not scores.has_mask:
        return None
    n = scores.score_arrays

    def of_read(*values: Any) -> Any:
        own = scores.by_use([*[None] * n, *values[4:]])
        return visible_of(scores, own, Element(*values[:4]))

    return closed(of_read, *[INDEX] * 4, *map(_type, arrays[n:]))


def _type(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype)
