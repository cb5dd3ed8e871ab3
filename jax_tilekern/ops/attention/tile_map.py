"""Which tiles of scores a mask empties, and which it leaves whole, by interval arithmetic.

``visible(b, h, q, k, *arrays)`` is evaluated once for a whole tile: the indices of the batch and of
the heads are exact, those of queries and keys are intervals, and every value in the function is an
interval. A read of an array is the least and the largest element that the indices reach. What no
rule knows is an interval of everything, so that an answer is always right, and at worst of no use.

Numbers that depend on no array are NumPy's, and the map of such a mask is a constant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.epilogue.primitives import INNER_JAXPR
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.index_functions import is_read
from jax_tilekern.ops.attention.intervals import Interval, anything, evaluated, module_of

NONE, SOME, ALL = range(3)

# Elements that a read of windows gathers; beyond that it is of the whole dimension.
_MOST_GATHERED = 1 << 26


@dataclass(frozen=True)
class _Part:
    """A part of an array: an index, or ``None`` for all, by dimension, and which of them it has."""

    array: Any
    indices: tuple[Interval | None, ...]
    dims: tuple[int, ...]


_Value = Interval | _Part | None  # ``None`` for an array that no rule knows.


def tile_kinds(
    visible: Any, arrays: Sequence[Any], sizes: tuple[int, int, int, int], tile_q: int, tile_k: int
) -> Any:
    """Return how many elements of each tile are visible: ``NONE``, ``SOME`` or ``ALL``, int8.

    Parameters
    ----------
    visible
        ``(b, h, q, k, *arrays) -> bool``, of ``scores.visible_jaxpr``.
    arrays
        What it reads.
    sizes
        Numbers of the batch, heads, queries and keys.
    tile_q, tile_k
        Sizes of a tile. A tile that reaches beyond the last key is never whole.

    Returns
    -------
    kinds
        Of shape ``(batch or 1, heads or 1, query tiles, key tiles)``: 1 where the mask does not
        depend on the index. An array of NumPy's, if the mask depends on no array.
    """
    batch, heads, queries, keys = sizes
    jaxpr = visible.jaxpr
    b, h = (
        _number(np.arange(n if is_read(jaxpr, axis) else 1, dtype=np.int32), axis)
        for axis, n in enumerate((batch, heads))
    )
    q, k = _tile_indices(queries, tile_q, 2), _tile_indices(keys, tile_k, 3)
    values: list[_Value] = [b, h, q, k, *map(_whole, arrays)]
    (result,) = _evaluated(jaxpr, visible.consts, values)
    assert isinstance(result, Interval)
    xp = module_of(result.low, result.high)
    shape = tuple(x.low.shape[axis] for axis, x in enumerate((b, h, q, k)))
    is_full = k.low + tile_k <= keys
    kinds = xp.where(result.high, xp.where(result.low & is_full, ALL, SOME), NONE)
    return xp.broadcast_to(kinds, shape).astype(np.int8)


def tile_lists(kinds: Any) -> tuple[Any, Any]:
    """Return the tiles of each row that are not empty.

    Parameters
    ----------
    kinds
        Of :func:`tile_kinds`; with the last two dimensions exchanged, for lists of queries' tiles.

    Returns
    -------
    counts
        Their number, int32, without the last dimension of ``kinds``.
    lists
        ``2 * tile + (kind == ALL)`` in ascending order, int32, of the shape of ``kinds``; from
        ``counts`` on it has no meaning.
    """
    xp = np if isinstance(kinds, np.ndarray) else jnp
    tiles = np.arange(kinds.shape[-1], dtype=np.int32)
    numbers = xp.where(kinds > 0, 2 * tiles + (kinds == ALL), 2 * len(tiles)).astype(np.int32)
    return (kinds > 0).sum(-1, dtype=np.int32), xp.sort(numbers, -1)


def _tile_indices(count: int, tile: int, axis: int) -> Interval:
    low = np.arange(0, count, tile, dtype=np.int32)
    high = np.minimum(low + np.int32(tile - 1), np.int32(count - 1))
    return Interval(_along(axis, low), _along(axis, high), min(tile, count) - 1)


def _whole(x: Any) -> _Value:
    return _read(_Part(x, (None,) * x.ndim, tuple(range(x.ndim))))


def _number(x: Any, axis: int = 0) -> Interval:
    return Interval.exactly(_along(axis, np.asarray(x)))


def _along(axis: int, x: Any) -> Any:
    return x.reshape([-1 if i == axis else 1 for i in range(4)])


# Evaluation.


def _evaluated(jaxpr: Any, consts: Sequence[Any], operands: Sequence[_Value]) -> list[_Value]:
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, operands, strict=True))
    values |= {var: _whole(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}
    for eqn in jaxpr.eqns:
        read = [_number(x.val) if compat.is_literal(x) else values[x] for x in eqn.invars]
        values.update(zip(eqn.outvars, _results(eqn, read), strict=True))
    return [_number(x.val) if compat.is_literal(x) else values[x] for x in jaxpr.outvars]


def _results(eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
    name = eqn.primitive.name
    if name in INNER_JAXPR:
        inner = eqn.params[INNER_JAXPR[name]]
        inner, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
        return _evaluated(inner, consts, operands)
    aval = eqn.outvars[0].aval
    found: _Value = None
    if name in _PARTS and isinstance(operands[0], _Part):
        found = _PARTS[name](eqn, operands[0], operands[1:])
    else:
        scalars = [x for x in operands if isinstance(x, Interval)]
        if len(scalars) == len(operands):
            found = evaluated(eqn, *scalars)
    if found is not None and (aval.ndim == 0) == isinstance(found, Interval):
        return [found]
    return [anything(x.aval) for x in eqn.outvars]


# Parts of arrays.


def _sliced(eqn: Any, part: _Part, starts: Sequence[_Value]) -> _Value:
    """Take one index or all of each dimension, by a ``slice`` or ``dynamic_slice``."""
    if eqn.primitive.name == "slice":
        if any(x != 1 for x in eqn.params["strides"] or ()):
            return None
        first, last = eqn.params["start_indices"], eqn.params["limit_indices"]
        starts = [_number(np.int32(x)) for x in first]
        sizes = [y - x for x, y in zip(first, last, strict=True)]
    else:
        sizes = eqn.params["slice_sizes"]
    indices = list(part.indices)
    for dim, start, size in zip(part.dims, starts, sizes, strict=True):
        whole = 1 if indices[dim] is not None else part.array.shape[dim]
        if size == whole:
            continue
        if size != 1 or not isinstance(start, Interval):
            return None
        # An index beyond the array is that of its first or last element.
        indices[dim] = _clipped(start, whole - 1)
    return dataclasses.replace(part, indices=tuple(indices))


def _squeezed(eqn: Any, part: _Part, _: Sequence[_Value]) -> _Value:
    """Remove dimensions, by a ``squeeze`` or a ``reshape`` to a scalar."""
    removed = eqn.params.get("dimensions", range(len(part.dims)))
    if eqn.primitive.name == "reshape" and eqn.outvars[0].aval.ndim:
        return None
    dims = tuple(dim for i, dim in enumerate(part.dims) if i not in removed)
    return _read(dataclasses.replace(part, dims=dims))


_PARTS: dict[str, Callable[..., _Value]] = {
    "dynamic_slice": _sliced,
    "slice": _sliced,
    "squeeze": _squeezed,
    "reshape": _squeezed,
}


def _clipped(x: Interval, last: int) -> Interval:
    low, high = (module_of(end).clip(end, 0, last) for end in (x.low, x.high))
    return Interval(low, low if x.is_exact else high, x.width)


def _read(part: _Part) -> _Value:
    """Return the part, or what its element lies in if it has one."""
    array = part.array
    if part.dims:
        return part
    if not isinstance(array.dtype, np.dtype) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    # A dimension without an index is one of 1.
    indices = [_number(np.int32(0)) if x is None else x for x in part.indices]
    ends: list[Any] = [jnp.asarray(array)] * (1 if all(x.is_exact for x in indices) else 2)
    numbers = []
    for dim, index in enumerate(indices):
        if not index.is_exact:
            ends, index = _read_windows(ends, dim, index)
        numbers.append(index.low)
    ends = [x[tuple(numbers)] if numbers else x.reshape(1, 1, 1, 1) for x in ends]
    return Interval(ends[0], ends[-1])


def _read_windows(ends: Sequence[Any], dim: int, index: Interval) -> tuple[list[Any], Interval]:
    """Return the ends over the windows of an index along a dimension, and the index of each."""
    shape = np.broadcast_shapes(index.low.shape, index.high.shape)
    low, high = (module_of(x).broadcast_to(x, shape).reshape(-1) for x in (index.low, index.high))
    number: Any = np.arange(math.prod(shape), dtype=np.int32)
    if index.is_constant:
        (low, high), number = np.unique(np.stack([low, high]), axis=1, return_inverse=True)
        width = int((high - low).max(initial=0))
    else:
        width = -1 if index.width is None else index.width
    extremes = list(zip((jnp.min, jnp.max), ends, strict=True))
    whole = [f(x, dim, keepdims=True) for f, x in extremes]
    others = ends[0].size // max(1, ends[0].shape[dim])
    if width < 0 or low.size * (width + 1) * others > _MOST_GATHERED:
        return whole, _number(np.int32(0))
    elements = low[:, None] + np.arange(width + 1, dtype=np.int32)
    elements = module_of(elements).minimum(elements, high[:, None])
    found = [f(jnp.take(x, elements, dim, mode="clip"), dim + 1) for f, x in extremes]
    if not index.is_constant:
        # Windows are rarely wider than expected.
        shape_along = [-1 if i == dim else 1 for i in range(ends[0].ndim)]
        is_wider = (high - low > width).reshape(shape_along)
        found = [jnp.where(is_wider, x, y) for x, y in zip(whole, found, strict=True)]
    number = np.asarray(number, np.int32).reshape(shape)
    return found, Interval.exactly(number)
