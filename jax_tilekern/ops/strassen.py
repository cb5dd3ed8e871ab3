"""``strassen_matmul``: matrix products with seven multiplications of blocks in place of eight."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.ops.matmul import matmul


def strassen_matmul(
    a: ArrayLike, b: ArrayLike, *, levels: int = 1, precision: lax.PrecisionLike = None
) -> Array:
    """Matrix product by Strassen's algorithm in Winograd's form.

    Each level cuts both operands into 2 x 2 blocks and makes 7 products and 15 additions of blocks
    in place of 8 products. Odd sizes are padded with zeros. Sums of blocks are rounded to the
    operands' type, so that errors grow: by a factor of at most 4.5 a level in the bound of Higham
    (Accuracy and Stability of Numerical Algorithms, section 23.2.2), and of about 2 for random
    matrices. The bound is on the norm, so small elements of the result may have no correct digit
    where others are large. Integers are exact, modulo their type as in JAX.

    Derivatives are made of products of the same blocks: 7 for each operand and level.

    Parameters
    ----------
    a
        Array of shape ``(..., m, k)``.
    b
        Array of shape ``(..., k, n)``. Batch dimensions broadcast against those of ``a``.
    levels
        How often operands are cut; 0 is :func:`jax_tilekern.matmul`.
    precision
        Of the products, as of :func:`jax_tilekern.matmul`.

    Returns
    -------
    Array
        Shape ``(..., m, n)``, of the type of :func:`jax.numpy.matmul`.

    Raises
    ------
    ValueError
        If an operand is no matrix, ``levels`` is negative, or batch dimensions do not broadcast.
    TypeError
        If an operand is not an array, ``levels`` no integer, or contracted sizes differ.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.strassen_matmul(jnp.ones((3, 4)), jnp.ones((4, 2)))
    Array([[4., 4.],
           [4., 4.],
           [4., 4.]], dtype=float32)
    """
    levels = operator.index(levels)
    if levels < 0:
        raise ValueError(f"levels is {levels}, which is negative")
    result = jax.eval_shape(lambda a, b: matmul(a, b, precision=precision), a, b)
    a, b = (jnp.asarray(operand).astype(result.dtype) for operand in (a, b))
    for name, operand in (("a", a), ("b", b)):
        if operand.ndim < 2:
            raise ValueError(f"{name} has shape {operand.shape}, which is no matrix")
    parts = 2**levels
    product = _product(_padded(a, parts), _padded(b, parts), levels, precision, _sum_type(a))
    return product[..., : a.shape[-2], : b.shape[-1]].astype(result.dtype)


def _product(
    a: Array, b: Array, levels: int, precision: lax.PrecisionLike, out: DTypeLike
) -> Array:
    """Multiply matrices whose sizes are multiples of 2 ** levels."""
    if levels == 0:
        return matmul(a, b, precision=precision, preferred_element_type=out)
    a11, a12, a21, a22 = _blocks(a)
    b11, b12, b21, b22 = _blocks(b)
    s1, t1 = _rounded(a21, +1, a22), _rounded(b12, -1, b11)
    s2, t2 = _rounded(s1, -1, a11), _rounded(b22, -1, t1)
    s3, t3 = _rounded(a11, -1, a21), _rounded(b22, -1, b12)
    s4, t4 = _rounded(a12, -1, s2), _rounded(t2, -1, b21)
    p1, p2, p3, p4, p5, p6, p7 = (
        _product(x.astype(a.dtype), y.astype(b.dtype), levels - 1, precision, out)
        for x, y in (
            (a11, b11), (a12, b21), (s4, b22), (a22, t4), (s1, t1), (s2, t2), (s3, t3)
        )
    )  # fmt: skip
    u2 = p1 + p6
    u3 = u2 + p7
    u4 = u2 + p5
    rows = [[p1 + p2, u4 + p3], [u3 - p4, u3 + p5]]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _rounded(x: Array, sign: int, y: Array) -> Array:
    """Add or subtract in float32 at least, so that repeated sums are rounded once."""
    wide = _sum_type(x)
    x, y = x.astype(wide), y.astype(wide)
    return x + y if sign > 0 else x - y


def _sum_type(x: Array) -> DTypeLike:
    """Return the type of sums, which are finally rounded to the type of ``x``."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.promote_types(x.dtype, jnp.float32)
    return jnp.int32 if x.dtype == jnp.int8 else x.dtype


def _blocks(x: Array) -> tuple[Array, Array, Array, Array]:
    rows, columns = (size // 2 for size in x.shape[-2:])
    return (
        x[..., :rows, :columns],
        x[..., :rows, columns:],
        x[..., rows:, :columns],
        x[..., rows:, columns:],
    )


def _padded(x: Array, multiple: int) -> Array:
    missing = [(0, 0)] * (x.ndim - 2) + [(0, -size % multiple) for size in x.shape[-2:]]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x
