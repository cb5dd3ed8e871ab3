"""Tensor products: JAX's own functions, whose products trace to the primitive of matrix products.

JAX says which ``dot_general`` a tensor product is, and in which order several of them are
cheapest; :func:`jax_tilekern.patch` lets each be this library's. An ``einsum`` of two operands is
the primitive itself, which writes the result in the order that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.interop.patch import patch
from jax_tilekern.interop.result_types import product_type
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.labelled_operands import swapped_precision
from jax_tilekern.plans.contraction import Contraction


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: str | bool | list[tuple[int, ...]] = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    _dot_general: Callable[..., Any] = lax.dot_general,
) -> Array:
    """Einstein summation, with the semantics of :func:`jax.numpy.einsum`.

    Parameters
    ----------
    subscripts
        Labels of the dimensions, for example ``"bqhd,bkhd->bhqk"``; or the first operand, followed
        by the labels of its dimensions as a sequence, and so on.
    *operands
        Arrays of any rank, and any number of them: a path of products of two is chosen.
    out
        Not supported, as in JAX.
    optimize
        How the path is chosen: ``"auto"``, ``"optimal"``, ``"greedy"``, whether to choose at all,
        or the path itself, as :func:`jax.numpy.einsum_path` returns it.
    precision, preferred_element_type
        As in :func:`jax_tilekern.matmul`.
    out_sharding
        As in :func:`jax_tilekern.dot_general`.

    Returns
    -------
    Array
        Its dimensions are the labels after the arrow.

    Raises
    ------
    ValueError
        If the subscripts do not fit the operands.
    TypeError
        If an operand is not an array, or sizes of a label differ.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> q, k = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 8))
    >>> jtk.einsum("bqhd,bkhd->bhqk", q, k).shape
    (2, 3, 5, 7)
    """
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    path: dict[str, Any] = {"out": out, "optimize": optimize}
    if _dot_general is not lax.dot_general:
        # Layers of flax pass the hook of their user.
        return jnp.einsum(subscripts, *operands, **path, **options, _dot_general=_dot_general)
    # A path of one product has no other order. JAX raises the errors for what is no array.
    has_two_operands = (
        isinstance(subscripts, str) and len(operands) == 2 and all(map(_is_array, operands))
    )
    if has_two_operands and isinstance(optimize, str) and optimize == "auto" and out is None:
        return _einsum_of_two(subscripts, *operands, **options)
    with patch():
        return jnp.einsum(subscripts, *operands, **path, **options)


def _is_array(x: Any) -> bool:
    is_number = isinstance(x, (Array, np.ndarray, np.generic, int, float, complex))
    return is_number or hasattr(x, "__jax_array__")


@jitted("subscripts", "precision", "preferred_element_type", "out_sharding")
def _einsum_of_two(
    subscripts: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> Array:
    options: dict[str, Any] = {
        "subscripts": subscripts,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    result = product_type(_einsum_by_jax, a, b, **options)
    a, b = jnp.asarray(a), jnp.asarray(b)
    contraction = _contraction(subscripts, a.shape, b.shape)
    if contraction is None:
        with patch():
            return _einsum_by_jax(a, b, **options)
    canonical = compat.canonicalize_precision(precision)
    if contraction.swapped().dot_general_out == contraction.out:
        # A product that is left to XLA is not transposed either.
        a, b, contraction = b, a, contraction.swapped()
        canonical = swapped_precision(canonical)
    product = contract(
        a,
        b,
        contraction=contraction,
        precision=canonical,
        out_dtype=result.dtype,
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )
    return compat.with_type(product, result.dtype, result.weak_type)


def _einsum_by_jax(a: ArrayLike, b: ArrayLike, *, subscripts: str, **options: Any) -> Array:
    result: Array = jnp.einsum(subscripts, a, b, **options)
    return result


def _contraction(
    subscripts: str, a_shape: Sequence[int], b_shape: Sequence[int]
) -> Contraction | None:
    """Return the contraction that valid subscripts are, if they are nothing else than one."""
    inputs, arrow, out_names = subscripts.replace(" ", "").partition("->")
    if not arrow:
        return None
    a_names, b_names = inputs.split(",")
    a, b = _dimensions(a_names, len(a_shape)), _dimensions(b_names, len(b_shape))
    ellipsis = sum(isinstance(name, int) for name in set(a + b))
    out = _dimensions(out_names, len(out_names.replace("...", "")) + ellipsis)
    diagonal = any(len(set(names)) < len(names) for names in (a, b))
    summed_first = not (set(a) ^ set(b)) <= set(out)
    b_sizes = dict(zip(b, b_shape, strict=True))
    broadcast = any(b_sizes.get(name, size) != size for name, size in zip(a, a_shape, strict=True))
    if diagonal or summed_first or broadcast:
        return None
    labels = {name: label for label, name in enumerate(dict.fromkeys(a + b))}
    lhs, rhs, result = (tuple(labels[name] for name in names) for names in (a, b, out))
    return Contraction(lhs, rhs, result)


def _dimensions(names: str, rank: int) -> list[str | int]:
    """Return a name for each dimension; those of an ellipsis are numbered from its last one."""
    before, dots, after = names.partition("...")
    count = rank - len(before) - len(after) if dots else 0
    return [*before, *range(-count, 0), *after]


@patch()
def tensordot(
    a: ArrayLike,
    b: ArrayLike,
    axes: int | Sequence[int] | Sequence[Sequence[int]] = 2,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Sum of products over given axes, with the semantics of :func:`jax.numpy.tensordot`.

    Parameters
    ----------
    a, b
        Arrays of any rank.
    axes
        How many of the last axes of ``a`` and the first of ``b`` are contracted, in order; or the
        axes of each, which may be negative.
    precision, preferred_element_type
        As in :func:`jax_tilekern.matmul`.
    out_sharding
        As in :func:`jax_tilekern.dot_general`.

    Returns
    -------
    Array
        Its dimensions are those of ``a`` that are not contracted, then those of ``b``.

    Raises
    ------
    TypeError
        If an operand is not an array, or contracted sizes or numbers of axes differ.
    """
    return jnp.tensordot(
        a,
        b,
        axes,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


@patch()
def inner(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Sum of products over the last axes, with the semantics of :func:`jax.numpy.inner`.

    Parameters
    ----------
    a
        Array of shape ``(..., k)``, or a scalar. It is not conjugated.
    b
        Array of shape ``(..., k)``, or a scalar. Leading dimensions of the two do not broadcast:
        the result has those of ``a``, then those of ``b``.
    precision, preferred_element_type
        As in :func:`jax_tilekern.dot`.

    Returns
    -------
    Array
        A scalar for two vectors.

    Raises
    ------
    TypeError
        If an operand is not an array, or the last sizes differ.
    """
    return jnp.inner(a, b, precision=precision, preferred_element_type=preferred_element_type)


@patch()
def vecdot(
    x1: ArrayLike,
    x2: ArrayLike,
    /,
    *,
    axis: int = -1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Dot products of pairs of vectors, with the semantics of :func:`jax.numpy.vecdot`.

    Parameters
    ----------
    x1
        Array of any shape; conjugated if it is complex.
    x2
        Array of any shape. Dimensions other than ``axis`` broadcast against those of ``x1``.
    axis
        Where both have their vectors.
    precision, preferred_element_type
        As in :func:`jax_tilekern.dot`.

    Returns
    -------
    Array
        Without the vectors' axis.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If an operand is not an array.
    """
    return jnp.vecdot(
        x1, x2, axis=axis, precision=precision, preferred_element_type=preferred_element_type
    )


@patch()
def multi_dot(arrays: Sequence[ArrayLike], *, precision: lax.PrecisionLike = None) -> Array:
    """Product of several matrices in the cheapest order, as :func:`jax.numpy.linalg.multi_dot`.

    Parameters
    ----------
    arrays
        Two or more matrices, of which the first may be a row vector and the last a column vector,
        both one-dimensional.
    precision
        As in :func:`jax_tilekern.matmul`.

    Returns
    -------
    Array
        Their product.

    Raises
    ------
    ValueError
        If their ranks or sizes do not fit.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> u, v, x = jnp.ones((500, 2)), jnp.ones((2, 500)), jnp.ones(500)
    >>> [choice.result for choice in jtk.explain(lambda *xs: jtk.multi_dot(xs), u, v, x)]
    ['f32[2]', 'f32[500]']
    """
    return jnp.linalg.multi_dot(arrays, precision=precision)
