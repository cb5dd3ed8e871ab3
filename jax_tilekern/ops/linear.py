"""``linear`` and ``gated_linear``: layers of neural networks, as products with epilogues."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.matmul import matmul

Activation = Callable[[Any], Any]


@jitted("activation", "precision", "preferred_element_type")
def linear(
    x: ArrayLike,
    w: ArrayLike,
    b: ArrayLike | None = None,
    activation: Activation | None = None,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Dense layer ``activation(x @ w + b)``, in one kernel.

    Bias and activation are computed in the type in which the product is accumulated, and the result
    is rounded once. See :func:`matmul`, whose epilogue they are.

    Parameters
    ----------
    x
        Array of shape ``(..., k)``.
    w
        Array of shape ``(k, n)``.
    b
        Array of shape ``(n,)``, or any other that broadcasts to the result.
    activation
        A function of scalars, such as ``jax.nn.gelu``.
    precision, preferred_element_type
        As in :func:`matmul`.

    Returns
    -------
    Array
        Shape ``(..., n)``.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If an operand is not an array, or the activation is not a function of scalars.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w, b = jnp.ones((64, 128)), jnp.ones((128, 32)), jnp.ones(32)
    >>> jax.grad(lambda w: jtk.linear(x, w, b, jax.nn.gelu).sum())(w).shape
    (128, 32)
    """
    operands = () if b is None else (b,)
    epilogue = activation if b is None else _after_bias(activation)
    return matmul(
        x,
        w,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
        operands=operands,
    )


@jitted("activation", "precision", "preferred_element_type")
def gated_linear(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    activation: Activation = jax.nn.silu,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Gated linear unit ``activation(x @ w_gate) * (x @ w_up)``, in two kernels.

    The second product's kernel reads the first product and combines both, so no other pass over
    memory is made. The first product is rounded to its type.

    Parameters
    ----------
    x
        Array of shape ``(..., k)``.
    w_gate, w_up
        Arrays of shape ``(k, n)``.
    activation
        A function of scalars: ``jax.nn.silu`` makes a SwiGLU, ``jax.nn.gelu`` a GEGLU.
    precision, preferred_element_type
        As in :func:`matmul`.

    Returns
    -------
    Array
        Shape ``(..., n)``.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If an operand is not an array, or the activation is not a function of scalars.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
    >>> jtk.gated_linear(x, w, w).shape
    (64, 32)
    """
    types: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    up = matmul(x, w_up, **types)
    return matmul(x, w_gate, epilogue=_times(activation), operands=(up,), **types)


# A function is traced once for each object, so equal layers share one.


@functools.lru_cache(maxsize=256)
def _after_bias(activation: Activation | None) -> Callable[[Any, Any], Any]:
    def biased(y: Any, bias: Any) -> Any:
        return y + bias if activation is None else activation(y + bias)

    return _named(biased, activation, "bias")


@functools.lru_cache(maxsize=256)
def _times(activation: Activation) -> Callable[[Any, Any], Any]:
    def gated(y: Any, up: Any) -> Any:
        return activation(y) * up

    return _named(gated, activation, "gate")


def _named(function: Callable[..., Any], activation: Any, what: str) -> Callable[..., Any]:
    name = getattr(activation, "__name__", "") if activation is not None else ""
    function.__name__ = f"{what}_{name}" if name else what
    return function
