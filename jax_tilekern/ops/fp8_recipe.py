"""The recipe of training in 8-bit floats: what its products have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.plans.quantize import QUANTIZED_DTYPES, flag, fp8_type


@dataclass(frozen=True)
class Fp8Recipe:
    """How products of training are computed in 8-bit floats.

    Operands are float8_e4m3fn: activations in blocks of 1x128, weights in blocks of 128x128.

    Parameters
    ----------
    gradient_dtype
        Type of quantised cotangents, float8_e4m3fn or float8_e5m2.
    power_of_two
        Whether scales are powers of two.

    Raises
    ------
    TypeError
        If ``gradient_dtype`` is another type, or ``power_of_two`` is not true or false.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.Fp8Recipe(jnp.float8_e5m2)
    Fp8Recipe(gradient_dtype=dtype(float8_e5m2), power_of_two=False)
    """

    gradient_dtype: DTypeLike = jnp.float8_e4m3fn
    power_of_two: bool = False

    def __post_init__(self) -> None:
        """Check and canonicalise the fields."""
        dtype = fp8_type("Fp8Recipe: gradient_dtype is", self.gradient_dtype)
        object.__setattr__(self, "gradient_dtype", dtype)
        object.__setattr__(self, "power_of_two", flag("power_of_two", self.power_of_two))


def check_quantizable(function: str, **arrays: ArrayLike) -> None:
    """Raise an error unless the recipe quantises arrays of these types."""
    for name, x in arrays.items():
        dtype = jnp.asarray(x).dtype
        if dtype not in QUANTIZED_DTYPES:
            raise TypeError(f"{function} takes bfloat16, float16 or float32, and {name} is {dtype}")


@jax.custom_jvp
def differentiated_once(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays whose tangents are an error."""
    return arrays


@differentiated_once.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError(
        "products in 8-bit floats have no second derivative: quantisation has none, and the "
        "recipe's gradient is not that of the function"
    )
