"""``matmul`` and ``dot_general``: JAX's signatures and semantics over one primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.interop.patch import replace
from jax_tilekern.interop.result_types import product_type
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.ops.products.labelled_operands import check_operands
from jax_tilekern.ops.products.quantized_weights import (
    QuantizedWeights,
    can_multiply,
    multiply_by,
    split_weights,
)
from jax_tilekern.plans.contraction import Contraction, DimensionNumbers


@jitted(
    "precision", "preferred_element_type", "out_sharding", functions=["epilogue"], weights=["b"]
)
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Array:
    """Matrix product with the semantics of :func:`jax.numpy.matmul`, and an epilogue.

    Parameters
    ----------
    a
        Array of shape ``(..., m, k)`` or ``(k,)``.
    b
        Array of shape ``(..., k, n)`` or ``(k,)``, or :class:`QuantizedWeights`. Batch dimensions
        broadcast against those of ``a``; what is broadcast is not materialised.
    precision
        As in :func:`jax.lax.dot_general`: ``None``, a name, a ``jax.lax.Precision`` or a pair, or
        a ``jax.lax.DotAlgorithmPreset``. On a GPU float32 operands are multiplied in TF32 by
        default and in float32 at ``HIGHEST``.
    preferred_element_type
        Type of the result. By default that of the operands after promotion.
    out_sharding
        Sharding of the result on a mesh with explicit axes. It is required where contracted
        dimensions of both operands are sharded.
    epilogue
        A function ``epilogue(accumulator, *operands)`` of scalars, which is applied to every
        element of the product in the kernel that computes it. The accumulator has the type in
        which the product is accumulated: float32 for floats of 16 and 8 bits, int32 for integers of
        16 and 8 bits, otherwise the operands' type. It may return several scalars, in any
        tree. A call is traced once for each function object and the values of the variables
        that it reads.
    operands
        Arrays that broadcast to the result by NumPy's rules: a bias ``(n,)``, a scale of rows
        ``(m, 1)``, a residual ``(m, n)``. The epilogue gets one element of each.

    Returns
    -------
    Array
        Shape ``(..., m, n)``, without the dimension that a one-dimensional operand lacks. With an
        epilogue, an array for each scalar that it returns. What it returns in the accumulator's
        type is rounded to the product's type, once; any other type is kept.

    Raises
    ------
    ValueError
        If an operand is a scalar, or batch dimensions do not broadcast, or an operand of the
        epilogue does not broadcast to the result.
    TypeError
        If an operand is not an array, or contracted sizes differ, or the epilogue is not a function
        of scalars.
    jax.sharding.ShardingTypeError
        If the operands' explicit shardings do not go together, or do not settle the result's.

    See Also
    --------
    linear : a product with bias and activation.
    explain : which kernel computes a product, and why.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
    >>> jax.grad(lambda w: jtk.matmul(x, w).sum())(w).shape
    (128, 32)
    """
    return matrix_product(
        Role("matmul"), a, b, precision, preferred_element_type, out_sharding, epilogue, operands
    )


def matrix_product(
    role: Role,
    a: ArrayLike,
    b: ArrayLike,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Array:
    """Compute :func:`matmul`; ``role`` is what errors call the epilogue."""
    b, weights = split_weights(b)
    result = product_type(
        jnp.matmul,
        a,
        b,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    a, b, contraction = labelled_matrices(jnp.asarray(a), jnp.asarray(b))
    product = _product(
        a, b, contraction, result, precision, out_sharding, epilogue, operands, role,
        weights=weights,
    )  # fmt: skip
    if epilogue is not None:
        return product
    return compat.with_type(product, result.dtype, result.weak_type)


@jitted("precision", "preferred_element_type", "out_sharding", functions=["epilogue"])
def symmetric_matmul(
    a: ArrayLike,
    b: ArrayLike | None = None,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Array:
    """Matrix product ``a @ b`` that is known to be symmetric; ``a @ a.mT`` by default.

    On a Hopper GPU a kernel may compute the tiles on and below the diagonal alone, and store those
    below it twice. Elsewhere it is an ordinary product.

    Parameters
    ----------
    a
        Array of shape ``(..., m, k)``.
    b
        Array of shape ``(..., k, m)``, by default ``a.mT``. Other such products are those of
        symmetric matrices that commute, such as polynomials of one, and of ``a`` and
        ``(a * weights).mT``. Batch dimensions broadcast.
    precision, preferred_element_type, out_sharding
        As in :func:`matmul`.
    epilogue
        A function ``epilogue(accumulator, *operands)`` of scalars, as in :func:`matmul`.
    operands
        Arrays that broadcast to the result, of which the epilogue makes a symmetric one: scalars,
        numbers of each matrix ``(..., 1, 1)``, symmetric matrices ``(..., m, m)``, or a scale of
        rows ``(..., m, 1)`` with the same scale of columns ``(..., 1, m)``.

    Returns
    -------
    Array
        Shape ``(..., m, m)``, as :func:`matmul` returns it. Nothing checks that the product and
        what the epilogue makes of it are symmetric: where they are not, elements above the diagonal
        may be those below it.

    Raises
    ------
    ValueError
        If ``a`` or ``b`` has fewer than two dimensions, or the product is not square, or batch
        dimensions do not broadcast, or the epilogue has more operands of rows than of columns.
    TypeError, jax.sharding.ShardingTypeError
        As in :func:`matmul`.

    Notes
    -----
    Derivatives are those of the product. Their factors need not be symmetric.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> gram = jtk.symmetric_matmul(jnp.ones((64, 128)))
    >>> cubic = jtk.symmetric_matmul(
    ...     gram, gram, epilogue=lambda x, y: 2 * x - y, operands=(gram,)
    ... )
    >>> cubic.shape
    (64, 64)
    """
    check_operands("symmetric_matmul", epilogue, operands=operands)
    a = jnp.asarray(a)
    other = None if b is None else jnp.asarray(b)
    _check_symmetric(a, other, operands)
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    if other is None:
        result = product_type(_gram_by_jax, a, **options)
    else:
        result = product_type(jnp.matmul, a, other, **options)
    if other is None:
        # Its rows are the columns of the transpose.
        *batch, m, n, k = range(a.ndim + 1)
        other, contraction = a, Contraction((*batch, m, k), (*batch, n, k), (*batch, m, n))
    else:
        a, other, contraction = labelled_matrices(a, other)
    product = _product(
        a, other, contraction, result, precision, out_sharding, epilogue or _identity, operands,
        Role("symmetric_matmul"), symmetric=True,
    )  # fmt: skip
    if epilogue is not None:
        return product
    return compat.with_type(product, result.dtype, result.weak_type)


def _gram_by_jax(a: Array, **options: Any) -> Array:
    result: Array = jnp.matmul(a, a.mT, **options)
    return result


def _identity(accumulator: Any) -> Any:
    return accumulator


def _check_symmetric(a: Array, b: Array | None, operands: Sequence[ArrayLike]) -> None:
    if a.ndim < 2 or (b is not None and (b.ndim < 2 or a.shape[-2] != b.shape[-1])):
        shapes = f"shape {a.shape}" if b is None else f"shapes {a.shape} and {b.shape}"
        raise ValueError(
            f"symmetric_matmul takes matrices (..., m, k) and (..., k, m), not {shapes}"
        )
    sizes = [(1, 1, *np.shape(x))[-2:] for x in operands]
    row_operands, column_operands = (sum(x[i] == 1 < x[1 - i] for x in sizes) for i in (1, 0))
    if row_operands != column_operands:
        raise ValueError(
            f"symmetric_matmul: the epilogue has {row_operands} operands of rows (..., m, 1) and "
            f"{column_operands} of columns (..., 1, m), of shapes "
            f"{[np.shape(x) for x in operands]}: "
            "pass each as both, or use matmul"
        )


def labelled_matrices(a: Array, b: Array) -> tuple[Array, Array, Contraction]:
    """Return the operands of a matrix product without what is broadcast, and the contraction."""
    # Batch dimensions are labelled from the right, as broadcasting aligns them. An operand whose
    # size is 1 where the other's is not goes without the label.
    batch = range(max(a.ndim, b.ndim, 2) - 2)
    k, m, n = (len(batch) + i for i in range(3))
    a_labels = (*batch[max(0, len(batch) - (a.ndim - 2)) :], m, k) if a.ndim > 1 else (k,)
    b_labels = (*batch[max(0, len(batch) - (b.ndim - 2)) :], k, n) if b.ndim > 1 else (k,)
    a_sizes, b_sizes = (
        dict(zip(labels, x.shape, strict=True)) for labels, x in ((a_labels, a), (b_labels, b))
    )
    a_alone = {x for x in batch if x in a_sizes and b_sizes.get(x, 1) == 1}
    b_alone = {x for x in batch if x in b_sizes and x not in a_alone and a_sizes.get(x, 1) == 1}
    a, a_labels = _without(a, a_labels, b_alone)
    b, b_labels = _without(b, b_labels, a_alone)
    out = (*batch, *((m,) if m in a_labels else ()), *((n,) if n in b_labels else ()))
    return a, b, Contraction(a_labels, b_labels, out)


@jitted(
    "dimension_numbers",
    "precision",
    "preferred_element_type",
    "out_sharding",
    functions=["epilogue"],
    weights=["rhs"],
)
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Array:
    """General contraction with the signature and semantics of :func:`jax.lax.dot_general`.

    Takes the place of ``lax.dot_general`` where a library accepts one, for example
    ``flax.linen.Dense(dot_general=jax_tilekern.dot_general)``, ``flax.nnx.Linear`` or
    ``jnp.einsum(..., _dot_general=jax_tilekern.dot_general)``.

    Parameters
    ----------
    lhs, rhs
        Arrays of any rank; ``rhs`` may be :class:`QuantizedWeights`.
    dimension_numbers
        ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, non-negative. ``None``
        for products of matrices and vectors, as far as JAX's function takes it.
    precision
        As in :func:`matmul`.
    preferred_element_type
        Type of the result. By default that of the operands after promotion.
    out_sharding, epilogue, operands
        As in :func:`matmul`.

    Returns
    -------
    Array
        Its dimensions are the batch dimensions, then those of ``lhs`` that are neither batch nor
        contracted, then those of ``rhs``. With an epilogue, as in :func:`matmul`.

    Raises
    ------
    TypeError
        If ``dimension_numbers`` do not fit the operands, or sizes or types do not match, or the
        epilogue is not a function of scalars.
    ValueError
        If an operand of the epilogue does not broadcast to the result.
    """
    rhs, weights = split_weights(rhs)
    compat.check_arraylike("dot_general", lhs, rhs)
    result = product_type(
        lax.dot_general,
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    contraction = Contraction.from_dot_general(lhs.ndim, rhs.ndim, dimension_numbers)
    role = Role("dot_general")
    return _product(
        lhs, rhs, contraction, result, precision, out_sharding, epilogue, operands, role,
        weights=weights,
    )  # fmt: skip


def _product(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    result: Any,
    precision: lax.PrecisionLike,
    out_sharding: NamedSharding | PartitionSpec | None,
    epilogue: Callable[..., Any] | None,
    operands: Sequence[ArrayLike],
    role: Role,
    *,
    symmetric: bool = False,
    weights: QuantizedWeights | None = None,
) -> Array:
    """Contract two arrays; ``result`` is the type of JAX's own product of them.

    ``weights`` are those that ``rhs`` was made of.
    """
    explicit = None if out_sharding is None else compat.explicit_sharding(result)
    canonical = compat.canonicalize_precision(precision)
    check_operands(role.call, epilogue, operands=operands)
    if weights is not None and can_multiply(lhs, weights, contraction, result.dtype):
        by_weights: Array = multiply_by(
            lhs,
            weights,
            contraction,
            precision=canonical,
            out_dtype=result.dtype,
            shape=result.shape,
            role=role,
            epilogue=epilogue,
            operands=operands,
            out_sharding=explicit,
        )
        return by_weights
    if epilogue is None:
        return contract(
            lhs,
            rhs,
            contraction=contraction,
            precision=canonical,
            out_dtype=result.dtype,
            out_sharding=explicit,
        )
    results: Array = contract_with_epilogue(
        lhs,
        rhs,
        contraction=contraction,
        precision=canonical,
        product=result.dtype,
        shape=result.shape,
        epilogue=epilogue,
        operands=operands,
        symmetric=symmetric,
        out_sharding=explicit,
        role=role,
    )
    return results


def _without(x: Array, labels: tuple[int, ...], dropped: set[int]) -> tuple[Array, tuple[int, ...]]:
    """Squeeze the dropped labels' dimensions."""
    axes = [i for i, label in enumerate(labels) if label in dropped]
    return lax.squeeze(x, axes), tuple(label for label in labels if label not in dropped)


replace(compat.dot_general_p, dot_general)
