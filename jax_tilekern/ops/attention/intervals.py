"""Interval arithmetic of scalars, by equations of jaxprs.

Numbers that depend on no array are NumPy's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.epilogue.primitives import is_elementwise
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp

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

    @classmethod
    def exactly(cls, value: Any) -> Interval:
        """Return the interval of one value."""
        return cls(value, value)


def evaluated(eqn: Any, *operands: Interval) -> Interval | None:
    """Return what the result of an equation lies in; ``None`` if no rule knows."""
    rule: Callable[..., Interval | None] = _RULES.get(eqn.primitive.name, _at_exact_values)
    return rule(eqn, *operands)


def anything(aval: Any) -> Interval | None:
    """Return the interval of all values of a type; ``None`` if it is that of an array."""
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


def module_of(*values: Any) -> Any:
    """Return NumPy if all values are its arrays, and otherwise ``jax.numpy``."""
    return np if all(isinstance(x, np.ndarray) for x in values) else jnp


# Rules.


def _quotient(a: Any, b: Any) -> Any:
    """Return a quotient of integers rounded to 0, or of floats; of 1 if the divisor is 0."""
    b = module_of(b).where(b == 0, 1, b).astype(b.dtype)
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
    "max": lambda a, b: module_of(a, b).maximum(a, b),
    "min": lambda a, b: module_of(a, b).minimum(a, b),
    "sign": lambda a: module_of(a).sign(a),
    "floor": lambda a: module_of(a).floor(a),
    "ceil": lambda a: module_of(a).ceil(a),
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
        return Interval.exactly(values[0])
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
        module_of(condition, a, b).where(condition, a, b)
        for a, b in ((x.low, y.low), (x.high, y.high))
    )
    return Interval(low, high, y.width)


def _or_anything(condition: Any, aval: Any, x: Interval) -> Interval | None:
    whole = anything(aval)
    return None if whole is None else _where(condition, whole, x)


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
    return Interval.exactly(always) if is_exact else Interval(always, ~never)


def _remainder(eqn: Any, a: Interval, b: Interval) -> Interval | None:
    if not jnp.issubdtype(a.low.dtype, jnp.integer):
        return None
    first, last = (x - b.low * _quotient(x, b.low) for x in (a.low, a.high))
    if a.is_exact and b.is_exact:
        return Interval.exactly(first)
    xp = module_of(a.low, a.high, b.low, b.high)
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
        low = module_of(which.low, x.low, y.low).where(which.low, y.low, x.low)
        return Interval.exactly(low)
    least, most = _MONOTONIC["min"](x.low, y.low), _MONOTONIC["max"](x.high, y.high)
    either = Interval(least, most, _expected_width("select_n", cases))
    return _where(which.low, y, _where(~which.high, x, either))


def _magnitude(_: Any, a: Interval) -> Interval:
    if a.is_exact:
        low = abs(a.low)
        return Interval.exactly(low)
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
    return Interval.exactly(low)
