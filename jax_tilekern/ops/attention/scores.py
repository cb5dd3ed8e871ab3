"""The scores of a call of attention, and which keys a query sees, as functions of scalars.

Everything that a call does to the products of queries and keys is one description,
:class:`Scores`, a parameter of the primitives. A call means, for each element ``b`` of the batch,
head ``h``, query ``q`` and key ``k``,

    score(scale * <query, key>, b, h, q, k, *arrays)    in float32, or float64
    visible(b, h, q, k, *arrays)                        a bool

:func:`score_jaxpr`, :func:`slope_jaxpr` and :func:`visible_jaxpr` give them as jaxprs of scalars,
for kernels. The arrays that they read are operands of the primitives, in the order of
:class:`Arrays`.

Indices count from the first element of a device's part, and so do ``bias``, ``mask`` and lengths.
The user's functions get indices of the whole call: ``origins``, the first element of the batch, the
first head and the first query of the part, are the last operand where devices share a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.plain_data import from_equations, to_equations
from jax_tilekern.epilogue.scalar_function import evaluate_without_names, takes
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import MOST_FUNCTIONS, UserFunction
from jax_tilekern.partitioning import params_text

INDEX = jax.core.ShapedArray((), np.dtype(np.int32))
_NOT_JAX_ARRAYS = (np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True, eq=False)
class IndexFunction:
    """A function of the user's: of a score or not, of four indices, and of arrays that it reads."""

    name: str  # what explain calls it
    jaxpr: compat.ClosedJaxpr  # (*scalars, *arrays) -> one scalar, without constants
    scalars: int  # 5 for a score and the indices, 4 for the indices

    @property
    def dtypes(self) -> frozenset[Any]:
        """Types of all values, which decide the modes of rules."""
        equations = compat.leaf_equations(self.jaxpr.jaxpr)
        avals = [x.aval for eqn in equations for x in (*eqn.invars, *eqn.outvars)]
        dtypes = (getattr(x, "dtype", None) for x in (*self.jaxpr.in_avals, *avals))
        return frozenset(x for x in dtypes if isinstance(x, np.dtype))

    @property
    def arrays(self) -> int:
        """How many arrays it reads."""
        return len(self.jaxpr.in_avals) - self.scalars

    def __call__(self, *operands: Any) -> Any:
        return evaluate_without_names(self.jaxpr.jaxpr, len(operands), *operands)[0]

    def over_indices(self, *operands: Any) -> Array:
        """Return the function of vectors of indices, and of scores ``(b, h, q, k)``."""
        function: Callable[..., Any] = self.__call__
        for index in reversed(range(4)):
            axes: list[int | None] = [None] * len(operands)
            axes[self.scalars - 4 + index] = 0
            if self.scalars == 5:
                axes[0] = 0
            function = jax.vmap(function, in_axes=tuple(axes))
        result: Array = compat.staged(function)(*operands)
        return result

    def reads(self, index: int) -> bool:
        """Whether the result may depend on an index: of the batch, head, query or key."""
        jaxpr = self.jaxpr.jaxpr
        var = jaxpr.invars[self.scalars - 4 + index]
        return var in jaxpr.outvars or any(var in x.invars for x in jaxpr.eqns)

    def mapped(self, count: int, batch: int, is_mapped: Sequence[bool]) -> IndexFunction:
        """Return the function for ``count * batch`` elements, of which mapped arrays have a part.

        A mapped array has a leading dimension of ``count``.
        """
        n = self.scalars
        if not (self.reads(0) or any(is_mapped)):
            return self

        def function(*operands: Any) -> Any:
            scalars, arrays = list(operands[:n]), operands[n:]
            b, size = scalars[n - 4], np.int32(max(1, batch))
            number, scalars[n - 4] = lax.div(b, size), lax.rem(b, size)
            own = (
                x.at[number].get(mode="promise_in_bounds") if leads else x
                for x, leads in zip(arrays, is_mapped, strict=True)
            )
            return self(*scalars, *own)

        avals = [
            x.update(shape=(count, *x.shape)) if leads else x
            for x, leads in zip(self.jaxpr.in_avals[n:], is_mapped, strict=True)
        ]
        return dataclasses.replace(self, jaxpr=closed(function, *self.jaxpr.in_avals[:n], *avals))


def _to_data(function: IndexFunction) -> dict[str, Any] | None:
    """Return a function as plain data; one with a derivative of its own has none."""
    avals = function.jaxpr.in_avals
    types = [getattr(x, "dtype", None) for x in avals]
    equations = function.jaxpr.jaxpr.eqns
    if not all(isinstance(x, np.dtype) for x in types) or any(map(compat.jaxprs_of, equations)):
        return None
    found = to_equations(function.jaxpr)
    return found and {
        "name": function.name,
        "scalars": function.scalars,
        "types": tuple(zip(types, (x.shape for x in avals), strict=True)),
        **found,
    }


def _from_data(data: dict[str, Any]) -> IndexFunction:
    avals = [jax.core.ShapedArray(shape, dtype) for dtype, shape in data["types"]]
    # XLA calls this function on its own thread, where the user's configuration is not set.
    with jax.enable_x64(True):
        jaxpr = closed(from_equations(data), *avals)
    return IndexFunction(data["name"], jaxpr, data["scalars"])


params_text.register(IndexFunction, _to_data, _from_data)


def closed(function: Callable[..., Any], *avals: Any) -> Any:
    """Trace a function whose types have no mesh."""
    with compat.without_mesh():
        return jax.make_jaxpr(function)(*avals)


def traced(
    function: Callable[..., Any], argument: str, score: np.dtype[Any] | None
) -> tuple[IndexFunction, list[Array]]:
    """Trace a function of the user's; return it with the arrays that it closes over.

    ``score`` is the type of its first operand and of its result; without one it is a mask.

    Raises
    ------
    TypeError
        If it does not take these operands, or does not return such a scalar.
    """
    if not callable(function):
        raise TypeError(f"attention: {argument} is {function!r}; it is a function of scalars")
    user = UserFunction(function)
    if _has_tracers(user.read):
        return _traced(function, argument, score)
    kept: list[tuple[IndexFunction, list[Array]]] = _kept(user, argument, score)
    if kept:
        return kept[0]
    found = _traced(function, argument, score)
    if not _has_tracers(found[1]):
        kept.append(found)
    return found


def _has_tracers(values: Sequence[Any]) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))


@compat.cached(max_size=MOST_FUNCTIONS)
def _kept(*_: Any) -> list[tuple[IndexFunction, list[Array]]]:
    """Return where a function that is traced for some types is kept, if it reads no tracers."""
    return []


def _traced(
    function: Callable[..., Any], argument: str, score: np.dtype[Any] | None
) -> tuple[IndexFunction, list[Array]]:
    scalars = [INDEX] * 4 if score is None else [jax.core.ShapedArray((), score), *[INDEX] * 4]
    name = getattr(function, "__name__", type(function).__name__)
    called = f"attention: {argument} {name}"
    if not takes(function, len(scalars)):
        first = "" if score is None else "score, "
        raise TypeError(
            f"{called} does not take {len(scalars)} scalars, ({first}batch, head, query_index, "
            "key_index)"
        )
    # Arrays that vary over a mesh become operands, whose types say nothing of it.
    with compat.without_casts_to_varying():
        # make_jaxpr keeps what it traced of a function, whatever the function reads since.
        traced, result = jax.make_jaxpr(lambda *x: function(*x), return_shape=True)(*scalars)
    if getattr(result, "shape", None) != ():
        raise TypeError(f"{called} returns {result}; it must return one scalar")
    kind, wanted = ("b", "a boolean") if score is None else ("f", "a real number")
    kind_of_result = "f" if jnp.issubdtype(result.dtype, jnp.floating) else result.dtype.kind
    if kind_of_result != kind and not (kind == "f" and kind_of_result in "iu"):
        raise TypeError(f"{called} returns {result.dtype}; it must return {wanted}")
    if traced.effects:
        raise TypeError(f"{called} has a side effect; it is evaluated any number of times")
    consts = [jnp.asarray(x) if isinstance(x, _NOT_JAX_ARRAYS) else x for x in traced.consts]

    def converted(*values: Any) -> Any:
        own, arrays = values[: len(scalars)], values[len(scalars) :]
        (found,) = evaluate_without_names(traced.jaxpr, len(own), *own, *arrays)
        return found if score is None else jnp.asarray(found).astype(score)

    types = (jax.core.ShapedArray(jnp.shape(x), jax.typeof(x).dtype) for x in consts)
    found = IndexFunction(name, closed(converted, *scalars, *types), len(scalars))
    # Functions of the same equations have one program.
    return params_text.shared(found), consts


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


# As functions of scalars, for kernels.


def _element(x: Any, divisor: int | None, origins: Any, b: Any, *others: Any) -> Any:
    """Return an element of an array of which any dimension may be 1."""
    first = b
    if divisor is not None:
        first = lax.div(b if origins is None else b + origins[0], np.int32(divisor))
        first = lax.rem(first, np.int32(x.shape[0]))
    indices = [
        0 if size == 1 else index for size, index in zip(x.shape, (first, *others), strict=True)
    ]
    return x.at[tuple(indices)].get(mode="promise_in_bounds")


def of_whole(origins: Any, *indices: Any) -> list[Any]:
    """Return the indices in the whole call."""
    if origins is None:
        return list(indices)
    return [*(x + origins[i] for i, x in enumerate(indices[:3])), indices[3]]


def score_of(scores: Scores, arrays: Arrays, s: Any, *indices: Any) -> Any:
    if arrays.bias is not None:
        bias = _element(arrays.bias, scores.divisor("bias"), arrays.origins, *indices)
        s = s + bias.astype(s.dtype)
    if scores.score_mod is not None:
        s = scores.score_mod(s, *of_whole(arrays.origins, *indices), *arrays.of_score)
    return s


def _visible(scores: Scores, arrays: Arrays, *indices: Any) -> Any:
    b, h, q, k = of_whole(arrays.origins, *indices)
    found = []
    if arrays.mask is not None:
        found.append(_element(arrays.mask, scores.divisor("mask"), arrays.origins, *indices))
    for name, index in (("query_lengths", q), ("key_lengths", k)):
        if (lengths := getattr(arrays, name)) is not None:
            own = _element(lengths, scores.divisor(name), arrays.origins, indices[0])
            found.append(index < own)
    found += window_conditions(scores, q, k)
    if scores.mask_mod is not None:
        found.append(scores.mask_mod(b, h, q, k, *arrays.of_mask))
    result = found[0]
    for other in found[1:]:
        result = result & other
    return result


def window_conditions(scores: Scores, q: Any, k: Any) -> list[Any]:
    """Return the conditions on a query and a key of a causal call, and of one with a window."""
    found = [k <= q] if scores.is_causal else []
    if scores.window is not None:
        before, after = scores.window
        found.append(q - before <= k)
        if not scores.is_causal:
            found.append(k <= q + after)
    return found


def score_jaxpr(scores: Scores, score: np.dtype[Any], arrays: Sequence[Any]) -> Any:
    """Return ``(s, b, h, q, k, *score_arrays) -> score``, ``None`` if it is the identity.

    ``score`` is the type of both. ``arrays`` are all of the call, arrays or types; those that the
    score reads are the first ``scores.score_arrays``, and the origins if there are any.
    """
    return score_as_jaxpr(score_of, scores, score, arrays)


def slope_jaxpr(scores: Scores, score: np.dtype[Any], arrays: Sequence[Any]) -> Any:
    """Return ``(s, b, h, q, k, *score_arrays) -> (score, derivative by s)``, or ``None``."""

    def with_slope(scores: Scores, own: Arrays, s: Any, *indices: Any) -> Any:
        def of_s(s: Any) -> Any:
            return score_of(scores, own, s, *indices)

        return jax.jvp(of_s, [s], [jnp.ones_like(s)])

    return score_as_jaxpr(with_slope, scores, score, arrays)


def score_as_jaxpr(
    function: Callable[..., Any], scores: Scores, score: np.dtype[Any], arrays: Sequence[Any]
) -> Any:
    """Return ``function(scores, arrays by their use, s, *indices)`` as ``score_jaxpr`` is."""
    if not scores.has_score:
        return None
    n = scores.score_arrays
    others = [None] * (len(scores.kinds) - n)

    def of_read(s: Any, *values: Any) -> Any:
        indices, read = values[:4], values[4:]
        own = scores.by_use([*read[:n], *others, *read[n:]])
        return function(scores, own, s, *indices)

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
        return _visible(scores, scores.by_use([*[None] * n, *values[4:]]), *values[:4])

    return closed(of_read, *[INDEX] * 4, *map(_type, arrays[n:]))


def _type(x: Any) -> Any:
    return jax.core.ShapedArray(x.shape, x.dtype)
