"""Primitives that decompose matrices: singular values, eigenvalues of symmetric matrices, and QR.

``matrix_kernels.py`` has the kernels. Derivatives are JAX's rules, in products and systems of this
package, and in the primitives again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jax_tilekern.interop import ffi
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.linalg.matrices import (
    define_matrix,
    product,
    solve,
    split_alike,
    triangular_solve,
)
from jax_tilekern.ops.linalg.matrix_kernels import decomposition_on_cpu, decomposition_on_cuda
from jax_tilekern.primitives.operation import lowering_platform
from jax_tilekern.scope import Function

Rule = tuple[list[Any], list[Any]]


def svd(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    """Return singular values, and with ``vectors`` the left and the transposed right ones.

    Bases are completed if ``full``.
    """
    return tuple(_svd(*split_alike(a), vectors=vectors, full=full))


def eigh(a: Array, *, vectors: bool, lower: bool, symmetrize: bool) -> tuple[Array, ...]:
    """Return eigenvalues, and with ``vectors`` the eigenvectors as columns.

    They are those of the lower or upper triangle alone, unless ``symmetrize``.
    """
    return tuple(_eigh(*split_alike(a), vectors=vectors, lower=lower, symmetrize=symmetrize))


def qr(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    """Return the orthogonal factor if ``vectors``, and the triangular one."""
    return tuple(_qr(*split_alike(a), vectors=vectors, full=full))


def on_finite_matrices(function: Function) -> Function:
    """Make one of JAX's functions compute NaN for a matrix that is not finite.

    LAPACK's iteration for singular values does not end for some matrices with infinities.
    """

    @functools.wraps(function)
    def guarded(a: Array, *args: Any, **params: Any) -> Any:
        finite = jnp.isfinite(a).all((-2, -1))

        def masked(x: Array) -> Array:
            own = tuple(range(finite.ndim, x.ndim))
            return jnp.where(jnp.expand_dims(finite, own), x, jnp.nan)

        results = function(jnp.where(finite[..., None, None], a, 0), *args, **params)
        return jax.tree.map(masked, results)

    return guarded  # type: ignore[return-value]


# Derivatives.


def _svd_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, vectors: bool, full: bool
) -> Rule:
    """Differentiate as :func:`jax.lax.linalg.svd` does."""
    ((a,), (a_dot,)) = primals, tangents
    m, n = a.shape[-2:]
    if vectors and full and m != n:
        raise NotImplementedError(
            "Singular value decomposition JVP not implemented for full matrices"
        )
    s, u, vt = svd(a, vectors=True, full=False)
    v = vt.mT
    moved = product(a_dot, v)
    if not vectors:
        return [s], [jnp.sum(u * moved, axis=-2)]
    inner = product(u.mT, moved)
    row, column = s[..., None, :], s[..., :, None]
    identity = jnp.eye(s.shape[-1], dtype=s.dtype)
    inverse_differences = 1 / ((row + column) * (row - column) + identity) - identity
    by_row, by_column = row * inner, column * inner
    u_dot = product(u, inverse_differences * (by_row + by_row.mT))
    v_dot = product(v, inverse_differences * (by_column + by_column.mT))
    if m > n:
        u_dot += (moved - product(u, product(u.mT, moved))) / row
    if n > m:
        moved = product(a_dot.mT, u)
        v_dot += (moved - product(v, product(vt, moved))) / row
    return [s, u, vt], [jnp.diagonal(inner, axis1=-2, axis2=-1), u_dot, v_dot.mT]


def _eigh_jvp(
    primals: Sequence[Array],
    tangents: Sequence[Array],
    *,
    vectors: bool,
    lower: bool,
    symmetrize: bool,
) -> Rule:
    """Differentiate as :func:`jax.lax.linalg.eigh` does."""
    ((a,), (a_dot,)) = primals, tangents
    if not symmetrize:
        # Second derivatives follow from the symmetric part, as by JAX's rule.
        a = (a + a.mT) / 2
    w, v = eigh(a, vectors=True, lower=lower, symmetrize=symmetrize)
    if symmetrize:
        a_dot = (a_dot + a_dot.mT) / 2
    moved = product(a_dot, v)
    if not vectors:
        return [w], [jnp.sum(v * moved, axis=-2)]
    inner = product(v.mT, moved)
    identity = jnp.eye(w.shape[-1], dtype=w.dtype)
    inverse_differences = 1 / (w[..., None, :] - w[..., :, None] + identity) - identity
    return [w, v], [
        jnp.diagonal(inner, axis1=-2, axis2=-1),
        product(v, inverse_differences * inner),
    ]


def _qr_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, vectors: bool, full: bool
) -> Rule:
    """Differentiate as :func:`jax.lax.linalg.qr` does.

    The complement of ``full`` matrices follows arXiv:2409.13374.
    """
    ((a,), (a_dot,)) = primals, tangents
    m, n = a.shape[-2:]
    k = min(m, n)
    q, r = qr(a, vectors=True, full=full)
    thin, complement = q[..., :k], q[..., k:]
    thin_dot, r_dot = _thin_qr_jvp(thin, r[..., :k, :k], a_dot[..., :k])
    if n > m:
        rest_dot = product(thin_dot.mT, a[..., k:]) + product(q.mT, a_dot[..., k:])
        r_dot = jnp.concatenate([r_dot, rest_dot], axis=-1)
    q_dot = thin_dot
    if full and m > n:
        r_dot = jnp.concatenate([r_dot, jnp.zeros_like(r[..., n:, :])], axis=-2)
        top, bottom = q[..., :n, :n], q[..., n:, :n]
        shifted = top - jnp.eye(n, dtype=q.dtype)
        z = solve(shifted, bottom.mT, transpose=True)
        rest = thin_dot[..., n:, :] - product(z.mT, thin_dot[..., :n, :])
        complement_dot = product(thin_dot, z) - product(thin + product(complement, z.mT), rest.mT)
        q_dot = jnp.concatenate([thin_dot, complement_dot], axis=-1)
    return ([q, r], [q_dot, r_dot]) if vectors else ([r], [r_dot])


def _thin_qr_jvp(q: Array, r: Array, a_dot: Array) -> tuple[Array, Array]:
    """Differentiate for matrices with at least as many rows as columns."""
    moved = triangular_solve(r, a_dot, left_side=False, lower=False)
    inner = product(q.mT, moved)
    below = jnp.tril(inner, -1)
    skew = below - below.mT
    return product(q, skew - inner) + moved, product(inner - skew, r)


# The primitives.


def _like(a: Array, *sizes: int) -> Array:
    """Return an array for each matrix, of other sizes."""
    own = (None,) * len(sizes)
    return jnp.broadcast_to(a.sum((-2, -1))[(..., *own)], (*a.shape[:-2], *sizes))


def _like_svd(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    m, n = a.shape[-2:]
    k = min(m, n)
    bases = _like(a, m, m if full else k), _like(a, n if full else k, n)
    return (_like(a, k), *(bases if vectors else ()))


def _svd_reference(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    computed: Callable[..., Any] = lax.linalg.svd
    if lowering_platform.value == "cpu":
        computed = on_finite_matrices(computed)
    if not vectors:
        return (computed(a, compute_uv=False),)
    u, s, vt = computed(a, full_matrices=full)
    return s, u, vt


_svd = define_matrix(
    "svd",
    like_results=_like_svd,
    reference=_svd_reference,
    jvp=_svd_jvp,
    cpu=functools.partial(decomposition_on_cpu, ffi.CPU_MATRIX_SVD),
    cuda=functools.partial(decomposition_on_cuda, "svd"),
    describe=lambda vectors, full: "svd" if vectors else "singular values",
)


def _eigh_reference(a: Array, *, vectors: bool, lower: bool, symmetrize: bool) -> tuple[Array, ...]:
    v, w = lax.linalg.eigh(a, lower=lower, symmetrize_input=symmetrize)
    return (w, v) if vectors else (w,)


_eigh = define_matrix(
    "eigh",
    like_results=lambda a, vectors, **_: (a.sum(-1), a)[: 1 + vectors],
    reference=_eigh_reference,
    jvp=_eigh_jvp,
    cpu=functools.partial(decomposition_on_cpu, ffi.CPU_MATRIX_EIGH),
    cuda=functools.partial(decomposition_on_cuda, "eigh"),
    describe=lambda vectors, **_: "eigh" if vectors else "eigenvalues",
)


def _like_qr(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    m, n = a.shape[-2:]
    order = m if full else min(m, n)
    return (*((_like(a, m, order),) if vectors else ()), _like(a, order, n))


def _qr_reference(a: Array, *, vectors: bool, full: bool) -> tuple[Array, ...]:
    q, r = lax.linalg.qr(a, full_matrices=full)
    return (q, r) if vectors else (r,)


_qr = define_matrix(
    "qr",
    like_results=_like_qr,
    reference=_qr_reference,
    jvp=_qr_jvp,
    cpu=functools.partial(decomposition_on_cpu, ffi.CPU_MATRIX_QR),
    cuda=functools.partial(decomposition_on_cuda, "qr"),
    describe=lambda vectors, full: "qr" if vectors else "r of qr",
)
