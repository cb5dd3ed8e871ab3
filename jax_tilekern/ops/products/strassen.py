"""``strassen_matmul``: matrix products with seven multiplications of blocks in place of eight.

It is a primitive of its own, so that it is differentiated, batched and partitioned like the product
that it computes. Each device applies the algorithm to its part of the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.arguments import integer
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products import contraction as contractions
from jax_tilekern.ops.products.contraction_lowering import CPU, source, stated_product
from jax_tilekern.ops.products.epilogues import as_dot_general, in_float32
from jax_tilekern.ops.products.labelled_operands import product_by_lax
from jax_tilekern.ops.products.matmul import labelled_matrices
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.strassen import is_slower_in_blocks
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


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

    Each level cuts both operands into 2 x 2 blocks, and makes 7 products and 15 additions of blocks
    in place of 8 products. Odd sizes are padded with zeros. Sums of blocks are rounded to the
    operands' type: errors, in the norm of the maximum, grow by a factor of up to 4.5 a level.
    Integers are exact, modulo their type. Derivatives are such products too. Each device of a mesh
    cuts its own part; where a product is left to XLA, it is XLA's own. On a CPU of which times are
    recorded, a product that is predicted to be faster than its blocks is not cut, unless
    ``jax_tilekern.policy("kernels")`` asks for it.

    Parameters
    ----------
    a, b
        Arrays of shapes ``(..., m, k)`` and ``(..., k, n)``. Batch dimensions broadcast.
    levels
        How often operands are cut; 0 is :func:`jax_tilekern.matmul`.
    precision, out_sharding
        As of :func:`jax_tilekern.matmul`, as are the result and errors.

    Returns
    -------
    Array
        Shape ``(..., m, n)``.

    Raises
    ------
    ValueError
        If an operand is no matrix, or ``levels`` is negative.
    """
    product = functools.partial(jnp.matmul, precision=precision, out_sharding=out_sharding)
    result = compat.result_type(product, a, b)
    levels = integer("strassen_matmul", "levels", levels)
    if levels < 0 or min(jnp.ndim(a), jnp.ndim(b)) < 2:
        raise ValueError(
            "strassen_matmul takes matrices (..., m, k) and (..., k, n), and levels from 0, not "
            f"shapes {jnp.shape(a)} and {jnp.shape(b)}, levels={levels}"
        )
    # Devices sum the cotangent of an operand that all have in the operand's own type.
    a, b = compat.unify_varying(jnp.asarray(a), jnp.asarray(b))
    lhs, rhs, contraction = labelled_matrices(*(compat.as_type(x, result.dtype) for x in (a, b)))
    found = _contract(
        lhs, rhs, contraction=contraction, levels=levels, out_dtype=result.dtype,
        precision=compat.canonicalize_precision(precision),
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )  # fmt: skip
    return compat.with_type(found, result.dtype, result.weak_type)


def _contract(lhs: Array, rhs: Array, *, levels: int, **params: Any) -> Array:
    if levels == 0:
        return contractions.contract(lhs, rhs, **params)
    return _bind(lhs, rhs, levels=levels, **params)  # type: ignore[no-any-return]


def _by_blocks(
    lhs: Array, rhs: Array, *, contraction: Contraction, levels: int, out_dtype: Any, **params: Any
) -> Array:
    """Cut one dimension of each kind; ``vmap`` and derivatives add others."""
    c, wide = contraction, accumulator_dtype(lhs.dtype)
    sizes = dict(zip((*c.lhs, *c.rhs), (*lhs.shape, *rhs.shape), strict=True))
    row, k, column = (max(x, key=sizes.__getitem__) for x in (c.rows, c.contracted, c.columns))

    def blocks(x: Array, *axes: int) -> list[Array]:
        padding = [(0, size % 2 * (axis in axes)) for axis, size in enumerate(x.shape)]
        halves = jnp.split(jnp.pad(x.astype(wide), padding), 2, axes[0])
        return [block for half in halves for block in jnp.split(half, 2, axes[1])]

    def product(x: Array, y: Array) -> Array:
        """Multiply sums of blocks, which are rounded once."""
        x, y = x.astype(lhs.dtype), y.astype(rhs.dtype)
        inner = {**params, "levels": levels - 1, "out_dtype": wide, "out_sharding": None}
        return _contract(x, y, contraction=c, **inner)

    a11, a12, a21, a22 = blocks(lhs, c.lhs.index(row), c.lhs.index(k))
    b11, b12, b21, b22 = blocks(rhs, c.rhs.index(k), c.rhs.index(column))
    s1, t1 = a21 + a22, b12 - b11
    s2, t2 = s1 - a11, b22 - t1
    p1, p5 = product(a11, b11), product(s1, t1)
    u2 = p1 + product(s2, t2)
    u3 = u2 + product(a11 - a21, b22 - b12)
    upper = p1 + product(a12, b21), u2 + p5 + product(a12 - s2, b22)
    lower = u3 - product(a22, t2 - b21), u3 + p5
    row_axis, column_axis = c.out.index(row), c.out.index(column)
    whole = jnp.concatenate([jnp.concatenate(x, column_axis) for x in (upper, lower)], row_axis)
    return lax.slice(whole, [0] * whole.ndim, [sizes[x] for x in c.out]).astype(out_dtype)


def _cuda(_: Any, __: Any, **params: Any) -> Rewrite:
    return Rewrite("7 products of blocks", functools.partial(_by_blocks, **params))


def _cpu(operands: Sequence[Operand], avals: Any, *, levels: int, **params: Any) -> Rewrite:
    if current_policy() != "kernels":
        product = stated_product(contractions.contract, CPU, operands, **params)
        if product is not None and is_slower_in_blocks(product, levels, current_cpu()):
            return Rewrite(
                "one product is predicted faster than 7 of blocks",
                functools.partial(contractions.contract, **params),
            )
    return _cuda(operands, avals, levels=levels, **params)


_bind = define(
    Operation(
        name="tilekern_strassen",
        reference=lambda lhs, rhs, levels, **params: product_by_lax(lhs, rhs, **params),
        transposes=contractions.transposes(_contract),
        batch=functools.partial(contractions.batched, _contract),
        sharding_rule=contractions.sharding_rule,
        planners={"cpu": Planner(no_refusal, _cpu), "cuda": Planner(no_refusal, _cuda)},
        describe=lambda contraction, levels, **_: f"strassen {contraction}, levels={levels}",
        source=source,
        in_float32=in_float32,
        stands_for=lambda levels, **params: as_dot_general(**params),
    )
)
