"""Calls of attention with emulated kernels: modes of the emulator, operands, and errors."""

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(3)
MODES = {
    "late": {"late": ("reads", "writes")},
    "backwards": {"backwards": True},
    "held": {"late": ("writes",), "held": int(RNG.integers(1, 2**31))},
}


def draw(*shape, dtype):
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


def everything(attention):
    """The result, the logsumexp, the gradients and a tangent."""

    def of(operands, d_out, dots):
        (out, residual), back = jax.vjp(attention, *operands)
        along = jax.jvp(attention, operands, dots)[1]
        return out, residual, *back((d_out, jnp.zeros_like(residual))), *along

    return of


def relative_errors(found, expected):
    """The error of each array relative to its norm; infinities and zeros are at the same places."""
    errors = []
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        finite = np.isfinite(y)
        np.testing.assert_array_equal(finite, np.isfinite(x))
        np.testing.assert_array_equal(x[~finite], y[~finite])
        x, y = x[finite], y[finite]
        errors.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))
    return errors
