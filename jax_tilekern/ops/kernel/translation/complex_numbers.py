"""Complex numbers of a lane as pairs of real ones.

A complex array of a jaxpr becomes two arrays, of the real and of the imaginary parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.epilogue.primitives import INNER_JAXPR
from jax_tilekern.epilogue.understood import Untranslatable, located, refuse_unknown
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.fourier import transform


class _Pair(NamedTuple):
    re: Any
    im: Any


# Primitives that do to each part what they do to a real array.
_OF_EACH_PART = frozenset(
    {
        "add", "add_any", "broadcast_in_dim", "concatenate", "copy", "cumsum", "device_put",
        "dynamic_slice", "dynamic_update_slice", "gather", "name", "neg", "optimization_barrier",
        "pad", "pvary", "reduce_sum", "reshape", "rev", "scatter",
        "select_n", "slice", "split", "squeeze", "stack", "stop_gradient", "sub", "tile",
        "transpose", "unstack",
    }
)  # fmt: skip


def translated() -> frozenset[str]:
    """Return the names of primitives of complex numbers alone."""
    return frozenset({"complex", "conj", "fft", "imag", "real"})


def part_type(dtype: Any) -> np.dtype[Any]:
    """Return the type of the parts of a complex type; another type is its own."""
    return np.finfo(dtype).dtype if _is_complex(dtype) else np.dtype(dtype)


def without_complex(closed: Any) -> Any:
    """Return a jaxpr of real arrays; a complex operand or result is two, one after the other."""
    if not _has_complex(closed):
        return closed
    types = [
        jax.core.ShapedArray(x.shape, part_type(x.dtype), weak_type=x.weak_type)
        for aval in closed.in_avals
        for x in [aval] * (1 + _is_complex(aval.dtype))
    ]

    def function(*parts: Any) -> list[Any]:
        operands = _joined(parts, closed.in_avals)
        return _parts(_evaluated(closed, operands))

    with compat.without_mesh():
        return jax.make_jaxpr(function)(*types)


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _touches(eqn: Any) -> bool:
    return any(_is_complex(x.aval.dtype) for x in (*eqn.invars, *eqn.outvars))


def _has_complex(closed: Any) -> bool:
    jaxpr = closed.jaxpr
    return any(_is_complex(x.dtype) for x in (*closed.in_avals, *closed.out_avals)) or any(
        _touches(eqn) or any(map(_has_complex, map(compat.closed_jaxpr, compat.jaxprs_of(eqn))))
        for eqn in jaxpr.eqns
    )


def _joined(parts: Iterable[Any], avals: Iterable[Any]) -> list[Any]:
    """Return values, of which complex ones are pairs."""
    rest = iter(parts)
    return [_Pair(next(rest), next(rest)) if _is_complex(x.dtype) else next(rest) for x in avals]


def _parts(values: Iterable[Any]) -> list[Any]:
    return [part for x in values for part in (x if isinstance(x, _Pair) else (x,))]


def _split(x: Any, aval: Any) -> Any:
    """Return a value, of which a complex constant is a pair of arrays or NumPy scalars."""
    if isinstance(x, _Pair) or not _is_complex(aval.dtype):
        return x
    return _Pair(*(np.asarray(part(x), part_type(aval.dtype))[()] for part in (np.real, np.imag)))


def _all_split(values: Iterable[Any], atoms: Iterable[Any]) -> list[Any]:
    return [_split(x, atom.aval) for x, atom in zip(values, atoms, strict=True)]


def _evaluated(closed: Any, operands: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    consts = _all_split(closed.consts, jaxpr.constvars)
    results = compat.eval_jaxpr_by(_equation, jaxpr, consts, operands)
    return _all_split(results, jaxpr.outvars)


def _equation(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    inner = [compat.closed_jaxpr(x) for x in compat.jaxprs_of(eqn)]
    if not _touches(eqn) and not any(map(_has_complex, inner)):
        return compat.bind_equation(eqn, operands)
    operands = _all_split(operands, eqn.invars)
    with compat.traced_from(eqn), located(eqn):
        if name in _CONTROL:
            return _CONTROL[name](eqn, *operands)
        if name in INNER_JAXPR:
            refuse_unknown(eqn)
            return _evaluated(compat.closed_jaxpr(eqn.params[INNER_JAXPR[name]]), operands)
        if name in _OF_EACH_PART:
            return _of_each_part(eqn, operands)
        if name not in _FUNCTIONS:
            raise Untranslatable(f"no CUDA for {name} of complex numbers")
        return [_FUNCTIONS[name](eqn, *operands)]


def _scan(eqn: Any, *operands: Any) -> list[Any]:
    consts, carried = compat.scan_parts(eqn)
    body = compat.closed_jaxpr(eqn.params["jaxpr"])

    def step(state: Any, inputs: Any) -> Any:
        found = _evaluated(body, [*operands[:consts], *state, *inputs])
        return found[:carried], found[carried:]

    settings = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    first = consts + carried
    state, outputs = lax.scan(step, [*operands[consts:first]], [*operands[first:]], **settings)
    return [*state, *outputs]


def _while(eqn: Any, *operands: Any) -> list[Any]:
    # Under a vmap, the condition has an element for each of those that it maps, which
    # ``lax.while_loop`` refuses.
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    params = {
        "cond_nconsts": len(_parts(operands[:first])),
        "body_nconsts": len(_parts(operands[first:second])),
        **{
            name: without_complex(compat.closed_jaxpr(eqn.params[name]))
            for name in ("cond_jaxpr", "body_jaxpr")
        },
    }
    found = eqn.primitive.bind(*_parts(operands), **{**eqn.params, **params})
    return _joined(found, (x.aval for x in eqn.outvars))


def _cond(eqn: Any, index: Any, *operands: Any) -> list[Any]:
    branches = [
        functools.partial(lambda branch, *xs: _evaluated(branch, xs), compat.closed_jaxpr(x))
        for x in eqn.params["branches"]
    ]
    found: list[Any] = lax.switch(index, branches, *operands)
    return found


def _of_each_part(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    found = []
    for k in range(2):
        read = [x[k] if isinstance(x, _Pair) else x for x in operands]
        results = eqn.primitive.bind(*read, **eqn.params)
        found.append(list(results) if eqn.primitive.multiple_results else [results])
    # Some operands of a barrier are real.
    return [
        _Pair(re, im) if _is_complex(x.aval.dtype) else re
        for x, re, im in zip(eqn.outvars, *found, strict=True)
    ]


# Functions of pairs.


def _product(x: _Pair, y: _Pair) -> _Pair:
    return _Pair(x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re)


def _quotient(x: _Pair, y: _Pair) -> _Pair:
    """Divide by Smith's method, whose intermediate values do not overflow."""
    swapped = jnp.abs(y.re) < jnp.abs(y.im)
    large, small = jnp.where(swapped, y.im, y.re), jnp.where(swapped, y.re, y.im)
    ratio = small / large
    below = large + small * ratio
    a, b = jnp.where(swapped, x.im, x.re), jnp.where(swapped, x.re, x.im)
    im = (b - a * ratio) / below
    return _Pair((a + b * ratio) / below, jnp.where(swapped, -im, im))


def _size(x: _Pair) -> Any:
    a, b = jnp.abs(x.re), jnp.abs(x.im)
    large, small = jnp.maximum(a, b), jnp.minimum(a, b)
    ratio = jnp.where(large == small, jnp.where(large == 0, 0, 1), small / large)
    return large * jnp.sqrt(1 + ratio * ratio)


def _exp(x: _Pair) -> _Pair:
    size = jnp.exp(x.re)
    return _Pair(size * jnp.cos(x.im), jnp.where(x.im == 0, x.im, size * jnp.sin(x.im)))


def _log(x: _Pair) -> _Pair:
    return _Pair(jnp.log(_size(x)), jnp.atan2(x.im, x.re))


def _sqrt(x: _Pair) -> _Pair:
    size = _size(x)
    t = jnp.sqrt((size + jnp.abs(x.re)) / 2)
    other = jnp.where(t == 0, 0, x.im / (2 * jnp.where(t == 0, 1, t)))
    sign = jnp.where(jnp.signbit(x.im), -1, 1).astype(t.dtype)
    right = x.re >= 0
    return _Pair(jnp.where(right, t, jnp.abs(other)), jnp.where(right, other, sign * t))


def _power(x: _Pair, y: Any) -> _Pair:
    if not isinstance(y, _Pair):  # An integer
        y = _Pair(jnp.asarray(y).astype(x.re.dtype), jnp.zeros_like(x.im))
    found, is_zero = _exp(_product(_log(x), y)), (x.re == 0) & (x.im == 0)
    vanishes = jnp.where(y.re > 0, 0, jnp.nan).astype(found.re.dtype)
    is_one = (y.re == 0) & (y.im == 0)
    of_zero = _Pair(jnp.where(is_one, 1, vanishes), jnp.where(is_one, 0, vanishes))
    return _Pair(*(jnp.where(is_zero, a, b) for a, b in zip(of_zero, found, strict=True)))


def _integer_power(x: _Pair, n: int) -> _Pair:
    one = _Pair(jnp.ones_like(x.re), jnp.zeros_like(x.im))
    found, square = one, x
    for bit in reversed(f"{abs(n):b}"):
        if bit == "1":
            found = square if found is one else _product(found, square)
        square = _product(square, square)
    return found if n >= 0 else _quotient(one, found)


def _sign(x: _Pair) -> _Pair:
    size = _size(x)
    below = jnp.where(size == 0, 1, size)
    return _Pair(x.re / below, x.im / below)


def _sinh(x: _Pair) -> _Pair:
    return _Pair(jnp.sinh(x.re) * jnp.cos(x.im), jnp.cosh(x.re) * jnp.sin(x.im))


def _cosh(x: _Pair) -> _Pair:
    return _Pair(jnp.cosh(x.re) * jnp.cos(x.im), jnp.sinh(x.re) * jnp.sin(x.im))


def _sin(x: _Pair) -> _Pair:
    return _Pair(jnp.sin(x.re) * jnp.cosh(x.im), jnp.cos(x.re) * jnp.sinh(x.im))


def _cos(x: _Pair) -> _Pair:
    return _Pair(jnp.cos(x.re) * jnp.cosh(x.im), -jnp.sin(x.re) * jnp.sinh(x.im))


def _converted(eqn: Any, x: Any) -> Any:
    target = np.dtype(eqn.outvars[0].aval.dtype)
    real = part_type(target)
    if not isinstance(x, _Pair):
        x = jnp.asarray(x).astype(real)
        return _Pair(x, jnp.zeros_like(x))
    if target.kind == "b":
        return (x.re != 0) | (x.im != 0)
    # A real type takes the real part.
    re = x.re.astype(real)
    return _Pair(re, x.im.astype(real)) if _is_complex(target) else re


def _dot_general(eqn: Any, x: Any, y: Any) -> _Pair:
    wanted = eqn.params["preferred_element_type"]
    params = {
        **eqn.params,
        "preferred_element_type": None if wanted is None else part_type(wanted),
    }
    dot = functools.partial(eqn.primitive.bind, **params)
    # One operand may be real.
    if not isinstance(x, _Pair):
        return _Pair(dot(x, y.re), dot(x, y.im))
    if not isinstance(y, _Pair):
        return _Pair(dot(x.re, y), dot(x.im, y))
    return _Pair(dot(x.re, y.re) - dot(x.im, y.im), dot(x.re, y.im) + dot(x.im, y.re))


def _scatter(function: Callable[..., Any], eqn: Any, x: _Pair, indices: Any, by: _Pair) -> _Pair:
    # The parameters of the primitive have a function of complex numbers too.
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    settings = {name: eqn.params[name] for name in names}
    return _Pair(*(function(a, indices, b, **settings) for a, b in zip(x, by, strict=True)))


def _fft(eqn: Any, x: Any) -> Any:
    meaning = jax.make_jaxpr(functools.partial(transform, **eqn.params))(eqn.invars[0].aval)
    return _evaluated(meaning, [x])[0]


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": _size, "cos": _cos, "cosh": _cosh, "div": _quotient, "exp": _exp,
    "log": _log, "mul": _product, "pow": _power, "sign": _sign, "sin": _sin, "sinh": _sinh,
    "sqrt": _sqrt,
    # A literal may be a scalar.
    "complex": lambda x, y: _Pair(*jnp.broadcast_arrays(x, y)),
    "eq": lambda x, y: (x.re == y.re) & (x.im == y.im),
    "imag": lambda x: x.im,
    "ne": lambda x, y: (x.re != y.re) | (x.im != y.im),
    "real": lambda x: x.re,
    "square": lambda x: _product(x, x),
}  # fmt: skip


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *operands: function(*operands)


_CONTROL: dict[str, Callable[..., list[Any]]] = {"scan": _scan, "while": _while, "cond": _cond}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convert_element_type": _converted,
    "dot_general": _dot_general,
    "fft": _fft,
    "scatter-add": functools.partial(_scatter, lax.scatter_add),
    "scatter-sub": functools.partial(_scatter, lax.scatter_sub),
    "integer_pow": lambda eqn, x: _integer_power(x, eqn.params["y"]),
    # The conjugate of a real number is a complex one.
    "conj": lambda _, x: (
        _Pair(x.re, -x.im) if isinstance(x, _Pair) else _Pair(x, jnp.zeros_like(x))
    ),
    **{name: _alone(function) for name, function in _ELEMENTWISE.items()},
}
