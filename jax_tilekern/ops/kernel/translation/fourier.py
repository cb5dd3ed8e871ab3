"""Fourier transforms of few points, as products with matrices of roots of unity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop.originals import jnp

# The longest transform, and the largest prime factor of its length.
_MOST_POINTS, _LARGEST_PRIME = 64, 31


def transform(x: Any, *, fft_type: Any, fft_lengths: tuple[int, ...]) -> Any:
    """Return what ``lax.fft`` means, for a real or complex array."""
    kind = lax.FftType(fft_type)
    if not all(isinstance(n, int) and 0 < n <= _MOST_POINTS for n in fft_lengths):
        raise Untranslatable(f"no CUDA for fft of {fft_lengths} points; a lane takes up to 64")
    is_real, is_inverse = kind == lax.FftType.RFFT, kind in (lax.FftType.IFFT, lax.FftType.IRFFT)
    last = fft_lengths[-1]
    if kind == lax.FftType.IRFFT:
        # The other half has the conjugates.
        for axis in range(-len(fft_lengths), -1):
            x = _along(x, axis, is_inverse)
        alone = np.isin(np.arange(last // 2 + 1), (0, last / 2))
        x = jnp.where(alone, x.real, x)
        others = x[..., (last - 1) // 2 : 0 : -1]
        return _along(jnp.concatenate([x, others.conj()], -1), -1, is_inverse).real
    for axis in range(-len(fft_lengths), 0):
        x = _along(x.astype(jnp.result_type(x, jnp.complex64)), axis, is_inverse)
    return x[..., : last // 2 + 1] if is_real else x


def _along(x: Any, axis: int, is_inverse: bool) -> Any:
    n = x.shape[axis]
    found = _of_last_axis(jnp.moveaxis(x, axis, -1), 1 if is_inverse else -1)
    return jnp.moveaxis(found / n if is_inverse else found, -1, axis)


def _of_last_axis(x: Any, sign: int) -> Any:
    """Transform along the last axis: by a matrix for a prime length, else by its factors."""
    n = x.shape[-1]
    p = next((p for p in range(2, n) if n % p == 0), n)
    if p > _LARGEST_PRIME:
        raise Untranslatable(f"no CUDA for fft of {n} points, which has the prime factor {p}")
    if p == n:
        return jnp.matmul(x, _roots(n, n, n, sign, x.dtype), precision=lax.Precision.HIGHEST)
    # Elements p k + j become transforms over k for each j, then over j.
    q = n // p
    inner = _of_last_axis(jnp.swapaxes(x.reshape(*x.shape[:-1], q, p), -1, -2), sign)
    outer = _of_last_axis(jnp.swapaxes(inner * _roots(p, q, n, sign, x.dtype), -1, -2), sign)
    return jnp.swapaxes(outer, -1, -2).reshape(x.shape)


def _roots(rows: int, columns: int, n: int, sign: int, dtype: Any) -> Any:
    """Return the matrix of the powers ``j k`` of the n-th root of unity."""
    powers = np.outer(np.arange(rows), np.arange(columns)) % n
    return np.exp(sign * 2j * math.pi / n * powers).astype(dtype)
