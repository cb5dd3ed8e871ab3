"""Products with vectors: JAX's signatures and semantics over the primitive of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.result_types import product_type
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.matmul import matmul
from jax_tilekern.plans.contraction import Contraction


@jitted("precision", "preferred_element_type", "out_sharding")
def dot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Dot product with the semantics of :func:`jax.numpy.dot`.

    Parameters
    ----------
    a
        Array of shape ``(..., k)``, or a scalar.
    b
        Array of shape ``(k,)`` or ``(..., k, n)``, or a scalar. Unlike in
        :func:`jax_tilekern.matmul`, leading dimensions of the two do not broadcast: the result
        has those of ``a``, then those of ``b``.
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
    result = product_type(
        jnp.dot,
        a,
        b,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    a, b = jnp.asarray(a), jnp.asarray(b)
    contracted = ((a.ndim - 1,), (max(0, b.ndim - 2),)) if a.ndim and b.ndim else ((), ())
    product = contract(
        a,
        b,
        contraction=Contraction.from_dot_general(a.ndim, b.ndim, (contracted, ((), ()))),
        precision=compat.canonicalize_precision(precision),
        out_dtype=result.dtype,
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )
    return compat.with_type(product, result.dtype, result.weak_type)


@jitted("precision", "preferred_element_type")
def vdot(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Dot product of all elements, with the semantics of :func:`jax.numpy.vdot`.

    Parameters
    ----------
    a
        Array of any shape; conjugated if it is complex.
    b
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
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    result = product_type(jnp.vdot, a, b, **options)
    a, b = jnp.asarray(a), jnp.asarray(b)
    a = jnp.conj(a) if jnp.issubdtype(a.dtype, jnp.complexfloating) else a
    if a.shape != b.shape:
        return dot(a.ravel(), b.ravel(), **options)
    # Arrays of one shape are contracted as they lie.
    labels = tuple(range(a.ndim))
    product = contract(
        a,
        b,
        contraction=Contraction(labels, labels, ()),
        precision=compat.canonicalize_precision(precision),
        out_dtype=result.dtype,
    )
    return compat.with_type(product, result.dtype, result.weak_type)


@jitted("precision", "preferred_element_type", "out_sharding")
def matvec(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Product of a matrix and a vector, with the semantics of :func:`jax.numpy.matvec`.

    ``vmap`` over vectors makes a product of matrices of it.

    Parameters
    ----------
    x1
        Array of shape ``(..., m, k)``.
    x2
        Array of shape ``(..., k)``. Batch dimensions broadcast against those of ``x1``; what is
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
    _check(jnp.matvec, x1, x2)
    product = matmul(
        x1,
        jnp.asarray(x2)[..., None],
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=_with_whole_dim(out_sharding, max(np.ndim(x1) - 1, np.ndim(x2)), -1),
    )
    return lax.squeeze(product, (product.ndim - 1,))


@jitted("precision", "preferred_element_type", "out_sharding")
def vecmat(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Product of a conjugated vector and a matrix, as :func:`jax.numpy.vecmat` has it.

    Parameters
    ----------
    x1
        Array of shape ``(..., k)``; conjugated if it is complex.
    x2
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
    _check(jnp.vecmat, x1, x2)
    x1 = jnp.asarray(x1)
    row = (jnp.conj(x1) if jnp.issubdtype(x1.dtype, jnp.complexfloating) else x1)[..., None, :]
    product = matmul(
        row,
        x2,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=_with_whole_dim(out_sharding, max(np.ndim(x2) - 1, np.ndim(x1)), -2),
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
