"""``strassen_matmul``: matrix products with seven multiplications of blocks in place of eight.

It is a primitive of its own, so that it is differentiated, batched and partitioned like the product
that it computes. Each device applies the algorithm to its part of the operands.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.contraction import (
    as_dot_general,
    batched,
    contract,
    in_float32,
    sharding_rule,
    transposes,
)
from jax_tilekern.ops.contraction_lowering import source
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.labelled_operands import product_by_lax
from jax_tilekern.ops.matmul import labelled_matrices, matmul
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.primitives.operation import Operation, Planner, Rewrite, define


@jitted("levels", "precision", "out_sharding")
def strassen_matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    levels: int = 1,
    precision: lax.PrecisionLike = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """Matrix product by Strassen's algorithm in Winograd's form.

    Each level cuts both operands into 2 x 2 blocks and makes 7 products and 15 additions of blocks
    in place of 8 products. Odd sizes are padded with zeros. Sums of blocks are rounded to the
    operands' type, so that errors grow: by a factor of at most 4.5 a level in the bound of Higham
    (Accuracy and Stability of Numerical Algorithms, section 23.2.2), and of about 2 for random
    matrices. The bound is on the norm, so small elements of the result may have no correct digit
    where others are large. Integers are exact, modulo their type as in JAX.

    Derivatives are computed by the same algorithm. On a mesh of devices the product is partitioned
    like :func:`jax_tilekern.matmul`, and each device cuts its own part; where a product is left to
    XLA, it is XLA's own.

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
    out_sharding
        As of :func:`jax_tilekern.matmul`.

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
    jax.sharding.ShardingTypeError
        As of :func:`jax_tilekern.matmul`.

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
    by_matmul = functools.partial(matmul, precision=precision, out_sharding=out_sharding)
    result = compat.result_type(by_matmul, a, b)
    for name, operand in (("a", a), ("b", b)):
        if jnp.ndim(operand) < 2:
            raise ValueError(f"{name} has shape {jnp.shape(operand)}, which is no matrix")
    if levels == 0:
        return by_matmul(a, b)
    # Devices sum the cotangent of an operand that all have in the operand's own type.
    a, b = compat.unify_varying(jnp.asarray(a), jnp.asarray(b))
    a, b = (compat.as_type(operand, result.dtype) for operand in (a, b))
    a, b, contraction = labelled_matrices(a, b)
    *_, rows, contracted = contraction.lhs
    product = _strassen(
        a,
        b,
        contraction=contraction,
        cut=(rows, contracted, contraction.rhs[-1], levels),
        precision=compat.canonicalize_precision(precision),
        out_dtype=np.dtype(result.dtype),
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )
    return compat.with_type(product, result.dtype, result.weak_type)


class _Cut(NamedTuple):
    """The labels that are halved, and how often.

    ``vmap`` and differentiation add labels to a contraction that stay whole. A row of a product is
    a contracted dimension or a column of another one in its derivatives.
    """

    row: int
    contracted: int
    column: int
    levels: int

    def of(self, contraction: Contraction) -> _Cut:
        """Return the labels in the places that they have in a contraction."""
        labels = self[:3]
        (row,) = (x for x in labels if x not in contraction.rhs)
        (contracted,) = (x for x in labels if x not in contraction.out)
        (column,) = (x for x in labels if x not in contraction.lhs)
        return _Cut(row, contracted, column, self.levels)


def _strassen(lhs: Array, rhs: Array, **params: Any) -> Array:
    """Contract two arrays of one type by Strassen's algorithm."""
    result: Array = _bind(lhs, rhs, **params)
    return result


def _plan(_: Any, __: Any, *, cut: tuple[int, ...], **params: Any) -> Rewrite:
    function = functools.partial(_by_blocks, cut=_Cut(*cut), **params)
    return Rewrite(f"{7 ** _Cut(*cut).levels} products of blocks", function)


def _by_blocks(
    lhs: Array,
    rhs: Array,
    *,
    contraction: Contraction,
    cut: _Cut,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Array:
    """Pad to a multiple of the blocks, multiply, and cut the result to size."""
    c, cut, parts = contraction, cut.of(contraction), 2**cut.levels
    product = _product(
        _padded(lhs, c.lhs, (cut.row, cut.contracted), parts),
        _padded(rhs, c.rhs, (cut.contracted, cut.column), parts),
        contraction,
        cut,
        precision,
        _sum_type(lhs),
    )
    rows, columns = c.out.index(cut.row), c.out.index(cut.column)
    product = lax.slice_in_dim(product, 0, lhs.shape[c.lhs.index(cut.row)], axis=rows)
    product = lax.slice_in_dim(product, 0, rhs.shape[c.rhs.index(cut.column)], axis=columns)
    return product.astype(out_dtype)


def _product(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    cut: _Cut,
    precision: Any,
    out: DTypeLike,
) -> Array:
    """Multiply matrices whose sizes are multiples of 2 ** levels."""
    if cut.levels == 0:
        dtype = np.dtype(out)
        return contract(lhs, rhs, contraction=contraction, precision=precision, out_dtype=dtype)
    c, smaller = contraction, cut._replace(levels=cut.levels - 1)
    a11, a12, a21, a22 = _blocks(lhs, c.lhs, cut.row, cut.contracted)
    b11, b12, b21, b22 = _blocks(rhs, c.rhs, cut.contracted, cut.column)
    s1, t1 = _rounded(a21, +1, a22), _rounded(b12, -1, b11)
    s2, t2 = _rounded(s1, -1, a11), _rounded(b22, -1, t1)
    s3, t3 = _rounded(a11, -1, a21), _rounded(b22, -1, b12)
    s4, t4 = _rounded(a12, -1, s2), _rounded(t2, -1, b21)
    p1, p2, p3, p4, p5, p6, p7 = (
        _product(x.astype(lhs.dtype), y.astype(rhs.dtype), contraction, smaller, precision, out)
        for x, y in (
            (a11, b11), (a12, b21), (s4, b22), (a22, t4), (s1, t1), (s2, t2), (s3, t3)
        )
    )  # fmt: skip
    u2 = p1 + p6
    u3 = u2 + p7
    u4 = u2 + p5
    rows, columns = c.out.index(cut.row), c.out.index(cut.column)
    halves = [[p1 + p2, u4 + p3], [u3 - p4, u3 + p5]]
    return jnp.concatenate([jnp.concatenate(row, axis=columns) for row in halves], axis=rows)


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


def _blocks(x: Array, labels: Labels, rows: int, columns: int) -> list[Array]:
    return [
        block
        for half in jnp.split(x, 2, axis=labels.index(rows))
        for block in jnp.split(half, 2, axis=labels.index(columns))
    ]


def _padded(x: Array, labels: Labels, cut: tuple[int, int], multiple: int) -> Array:
    missing = [
        (0, -size % multiple if label in cut else 0)
        for label, size in zip(labels, x.shape, strict=True)
    ]
    return jnp.pad(x, missing) if any(after for _, after in missing) else x


def _reference(lhs: Array, rhs: Array, *, cut: tuple[int, ...], **params: Any) -> Array:
    return product_by_lax(lhs, rhs, **params)


def _describe(contraction: Contraction, cut: tuple[int, ...], **_: Any) -> str:
    levels = _Cut(*cut).levels
    return f"strassen {contraction}, {levels} level{'s' * (levels > 1)}"


_bind = define(
    Operation(
        name="tilekern_strassen",
        reference=_reference,
        transposes=transposes(_strassen),
        batch=functools.partial(batched, _strassen),
        sharding_rule=sharding_rule,
        planners=dict.fromkeys(("cpu", "cuda"), Planner(lambda *_, **params: None, _plan)),
        describe=_describe,
        source=source,
        in_float32=in_float32,
        stands_for=as_dot_general,
    )
)
