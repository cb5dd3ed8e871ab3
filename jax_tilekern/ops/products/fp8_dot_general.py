"""``fp8_dot_general``: products of training in 8-bit floats, each with its own quantised operands.

A product and both of its gradients contract different dimensions, and scales belong to blocks along
the contracted one. So every operand is quantised twice, from one read: along each of its
dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.custom_rules import custom_vjp
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.explicit import by_automatic_axes
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.scaled_matmul import scaled_matmul
from jax_tilekern.ops.products.scaled_operands import check_result
from jax_tilekern.ops.quantisation.quantize import Block, quantize
from jax_tilekern.plans.contraction import DimensionNumbers, explicit_dimension_numbers
from jax_tilekern.plans.quantize import BLOCK, QUANTIZED_DTYPES, flag, fp8_type

_ROWS: Block = (1, BLOCK)
_SQUARE: Block = (BLOCK, BLOCK)


@jitted(
    "dimension_numbers",
    "precision",
    "preferred_element_type",
    "out_sharding",
    "gradient_dtype",
    "power_of_two",
)
def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    gradient_dtype: DTypeLike = jnp.float8_e4m3fn,
    power_of_two: bool = False,
) -> Array:
    """Contract two arrays in 8-bit floats, forward and backward.

    It replaces :func:`jax.lax.dot_general` in layers, for example as ``dot_general=`` of
    ``flax.linen.Dense`` and ``flax.nnx.Linear``. Operands are quantised as :func:`quantize` does:
    ``lhs``, the activations, in blocks of 1x128, and ``rhs``, the weights, in blocks of 128x128.
    The products are those of :func:`scaled_matmul`.

    The gradient is that of the product without quantisation ("straight-through"),
    where the cotangent is quantised in blocks of 1x128 as well. Each of the two products of the
    backward pass has operands that are quantised along its own contracted dimension, so the
    gradient of the weights has blocks of 128 tokens. There is no second derivative.

    Parameters
    ----------
    lhs, rhs
        Arrays of bfloat16, float16 or float32.
    dimension_numbers
        Contracted and batch dimensions, as in :func:`jax.lax.dot_general`.
    precision
        Ignored: the types are those of the quantised operands.
    preferred_element_type
        Type of the result; by default the operands' promoted type.
    out_sharding
        Sharding of the result on a mesh with explicit axes.
    gradient_dtype
        Type of the quantised cotangent, float8_e4m3fn or float8_e5m2. Operands are float8_e4m3fn.
    power_of_two
        Whether scales are powers of two.

    Returns
    -------
    Array
        As :func:`jax.lax.dot_general` returns it: batch dimensions, those of ``lhs``, those of
        ``rhs``.

    Raises
    ------
    TypeError
        If a type is another one, or a second derivative is taken.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.fp8_dot_general(jnp.ones((2, 3)), jnp.ones((3, 4)), (((1,), (0,)), ((), ())))
    Array([[3., 3., 3., 3.],
           [3., 3., 3., 3.]], dtype=float32)
    """
    del precision
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in QUANTIZED_DTYPES:
            raise TypeError(
                f"fp8_dot_general takes bfloat16, float16 or float32, and {name} is {x.dtype}"
            )
    gradient_dtype = fp8_type("fp8_dot_general: gradient_dtype is", gradient_dtype)
    power_of_two = flag("power_of_two", power_of_two)
    if preferred_element_type is not None:
        check_result("fp8_dot_general", preferred_element_type)
    common = jnp.promote_types(lhs.dtype, rhs.dtype)
    # The shape, the sharding and the errors are those of JAX's own function.
    result = compat.result_type(
        lambda a, b: lax.dot_general(
            a.astype(common),
            b.astype(common),
            dimension_numbers,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        ),
        lhs,
        rhs,
    )
    numbers = explicit_dimension_numbers(dimension_numbers, lhs.ndim)
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers

    def multiply(operands: tuple[Array, Array]) -> Array:
        left, lhs_first = _as_matrices(operands[0], lhs_batch, lhs_contracted)
        right, rhs_first = _as_matrices(operands[1], rhs_batch, rhs_contracted)
        # The types of cotangents are those of operands, so each varies as the product does.
        left, right = compat.unify_varying(left, right)
        call = _Call(lhs_first, rhs_first, result.dtype, gradient_dtype, power_of_two)
        product: Array = _product(left, right, call)
        return product.reshape(result.shape)

    out: Array = by_automatic_axes(
        multiply, (lhs, rhs), lambda: tuple(compat.explicit_sharding(result).spec)
    )
    return out


class _Call(NamedTuple):
    """How a product of matrices is computed.

    Attributes
    ----------
    lhs_first, rhs_first
        Whether the contracted dimension is the first one of an operand's matrices, and not the
        last.
    out
        Type of the product.
    gradient_dtype
        Type of quantised cotangents.
    power_of_two
        Whether scales are powers of two.
    """

    lhs_first: bool
    rhs_first: bool
    out: np.dtype[Any]
    gradient_dtype: np.dtype[Any]
    power_of_two: bool


def _as_matrices(x: Array, batch: Sequence[int], contracted: Sequence[int]) -> tuple[Array, bool]:
    """Merge dimensions; return matrices, and whether the contracted dimension comes first."""
    batch, contracted = tuple(batch), tuple(contracted)
    free = tuple(i for i in range(x.ndim) if i not in (*batch, *contracted))
    first = (*batch, *contracted, *free) == tuple(range(x.ndim)) and bool(contracted and free)
    parts = (contracted, free) if first else (free, contracted)
    moved = jnp.transpose(x, (*batch, *parts[0], *parts[1]))
    sizes = [math.prod(x.shape[i] for i in dims) for dims in parts]
    leading = [math.prod(x.shape[i] for i in batch)] if batch else []
    return moved.reshape(*leading, *sizes), first


class _Copies(NamedTuple):
    """Values and scales of an operand, quantised along its contracted and its other dimension."""

    contracted: tuple[Array, Array]
    free: tuple[Array, Array]


def _copies(x: Array, first: bool, block: Block, dtype: DTypeLike, power_of_two: bool) -> _Copies:
    last, transposed = quantize(x, block, dtype, power_of_two=power_of_two, both=True)
    return _Copies(transposed, last) if first else _Copies(last, transposed)


def _multiplied(lhs: tuple[Array, Array], rhs: tuple[Array, Array], dtype: Any) -> Array:
    (a, a_scales), (b, b_scales) = lhs, rhs
    result: Array = scaled_matmul(a, b, a_scales, b_scales, preferred_element_type=dtype)
    return result


@jax.custom_jvp
def _differentiated_once(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays whose tangents are an error."""
    return arrays


@_differentiated_once.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError(
        "products in 8-bit floats have no second derivative: quantisation has none, and the "
        "gradient of fp8_dot_general is not that of the function"
    )


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _product(lhs: Array, rhs: Array, call: _Call) -> Array:
    power_of_two = call.power_of_two

    def along_contracted(x: Array, first: bool, block: Block) -> tuple[Array, Array]:
        if first:
            return _copies(x, first, block, jnp.float8_e4m3fn, power_of_two).contracted
        pair: tuple[Array, Array] = quantize(x, block, power_of_two=power_of_two)
        return pair

    left = along_contracted(lhs, call.lhs_first, _ROWS)
    right = along_contracted(rhs, call.rhs_first, _SQUARE)
    return _multiplied(left, right, call.out)


def _forward(lhs: Array, rhs: Array, call: _Call) -> tuple[Array, Any]:
    lhs, rhs = _differentiated_once(lhs, rhs)
    e4m3, power_of_two = jnp.float8_e4m3fn, call.power_of_two
    left = _copies(lhs, call.lhs_first, _ROWS, e4m3, power_of_two)
    right = _copies(rhs, call.rhs_first, _SQUARE, e4m3, power_of_two)
    out = _multiplied(left.contracted, right.contracted, call.out)
    # Residuals are arrays, so empty ones tell the types of the operands.
    types = tuple(jnp.empty((0,), x.dtype) for x in (lhs, rhs))
    return out, (left.free, right.free, types)


def _backward(call: _Call, residuals: Any, cotangent: Array) -> tuple[Array, Array]:
    left, right, (lhs_like, rhs_like) = residuals
    (cotangent,) = _differentiated_once(cotangent)
    if cotangent.dtype not in QUANTIZED_DTYPES:
        cotangent = cotangent.astype(np.float32)
    along_n, along_m = quantize(
        cotangent, _ROWS, call.gradient_dtype, power_of_two=call.power_of_two, both=True
    )
    # A and B are swapped where the operand lies transposed.
    left_factors = (right, along_n) if call.lhs_first else (along_n, right)
    right_factors = (left, along_m) if call.rhs_first else (along_m, left)
    return _multiplied(*left_factors, lhs_like.dtype), _multiplied(*right_factors, rhs_like.dtype)


_product.defvjp(_forward, _backward)
