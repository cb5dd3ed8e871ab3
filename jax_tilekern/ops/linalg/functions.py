"""The functions of :mod:`jax_tilekern.linalg`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.custom_rules import custom_jvp
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp, jsp_linalg, lax
from jax_tilekern.ops.linalg import decompositions, matrices, matrix_functions
from jax_tilekern.ops.linalg.jax_matrices import (
    composed,
    is_left_to_jax,
    refusal_of_decomposition,
    refusal_of_square,
)
from jax_tilekern.ops.linalg.matrix_kernels import has_solve_kernel, refusal
from jax_tilekern.ops.products.matmul import matmul as matmul
from jax_tilekern.ops.products.tensor_products import multi_dot as multi_dot
from jax_tilekern.ops.products.tensor_products import tensordot as tensordot
from jax_tilekern.ops.products.tensor_products import vecdot as vecdot
from jax_tilekern.partitioning.explicit import split_alike
from jax_tilekern.partitioning.rule import Dims

Result = TypeVar("Result")


class SlogdetResult(NamedTuple):
    """The sign of a determinant, and the logarithm of its absolute value."""

    sign: Array
    logabsdet: Array


@jax.jit
def inv(a: ArrayLike) -> Array:
    """Inverse of square matrices, with the semantics of :func:`jax.numpy.linalg.inv`.

    Small matrices have Gauss-Jordan elimination with partial pivoting, large ones LU factors. The
    error is bounded by a multiple of the condition number times the unit roundoff, as that of JAX's
    is (Higham, Accuracy and Stability of Numerical Algorithms, sections 14.3 and 14.4). Prefer
    :func:`solve` to a product with an inverse: its residual is small for any condition number.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``.

    Returns
    -------
    Array
        The inverses, of the same shape; not finite for a singular matrix.

    Raises
    ------
    ValueError
        If the matrices are not square.
    TypeError
        If ``a`` is not an array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linalg.inv(jnp.array([[2.0, 0.0], [0.0, 4.0]]))
    Array([[0.5 , 0.  ],
           [0.  , 0.25]], dtype=float32)
    """
    return _computed("inv", jnp.linalg.inv, matrices.inverse, a)


@jax.jit
def solve(a: ArrayLike, b: ArrayLike) -> Array:
    """Solve ``a @ x = b``, with the semantics of :func:`jax.numpy.linalg.solve`.

    It is Gaussian elimination with partial pivoting. For a large matrix on Hopper the pivots are
    those of a tournament. A kernel does not return its factors, so derivatives factor the matrix
    again. Elsewhere XLA reuses the factors.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``.
    b
        Array of shape ``(n,)`` or ``(..., n, m)``. Leading dimensions broadcast against those of
        ``a``. A matrix of ``a`` with many right-hand sides is factored once for all of them.

    Returns
    -------
    Array
        The solutions, of the shape of ``b`` with the leading dimensions broadcast; not finite where
        a matrix is singular.

    Raises
    ------
    ValueError
        If the matrices are not square, or shapes do not fit.
    TypeError
        If an operand is not an array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linalg.solve(jnp.array([[0.0, 2.0], [4.0, 0.0]]), jnp.array([2.0, 8.0]))
    Array([2., 1.], dtype=float32)
    """

    def ours(a: Array, b: Array) -> Array:
        function = matrices.solve if has_solve_kernel(a) else _solve_by_factors
        return _with_vectors(function, a, b, vectors=b.ndim == 1)

    return _computed("solve", jnp.linalg.solve, ours, a, b)


@functools.partial(jax.jit, static_argnames=("upper", "symmetrize_input"))
def cholesky(a: ArrayLike, *, upper: bool = False, symmetrize_input: bool = True) -> Array:
    """Cholesky factor, with the semantics of :func:`jax.numpy.linalg.cholesky`.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)`` of symmetric (or Hermitian) positive definite matrices.
    upper
        Whether to return the upper factor instead of the lower one.
    symmetrize_input
        Whether to factor ``(a + a.mT) / 2``, so that derivatives are those of a function of a
        symmetric matrix; otherwise the lower triangle alone is read.

    Returns
    -------
    Array
        The factors, of the same shape, with zeros in the other triangle. The triangle is NaN where
        a matrix is not positive definite.

    Raises
    ------
    ValueError
        If the matrices are not square.
    TypeError
        If ``a`` is not an array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linalg.cholesky(jnp.array([[4.0, 2.0], [2.0, 10.0]]))
    Array([[2., 0.],
           [1., 3.]], dtype=float32)
    """

    def ours(a: Array) -> Array:
        factor = matrices.cholesky(a, symmetrize=symmetrize_input)
        return factor.mT if upper else factor

    theirs = functools.partial(jnp.linalg.cholesky, upper=upper, symmetrize_input=symmetrize_input)
    return _computed("cholesky", _if_square(theirs), ours, a)


@functools.partial(jax.jit, static_argnames=("permute_l", "overwrite_a", "check_finite"))
def lu(
    a: ArrayLike, permute_l: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, ...]:
    """LU factors with partial pivoting, with the semantics of :func:`jax.scipy.linalg.lu`.

    Leading dimensions are a batch, which JAX's function does not support.

    Parameters
    ----------
    a
        Array of shape ``(..., m, n)``.
    permute_l
        Whether to return ``(p @ l, u)``.
    overwrite_a, check_finite
        Unused; they exist in SciPy's signature.

    Returns
    -------
    p, l, u
        Matrices with ``a == p @ l @ u``, or ``p @ l`` and ``u``.

    Raises
    ------
    ValueError, TypeError
        As JAX's.
    """
    # JAX's takes lists.
    a = jnp.asarray(a) if isinstance(a, list | tuple) else a
    theirs: Any = functools.partial(jsp_linalg.lu, permute_l=permute_l)
    for _ in jnp.shape(a)[2:]:
        theirs = jax.vmap(theirs)

    def ours(a: Array) -> tuple[Array, ...]:
        both, _, permutation = matrices.lu(a)
        return _unpacked(both, permutation, permute_l)

    return _computed("lu", theirs, ours, a, refusal=refusal_of_square)


@functools.partial(jax.jit, static_argnames=("overwrite_a", "check_finite"))
def lu_factor(
    a: ArrayLike, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[Array, Array]:
    """LU factors in one matrix, with the semantics of :func:`jax.scipy.linalg.lu_factor`.

    Parameters
    ----------
    a
        Array of shape ``(..., m, n)``.
    overwrite_a, check_finite
        Unused; they exist in SciPy's signature.

    Returns
    -------
    lu
        ``u``, and below its diagonal ``l`` without its own.
    pivots
        The row that each row was exchanged with.

    Raises
    ------
    ValueError, TypeError
        As JAX's.
    """

    def ours(a: Array) -> tuple[Array, Array]:
        factors, pivots, _ = matrices.lu(a)
        return factors, pivots

    return _computed("lu_factor", jsp_linalg.lu_factor, ours, a, refusal=refusal_of_square)


@jax.jit
def det(a: ArrayLike) -> Array:
    """Return determinants, with the semantics of :func:`jax.numpy.linalg.det`.

    It is the product of the pivots, and JAX's formula for matrices up to 3x3, which XLA fuses.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``.

    Returns
    -------
    Array
        Of the leading shape. The derivative is right for matrices of rank ``n - 1`` too whose last
        pivot is the one that is zero, and 0 for lesser ones.

    Raises
    ------
    ValueError
        If the matrices are not square.
    TypeError
        If ``a`` is not an array.
    """
    refusal = functools.partial(_refusal_of_determinant, formulas_to=3)
    return _computed("det", jnp.linalg.det, _det, a, refusal=refusal)


@functools.partial(jax.jit, static_argnames=("method",))
def slogdet(a: ArrayLike, *, method: Literal["lu", "qr"] | None = None) -> SlogdetResult:
    """Sign and logarithm of determinants, with the semantics of :func:`jax.numpy.linalg.slogdet`.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``.
    method
        ``"lu"``, which is the default, or ``"qr"``.

    Returns
    -------
    SlogdetResult
        ``sign`` and ``logabsdet``, of the leading shape; 0 and ``-inf`` for a singular matrix.

    Raises
    ------
    ValueError
        If the matrices are not square, or there is no such method.
    TypeError
        If ``a`` is not an array.
    """
    theirs = functools.partial(jnp.linalg.slogdet, method=method)
    if method == "qr":
        return SlogdetResult(*composed(theirs)(a))
    refusal = functools.partial(_refusal_of_determinant, formulas_to=2)
    return SlogdetResult(*_computed("slogdet", theirs, _slogdet, a, refusal=refusal))


@functools.partial(
    jax.jit, static_argnames=("full_matrices", "compute_uv", "hermitian", "subset_by_index")
)
def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
    subset_by_index: tuple[int, int] | None = None,
) -> Any:
    """Singular value decomposition, with the semantics of :func:`jax.numpy.linalg.svd`.

    It is one-sided Jacobi, whose error in a small singular value is often smaller than LAPACK's
    (Demmel and Veselic, SIAM J. Matrix Anal. Appl. 13, 1992).

    Parameters
    ----------
    a
        Array of shape ``(..., m, n)``.
    full_matrices
        Whether ``u`` and ``vh`` are square.
    compute_uv
        Whether to return more than ``s``.
    hermitian
        Whether the matrices are symmetric; then it follows from :func:`eigh`.
    subset_by_index
        As JAX's, whose own function it then is.

    Returns
    -------
    u, s, vh
        A named tuple with ``a == u * s @ vh``, ``s`` of shape ``(..., min(m, n))`` in descending
        order; ``s`` alone unless ``compute_uv``. All are NaN for a matrix that is not finite.

    Raises
    ------
    ValueError
        If ``a`` has less than two dimensions.
    TypeError
        If ``a`` is not an array.
    NotImplementedError
        If ``u`` and ``vh`` of rectangular matrices with ``full_matrices`` are differentiated.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linalg.svd(jnp.array([[0.0, 3.0], [2.0, 0.0]]), compute_uv=False)
    Array([3., 2.], dtype=float32)
    """
    theirs: Any = functools.partial(
        jnp.linalg.svd,
        full_matrices=full_matrices,
        compute_uv=compute_uv,
        hermitian=hermitian,
        subset_by_index=subset_by_index,
    )

    def ours(a: Array) -> Any:
        s, *bases = decompositions.svd(a, vectors=bool(compute_uv), full=bool(full_matrices))
        return (bases[0], s, bases[1]) if bases else s

    if hermitian or subset_by_index is not None:
        return composed(theirs)(a)
    refusal = refusal_of_decomposition
    return _computed("svd", theirs, ours, a, refusal=refusal, if_finite=True)


@jax.jit
def svdvals(x: ArrayLike, /) -> Array:
    """Singular values, with the semantics of :func:`jax.numpy.linalg.svdvals`.

    Parameters
    ----------
    x
        Array of shape ``(..., m, n)``.

    Returns
    -------
    Array
        Of shape ``(..., min(m, n))``, in descending order.

    Raises
    ------
    ValueError, TypeError
        As :func:`svd`.
    """

    def ours(x: Array) -> Array:
        return decompositions.svd(x, vectors=False, full=False)[0]

    refusal = refusal_of_decomposition
    return _computed("svdvals", jnp.linalg.svdvals, ours, x, refusal=refusal, if_finite=True)


@functools.partial(jax.jit, static_argnames=("UPLO", "symmetrize_input"))
def eigh(a: ArrayLike, UPLO: str | None = None, symmetrize_input: bool = True) -> Any:
    """Eigenvalues and eigenvectors of symmetric matrices, as :func:`jax.numpy.linalg.eigh`.

    It is cyclic Jacobi with two-sided rotations (Golub and Van Loan, Matrix Computations, section
    8.5), and on GPUs QL steps of a tridiagonal matrix above 4x4.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``.
    UPLO
        The triangle that is read, ``"L"`` or ``"U"``; ``None`` is ``"L"``.
    symmetrize_input
        Whether to decompose ``(a + a.mT) / 2`` instead.

    Returns
    -------
    eigenvalues, eigenvectors
        A named tuple of arrays of shapes ``(..., n)``, in ascending order, and ``(..., n, n)``,
        whose columns are the vectors. Both are NaN for a matrix that is not finite.

    Raises
    ------
    ValueError
        If the matrices are not square, or there is no such ``UPLO``.
    TypeError
        If ``a`` is not an array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linalg.eigh(jnp.array([[0.0, 2.0], [2.0, 0.0]])).eigenvalues
    Array([-2.,  2.], dtype=float32)
    """
    theirs: Any = functools.partial(jnp.linalg.eigh, UPLO=UPLO, symmetrize_input=symmetrize_input)
    ours = functools.partial(
        decompositions.eigh, vectors=True, lower=UPLO != "U", symmetrize=symmetrize_input
    )
    return _computed("eigh", _if_square(theirs), ours, a, refusal=refusal_of_decomposition)


@functools.partial(jax.jit, static_argnames=("UPLO", "symmetrize_input"))
def eigvalsh(a: ArrayLike, UPLO: str | None = "L", *, symmetrize_input: bool = True) -> Array:
    """Eigenvalues of symmetric matrices, as :func:`jax.numpy.linalg.eigvalsh`.

    Parameters
    ----------
    a, UPLO, symmetrize_input
        As of :func:`eigh`.

    Returns
    -------
    Array
        Of shape ``(..., n)``, in ascending order.

    Raises
    ------
    ValueError, TypeError
        As :func:`eigh`.
    """
    theirs: Any = functools.partial(
        jnp.linalg.eigvalsh, UPLO=UPLO, symmetrize_input=symmetrize_input
    )

    def ours(a: Array) -> Array:
        lower = UPLO != "U"
        return decompositions.eigh(a, vectors=False, lower=lower, symmetrize=symmetrize_input)[0]

    return _computed("eigvalsh", _if_square(theirs), ours, a, refusal=refusal_of_decomposition)


@functools.partial(jax.jit, static_argnames=("mode",))
def qr(a: ArrayLike, mode: str = "reduced") -> Any:
    """QR factors, with the semantics of :func:`jax.numpy.linalg.qr`.

    Householder reflections give the signs of LAPACK's factors.

    Parameters
    ----------
    a
        Array of shape ``(..., m, n)``.
    mode
        ``"reduced"`` for factors of shapes ``(..., m, k)`` and ``(..., k, n)`` with
        ``k = min(m, n)``; ``"complete"`` for ``(..., m, m)`` and ``(..., m, n)``; ``"r"`` for the
        reduced triangular factor alone; ``"raw"`` is JAX's own function.

    Returns
    -------
    Q, R
        A named tuple with ``a == Q @ R``, or ``R`` alone.

    Raises
    ------
    ValueError
        If ``a`` has less than two dimensions, or there is no such mode.
    TypeError
        If ``a`` is not an array.
    """

    def ours(a: Array) -> Any:
        *q, r = decompositions.qr(a, vectors=mode != "r", full=mode == "complete")
        return (*q, r)

    def refusal(a: Array) -> str | None:
        return "qr of mode raw is JAX's own" if mode == "raw" else refusal_of_decomposition(a)

    theirs: Any = functools.partial(jnp.linalg.qr, mode=mode)
    return _computed("qr", theirs, ours, a, refusal=refusal)


@functools.partial(jax.jit, static_argnames=("hermitian",))
def pinv(
    a: ArrayLike,
    rtol: ArrayLike | None = None,
    hermitian: bool = False,
    *,
    rcond: ArrayLike | None = None,
) -> Array:
    """Pseudo-inverse, with the semantics of :func:`jax.numpy.linalg.pinv`.

    Parameters
    ----------
    a
        Array of shape ``(..., m, n)``.
    rtol
        Singular values up to ``rtol`` times the largest count as zero; an array of the leading
        shape. By default it is ``10 * max(m, n)`` times the type's epsilon.
    hermitian
        Whether the matrices are symmetric; then it follows from :func:`eigh`.
    rcond
        Another name of ``rtol``.

    Returns
    -------
    Array
        Of shape ``(..., n, m)``.

    Raises
    ------
    ValueError
        If ``a`` has less than two dimensions, or both ``rtol`` and ``rcond`` are given.
    TypeError
        If ``a`` is not an array.
    """

    def theirs(a: ArrayLike) -> Array:
        return jnp.linalg.pinv(a, rtol, hermitian, rcond=rcond)

    if hermitian:
        return composed(theirs)(a)

    def ours(a: Array) -> Array:
        given = rcond if rtol is None else rtol
        if given is None:
            given = 10.0 * max(a.shape[-2:]) * float(np.finfo(a.dtype).eps)
        return matrix_functions.pseudo_inverse(a, compat.as_type(given, a.dtype))

    refusal = refusal_of_decomposition
    return _computed("pinv", theirs, ours, a, refusal=refusal, if_finite=True)


@functools.partial(jax.jit, static_argnames=("upper_triangular", "max_squarings"))
def expm(A: ArrayLike, *, upper_triangular: bool = False, max_squarings: int = 16) -> Array:
    """Matrix exponential, with the semantics of :func:`jax.scipy.linalg.expm`.

    It is the scaling and squaring method (Higham, SIAM J. Matrix Anal. Appl. 26, 2005) with one
    Padé approximant for all matrices of a type, and as many squarings as the batch needs.

    Parameters
    ----------
    A
        Array of shape ``(..., n, n)``.
    upper_triangular
        Whether the matrices are upper triangular.
    max_squarings
        The most squarings.

    Returns
    -------
    Array
        The exponentials, of the same shape; NaN where a matrix needs more squarings.

    Raises
    ------
    ValueError
        If the matrices are not square.
    TypeError
        If ``A`` is not an array.
    """
    keywords: Any = {"upper_triangular": upper_triangular, "max_squarings": max_squarings}
    theirs = functools.partial(jsp_linalg.expm, **keywords)
    ours = functools.partial(matrix_functions.exponential, **keywords)
    return _computed("expm", theirs, ours, A, refusal=refusal_of_decomposition)


@functools.partial(
    jax.jit, static_argnames=("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
)
def triangular_solve(
    a: ArrayLike,
    b: ArrayLike,
    *,
    left_side: bool = False,
    lower: bool = False,
    transpose_a: bool = False,
    conjugate_a: bool = False,
    unit_diagonal: bool = False,
) -> Array:
    """Solve with a triangle, with the semantics of :func:`jax.lax.linalg.triangular_solve`.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``, of which one triangle is read.
    b
        Array of shape ``(..., n, m)`` if ``left_side``, else ``(..., m, n)``, or one dimension
        less; leading dimensions are those of ``a``.
    left_side
        Whether to solve ``a @ x = b`` instead of ``x @ a = b``.
    lower
        Which triangle.
    transpose_a, conjugate_a
        Whether to transpose or conjugate the triangle.
    unit_diagonal
        Whether the diagonal is assumed to be ones, and not read.

    Returns
    -------
    Array
        The solutions, of the shape and type of ``b``.

    Raises
    ------
    ValueError, TypeError
        As JAX's.
    """
    theirs = functools.partial(
        lax.linalg.triangular_solve,
        left_side=left_side,
        lower=lower,
        transpose_a=transpose_a,
        conjugate_a=conjugate_a,
        unit_diagonal=unit_diagonal,
    )

    def ours(a: Array, b: Array) -> Array:
        vector = b.ndim == a.ndim - 1
        axis = b.ndim if left_side else b.ndim - 1
        x = matrices.triangular_solve(
            a,
            jnp.expand_dims(b, axis) if vector else b,
            left_side=left_side,
            lower=lower,
            transpose=transpose_a,
            unit_diagonal=unit_diagonal,
        )
        return jnp.squeeze(x, axis) if vector else x

    return _computed("triangular_solve", theirs, ours, a, b)


@functools.partial(
    jax.jit,
    static_argnames=("trans", "lower", "unit_diagonal", "overwrite_b", "debug", "check_finite"),
)
def solve_triangular(
    a: ArrayLike,
    b: ArrayLike,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    debug: Any = None,
    check_finite: bool = True,
) -> Array:
    """Solve with a triangle, with the semantics of :func:`jax.scipy.linalg.solve_triangular`.

    Parameters
    ----------
    a
        Array of shape ``(..., n, n)``, of which one triangle is read.
    b
        Array of shape ``(n,)`` or ``(..., n, m)``. Leading dimensions broadcast against those of
        ``a``.
    trans
        0 or ``"N"`` for ``a``, 1 or ``"T"`` for its transpose, 2 or ``"C"`` for its conjugate
        transpose.
    lower
        Which triangle.
    unit_diagonal
        Whether the diagonal is assumed to be ones, and not read.
    overwrite_b, debug, check_finite
        Unused; they exist in SciPy's signature.

    Returns
    -------
    Array
        The shape of ``b`` with the leading dimensions broadcast.

    Raises
    ------
    ValueError, TypeError
        As JAX's.
    """
    theirs = functools.partial(
        jsp_linalg.solve_triangular, trans=trans, lower=lower, unit_diagonal=unit_diagonal
    )
    function = functools.partial(
        matrices.triangular_solve,
        left_side=True,
        lower=lower,
        transpose=trans not in (0, "N"),
        unit_diagonal=unit_diagonal,
    )

    def ours(a: Array, b: Array) -> Array:
        # JAX still accepts a batch of vectors too.
        vectors = b.ndim == 1 or (a.ndim == b.ndim + 1 and a.shape[-1] == b.shape[-1])
        return _with_vectors(function, a, b, vectors=vectors)

    return _computed("solve_triangular", theirs, ours, a, b)


@mode_independent
def _unpacked(both: Array, permutation: Array, permute_l: bool) -> tuple[Array, ...]:
    """Return the matrices of :func:`lu`."""
    identity = jnp.eye(both.shape[-1], dtype=both.dtype)
    lower, upper = jnp.tril(both, -1) + identity, jnp.triu(both)
    if permute_l:
        places = jnp.argsort(permutation, axis=-1)
        return jnp.take_along_axis(lower, places[..., None], axis=-2), upper
    # The one of column i is in row permutation[i].
    rows = lax.broadcasted_iota(permutation.dtype, both.shape, both.ndim - 2)
    return (rows == permutation[..., None, :]).astype(both.dtype), lower, upper


@mode_independent
def _solve_by_factors(a: Array, b: Array) -> Array:
    """Solve so that derivatives solve with the same factors."""
    factors, _, permutation = matrices.lu(lax.stop_gradient(a))
    triangle = functools.partial(matrices.triangular_solve, factors, left_side=True)

    def solved(_: Any, b: Array) -> Array:
        x = triangle(b[permutation], lower=True, unit_diagonal=True)
        return triangle(x, lower=False)

    def solved_transposed(_: Any, b: Array) -> Array:
        x = triangle(b, lower=False, transpose=True)
        x = triangle(x, lower=True, transpose=True, unit_diagonal=True)
        return x[jnp.argsort(permutation)]

    result: Array = lax.custom_linear_solve(
        functools.partial(matmul, a, precision=lax.Precision.HIGHEST),
        b,
        solve=solved,
        transpose_solve=solved_transposed,
    )
    return result


@mode_independent
def _with_vectors(function: Any, a: Array, b: Array, *, vectors: bool) -> Array:
    """Broadcast leading dimensions, each of the right-hand sides being a vector or a matrix."""

    def vector_function(a: Array, b: Array) -> Array:
        x: Array = function(a, b[:, None])
        return x[:, 0]

    a, b = split_alike([_leading_labels(a, 2), _leading_labels(b, 1 if vectors else 2)], (a, b))
    signature = "(n,n),(n)->(n)" if vectors else "(n,n),(n,m)->(n,m)"
    mapped = jnp.vectorize(vector_function if vectors else function, signature=signature)
    result: Array = mapped(a, b)
    return result


def _leading_labels(x: Array, own: int) -> Dims:
    """Label dimensions in front of the last ``own`` as they broadcast, without those of size 1."""
    sizes = x.shape[: x.ndim - own]
    leading = (i if size > 1 else None for i, size in enumerate(sizes, -len(sizes)))
    return (*leading, *[None] * own)


def _refusal(a: Array) -> str | None:
    return refusal(a.shape[-1], a.dtype)


def _refusal_of_determinant(a: Array, formulas_to: int) -> str | None:
    # The size may be symbolic, which the first refusal excludes.
    why = _refusal(a)
    if why is None and a.shape[-1] <= formulas_to:
        return f"up to {formulas_to}x{formulas_to} there is a formula, which XLA fuses"
    return why


def _computed(
    call: str,
    theirs: Callable[..., Any],
    ours: Callable[..., Result],
    *operands: ArrayLike,
    refusal: Callable[[Array], str | None] = _refusal,
    if_finite: bool = False,
) -> Result:
    """Compute a call by ``ours``, or by JAX's ``theirs`` for a reason that ``explain`` shows.

    Operands are converted to the type that JAX's function computes in. JAX's function raises the
    errors about them, and the results have its structure. With ``if_finite`` it computes finite
    matrices only.
    """
    types, structure = jax.tree.flatten(compat.type_of_whole(theirs, *operands))
    arrays = [_as_type(x, types[0].dtype) for x in operands]
    if is_left_to_jax(call, arrays[0], refusal(arrays[0])):
        by_jax = decompositions.on_finite_matrices(theirs) if if_finite else theirs
        result: Result = by_jax(*arrays)
    else:
        result = jax.tree.unflatten(structure, jax.tree.leaves(ours(*arrays)))
    return result


def _if_square(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    """Return one of JAX's functions that refuses rows and columns.

    JAX adds the transpose, which broadcasts them to a matrix.
    """

    def checked(a: Array) -> Any:
        result = function(a)
        shape = jnp.shape(a)
        if shape[-1] != shape[-2]:
            raise ValueError(f"matrices have the shape [..., n, n], not {shape}")
        return result

    return checked


def _as_type(x: ArrayLike, dtype: Any) -> Array:
    """Convert to a result's type; singular values of complex matrices are real."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(x)
    return compat.as_type(x, dtype)


def _pivots_and_sign(factors: Array, pivots: Array) -> tuple[Array, Array]:
    """Return the diagonal of U, and the sign of the permutation."""
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    exchanged = pivots != jnp.arange(pivots.shape[-1], dtype=pivots.dtype)
    odd = jnp.sum(exchanged, axis=-1) % 2
    return diagonal, (1 - 2 * odd).astype(factors.dtype)


@custom_jvp
@mode_independent
def _det(a: Array) -> Array:
    factors, pivots, _ = matrices.lu(a)
    diagonal, sign = _pivots_and_sign(factors, pivots)
    return sign * jnp.prod(diagonal, axis=-1)


@_det.defjvp
@mode_independent
def _det_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Return the trace of the adjugate times the tangent.

    The adjugate of ``U`` needs no division by its last pivot ``u``: it is
    ``inv(V) @ diag(p * u, ..., p * u, p)``, where ``V`` has 1 in place of ``u`` and ``p`` is the
    product of the other pivots.
    """
    ((a,), (a_dot,)) = primals, tangents
    factors, pivots, permutation = matrices.lu(a)
    diagonal, sign = _pivots_and_sign(factors, pivots)
    others = sign * jnp.prod(diagonal[..., :-1], axis=-1)
    determinant = others * diagonal[..., -1]
    scales = jnp.broadcast_to(determinant[..., None], diagonal.shape).at[..., -1].set(others)
    permuted = jnp.take_along_axis(a_dot, permutation[..., None], axis=-2)
    x = matrices.triangular_solve(factors, permuted, left_side=True, lower=True, unit_diagonal=True)
    upper = factors.at[..., -1, -1].set(1)
    # With a second zero among the pivots the adjugate is zero, or does not follow from the factors.
    deficient = jnp.any(diagonal[..., :-1] == 0, axis=-1)
    upper = jnp.where(deficient[..., None, None], jnp.eye(a.shape[-1], dtype=a.dtype), upper)
    x = matrices.triangular_solve(upper, scales[..., None] * x, left_side=True, lower=False)
    trace = jnp.trace(x, axis1=-2, axis2=-1)
    return determinant, jnp.where(deficient, jnp.zeros_like(trace), trace)


@custom_jvp
@mode_independent
def _slogdet(a: Array) -> tuple[Array, Array]:
    factors, pivots, _ = matrices.lu(a)
    diagonal, sign = _pivots_and_sign(factors, pivots)
    logarithm = jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1)
    return sign * jnp.prod(jnp.sign(diagonal), axis=-1), logarithm


@_slogdet.defjvp
@mode_independent
def _slogdet_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    ((a,), (a_dot,)) = primals, tangents
    sign, logarithm = _slogdet(a)
    trace = jnp.trace(matrices.solve(a, a_dot), axis1=-2, axis2=-1)
    return (sign, logarithm), (jnp.zeros_like(sign), trace)
