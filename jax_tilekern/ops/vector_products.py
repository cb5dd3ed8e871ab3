"""Products with vectors: JAX's signatures and semantics over the primitive of matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.matmul import matmul
from jax_tilekern.plans.gemm.contraction import Contraction


@jitted("precision", "preferred_element_type", "out_sharding")
def dot(
    x: ArrayLike,
    y: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Dot product with the semantics of :func:`jax.numpy.dot`.

    Parameters
    ----------
    x
        Array of shape ``(..., k)``, or a scalar.
    y
        Array of shape ``(k,)`` or ``(..., k, n)``, or a scalar. Unlike in
        :func:`jax_tilekern.matmul`, leading dimensions of the two do not broadcast: the result
        has those of ``x``, then those of ``y``.
    precision, preferred_element_type, out_sharding
        As in :func:`jax_tilekern.matmul`. A product with a vector is computed in float32 itself
        where one of matrices goes through TF32.

    Returns
    -------
    Array
        A scalar for two vectors.

    Raises
    ------
    TypeError
        If an operand is not an array, or contracted sizes differ.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jax.grad(jtk.dot)(jnp.ones(3), jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    result = compat.result_type(
        functools.partial(
            jnp.dot,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        ),
        x,
        y,
    )
    x, y = jnp.asarray(x), jnp.asarray(y)
    contracted = ((x.ndim - 1,), (max(0, y.ndim - 2),)) if x.ndim and y.ndim else ((), ())
    product = contract(
        x,
        y,
        Contraction.of_dot_general(x.ndim, y.ndim, (contracted, ((), ()))),
        precision=compat.canonicalize_precision(precision),
        out_dtype=result.dtype,
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )
    return compat.with_type(product, result.dtype, result.weak_type)


@jitted("precision", "preferred_element_type")
def vdot(
    x: ArrayLike,
    y: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Dot product of all elements, with the semantics of :func:`jax.numpy.vdot`.

    Parameters
    ----------
    x
        Array of any shape; conjugated if it is complex.
    y
        Array of any shape with as many elements.
    precision, preferred_element_type
        As in :func:`dot`.

    Returns
    -------
    Array
        A scalar.

    Raises
    ------
    TypeError
        If an operand is not an array, or sizes differ.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    x = jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    return dot(
        x.ravel(), y.ravel(), precision=precision, preferred_element_type=preferred_element_type
    )


@jitted("precision", "preferred_element_type", "out_sharding")
def matvec(
    a: ArrayLike,
    x: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Product of a matrix and a vector, with the semantics of :func:`jax.numpy.matvec`.

    ``vmap`` over vectors makes a product of matrices of it.

    Parameters
    ----------
    a
        Array of shape ``(..., m, k)``.
    x
        Array of shape ``(..., k)``. Batch dimensions broadcast against those of ``a``; what is
        broadcast is not materialised.
    precision, preferred_element_type, out_sharding
        As in :func:`dot`.

    Returns
    -------
    Array
        Shape ``(..., m)``.

    Raises
    ------
    ValueError
        If an operand has too few dimensions, or shapes do not fit.
    TypeError
        If an operand is not an array.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> a, xs = jnp.ones((64, 128)), jnp.ones((5, 128))
    >>> jax.vmap(jtk.matvec, (None, 0))(a, xs).shape
    (5, 64)
    """
    _check(jnp.matvec, a, x)
    product = matmul(
        a,
        jnp.asarray(x)[..., None],
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=_with_whole_dim(out_sharding, max(np.ndim(a) - 1, np.ndim(x)), -1),
    )
    return lax.squeeze(product, (product.ndim - 1,))


@jitted("precision", "preferred_element_type", "out_sharding")
def vecmat(
    x: ArrayLike,
    a: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Product of a conjugated vector and a matrix, as :func:`jax.numpy.vecmat` has it.

    Parameters
    ----------
    x
        Array of shape ``(..., k)``; conjugated if it is complex.
    a
        Array of shape ``(..., k, n)``. Batch dimensions broadcast as in :func:`matvec`.
    precision, preferred_element_type, out_sharding
        As in :func:`dot`.

    Returns
    -------
    Array
        Shape ``(..., n)``.

    Raises
    ------
    ValueError
        If an operand has too few dimensions, or shapes do not fit.
    TypeError
        If an operand is not an array.
    """
    _check(jnp.vecmat, x, a)
    x = jnp.asarray(x)
    row = (jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x)[..., None, :]
    product = matmul(
        row,
        a,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=_with_whole_dim(out_sharding, max(np.ndim(a) - 1, np.ndim(x)), -2),
    )
    return lax.squeeze(product, (product.ndim - 2,))


def _check(function: Callable[..., Array], *operands: ArrayLike) -> None:
    """Raise JAX's exceptions for shapes; the product checks types and shardings."""
    avals = map(jax.typeof, operands)
    jax.eval_shape(function, *(jax.ShapeDtypeStruct(x.shape, np.float32) for x in avals))


def _with_whole_dim(
    sharding: NamedSharding | PartitionSpec | None, rank: int, position: int
) -> NamedSharding | PartitionSpec | None:
    """Insert a dimension that is not sharded, at the last or last but one position."""
    if sharding is None:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    partitions = [*spec.partitions, *(None,) * (rank - len(spec.partitions))]
    partitions.insert(rank + 1 + position, None)
    spec = spec.update(partitions=tuple(partitions))
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else spec
