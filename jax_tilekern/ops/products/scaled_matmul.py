"""``scaled_matmul``: products of 8-bit floats, or by weights, that have a scale for each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.labelled_operands import check_operands
from jax_tilekern.ops.products.scaled_call import scaled_call
from jax_tilekern.ops.products.scaled_operands import (
    blocks_of,
    check_scales,
    check_types,
    check_weights,
    refuse_zeros,
)
from jax_tilekern.ops.products.scaled_product import SCALED
from jax_tilekern.ops.products.weight_product import weights_call
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.primitives.operation import Params


@jitted("preferred_element_type", "out_sharding", functions=["epilogue"])
def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike | None,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
    *,
    rhs_zeros: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Any:
    """Product of two arrays of 8-bit floats, or by quantised weights, and an epilogue.

    With ``lhs_scales`` the result is the sum over blocks of 128 of ``k`` of each block's product
    times the scales of both operands, all in float32. The names are those of
    :func:`jax.nn.scaled_matmul`, which has other blocks. Scales are differentiable; 8-bit floats
    have no useful tangent, so a tangent of an operand is refused. :func:`fp8_dot_general` has the
    derivatives of training.

    If ``lhs_scales`` is ``None``, ``lhs`` has no scales, and ``rhs`` are weights that
    :func:`quantize` made: the product is that of ``lhs`` and the dequantised weights
    ``(rhs - rhs_zeros) * rhs_scales``, with float32 accumulators. They are rounded to bfloat16 if
    ``lhs`` is bfloat16, and have the precision of float16 at least if it is float16. ``lhs``,
    scales and zero points are differentiable; integers have no derivative (``float0``), and a
    tangent of 8-bit floats is refused.

    Parameters
    ----------
    lhs
        ``(..., M, K)`` of float8_e4m3fn or float8_e5m2; of bfloat16, float16 or float32 if
        ``lhs_scales`` is ``None``.
    rhs
        ``(..., N, K)`` of either 8-bit type; weights may be int4 or int8, too. The dimensions
        before the last two are those of ``lhs``, or one of both operands has none.
    lhs_scales
        float32, with the leading dimensions of ``lhs``. The last two are ``M``, ``ceil(M / 128)``
        or 1 by ``ceil(K / 128)`` or 1: scales of single rows, of blocks of 128 rows or of all
        rows, for each 128 of ``k`` or for all.
    rhs_scales
        The same of ``rhs``, with ``N`` for ``M``. Those of weights may be for each 32 or 64 of
        ``k``, and of bfloat16 or float16.
    rhs_zeros
        Zero points of weights, of a type and the shape that ``rhs_scales`` may have.
    preferred_element_type
        Type of the result, to which it is rounded once.
    out_sharding
        Sharding of the product on a mesh with explicit axes.
    epilogue, operands
        A function ``epilogue(accumulator, *operands)`` of scalars and the arrays that it reads, as
        in :func:`matmul`. The accumulator is the scaled sum, in float32.

    Returns
    -------
    Array
        ``(..., M, N)``. With an epilogue, an array for each scalar that it returns. What an
        infinite scale multiplies, sums of products or elements, is infinite or NaN.

    Raises
    ------
    TypeError
        If a type is another one, or an operand has a tangent, or the epilogue is not a function
        of scalars.
    ValueError
        If shapes do not match. The message has the shapes of scales that are possible.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((2, 256), jnp.float8_e4m3fn)
    >>> w = jnp.ones((3, 256), jnp.float8_e4m3fn)
    >>> jtk.scaled_matmul(x, w, jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones((1, 1)))
    Array([[384., 384., 384.],
           [896., 896., 896.]], dtype=float32)
    >>> weights, scales = jtk.quantize(jnp.ones((3, 256)), (1, 64), jnp.int4)
    >>> jtk.scaled_matmul(jnp.ones((2, 256)), weights, None, scales)
    Array([[256., 256., 256.],
           [256., 256., 256.]], dtype=float32)
    """
    optional = compat.given(lhs_scales=lhs_scales, rhs_zeros=rhs_zeros)
    compat.check_arraylike("scaled_matmul", lhs, rhs, rhs_scales=rhs_scales, **optional)
    lhs, rhs, rhs_scales = map(jnp.asarray, (lhs, rhs, rhs_scales))
    zeros = None if rhs_zeros is None else jnp.asarray(rhs_zeros)
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    lhs_scales = None if lhs_scales is None else jnp.asarray(lhs_scales)
    _check(lhs, rhs, lhs_scales, rhs_scales, zeros, out_dtype)
    batch = max(lhs.ndim, rhs.ndim) - 2
    shared = tuple(range(batch))
    m, n, k = range(batch, batch + 3)
    contraction = Contraction(
        (*(shared if lhs.ndim > 2 else ()), m, k),
        (*(shared if rhs.ndim > 2 else ()), n, k),
        (*shared, m, n),
    )
    check_operands("scaled_matmul", epilogue, operands=operands)
    sharding = None
    if out_sharding is not None:

        def by_jax(lhs: Array, rhs: Array) -> Array:
            columns = jnp.swapaxes(rhs, -1, -2)
            return jnp.matmul(lhs, columns, preferred_element_type=F32, out_sharding=out_sharding)

        sharding = compat.explicit_sharding(compat.result_type(by_jax, lhs, rhs))
    call: dict[str, Any] = {
        "out_dtype": out_dtype,
        "shape": (*max(lhs.shape[:-2], rhs.shape[:-2], key=len), lhs.shape[-2], rhs.shape[-2]),
        "role": Role("scaled_matmul"),
        "epilogue": epilogue,
        "operands": operands,
        "out_sharding": sharding,
    }
    if lhs_scales is not None:
        layout: Params = {"contraction": contraction, "rows_last": (False, False)}
        return scaled_call(SCALED, (lhs, rhs, lhs_scales, rhs_scales), layout=layout, **call)
    return weights_call(lhs, (rhs, rhs_scales, zeros), contraction=contraction, **call)


def _check(
    lhs: Array,
    rhs: Array,
    lhs_scales: Array | None,
    rhs_scales: Array,
    rhs_zeros: Array | None,
    out: Any,
) -> None:
    if lhs_scales is None:
        check_weights("scaled_matmul", lhs, rhs, rhs_scales, rhs_zeros, out)
    else:
        refuse_zeros("scaled_matmul", rhs_zeros)
        check_types("scaled_matmul", lhs, rhs, out)
    if lhs.ndim > 2 and rhs.ndim > 2 and lhs.shape[:-2] != rhs.shape[:-2]:
        raise ValueError(
            "the leading dimensions of scaled_matmul's operands are equal, or one has none: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )
    if lhs_scales is None:
        return
    for name, x, scales in (("lhs", lhs, lhs_scales), ("rhs", rhs, rhs_scales)):
        rows = x.shape[-2]
        check_scales("scaled_matmul", name, x, scales, (rows, blocks_of(rows), 1))
