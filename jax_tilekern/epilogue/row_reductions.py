"""Results of a product's rows, which an epilogue returns beside elements or instead of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.typing import DTypeLike

from jax_tilekern.interop.originals import jnp
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.epilogue import RowQuantization, RowReductionKind
from jax_tilekern.plans.quantize import flag, fp8_type

# How the values of a row are reduced, or quantised.
RowKind = RowReductionKind | RowQuantization


@dataclass(frozen=True)
class RowReduction:
    """A result of an epilogue that is computed of each row of the product."""

    value: Any  # of one element
    kind: RowKind  # how the values of a row are reduced, or quantised

    def __getattr__(self, name: str) -> Any:
        # Python looks for special methods in objects that have no attributes yet.
        raise AttributeError(name if name.startswith("_") else f"{name}: {self._no_number()}")

    def _no_number(self) -> str:
        name = f"row_{self.kind if isinstance(self.kind, str) else 'quantize'}"
        return (
            f"{name}(...) is a result of the epilogue and no number inside it, because it is known "
            f"when the row is complete; return it, as in epilogue=lambda y: (y, {name}(y)), and "
            "compute with it after the product"
        )


def _refuse(self: RowReduction, *_: Any) -> Any:
    raise TypeError(self._no_number())


# What Python and JAX call where a number is used.
_BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
_OTHERS = ["neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "float", "int", "bool", "getitem"]
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS, "jax_array"):
    setattr(RowReduction, f"__{_name}__", _refuse)

jax.tree_util.register_dataclass(RowReduction, ("value",), ("kind",))


def row_sum(value: Any) -> RowReduction:
    """Return the sum of each row of the product, as a result of an epilogue.

    The row's elements are those along the last dimension of the product, which the result lacks.
    Values of 16-bit types are added in float32. The order of addition is fixed. Where the rows are
    sharded along it, each device adds its elements, and an all-reduce adds one sum per row.

    Parameters
    ----------
    value
        A scalar that the epilogue computes from one element.

    Examples
    --------
    Mean squares for a norm, beside the product:

    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 16))
    >>> y, squares = jtk.matmul(x, w, epilogue=lambda y: (y, jtk.row_sum(y * y)))
    >>> y.shape, squares
    ((4, 16), Array([1024., 1024., 1024., 1024.], dtype=float32))
    """
    return _reduction("sum", value)


def row_max(value: Any) -> RowReduction:
    """Return the maximum of each row of the product, as a result of an epilogue.

    As :func:`row_sum`; NaN if a value is NaN.
    """
    return _reduction("max", value)


def row_logsumexp(value: Any) -> RowReduction:
    """Return ``log(sum(exp(value)))`` of each row of the product, as a result of an epilogue.

    As :func:`row_sum`. Exponentials are taken relative to the maximum, as
    :func:`jax.nn.logsumexp` does.
    """
    return _reduction("logsumexp", value)


def row_quantize(
    value: Any, dtype: DTypeLike = jnp.float8_e4m3fn, *, power_of_two: bool = False
) -> tuple[RowReduction, RowReduction]:
    """Return the rows of the product, quantised in blocks of 1x128, as results of an epilogue.

    They are the bits that :func:`quantize` gives of the value, once it is rounded to the product's
    type where it has that of the accumulator. On a Hopper GPU the product's kernel writes them, so
    that the next product of :func:`scaled_matmul` has its operand from one pass. As for
    :func:`quantize`, there is no derivative. The product has two dimensions at least.

    Parameters
    ----------
    value
        A scalar that the epilogue computes from one element.
    dtype
        float8_e4m3fn or float8_e5m2.
    power_of_two
        Whether scales are rounded up to powers of two.

    Returns
    -------
    tuple
        Values ``(..., m, n)``, and scales of float32, ``(..., m, ceil(n / 128))``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 256))
    >>> h, scales = jtk.matmul(x, w, epilogue=lambda y: jtk.row_quantize(jax.nn.relu(y)))
    >>> h.shape, h.dtype, scales.shape
    ((4, 256), dtype(float8_e4m3fn), (4, 2))
    """
    quantized = fp8_type("row_quantize rounds to", dtype)
    power_of_two = flag("power_of_two of row_quantize", power_of_two)
    own = jax.dtypes.result_type(value)
    if not jnp.issubdtype(own, jnp.floating):
        raise TypeError(f"row_quantize takes bfloat16, float16 or float32, not {own}")
    values, scales = (
        _result("quantize", value, RowQuantization(quantized, power_of_two, is_scales))
        for is_scales in (False, True)
    )
    return values, scales


def _reduction(kind: RowReductionKind, value: Any) -> RowReduction:
    return _result(kind, value, kind)


def _result(name: str, value: Any, kind: RowKind) -> RowReduction:
    if shape := getattr(value, "shape", ()):
        raise TypeError(
            f"row_{name} takes a scalar and is a result of an epilogue, as in matmul(a, b, "
            f"epilogue=row_{name}); got an array of shape {shape}, whose last dimension a function "
            "of JAX reduces"
        )
    return RowReduction(value, kind)


_REDUCTIONS: dict[RowReductionKind, Callable[..., Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "logsumexp": jax.nn.logsumexp,
}


def reduced(values: Array, kind: RowReductionKind) -> Array:
    """Reduce the last dimension of an array in 32 bits at least, and return its type."""
    wide = values.astype(accumulator_dtype(values.dtype))
    return _REDUCTIONS[kind](wide, axis=-1).astype(values.dtype)
