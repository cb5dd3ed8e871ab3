"""8-bit floats from float32 and back, in fewer operations than XLA's conversions take on CPUs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def fp8_bits(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round float32 numbers, up to the largest of an 8-bit type, to the bits of that type."""
    mantissa, exponent, large = _format(dtype)
    dropped = 23 - mantissa
    bits = lax.bitcast_convert_type(x, np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    is_odd = magnitudes >> dropped & 1
    normal = (magnitudes + ((1 << dropped - 1) - 1) + is_odd) >> dropped
    normal = normal - ((126 + exponent) << mantissa)
    # An addition to a number whose ulp is the least subnormal rounds to a multiple of that.
    sums = lax.bitcast_convert_type(magnitudes, np.float32) + large
    subnormal = lax.bitcast_convert_type(sums, np.uint32) - large.view(np.uint32)
    is_normal = magnitudes >= np.float32(2.0**exponent).view(np.uint32)
    return (jnp.where(is_normal, normal, subnormal) | bits >> 24 & 0x80).astype(np.uint8)


def fp8_numbers(x: Array) -> Array:
    """Return 8-bit floats in float32."""
    mantissa, exponent, large = _format(x.dtype)
    bits = lax.bitcast_convert_type(x, np.uint8).astype(np.uint32)
    magnitudes = bits & 0x7F

    def float32(bits: Array) -> Array:
        return lax.bitcast_convert_type(bits, np.float32)

    normal = float32((magnitudes << 23 - mantissa) + ((126 + exponent) << 23))
    subnormal = float32(magnitudes | large.view(np.uint32)) - large
    numbers = jnp.where(magnitudes >= 1 << mantissa, normal, subnormal)
    if x.dtype == jnp.float8_e5m2:
        numbers = jnp.where(magnitudes == 0x7C, np.float32(np.inf), numbers)
        is_nan = magnitudes > 0x7C
    else:
        is_nan = magnitudes == 0x7F
    numbers = jnp.where(is_nan, np.float32(np.nan), numbers)
    return jnp.where(bits > 0x7F, -numbers, numbers)


def _format(dtype: np.dtype[Any]) -> tuple[int, int, np.float32]:
    """Return the bits of the mantissa, the least normal exponent and a float32.

    The float32 is a power of two whose ulp is the least subnormal number.
    """
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    mantissa, exponent = int(info.nmant), int(info.minexp)
    return mantissa, exponent, np.float32(2.0 ** (23 + exponent - mantissa))
