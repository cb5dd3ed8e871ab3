"""``quantize``: arrays of 8-bit floats, or of 4- or 8-bit integers, with a scale for each block.

Every platform gives the same bits. A reciprocal is rounded by integers, because XLA's division on
GPUs is not rounded to nearest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.explicit import spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel, transposed_sizes
from jax_tilekern.ops.quantisation.fp8_bits import fp8_bits
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gemm.arithmetic import FP8
from jax_tilekern.plans.quantize import (
    BLOCK,
    GROUPS,
    INTEGERS,
    QUANTIZED_DTYPES,
    Quantized,
    flag,
    plan_quantize,
    quantized_type,
)
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
    lowering_platform,
    no_refusal,
)

Block = tuple[int | None, int | None]
_BLOCKS: tuple[Block, ...] = (
    *((1, group) for group in GROUPS),
    (BLOCK, BLOCK),
    (1, None),
    (None, None),
)
# Blocks with smaller magnitudes count as zeros, so that subnormal numbers of float32, which some
# platforms flush, round to zero in every block.
_LEAST = np.float32(2.0**-90)
_MAX = dict(zip((*FP8, *INTEGERS), (448, 57344, 7, 127), strict=True))
# A byte that is NaN of either type, and the bits of the least float32 that is not finite.
_NAN = np.uint8(0x7F)
_INFINITY = np.uint32(0x7F800000)
# Arrays of fewer numbers are reduced faster than a CPU begins to share a pass.
_LARGE = 1 << 16


@jitted("block", "dtype", "power_of_two", "both", "symmetric")
def quantize(
    x: ArrayLike,
    block: Block = (1, BLOCK),
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    power_of_two: bool = False,
    both: bool = False,
    symmetric: bool = True,
) -> Any:
    """Round an array to 8-bit floats or to small integers, with a scale for each block.

    A scale is the largest magnitude of the block times the reciprocal of the largest number of
    ``dtype``, both in float32. Values are rounded to nearest even after the multiplication by the
    reciprocal of the scale, so that ``values * scale`` is close to ``x``. All platforms give the
    same bits. There is no derivative; :func:`fp8_dot_general` has that of training.

    - A block without a magnitude of ``2**-90`` or more has scale 1, and zeros.
    - If not ``symmetric``, a block whose range exceeds float32 has an infinite scale.
    - NaN and infinities become NaN, and do not count for the scale. Integers have no NaN, so the
      scale of their block is NaN, which makes the whole block NaN. Its values are zeros.

    Parameters
    ----------
    x
        ``(..., R, C)`` of bfloat16, float16 or float32.
    block
        Rows and columns of a block: ``(1, 32)``, ``(1, 64)``, ``(1, 128)``, ``(128, 128)``,
        ``(1, None)`` for whole rows or ``(None, None)`` for whole matrices. The last block of a row
        or column may be short.
    dtype
        float8_e4m3fn, float8_e5m2, int4 or int8. Integers are between -7 and 7, or -127 and 127.
    power_of_two
        Whether scales are rounded up to powers of two.
    both
        Whether the transpose is quantised, too, from one read of ``x``: a product that contracts
        ``R`` takes it, because :func:`scaled_matmul` contracts last dimensions.
    symmetric
        If false, integers have a zero point for each block, and ``(values - zero) * scale`` is
        close to ``x``. The scale is the distance of the least from the largest number of the block
        and 0, over 15 or 255. The zero point is the integer that stands for 0.

    Returns
    -------
    tuple
        Values ``(..., R, C)``, and scales of float32, ``(..., R, ceil(C / 128))`` in blocks of
        ``(1, 128)``. If not ``symmetric``, zero points of float32 and the shape of the scales. With
        ``both``, this tuple, and that of the transpose: values ``(..., C, R)`` and scales
        ``(..., C, ceil(R / 128))``.

    Raises
    ------
    TypeError
        If a type is another one, or ``x`` has a tangent.
    ValueError
        If a block is another one, or ``x`` has fewer than 2 dimensions, or 8-bit floats are not
        ``symmetric``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> values, scales = jtk.quantize(jnp.array([[1.0, -3.5], [0.0, 448.0]]))
    >>> values
    Array([[128, -448],
           [0, 448]], dtype=float8_e4m3fn)
    >>> scales
    Array([[0.0078125],
           [1.       ]], dtype=float32)
    """
    x = jnp.asarray(x)
    quantized = quantized_type("quantize rounds to", dtype)
    if x.dtype not in QUANTIZED_DTYPES:
        raise TypeError(f"quantize takes bfloat16, float16 or float32, not {x.dtype}")
    if block not in _BLOCKS:
        raise ValueError(f"quantize has blocks {', '.join(map(str, _BLOCKS))}, not {block}")
    if x.ndim < 2:
        raise ValueError(f"quantize takes at least 2 dimensions, and x has shape {x.shape}")
    both = flag("both of quantize", both)
    symmetric = flag("symmetric of quantize", symmetric)
    if not symmetric and quantized not in INTEGERS:
        raise ValueError(f"quantize has zero points of int4 and int8, not of {quantized}")
    params = {
        "dtype": quantized,
        "power_of_two": flag("power_of_two of quantize", power_of_two),
        "both": both,
        "symmetric": symmetric,
    }
    bind = _bind if block[1] else _bind_whole
    results = bind(x, block=block, **params)
    count = 2 if symmetric else 3
    if _has_rows_last(block):
        results = [
            jnp.swapaxes(each, -1, -2) if i % count else each for i, each in enumerate(results)
        ]
    one, transposed = tuple(results[:count]), tuple(results[count:])
    return (one, transposed) if both else one


# Meaning. Scales of parts of rows have those of adjacent rows adjacent, as products read them.


def _has_rows_last(block: Block) -> bool:
    rows, columns = block
    return rows == 1 and columns is not None


def _reference(
    x: Array,
    *,
    block: Block,
    dtype: np.dtype[Any],
    power_of_two: bool,
    both: bool,
    symmetric: bool,
) -> list[Array]:
    x = x.astype(np.float32)
    results: list[Array] = []
    # The transpose is quantised where the array lies, in blocks that are transposed.
    for of_transpose in (False, True)[: 1 + both]:
        own = block[::-1] if of_transpose else block
        values, *of_blocks = _quantized(x, own, dtype, power_of_two, symmetric)
        results.append(jnp.swapaxes(values, -1, -2) if of_transpose else values)
        moved = of_transpose != _has_rows_last(block)
        results += [jnp.swapaxes(y, -1, -2) if moved else y for y in of_blocks]
    return results


def _quantized(
    x: Array, block: Block, dtype: np.dtype[Any], power_of_two: bool, symmetric: bool
) -> list[Array]:
    given, x = x, _in_whole_blocks(x, block)

    def of_elements(y: Array) -> Array:
        for axis, size in zip((x.ndim - 2, x.ndim - 1), block, strict=True):
            if size not in (1, None):
                y = scales_of_elements(y, axis, x.shape[axis], size)
        return y

    finite = jnp.isfinite(x)
    above, below = _extrema(x, dtype in FP8, block, symmetric)
    if dtype not in FP8:
        has_nan = ~jnp.isfinite(jnp.maximum(above, below))
        above, below = (jnp.where(has_nan, np.float32(0), y) for y in (above, below))
    largest = jnp.maximum(above, below)
    if symmetric:
        scales = largest * np.float32(1 / _MAX[dtype])
    else:
        least, most = -1 - _MAX[dtype], _MAX[dtype]
        # The halves are exact, so a fused multiply-add has the same bits.
        halves = above * np.float32(0.5) + below * np.float32(0.5)
        scales = halves * np.float32(2 / (most - least))
    if power_of_two:
        scales = _power_of_two(scales)
    is_zero = largest < _LEAST
    factors = jnp.where(is_zero, np.float32(1), _reciprocal(scales))
    if dtype not in FP8:
        factors = jnp.where(has_nan, np.float32(0), factors)
    scales = jnp.where(is_zero, np.float32(1), scales)
    scaled = x * of_elements(factors)
    results = [scales]
    if dtype in FP8:
        # XLA may change the bits of NaN where it selects 8-bit floats.
        bits = jnp.where(finite, _rounded_bits(scaled, dtype), _NAN)
        values = lax.bitcast_convert_type(bits, dtype)
    else:
        steps_of = lax.round(jnp.where(finite, scaled, 0), lax.RoundingMethod.TO_NEAREST_EVEN)
        if symmetric:
            values = jnp.clip(steps_of, -_MAX[dtype], _MAX[dtype]).astype(dtype)
        else:
            # The zero point of a block of zeros is 0.
            lowest = lax.round(below * factors, lax.RoundingMethod.TO_NEAREST_EVEN)
            zeros = jnp.where(is_zero, 0, jnp.clip(least + lowest, least, most))
            values = jnp.clip(steps_of + of_elements(zeros), least, most).astype(dtype)
            results.append(zeros)
        results[0] = jnp.where(has_nan, np.float32(np.nan), scales)
    if x is not given:
        values = jax.sharding.reshard(values, jax.typeof(given).sharding)
    return [values, *results]


def _in_whole_blocks(x: Array, block: Block) -> Array:
    """Gather the dimensions whose parts on a mesh with explicit axes are no whole blocks."""
    sharding = compat.explicit_sharding(jax.typeof(x))
    if sharding is None:
        return x
    spec = list(spec_of(x))
    for axis, size in zip((x.ndim - 2, x.ndim - 1), block, strict=True):
        names = spec[axis] or ()
        names = (names,) if isinstance(names, str) else names
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        if size not in (1, None) and parts > 1 and x.shape[axis] % (parts * size):
            spec[axis] = None
    if spec == [*spec_of(x)]:
        return x
    whole: Array = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return whole


def scales_of_elements(scales: Array, axis: int, size: int, block: int = BLOCK) -> Array:
    """Repeat the scales of blocks for the ``size`` elements along an axis."""
    *leading, count = scales.shape[: axis + 1]
    following = scales.shape[axis + 1 :]
    # jnp.repeat refuses explicit axes.
    blocks = jnp.broadcast_to(
        jnp.expand_dims(scales, axis + 1), (*leading, count, block, *following)
    )
    elements = blocks.reshape(*leading, count * block, *following)
    return lax.slice_in_dim(elements, 0, size, axis=axis)


def _extrema(x: Array, of_finite: bool, block: Block, symmetric: bool) -> list[Array]:
    """Return the largest magnitudes of each block above and below zero.

    If ``symmetric``, both may be that of the whole block. One of a block with NaN or infinities is
    not finite, unless they are ``of_finite`` numbers.
    """
    is_large = not isinstance(x.size, int) or x.size >= _LARGE
    if lowering_platform.value == "cpu" and is_large:
        return _extrema_in_one_pass(x, of_finite, block)
    x = jnp.where(jnp.isfinite(x), x, 0 if of_finite else np.inf)
    if symmetric:
        return [_reduced_blocks(jnp.max, jnp.abs(x), block)] * 2
    extrema = _reduced_blocks(jnp.max, x, block), -_reduced_blocks(jnp.min, x, block)
    return [jnp.maximum(y, 0) for y in extrema]


def _reduced_blocks(reduce: Callable[..., Array], x: Array, block: Block) -> Array:
    for axis, size in zip((x.ndim - 2, x.ndim - 1), block, strict=True):
        if size is None:
            x = reduce(x, axis, keepdims=True, initial=0)
        else:
            x = reduce(_split_along(x, axis, size), axis + 1)
    return x


def _extrema_in_one_pass(x: Array, of_finite: bool, block: Block) -> list[Array]:
    """Return what :func:`_extrema` does, for which XLA has several passes on CPUs.

    They are passes over arrays that it writes first: one for each maximum, and for the padding.
    """
    for axis, size in zip((x.ndim - 2, x.ndim - 1), block, strict=True):
        n = x.shape[axis]
        if size not in (1, None) and isinstance(n, int) and n > size and n % size:
            whole = n - n % size
            ends = (0, whole), (whole, n)
            parts = (lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in ends)
            pairs = zip(*(_extrema_in_one_pass(y, of_finite, block) for y in parts), strict=True)
            return [jnp.concatenate(pair, axis) for pair in pairs]
    # Magnitudes are ordered as their bits are, and integers are compared faster.
    bits = lax.bitcast_convert_type(_split(x, block), np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    if of_finite:
        magnitudes = jnp.where(magnitudes < _INFINITY, magnitudes, 0)
    is_negative = bits > 0x7FFFFFFF
    found = lax.reduce(
        (jnp.where(is_negative, 0, magnitudes), jnp.where(is_negative, magnitudes, 0)),
        (np.uint32(0),) * 2,
        lambda x, y: tuple(map(lax.max, x, y)),
        (bits.ndim - 3, bits.ndim - 1),
    )
    return [lax.bitcast_convert_type(y, np.float32) for y in found]


def _rounded_bits(x: Array, dtype: np.dtype[Any]) -> Array:
    if lowering_platform.value == "cpu":
        return fp8_bits(x, dtype)
    return lax.bitcast_convert_type(x.astype(dtype), np.uint8)


def _split(x: Array, block: Block) -> Array:
    """Return matrices as blocks of ``(..., rows of blocks, rows, columns of blocks, columns)``."""
    # On explicit axes a reshape splits one dimension.
    return _split_along(_split_along(x, x.ndim - 1, block[1]), x.ndim - 2, block[0])


def _split_along(x: Array, axis: int, size: int | None) -> Array:
    n = x.shape[axis]
    if size is None or (isinstance(n, int) and 0 < n < size):
        count, size = 1, n
    else:
        count = -(-n // size)
    padding = [(0, count * size - n if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])


def _power_of_two(x: Array) -> Array:
    """Round normal numbers up to powers of two."""
    bits = lax.bitcast_convert_type(x, np.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, np.float32)


def _reciprocal(x: Array) -> Array:
    """Return 1 / x of positive normal numbers, rounded to nearest, and 0 for infinity."""
    if lowering_platform.value == "cpu":
        return 1 / x
    bits = lax.bitcast_convert_type(x, np.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF | 0x800000
    # The reciprocal of the mantissa in steps of 2^-24, up to a few of them; then the residual of
    # its product with the mantissa, modulo 2^32, tells how many.
    fraction = lax.bitcast_convert_type(bits & 0x7FFFFF | 0x3F800000, np.float32)
    near = lax.div(jnp.ones_like(fraction), fraction)
    steps = (near * np.float32(2**24)).astype(np.int32)
    residual = -(steps * mantissa)
    steps += jnp.floor_divide(2 * residual + mantissa, 2 * mantissa)
    power = lax.bitcast_convert_type(jnp.maximum(254 - exponent, 0) << 23, np.float32)
    return steps.astype(np.float32) * np.float32(2**-24) * power


# Rules.


def _jvp(*_: Any, **__: Any) -> Any:
    raise TypeError(
        "quantize has no derivative, because it rounds: take jax_tilekern.fp8_dot_general, whose "
        "derivative is that of training, or jax.lax.stop_gradient"
    )


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], *, block: Block, **params: Any
) -> tuple[list[Array], list[int]]:
    (x,), (dim,) = operands, dims
    assert dim is not None
    bind = _bind if block[1] else _bind_whole
    results = bind(jnp.moveaxis(x, dim, 0), block=block, **params)
    return results, [0] * len(results)


def _sharding_rule(x: Any, *, block: Block, both: bool, symmetric: bool, **_: Any) -> ShardingRule:
    """Let devices share whole blocks, of a dimension that consists of several."""
    labels = tuple(range(x.ndim))
    *leading, row, column = labels
    first = (row, column) if block == (BLOCK, BLOCK) else (column, row)
    of_blocks = 1 if symmetric else 2
    results = [labels, *[(*leading, *first)] * of_blocks]
    if both:
        results += [(*leading, column, row), *[(*leading, *first[::-1])] * of_blocks]
    rule = ShardingRule(
        (labels,),
        tuple(results),
        dict(enumerate(x.shape)),
        flops=x.size,
        names={label: f"axis {label}" for label in labels},
    )
    assert block[1] is not None
    return rule.in_blocks((column, row) if both or block[0] == BLOCK else (column,), block[1])


# Lowering.


def _by_xla(*_: Any, **params: Any) -> Rewrite:
    return Rewrite("XLA computes scales, and rounds", functools.partial(_reference, **params))


def _cuda(
    operands: Sequence[Operand],
    _: Any,
    *,
    block: Block,
    dtype: np.dtype[Any],
    power_of_two: bool,
    both: bool,
    symmetric: bool,
) -> Outcome:
    (x,) = operands
    *leading, rows, columns = x.aval.shape
    # XLA fuses vectors with the outer products that read them.
    is_vector = columns == 1 or (block[0] == BLOCK and rows == 1)
    if dtype not in FP8 or block[1] != BLOCK or is_vector:
        return _by_xla(
            block=block, dtype=dtype, power_of_two=power_of_two, both=both, symmetric=symmetric
        )
    problem = Quantized(
        math.prod(leading), rows, columns, x.aval.dtype, dtype,
        square=block[0] == BLOCK, transposed=both, power_of_two=power_of_two,
    )  # fmt: skip
    return planned_kernel([x.value], plan_quantize, problem, transposed_sizes(operands))


def _described(*, block: Block, dtype: np.dtype[Any], both: bool, symmetric: bool, **_: Any) -> str:
    rows, columns = ("all" if size is None else size for size in block)
    others = f"{', both' if both else ''}{'' if symmetric else ', with zero points'}"
    return f"quantize in blocks of {rows}x{columns} to {dtype}{others}"


def _operation(name: str, cuda: Callable[..., Outcome], **rules: Any) -> Callable[..., list[Array]]:
    return define(
        Operation(
            name=name,
            reference=_reference,
            several_results=True,
            jvp=_jvp,
            batch=_batch,
            planners={"cpu": Planner(no_refusal, _by_xla), "cuda": Planner(no_refusal, cuda)},
            describe=_described,
            **rules,
        )
    )


_bind = _operation("tilekern_quantize", _cuda, sharding_rule=_sharding_rule)
# Devices combine the maxima of whole rows, as XLA partitions them.
_bind_whole = _operation(
    "tilekern_quantize_whole", _by_xla, sharding_rule=None, composed=_reference
)
