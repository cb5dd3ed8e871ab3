"""Special functions and ciphers of a lane, as JAX functions of their operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Value
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

# Bernoulli's numbers B_2k divided by (2 k)!, for k from 1 on.
_BERNOULLI = tuple(
    numerator / denominator / math.factorial(2 * k)
    for k, (numerator, denominator) in enumerate(
        ((1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510),
         (43867, 798), (-174611, 330), (854513, 138), (-236364091, 2730)), 1,
    )
)  # fmt: skip


def _meaning_rule(name: str, function: Callable[..., Any]) -> None:
    """Make a JAX function of arrays of one shape the rule of a primitive of elements.

    It computes 16-bit floats in float32.
    """

    @rule(name)
    def write(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
        dtype = eqn.outvars[0].aval.dtype

        def means(*xs: Any) -> list[Any]:
            wide = [x.astype(jnp.float32) if computed_type(x.dtype) == "float" else x for x in xs]
            found = function(*jnp.broadcast_arrays(*wide))
            return [y.astype(dtype) for y in (found if isinstance(found, tuple) else (found,))]

        return writer.meaning(means, eqn, operands)


for _name, _function in compat.lowered_functions().items():
    _meaning_rule(_name, _function)


def _equal(x: Any, y: Any) -> Any:
    """Compare in the total order, in which NaN is equal to NaN and 0 is not to -0."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x == y
    return jnp.where(x == y, jnp.signbit(x) == jnp.signbit(y), (x != x) & (y != y))


def _high_half(x: Any, y: Any) -> Any:
    """Multiply the halves of integers; return the upper half of the product."""
    half = x.dtype.itemsize * 4
    unsigned = jnp.dtype(f"uint{2 * half}")
    low = unsigned.type(2**half - 1)
    a, b = x.astype(unsigned), y.astype(unsigned)
    middle = (a >> half) * (b & low) + (((a & low) * (b & low)) >> half)
    other = (a & low) * (b >> half) + (middle & low)
    found = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        found = found - jnp.where(x < 0, b, 0) - jnp.where(y < 0, a, 0)
    return found.astype(x.dtype)


@functools.cache
def _bessel_coefficients() -> tuple[Any, Any]:
    """Return Chebyshev series of ``i1e(x) / x`` below 8, and of ``i1e(x) * sqrt(x)`` above."""
    # JAX needs SciPy, whose import takes a tenth of a second.
    import scipy.special
    from numpy.polynomial import chebyshev

    def below(t: Any) -> Any:
        return scipy.special.i1e(4 * (t + 1)) / (4 * (t + 1))

    def above(t: Any) -> Any:
        return scipy.special.i1e(16 / (t + 1)) * np.sqrt(16 / (t + 1))

    return chebyshev.chebinterpolate(below, 27), chebyshev.chebinterpolate(above, 27)


def _bessel_i1e(x: Any) -> Any:
    below, above = _bessel_coefficients()
    size = jnp.abs(x)
    small = _chebyshev(size / 4 - 1, below) * size
    large = jnp.maximum(size, 8)
    found = jnp.where(size <= 8, small, _chebyshev(16 / large - 1, above) / jnp.sqrt(large))
    return jnp.sign(x) * found


def _chebyshev(x: Any, coefficients: Any) -> Any:
    """Evaluate a series by Clenshaw's recurrence."""
    first = second = jnp.zeros_like(x)
    for c in coefficients[:0:-1]:
        first, second = 2 * x * first - second + x.dtype.type(c), first
    return x * first - second + x.dtype.type(coefficients[0])


def _zeta(x: Any, q: Any) -> Any:
    """Sum ``(q + k) ** -x``: the first terms, and the others by Euler and Maclaurin."""

    def goes_on(state: Any) -> Any:
        k, a, _ = state
        return (k < 9) | jnp.any(a <= 9)

    def step(state: Any) -> Any:
        k, a, sum_ = state
        more = (k < 9) | (a <= 9)
        return k + 1, jnp.where(more, a + 1, a), sum_ + jnp.where(more, jnp.power(a, -x), 0)

    # Where q is far below zero the sum of its terms has no end.
    start = jnp.where(q > -1000, q, jnp.nan)
    _, a, sum_ = lax.while_loop(goes_on, step, (0, start, jnp.zeros_like(q)))
    power = jnp.power(a, -x)
    sum_ = sum_ + power * a / (x - 1) + power / 2
    factor, power = x, power / a
    for k, coefficient in enumerate(_BERNOULLI, 1):
        sum_ = sum_ + factor * power * x.dtype.type(coefficient)
        factor = factor * (x + 2 * k - 1) * (x + 2 * k)
        power = power / (a * a)
    below, pole = q <= 0, (q <= 0) & (q == jnp.floor(q))
    infinite = (x == 1) | (pole & (x > 1) & (x % 2 == 0))
    invalid = (x < 1) | pole | (below & (x != jnp.floor(x)))
    return jnp.where(infinite, jnp.inf, jnp.where(invalid, jnp.nan, sum_))


def _polygamma(m: Any, x: Any) -> Any:
    sign = jnp.where(m % 2 == 0, -1, 1)
    found = sign * jnp.exp(lax.lgamma(m + 1)) * _zeta(m + 1, x)
    found = jnp.where(m == 0, lax.digamma(x), found)
    return jnp.where((m < 0) | (m != jnp.floor(m)), jnp.nan, found)


_meaning_rule("eq_to", _equal)
_meaning_rule("mulhi", _high_half)
_meaning_rule("bessel_i1e", _bessel_i1e)
_meaning_rule("zeta", _zeta)
_meaning_rule("polygamma", _polygamma)
