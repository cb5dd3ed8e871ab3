"""``scaled_matmul``: products of 8-bit floats that have a scale for each block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.epilogues import elementwise_function, with_blocks_last
from jax_tilekern.ops.products.fused_contraction import labelled_operands
from jax_tilekern.ops.products.labelled_operands import check_operands
from jax_tilekern.ops.products.scaled_operands import blocks_of, check_scales, check_types
from jax_tilekern.ops.products.scaled_product import scaled_product, scaled_product_with_epilogue
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import TYPES
from jax_tilekern.primitives.operation import Params

_F32: np.dtype[Any] = np.dtype(np.float32)


@jitted("preferred_element_type", "out_sharding", functions=["epilogue"])
def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Any:
    """Product of two arrays of 8-bit floats, each with scales of its blocks, and an epilogue.

    The result is the sum over blocks of 128 of ``k`` of each block's product times the scales of
    both operands, all in float32. The names are those of :func:`jax.nn.scaled_matmul`, which has
    other blocks. Scales are differentiable; 8-bit floats have no useful tangent, so a tangent of
    an operand is refused. :func:`fp8_dot_general` has the derivatives of training.

    Parameters
    ----------
    lhs
        ``(..., M, K)`` of float8_e4m3fn or float8_e5m2.
    rhs
        ``(..., N, K)`` of either type. The dimensions before the last two are those of ``lhs``,
        or one of both operands has none.
    lhs_scales
        float32, with the leading dimensions of ``lhs``. The last two are ``M``, ``ceil(M / 128)``
        or 1 by ``ceil(K / 128)`` or 1: scales of single rows, of blocks of 128 rows or of all
        rows, for each 128 of ``k`` or for all.
    rhs_scales
        The same of ``rhs``, with ``N`` for ``M``.
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
        ``(..., M, N)``. With an epilogue, an array for each scalar that it returns.

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
    """
    lhs, rhs, lhs_scales, rhs_scales = map(jnp.asarray, (lhs, rhs, lhs_scales, rhs_scales))
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    _check(lhs, rhs, lhs_scales, rhs_scales, out_dtype)
    batch = max(lhs.ndim, rhs.ndim) - 2
    shared = tuple(range(batch))
    m, n, k = range(batch, batch + 3)
    contraction = Contraction(
        (*(shared if lhs.ndim > 2 else ()), m, k),
        (*(shared if rhs.ndim > 2 else ()), n, k),
        (*shared, m, n),
    )
    check_operands("scaled_matmul", epilogue, operands=operands)
    arrays = [jnp.asarray(x) for x in operands]
    factors = (lhs, rhs, lhs_scales, rhs_scales)
    sharding = None
    if out_sharding is not None:

        def by_jax(lhs: Array, rhs: Array) -> Array:
            columns = jnp.swapaxes(rhs, -1, -2)
            return jnp.matmul(lhs, columns, preferred_element_type=_F32, out_sharding=out_sharding)

        sharding = compat.explicit_sharding(compat.result_type(by_jax, lhs, rhs))

    layout: Params = {"contraction": contraction, "rows_last": (False, False)}

    def product(dtype: np.dtype[Any]) -> Array:
        multiply = functools.partial(scaled_product, **layout, out_dtype=dtype)
        result: Array = compat.with_automatic_axes(multiply, sharding)(*factors)
        return result

    if epilogue is not None:
        role = Role("scaled_matmul")
        function, closed_over, nested = trace_scalars(
            epilogue, _F32, out_dtype, [x.dtype for x in arrays], role
        )
        if not function.is_identity:
            shape = (*max(lhs.shape[:-2], rhs.shape[:-2], key=len), lhs.shape[-2], rhs.shape[-2])
            read = labelled_operands(arrays, (), contraction=contraction, shape=shape, role=role)
            read += [(jnp.asarray(x), ()) for x in closed_over]
            if sharding is None:
                results = scaled_product_with_epilogue(
                    *factors, operands=read, function=function, **layout, out_dtype=out_dtype
                )
            else:
                own_labels = [labels for _, labels in read]
                elementwise = elementwise_function(function, contraction, own_labels)
                results = elementwise(product(_F32), *(x for x, _ in read))
            return nested(with_blocks_last(results, function))
    own = out_dtype if out_dtype in TYPES["fp8"].results else _F32
    result = product(own).astype(out_dtype)
    return result if epilogue is None else nested([result])


def _check(lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, out: Any) -> None:
    check_types("scaled_matmul", lhs, rhs, out)
    if lhs.ndim > 2 and rhs.ndim > 2 and lhs.shape[:-2] != rhs.shape[:-2]:
        raise ValueError(
            "the leading dimensions of scaled_matmul's operands are equal, or one has none: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )
    for name, x, scales in (("lhs", lhs, lhs_scales), ("rhs", rhs, rhs_scales)):
        rows = x.shape[-2]
        check_scales("scaled_matmul", name, x, scales, (rows, blocks_of(rows), 1))
