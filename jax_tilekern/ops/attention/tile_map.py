"""Which tiles of scores a mask empties, and which it leaves whole, by interval arithmetic.

``visible(b, h, q, k, *arrays)`` is evaluated once for a whole tile: the indices of the batch and of
the heads are exact, those of queries and keys are intervals, and every value in the function is an
interval. A read of an array is the least and the largest element that the indices reach. What no
rule knows is an interval of everything, so that an answer is always right, and at worst of no use.

Numbers that depend on no array are NumPy's, and the map of such a mask is a constant.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_elementwise
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp

NONE, SOME, ALL = range(3)

# Elements that a read of windows gathers; beyond that it is of the whole dimension.
_MOST_GATHERED = 1 << 26
# Share by which results of floating-point arithmetic may differ between programs.
_ROUNDING = 2.0**-20


@dataclass(frozen=True)
class Interval:
    """What a value of each tile lies in, of shape ``(batch, heads, query tiles, key tiles)``.

    Any dimension may be 1. An exact value has one array as both ends. Booleans are intervals, too:
    ``low`` says that a value is always true, ``high`` that it may be.
    """

    low: Any
    high: Any
    width: int | None = None  # ``high - low`` as it is expected, which no answer relies on

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @property
    def is_constant(self) -> bool:
        return isinstance(self.low, np.ndarray) and isinstance(self.high, np.ndarray)


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
    reads = [_is_read(jaxpr, x) for x in jaxpr.invars[:2]]
    b, h = (
        _number(np.arange(n if is_read else 1, dtype=np.int32), axis)
        for axis, (n, is_read) in enumerate(zip((batch, heads), reads, strict=True))
    )
    q, k = _tile_indices(queries, tile_q, 2), _tile_indices(keys, tile_k, 3)
    values: list[_Value] = [b, h, q, k, *map(_whole, arrays)]
    (result,) = _evaluated(jaxpr, visible.consts, values)
    assert isinstance(result, Interval)
    xp = _module(result.low, result.high)
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


def _is_read(jaxpr: Any, var: Any) -> bool:
    return var in jaxpr.outvars or any(var in eqn.invars for eqn in jaxpr.eqns)


def _whole(x: Any) -> _Value:
    return _read(_Part(x, (None,) * x.ndim, tuple(range(x.ndim))))


def _number(x: Any, axis: int = 0) -> Interval:
    value = _along(axis, np.asarray(x))
    return Interval(value, value)


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
            rule: Callable[..., Any] = _RULES.get(name, _at_exact_values)
            found = rule(eqn, *scalars)
    if found is not None and (aval.ndim == 0) == isinstance(found, Interval):
        return [found]
    return [_anything(x.aval) for x in eqn.outvars]


def _anything(aval: Any) -> Interval | None:
    dtype = getattr(aval, "dtype", None)
    if aval.ndim or not isinstance(dtype, np.dtype):
        return None
    ends: tuple[Any, Any]
    if dtype == np.bool_:
        ends = False, True
    elif jnp.issubdtype(dtype, jnp.integer):
        ends = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif jnp.issubdtype(dtype, jnp.floating):
        ends = -np.inf, np.inf
    else:
        return None
    low, high = (np.full((1, 1, 1, 1), x, dtype) for x in ends)
    return Interval(low, high)


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
    low, high = (_module(end).clip(end, 0, last) for end in (x.low, x.high))
    return Interval(low, low if x.is_exact else high, x.width)


def _read(part: _Part) -> _Value:
    """Return the part, or what its element lies in if it has one."""
    array = part.array
    if part.dims:
        return part
    if not isinstance(array.dtype, np.dtype) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    ends: list[Any] = [jnp.asarray(array)] * (1 if all(_is_point(x) for x in part.indices) else 2)
    numbers = []
    for dim, index in enumerate(part.indices):
        if index is None:  # of a dimension of 1
            index = _number(np.int32(0))
        if not index.is_exact:
            ends, index = _read_windows(ends, dim, index)
        numbers.append(index.low)
    if not numbers:
        ends = [x.reshape(1, 1, 1, 1) for x in ends]
    else:
        ends = [x[tuple(numbers)] for x in ends]
    return Interval(ends[0], ends[-1])


def _is_point(index: Interval | None) -> bool:
    return index is None or index.is_exact


def _read_windows(ends: Sequence[Any], dim: int, index: Interval) -> tuple[list[Any], Interval]:
    """Return the ends over the windows of an index along a dimension, and the index of each."""
    shape = np.broadcast_shapes(index.low.shape, index.high.shape)
    low, high = (_module(x).broadcast_to(x, shape).reshape(-1) for x in (index.low, index.high))
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
    elements = _module(elements).minimum(elements, high[:, None])
    found = [f(jnp.take(x, elements, dim, mode="clip"), dim + 1) for f, x in extremes]
    if not index.is_constant:
        # Windows are rarely wider than expected.
        shape_along = [-1 if i == dim else 1 for i in range(ends[0].ndim)]
        is_wider = (high - low > width).reshape(shape_along)
        found = [jnp.where(is_wider, x, y) for x, y in zip(whole, found, strict=True)]
    number = np.asarray(number, np.int32).reshape(shape)
    return found, Interval(number, number)


# Rules of scalars.


def _module(*values: Any) -> Any:
    return np if all(isinstance(x, np.ndarray) for x in values) else jnp


def _quotient(a: Any, b: Any) -> Any:
    """Return a quotient of integers rounded to 0, or of floats; of 1 if the divisor is 0."""
    b = _module(b).where(b == 0, 1, b).astype(b.dtype)
    if not jnp.issubdtype(a.dtype, jnp.integer):
        return a / b
    floor = a // b
    return floor + ((a - floor * b != 0) & ((a < 0) != (b < 0))).astype(floor.dtype)


def _converted(x: Any, params: Any) -> Any:
    return x != 0 if params["new_dtype"] == np.bool_ else x.astype(params["new_dtype"])


# Functions that are monotonic in each operand, wherever the others are: their least and their
# largest results are those of ends.
_MONOTONIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "div": _quotient,
    "max": lambda a, b: _module(a, b).maximum(a, b),
    "min": lambda a, b: _module(a, b).minimum(a, b),
    "sign": lambda a: _module(a).sign(a),
    "floor": lambda a: _module(a).floor(a),
    "ceil": lambda a: _module(a).ceil(a),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: ~a,
    "shift_right_arithmetic": lambda a, b: a >> b,
    "convert_element_type": _converted,
}
_MONOTONIC_ONLY_OF_BOOLEANS = ("and", "or", "not")
_ROUNDED = ("add", "sub", "mul", "div")


def _by_ends(eqn: Any, *operands: Interval) -> Interval | None:
    """Evaluate a monotonic function at the ends of intervals."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    function, types = _MONOTONIC[name], [x.low.dtype for x in operands]
    is_exact = all(x.is_exact for x in operands)
    if name in _MONOTONIC_ONLY_OF_BOOLEANS and not (is_exact or aval.dtype == np.bool_):
        return None
    if name == "convert_element_type":
        function = functools.partial(_converted, params=eqn.params)
        # Conversions to fewer bits wrap around, or have no meaning.
        to_float = jnp.issubdtype(aval.dtype, jnp.floating)
        to_bool = aval.dtype == np.bool_ and is_exact
        if not (np.can_cast(types[0], aval.dtype) or to_float or to_bool):
            return None
    ends = [(x.low,) if x.is_exact else (x.low, x.high) for x in operands]
    corners = list(itertools.product(*ends))
    with np.errstate(all="ignore"):
        values = [function(*x) for x in corners]
    low, high = (functools.reduce(f, values) for f in (_MONOTONIC["min"], _MONOTONIC["max"]))
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    if name in _ROUNDED and is_float:
        low, high = low - abs(low) * _ROUNDING, high + abs(high) * _ROUNDING
        return Interval(low.astype(aval.dtype), high.astype(aval.dtype))
    if is_exact:
        return Interval(values[0], values[0])
    unknown = _unknown(name, operands, corners)
    found = Interval(low, high, _expected_width(name, operands))
    return found if unknown is None else _or_anything(unknown, aval, found)


def _unknown(name: str, operands: Sequence[Interval], corners: Any) -> Any:
    """Return where ends do not bound a result: NaN, overflow, and divisors around 0."""
    found = []
    if any(jnp.issubdtype(x.low.dtype, jnp.floating) for x in operands):
        found += [x != x for own in operands for x in (own.low, own.high)]
    elif name in ("add", "sub", "mul", "neg"):
        info = np.iinfo(operands[0].low.dtype)
        floats = (_MONOTONIC[name](*(x.astype(np.float32) for x in own)) for own in corners)
        found += [(x > 0.999 * info.max) | (x < 0.999 * info.min) for x in floats]
    if name == "div":
        found.append((operands[1].low <= 0) & (operands[1].high >= 0))
    if not found:
        return None
    unknown = functools.reduce(lambda a, b: a | b, found)
    return None if isinstance(unknown, np.ndarray) and not unknown.any() else unknown


def _where(condition: Any, x: Interval, y: Interval) -> Interval:
    low, high = (
        _module(condition, a, b).where(condition, a, b)
        for a, b in ((x.low, y.low), (x.high, y.high))
    )
    return Interval(low, high, y.width)


def _or_anything(condition: Any, aval: Any, x: Interval) -> Interval | None:
    anything = _anything(aval)
    return None if anything is None else _where(condition, anything, x)


def _expected_width(name: str, operands: Sequence[Interval]) -> int | None:
    widths = [0 if x.is_exact else x.width for x in operands]
    if None in widths or name not in ("add", "sub", "neg", "max", "min", "select_n"):
        return None
    own = [x for x in widths if x is not None]
    return sum(own) if name in ("add", "sub") else max(own)


def _equal(eqn: Any, a: Interval, b: Interval) -> Interval | None:
    if eqn.primitive.name == "xor" and a.low.dtype != np.bool_:
        return None
    never = (a.low > b.high) | (b.low > a.high)
    always = (a.low == b.high) & (a.high == b.low)
    is_exact = a.is_exact and b.is_exact
    if eqn.primitive.name in ("ne", "xor"):
        return Interval(never, ~always) if not is_exact else Interval(~always, ~always)
    return Interval(always, always) if is_exact else Interval(always, ~never)


def _remainder(eqn: Any, a: Interval, b: Interval) -> Interval | None:
    if not jnp.issubdtype(a.low.dtype, jnp.integer):
        return None
    first, last = (x - b.low * _quotient(x, b.low) for x in (a.low, a.high))
    if a.is_exact and b.is_exact:
        return Interval(first, first)
    xp = _module(a.low, a.high, b.low, b.high)
    bound = b.high - 1
    low = xp.where(a.low >= 0, 0, xp.maximum(a.low, -bound)).astype(a.low.dtype)
    high = xp.where(a.high <= 0, 0, xp.minimum(a.high, bound)).astype(a.low.dtype)
    if b.is_exact:
        is_one_period = _quotient(a.low, b.low) == _quotient(a.high, b.low)
        is_one_period = is_one_period & ((a.low >= 0) | (a.high <= 0))
        low, high = xp.where(is_one_period, first, low), xp.where(is_one_period, last, high)
    return _or_anything(b.low <= 0, eqn.outvars[0].aval, Interval(low, high))


def _selected(eqn: Any, which: Interval, *cases: Interval) -> Interval | None:
    if len(cases) != 2 or which.low.dtype != np.bool_:
        return None
    x, y = cases
    if which.is_constant and not np.any(which.high):
        return x
    if which.is_constant and np.all(which.low):
        return y
    if which.is_exact and x.is_exact and y.is_exact:
        low = _module(which.low, x.low, y.low).where(which.low, y.low, x.low)
        return Interval(low, low)
    least, most = _MONOTONIC["min"](x.low, y.low), _MONOTONIC["max"](x.high, y.high)
    either = Interval(least, most, _expected_width("select_n", cases))
    return _where(which.low, y, _where(~which.high, x, either))


def _magnitude(_: Any, a: Interval) -> Interval:
    if a.is_exact:
        low = abs(a.low)
        return Interval(low, low)
    maximum = _MONOTONIC["max"]
    return Interval(maximum(maximum(a.low, -a.high), 0 * a.low), maximum(-a.low, a.high))


def _same(_: Any, a: Interval) -> Interval:
    return a


_RULES: dict[str, Callable[..., Interval | None]] = {
    **dict.fromkeys(_MONOTONIC, _by_ends),
    "eq": _equal,
    "ne": _equal,
    "xor": _equal,
    "rem": _remainder,
    "select_n": _selected,
    "abs": _magnitude,
    "copy": _same,
    "stop_gradient": _same,
    "squeeze": _same,
    "reshape": _same,
    "broadcast_in_dim": _same,
}


def _at_exact_values(eqn: Any, *operands: Interval) -> Interval | None:
    """Evaluate any elementwise function of indices of the batch and heads, and what they read."""
    aval = eqn.outvars[0].aval
    if not (is_elementwise(eqn.primitive.name) and all(x.is_exact for x in operands)):
        return None
    values = jnp.broadcast_arrays(*(x.low for x in operands))
    with np.errstate(all="ignore"):
        (low, *others) = compat.bind_equation(eqn, values)
    if others or jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    return Interval(low, low)
