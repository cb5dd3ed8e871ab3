"""Eigenvalues and singular values of small matrices in a lane, by Jacobi's method.

A sweep rotates every pair of rows or columns once, in rounds of disjoint pairs: each index has one
partner in a round. All rotations of a round are an operation of whole arrays, or of a group of
threads by ``lane_eigenvalues.cuh``, for symmetric matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.linear_algebra import matrix_rule
from jax_tilekern.ops.kernel.translation.values import Value, in_memory, times
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

# Sweeps of matrices of float64 and of float32 converge quadratically, after about 8 and 6.
_MAX_SWEEPS = 20


def _partners(n: int) -> Any:
    """Return the partner of each index in each round; in odd sizes one index is its own."""
    even = n + n % 2
    rounds = []
    for k in range(even - 1):
        # Indices that add up to k meet; the last one meets the one that would meet itself.
        partner = [(k - i) % (even - 1) for i in range(even - 1)]
        alone = next(i for i, other in enumerate(partner) if i == other)
        partner[alone] = even - 1
        rounds.append([*partner, alone][:n])
    numbers = np.array(rounds, np.int32).reshape(-1, n)
    return jnp.asarray(np.where(numbers < n, numbers, np.arange(n, dtype=np.int32)))


def _rotations(own: Any, other: Any, between: Any, partner: Any) -> tuple[Any, Any]:
    """Return cosines and sines that make ``between`` zero for each index and its partner."""
    here = jnp.arange(partner.size)
    none = (between == 0) | (partner == here)
    ratio = (other - own) / jnp.where(none, 1, 2 * between)
    # The partner's sine is the negative one, also of two equal elements.
    sign = jnp.where(ratio == 0, jnp.where(partner > here, 1, -1), jnp.sign(ratio))
    tangent = jnp.where(none, 0, sign / (jnp.abs(ratio) + jnp.sqrt(1 + ratio * ratio)))
    cosine = lax.rsqrt(1 + tangent * tangent)
    return cosine, tangent * cosine


def _swept(rotate: Callable[..., Any], is_done: Callable[..., Any], state: Any, n: int) -> Any:
    """Rotate until the state is done."""
    partners = _partners(n)

    def sweep(found: Any) -> Any:
        count, state = found
        return count + 1, lax.scan(lambda s, p: (rotate(s, p), None), state, partners)[0]

    def goes_on(found: Any) -> Any:
        return (found[0] < _MAX_SWEEPS) & ~is_done(found[1])

    return lax.while_loop(goes_on, sweep, (0, state))[1]


@matrix_rule("eigh", (2,), "lower sort_eigenvalues subset_by_index algorithm")
def _eigh(x: Any, *, lower: bool, subset_by_index: Any, **_: Any) -> Any:
    n = x.shape[0]
    _refuse_subset("eigh", subset_by_index, n)
    triangle = jnp.tril(x) if lower else jnp.triu(x)
    a = triangle + (jnp.tril(triangle, -1) + jnp.triu(triangle, 1)).T
    finite = jnp.isfinite(a).all()
    a = jnp.where(finite, a, 0)
    a, vectors = _diagonalise.bind(a)
    values = jnp.where(finite, jnp.diagonal(a), jnp.nan)
    order = jnp.argsort(values)
    return jnp.where(finite, vectors.T, jnp.nan)[:, order], values[order]


_diagonalise = compat.Primitive("lane_diagonalise")
_diagonalise.multiple_results = True
_diagonalise.def_abstract_eval(lambda a: [jax.core.ShapedArray(a.shape, a.dtype)] * 2)


def _batched_diagonalise(_: Any, operands: Sequence[Any], dims: Sequence[Any]) -> Any:
    (a,), (dim,) = operands, dims
    return _diagonalise.bind(jnp.moveaxis(a, dim, 0)), (0, 0)


compat.register_batching(_diagonalise, _batched_diagonalise)


@rule("lane_diagonalise")
def _diagonalised(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    """Write the rotations of symmetric matrices: the diagonal ones, and eigenvectors as rows."""
    (x,) = operands
    n = x.shape[-1]
    batch = x.shape[:-2]
    if not writer.is_spread(n * n):
        means = _rotated_to_diagonal
        for _dim in batch:
            means = jax.vmap(means)
        return writer.meaning(means, eqn, operands)
    writer.headers.add("lane_eigenvalues.cuh")
    a, vectors = writer.to_update(x, None), writer.array(x.dtype, x.shape)
    rotations, rows = (writer.array(np.dtype(y), (4 * n,)) for y in (x.dtype, np.int32))
    with writer.written(a), writer.loop(math.prod(batch), unroll=False) as i:
        places = ", ".join(f"&{y.name}[{times(i, n * n)}]" for y in (a, vectors))
        writer.line(f"lax::diagonalise<kThreads, {n}>({places}, {rotations.name}, {rows.name});")
    return [in_memory(a), in_memory(vectors)]


def _rotated_to_diagonal(a: Any) -> Any:
    n = a.shape[0]
    diagonal = jnp.eye(n, dtype=bool)
    # Eigenvalues have an error of this order.
    tolerance = np.finfo(a.dtype).eps * jnp.abs(a).max(initial=0)

    def is_done(state: Any) -> Any:
        return jnp.where(diagonal, 0, jnp.abs(state[0])).max(initial=0) <= tolerance

    def rotate(state: Any, partner: Any) -> Any:
        a, v = state
        own, here = jnp.diagonal(a), jnp.arange(n)
        c, s = _rotations(own, own[partner], a[here, partner], partner)
        a = c[:, None] * a - s[:, None] * a[partner]
        a = c * a - s * a[:, partner]
        # Rounding leaves the element of a pair close to zero, and not symmetric.
        a = (a + a.T) / 2
        return a, c[:, None] * v - s[:, None] * v[partner]

    return _swept(rotate, is_done, (a, jnp.eye(n, dtype=a.dtype)), n)


@matrix_rule("svd", (2,), "full_matrices compute_uv subset_by_index algorithm")
def _svd(x: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any, **_: Any) -> Any:
    """Make columns orthogonal; they are the left vectors times the singular values.

    The longest column is the first one.
    """
    _refuse_subset("svd", subset_by_index, min(x.shape))
    is_wide = x.shape[0] < x.shape[1]
    a = x.T if is_wide else x
    m, n = a.shape
    finite = jnp.isfinite(a).all()
    scale = jnp.abs(a).max(initial=0)
    scale = jnp.where(finite & (scale > 0), scale, 1)
    a = jnp.where(finite, a, 0) / scale
    tolerance = m * np.finfo(x.dtype).eps

    def products(a: Any, partner: Any) -> Any:
        return jnp.sum(a * a[:, partner], 0)

    def is_done(state: Any) -> Any:
        gram = state[0].T @ state[0]
        lengths = jnp.sqrt(jnp.diagonal(gram))
        # Columns that are zero but for rounding need no angles.
        bound = jnp.maximum(lengths[:, None] * lengths, (tolerance * lengths.max(initial=0)) ** 2)
        return jnp.where(jnp.eye(n, dtype=bool), True, jnp.abs(gram) <= tolerance * bound).all()

    def rotate(state: Any, partner: Any) -> Any:
        squares = products(state[0], jnp.arange(n))
        c, s = _rotations(squares, squares[partner], products(state[0], partner), partner)
        return tuple(c * y - s * y[:, partner] for y in state)

    a, v = _swept(rotate, is_done, (a, jnp.eye(n, dtype=x.dtype)), n)
    values = jnp.sqrt(jnp.sum(a * a, 0))
    order = jnp.argsort(-values)
    values = jnp.where(finite, values[order] * scale, jnp.nan)
    if not compute_uv:
        return [values]
    basis = _orthonormal(a[:, order], m if full_matrices else n)
    left, right = (jnp.where(finite, y, jnp.nan) for y in (basis, v[:, order]))
    return [values, right, left.T] if is_wide else [values, left, right.T]


def _orthonormal(a: Any, columns: int) -> Any:
    """Return a basis whose first vectors are the orthogonal columns of an array, normalised.

    Householder's reflections complete it where columns are zero.
    """
    m, n = a.shape

    def reflect(r: Any, k: Any) -> tuple[Any, Any]:
        x = jnp.where(jnp.arange(m) >= k, r[:, k], 0)
        largest = jnp.abs(x).max()
        x = x / jnp.where(largest > 0, largest, 1)
        length = jnp.sqrt(jnp.sum(x * x))
        v = x.at[k].add(jnp.where(x[k] < 0, -length, length))
        factor = 2 / jnp.where(largest > 0, jnp.sum(v * v), 1)
        return r - factor * v[:, None] * (v @ r), (v, factor, jnp.where(x[k] < 0, 1, -1))

    _, (vectors, factors, signs) = lax.scan(reflect, a, jnp.arange(n))

    def reflect_back(q: Any, reflection: Any) -> tuple[Any, None]:
        v, factor = reflection
        return q - factor * v[:, None] * (v @ q), None

    start = jnp.eye(m, columns, dtype=a.dtype)
    q, _ = lax.scan(reflect_back, start, (vectors, factors), reverse=True)
    return q.at[:, :n].multiply(signs.astype(a.dtype))


def _refuse_subset(name: str, subset: Any, n: int) -> None:
    if subset not in (None, (0, n)):
        raise Untranslatable(f"no CUDA for {name} with subset_by_index={subset}")
