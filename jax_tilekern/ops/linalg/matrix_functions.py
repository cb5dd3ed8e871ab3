"""Functions of matrices, by products, systems and decompositions of batches."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.interop.custom_rules import custom_jvp
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import lax
from jax_tilekern.ops.linalg import decompositions
from jax_tilekern.ops.linalg.matrices import product, solve, triangular_solve

# The coefficients of the numerator of the [m/m] Padé approximant, and the largest 1-norm for which
# it is accurate to the type's rounding (Higham, SIAM J. Matrix Anal. Appl. 26, 2005, table 2.3).
_PADE_7 = (17297280.0, 8648640.0, 1995840.0, 277200.0, 25200.0, 1512.0, 56.0, 1.0)
_PADE_13 = (
    64764752532480000.0, 32382376266240000.0, 7771770303897600.0, 1187353796428800.0,
    129060195264000.0, 10559470521600.0, 670442572800.0, 33522128640.0, 1323241920.0, 40840800.0,
    960960.0, 16380.0, 182.0, 1.0,
)  # fmt: skip
_LARGEST_NORM = {4: 3.925724783138660, 8: 5.371920351148152}
# On a GPU the host waits about 20 us for each condition, as long as several products of a batch of
# so many bytes take.
_SQUARINGS_AT_ONCE, _SMALL_BYTES = 4, 16 << 20


@mode_independent
def exponential(a: Array, *, upper_triangular: bool, max_squarings: int) -> Array:
    """Return exponentials by scaling and squaring."""
    norms = jnp.abs(a).sum(-2).max(-1, initial=0)
    doublings = lax.stop_gradient(jnp.log2(norms / _LARGEST_NORM[a.dtype.itemsize]))
    squarings = jnp.clip(jnp.ceil(doublings), 0, max_squarings)
    x = a / jnp.exp2(squarings)[..., None, None].astype(a.dtype)
    odd, even = _pade(x)
    numerator, denominator = even + odd, even - odd
    if upper_triangular:
        result = triangular_solve(denominator, numerator, left_side=True, lower=False)
    else:
        result = solve(denominator, numerator)

    def squared(steps: int, x: Array) -> Array:
        """Square as often as each matrix needs, by steps of which the batch may need none."""

        def some(x: Array, first: Array) -> tuple[Array, None]:
            unfinished = [first + i < squarings for i in range(steps)]

            def each(x: Array) -> Array:
                for is_unfinished in unfinished:
                    x = jnp.where(is_unfinished[..., None, None], product(x, x), x)
                return x

            return lax.cond(jnp.any(unfinished[0]), each, lambda x: x, x), None

        firsts = jnp.arange(0, max_squarings, steps, dtype=squarings.dtype)
        return lax.scan(some, x, firsts)[0]

    is_known = all(isinstance(size, int) for size in a.shape)
    at_once = _SQUARINGS_AT_ONCE if is_known and a.nbytes <= _SMALL_BYTES else 1
    result = lax.platform_dependent(
        result, cpu=functools.partial(squared, 1), default=functools.partial(squared, at_once)
    )
    # JAX gives NaN for the same matrices. Its approximants have arguments up to twice as large.
    is_refused = jnp.maximum(jnp.floor(doublings), 0) > max_squarings
    return jnp.where(is_refused[..., None, None], jnp.nan, result)


def _pade(a: Array) -> tuple[Array, Array]:
    """Return the odd and the even part of the numerator."""
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)
    squared = product(a, a)
    fourth = product(squared, squared)
    sixth = product(fourth, squared)

    def combined(coefficients: tuple[float, ...], *, with_identity: bool = True) -> Array:
        powers = (identity, squared, fourth, sixth) if with_identity else (squared, fourth, sixth)
        return functools.reduce(
            lax.add,
            (c * jnp.broadcast_to(p, a.shape) for c, p in zip(coefficients, powers, strict=True)),
        )

    if a.dtype == np.float32:
        return product(a, combined(_PADE_7[1::2])), combined(_PADE_7[::2])
    high = functools.partial(combined, with_identity=False)
    odd = product(sixth, high(_PADE_13[9::2])) + combined(_PADE_13[1:9:2])
    even = product(sixth, high(_PADE_13[8::2])) + combined(_PADE_13[:8:2])
    return product(a, odd), even


@custom_jvp
@mode_independent
def pseudo_inverse(a: Array, rtol: Array) -> Array:
    """Return pseudo-inverses, with singular values up to ``rtol`` times the largest as zero."""
    s, u, vt = decompositions.svd(a, vectors=True, full=False)
    cutoff = rtol[..., None] * s[..., :1]
    reciprocals = 1 / jnp.where(s > cutoff, s, jnp.inf)
    return product(vt.mT, reciprocals[..., None] * u.mT)


@pseudo_inverse.defjvp
@mode_independent
def _pseudo_inverse_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Differentiate as Golub and Pereyra, SIAM J. Numer. Anal. 10 (1973)."""
    (a, rtol), (a_dot, _) = primals, tangents
    p = pseudo_inverse(a, rtol)
    m, n = a.shape[-2:]
    # The products of the shorter side are smaller.
    if m >= n:
        left = product(product(p, p.mT), a_dot.mT)
        right = product(product(a_dot.mT, p.mT), p)
        inner = product(product(p, a_dot), p)
        return p, -inner + left - product(product(left, a), p) + right - product(
            product(p, a), right
        )
    left = product(p, product(p.mT, a_dot.mT))
    right = product(a_dot.mT, product(p.mT, p))
    inner = product(p, product(a_dot, p))
    return p, -inner + left - product(left, product(a, p)) + right - product(p, product(a, right))
