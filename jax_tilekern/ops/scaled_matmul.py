"""``scaled_matmul``: products of 8-bit floats that have a scale for each block.

The primitive contracts the last dimensions of its operands. The shape of an array of scales states
the blocks. Scales of rows, of blocks of 128 rows and of all rows differ in their strides alone, so
one kernel takes them all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.contraction import as_dot_general, contract, in_float32
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.labelled_operands import product_by_lax
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.contraction import Contraction, Dimension, merged, row_major_strides
from jax_tilekern.plans.gemm.arithmetic import FP8, TYPES
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import ScaledProduct, Scales
from jax_tilekern.plans.gemm.select import plan_scaled
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
)


@jitted("preferred_element_type")
def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
) -> Array:
    """Product of two arrays of 8-bit floats, each with scales of its blocks.

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

    Returns
    -------
    Array
        ``(..., M, N)``.

    Raises
    ------
    TypeError
        If a type is another one, or an operand has a tangent.
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
    own = out_dtype if out_dtype in TYPES["fp8"].results else np.dtype(np.float32)
    result: Array = _bind(
        lhs, rhs, lhs_scales, rhs_scales,
        contraction=contraction, out_dtype=own, columns_first=False,
    )  # fmt: skip
    return result.astype(out_dtype)


def _check(lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, out: Any) -> None:
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in FP8:
            raise TypeError(
                f"scaled_matmul multiplies float8_e4m3fn and float8_e5m2, and {name} is {x.dtype}; "
                "jax_tilekern.quantize makes them"
            )
        if x.ndim < 2:
            raise ValueError(f"{name} of scaled_matmul has at least 2 dimensions, not {x.shape}")
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"preferred_element_type of scaled_matmul is a float type, not {out}")
    if lhs.shape[-1] != rhs.shape[-1]:
        raise ValueError(
            "scaled_matmul contracts the last dimensions, which differ: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )
    if lhs.ndim > 2 and rhs.ndim > 2 and lhs.shape[:-2] != rhs.shape[:-2]:
        raise ValueError(
            "the leading dimensions of scaled_matmul's operands are equal, or one has none: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )
    for name, x, scales in (("lhs", lhs, lhs_scales), ("rhs", rhs, rhs_scales)):
        if scales.dtype != np.float32:
            raise TypeError(f"{name}_scales of scaled_matmul are float32, not {scales.dtype}")
        *leading, rows, k = x.shape
        possible = [
            (*leading, r, c)
            for r in dict.fromkeys((rows, _blocks(rows), 1))
            for c in dict.fromkeys((_blocks(k), 1))
        ]
        if scales.shape not in possible:
            raise ValueError(
                f"{name}_scales have shape {scales.shape}; {name} {x.shape} has scales of shape "
                + " or ".join(map(str, possible))
            )


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def dequantized(x: Array, scales: Array) -> Array:
    """Return values times the scales of their blocks, in float32."""
    for axis in (x.ndim - 2, x.ndim - 1):
        size = x.shape[axis]
        if scales.shape[axis] not in (1, size):
            repeated = jnp.repeat(scales, BLOCK, axis)
            scales = lax.slice_in_dim(repeated, 0, size, axis=axis)
    return x.astype(np.float32) * scales


# Meaning.


def _in_float32_by(
    multiply: Callable[..., Array],
    lhs: Array,
    rhs: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    *,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    columns_first: bool,
) -> Array:
    """Contract the operands in float32."""
    if columns_first:
        rhs_scales = jnp.swapaxes(rhs_scales, -1, -2)
    return multiply(
        dequantized(lhs, lhs_scales),
        dequantized(rhs, rhs_scales),
        contraction=contraction,
        precision=(lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        out_dtype=np.dtype(np.float32),
    ).astype(out_dtype)


def _reference(*operands: Array, **params: Any) -> Array:
    return _in_float32_by(product_by_lax, *operands, **params)


def _by_contraction(*operands: Array, **params: Any) -> Array:
    return _in_float32_by(contract, *operands, **params)


# Rules.


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    for name, tangent in zip(("lhs", "rhs"), tangents, strict=False):
        if type(tangent) is not ad.Zero:
            raise TypeError(
                f"scaled_matmul has no derivative by {name}, because 8-bit floats have no useful "
                "tangents: take jax_tilekern.fp8_dot_general, or jax.lax.stop_gradient"
            )
    lhs, rhs, *scales = primals
    result = _bind(*primals, **params)
    terms = [
        _bind(lhs, rhs, *scales[:i], ad.instantiate_zeros(tangent), *scales[i + 1 :], **params)
        for i, tangent in enumerate(tangents[2:])
        if type(tangent) is not ad.Zero
    ]
    return result, functools.reduce(lax.add, terms)


def _cotangent(operand: int, cotangent: Array, *operands: Any, **params: Any) -> Array:
    def linear(scales: Array) -> Array:
        return _reference(*operands[:operand], scales, *operands[operand + 1 :], **params)

    of_scales = operands[operand]
    (result,) = jax.linear_transpose(linear, of_scales)(cotangent)
    return result  # type: ignore[no-any-return]


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    **params: Any,
) -> tuple[Array, int]:
    """Put the mapped axis first. An operand and its scales have it together."""
    mapped = [dims[i] is not None or dims[i + 2] is not None for i in (0, 1)] * 2

    def moved(x: Array, dim: int | None, is_mapped: bool) -> Array:
        if not is_mapped:
            return x
        if dim is None:
            return jnp.broadcast_to(x, (axis_data.size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    of_labels = contraction.mapped(*(0 if x else None for x in mapped[:2]))
    values = map(moved, operands, dims, mapped)
    return _bind(*values, contraction=of_labels, **params), 0


def _sharding_rule(
    lhs: Any,
    rhs: Any,
    lhs_scales: Any,
    rhs_scales: Any,
    *,
    contraction: Contraction,
    columns_first: bool,
    **_: Any,
) -> ShardingRule:
    """Let devices share whole blocks, along dimensions that consist of those."""
    c = contraction
    of_scales = [lhs_scales.shape, rhs_scales.shape]
    if columns_first:
        *leading, columns, rows = rhs_scales.shape
        of_scales[1] = (*leading, rows, columns)
    sizes: dict[int, int] = {}
    blocked: set[int] = set()
    for labels, x, scales in zip((c.lhs, c.rhs), (lhs, rhs), of_scales, strict=True):
        for label, size, count in zip(labels, x.shape, scales, strict=True):
            if count not in (1, size):
                blocked.add(label)
            sizes[label] = size
    whole = {label for label in blocked if sizes[label] % BLOCK}
    blocked -= whole
    sizes = {
        label: size // BLOCK if label in blocked else size
        for label, size in sizes.items()
        if label not in whole
    }

    def kept(labels: Sequence[int]) -> Dims:
        return tuple(None if x in whole else x for x in labels)

    def kept_of_scales(labels: Sequence[int], shape: Sequence[int]) -> Dims:
        return tuple(
            label if count > 1 else None for label, count in zip(kept(labels), shape, strict=True)
        )

    left, right = map(kept_of_scales, (c.lhs, c.rhs), of_scales)
    if columns_first:
        right = (*right[:-2], right[-1], right[-2])
    m, n, k = c.lhs[-2], c.rhs[-2], c.lhs[-1]
    extents = dict(zip((*c.lhs, *c.rhs), (*lhs.shape, *rhs.shape), strict=True))
    return ShardingRule(
        (kept(c.lhs), kept(c.rhs), left, right),
        (kept(c.out),),
        sizes,
        flops=2 * math.prod(extents.values()),
        names={**dict.fromkeys(c.out[:-2], "batch"), m: "m", n: "n", k: "k"},
        blocked=frozenset(blocked),
    )


# Lowering.


def _refusal(*_: Any, **__: Any) -> Fallback | None:
    return None


def _in_float32(_operands: Any, _avals: Any, **params: Any) -> Rewrite:
    function = functools.partial(_by_contraction, **params)
    return Rewrite("the operands are dequantised, and multiplied in float32", function)


def _cuda(
    operands: Sequence[Operand],
    avals: Any,
    *,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    columns_first: bool,
) -> Outcome:
    params: dict[str, Any] = {"contraction": contraction, "out_dtype": out_dtype}
    stored = [_stored(operands[2], False), _stored(operands[3], columns_first)]
    scales = [
        _scales(x.aval.shape, s.aval.shape, flag, first)
        for x, s, flag, (_, first) in zip(
            operands[:2], operands[2:], (False, columns_first), stored, strict=True
        )
    ]
    if all(x.block_rows == 1 and x.row_stride > 1 for x in scales):
        return Rewrite(
            "scales of rhs transposed first: those of columns are adjacent",
            functools.partial(_with_columns_first, **params),
        )
    lhs, rhs = (x.aval for x in operands[:2])
    geometry, left, right = _geometry(contraction, [x.aval.shape for x in operands], *scales)
    product = ScaledProduct(
        geometry, lhs.dtype, rhs.dtype, out_dtype, "fp8", lhs_scales=left, rhs_scales=right
    )
    read = [*(x.value for x in operands[:2]), *(value for value, _ in stored)]
    return planned_kernel(read, plan_scaled, product)


def _with_columns_first(
    lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, **params: Any
) -> Array:
    columns = jnp.swapaxes(rhs_scales, -1, -2)
    result: Array = _bind(lhs, rhs, lhs_scales, columns, columns_first=True, **params)
    return result


def _stored(scales: Operand, columns_first: bool) -> tuple[Any, bool]:
    """Return where scales lie, and whether blocks of k come before those of rows in memory."""
    ndim = scales.aval.ndim
    found = None if columns_first else compat.transposed_from(scales.value)
    if found is not None and found[1] == [*range(ndim - 2), ndim - 1, ndim - 2]:
        return found[0], True
    return scales.value, columns_first


def _scales(
    shape: Sequence[int], of_scales: Sequence[int], columns_first: bool, k_first: bool
) -> Scales:
    """Return the strides of scales, without those of batch dimensions."""
    rows, columns = of_scales[-2:][::-1] if columns_first else of_scales[-2:]
    row, k = (1, rows) if k_first else (columns, 1)
    return Scales(
        block_rows=BLOCK if rows not in (1, shape[-2]) else 1,
        batch_strides=(),
        row_stride=0 if rows == 1 else row,
        k_stride=0 if columns == 1 else k,
    )


def _geometry(
    contraction: Contraction, shapes: Sequence[Sequence[int]], *scales: Scales
) -> tuple[MatmulGeometry, Scales, Scales]:
    """Return the strided product, and where the scales lie along its batch dimensions."""
    c = contraction
    lhs, rhs, of_lhs, of_rhs = (
        row_major_strides(labels, dict(zip(labels, shape, strict=True)))
        for labels, shape in zip((c.lhs, c.rhs) * 2, shapes, strict=True)
    )
    sizes = dict(zip((*c.lhs, *c.rhs), (*shapes[0], *shapes[1]), strict=True))
    out = row_major_strides(c.out, sizes)
    batch = merged(
        Dimension(
            sizes[x], lhs.get(x, 0), rhs.get(x, 0), out[x], 0, (of_lhs.get(x, 0), of_rhs.get(x, 0))
        )
        for x in c.out[:-2]
    )
    m, n, k = (sizes[x] for x in (c.lhs[-2], c.rhs[-2], c.lhs[-1]))
    left, right = scales
    while batch and _are_rows(batch[-1], m, n, k, left):
        m *= batch.pop().size
    geometry = MatmulGeometry(
        tuple(x.size for x in batch), m, n, k,
        lhs_strides=(*(x.lhs for x in batch), k, 1),
        rhs_strides=(*(x.rhs for x in batch), 1, k),
        out_strides=(*(x.out for x in batch), n, 1),
    )  # fmt: skip
    left, right = (
        dataclasses.replace(x, batch_strides=tuple(dim.further[i] for dim in batch))
        for i, x in enumerate((left, right))
    )
    return geometry, left, right


def _are_rows(dim: Dimension, m: int, n: int, k: int, scales: Scales) -> bool:
    """Whether a batch dimension continues the rows of ``lhs``, which has it alone."""
    blocks, rest = divmod(m, scales.block_rows)
    continues = scales.row_stride and dim.further[0] == blocks * scales.row_stride
    return (dim.lhs, dim.rhs, dim.out) == (m * k, 0, m * n) and bool(continues) and not rest


_bind = define(
    Operation(
        name="tilekern_scaled_matmul",
        reference=_reference,
        jvp=_jvp,
        transposes={i: functools.partial(_cotangent, i) for i in (2, 3)},
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={"cpu": Planner(_refusal, _in_float32), "cuda": Planner(_refusal, _cuda)},
        describe=lambda contraction, **_: f"scaled_matmul {contraction}",
        in_float32=in_float32,
        stands_for=lambda contraction, out_dtype, **_: as_dot_general(contraction, None, out_dtype),
    )
)
