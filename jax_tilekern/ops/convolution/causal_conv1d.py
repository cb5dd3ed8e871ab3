"""``causal_conv1d``: each channel convolved with a filter of its own along time.

Three primitives compute it. Operands of the first are ``x`` of shape ``(batch, length, channels)``,
the ``state`` of ``(batch, width - 1, channels)`` that comes before it, ``weights`` of
``(width, channels)`` and ``bias`` of ``(channels,)``, all of one type. Its tangent is linear in the
tangents of the four, and the transpose of that is the gradient, which computes the argument of the
activation again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.causal_conv1d import (
    CONVOLVED_DTYPES,
    WIDTHS,
    CausalConv,
    plan_causal_conv1d,
    plan_causal_conv1d_gradient,
)
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
    no_refusal,
)

_Arrays = Sequence[Any]
_BATCH, _CHANNELS = range(2)


@jitted("activation")
def causal_conv1d(
    x: ArrayLike,
    weights: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = None,
    state: ArrayLike | None = None,
) -> Array | tuple[Array, Array]:
    """Convolve each channel along time with a filter of its own, of present and past inputs.

    ``out[t, c] = activation(bias[c] + sum over i of weights[i, c] * x[t - (width - 1) + i, c])``.
    It is the layer before the recurrence of Mamba (Gu and Dao, 2023) and of similar models. A
    kernel reads ``x`` once, and the activation is part of it. The gradient is a kernel, too.

    Parameters
    ----------
    x
        Array of shape ``(..., length, channels)``.
    weights
        Array of shape ``(width, channels)``, the filter's weight of the present input last. Kernels
        have widths from 2 to 8.
    bias
        Array of shape ``(channels,)``.
    activation
        ``None`` or ``"silu"``.
    state
        The inputs before ``x``, of shape ``(..., width - 1, channels)``. Without it they are zeros.

    Returns
    -------
    out
        Of the shape of ``x`` and the promoted type. 16-bit types are computed in float32.
    state
        The last ``width - 1`` inputs, only if there is a ``state``: that of the next call.

    Raises
    ------
    TypeError
        If an operand is no array of floats or complex numbers.
    ValueError
        If shapes do not fit, or the activation is unknown.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, weights = jnp.arange(4.0)[:, None], jnp.array([[1.0], [10.0]])
    >>> jtk.causal_conv1d(x, weights)[:, 0]
    Array([ 0., 10., 21., 32.], dtype=float32)
    >>> out, state = jtk.causal_conv1d(x[:2], weights, state=jnp.zeros((1, 1)))
    >>> jtk.causal_conv1d(x[2:], weights, state=state)[0][:, 0]
    Array([21., 32.], dtype=float32)
    """
    optional = compat.given(bias=bias, state=state)
    compat.check_arraylike("causal_conv1d", x, weights, **optional)
    given = [x, weights, *optional.values()]
    # Arrays may have 64 bits although x64 is off.
    dtype = functools.reduce(jnp.promote_types, (jax.typeof(z).dtype for z in given))
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"causal_conv1d takes floats or complex numbers, not {dtype}")
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv1d: activation is {activation!r}; it is None or 'silu'")
    x, weights = compat.as_type(x, dtype), compat.as_type(weights, dtype)
    if x.ndim < 2 or weights.ndim != 2 or weights.shape[1] != x.shape[-1] or not len(weights):
        raise ValueError(
            "causal_conv1d takes x (..., length, channels) and weights (width, channels), not "
            f"shapes {x.shape} and {weights.shape}"
        )
    *outer, length, channels = x.shape
    history = (*outer, len(weights) - 1, channels)
    bias = _zeros(x, (channels,)) if bias is None else compat.as_type(bias, dtype)
    before = _zeros(x, history) if state is None else compat.as_type(state, dtype)
    for name, shape, wanted in (
        ("bias", bias.shape, (channels,)),
        ("state", before.shape, history),
    ):
        if shape != wanted:
            raise ValueError(
                f"causal_conv1d: {name} has shape {shape}; with x of {x.shape} and weights of "
                f"{weights.shape} it is {wanted}"
            )
    batch = math.prod(outer)
    sequences, first = (z.reshape(batch, *z.shape[-2:]) for z in (x, before))
    out: Array = _convolve(sequences, first, weights, bias, activation=activation)
    out = out.reshape(x.shape)
    if state is None:
        return out
    last = jnp.concatenate((before[..., length:, :], x[..., max(0, length - history[-2]) :, :]), -2)
    return out, last


def _zeros(x: Array, shape: tuple[int, ...]) -> Array:
    """Return zeros that explicit axes split as ``x``, along its outer dimensions and channels."""
    zeros = compat.as_type(jnp.zeros(shape, np.int8), x.dtype)
    sharding = compat.explicit_sharding(jax.typeof(x))
    if sharding is None:
        return zeros
    axes = (*tuple(sharding.spec), *(None,) * (x.ndim - len(sharding.spec)))
    spec = (*axes[:-2], None, axes[-1])[-len(shape) :]
    split: Array = jax.sharding.reshard(zeros, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
    return split


# Programs of XLA: what the primitives mean.


def _wide(x: Array) -> Array:
    """Return an array in the type in which it is computed, float32 at least."""
    return compat.as_type(x, jnp.promote_types(x.dtype, np.float32))


def _activated(x: Array, state: Array, weights: Array, bias: Array, *, activation: Any) -> Array:
    """Convolve in the type of the operands."""
    inputs = jnp.concatenate((state, x), 1)
    length = x.shape[1]
    z = bias
    for i, row in enumerate(weights):
        z = z + row * inputs[:, i : i + length]
    result: Array = jax.nn.silu(z) if activation == "silu" else z
    return result


def _forward(*operands: Array, activation: Any) -> Array:
    result = _activated(*map(_wide, operands), activation=activation)
    return compat.as_type(result, operands[0].dtype)


def _tangent(*operands: Array, activation: Any) -> Array:
    wide = list(map(_wide, operands))
    function = functools.partial(_activated, activation=activation)
    _, moved = jax.jvp(function, wide[:4], wide[4:])
    return compat.as_type(moved, operands[0].dtype)


def _gradient(*operands: Array, activation: Any) -> _Arrays:
    """Return the cotangents, of weights and bias in float32 at least."""
    dtype = operands[0].dtype
    *wide, d_out = map(_wide, operands)
    function = functools.partial(_activated, activation=activation)
    d_x, d_state, *others = jax.vjp(function, *wide)[1](d_out)
    return [compat.as_type(d_x, dtype), compat.as_type(d_state, dtype), *others]


# Derivatives.


def _jvp(primals: _Arrays, tangents: _Arrays, **params: Any) -> tuple[Any, Any]:
    moved = map(ad.instantiate_zeros, tangents)
    return _convolve(*primals, **params), _tangent_of(*primals, *moved, **params)


def _jvp_of_tangent(primals: _Arrays, tangents: _Arrays, **params: Any) -> tuple[Any, Any]:
    if any(type(x) is not ad.Zero for x in tangents[:4]):
        (out,), (moved,) = jvp_of(_as_list(_tangent), primals, tangents, **params)
        return out, moved
    moved = map(ad.instantiate_zeros, tangents[4:])
    return _tangent_of(*primals, **params), _tangent_of(*primals[:4], *moved, **params)


def _as_list(function: Callable[..., Array]) -> Callable[..., _Arrays]:
    return lambda *operands, **params: [function(*operands, **params)]


def _transposed_tangent(cotangent: Array, *operands: Any, **params: Any) -> _Arrays:
    results = _gradient_of(*operands[:4], cotangent, **params)
    return [compat.as_type(x, operands[0].dtype) for x in results]


# Batching: more sequences or, where the filters are mapped or have cotangents, more channels.


def _batch(
    axis_data: Any, operands: _Arrays, dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    sequences, filters = slice(0, 2), slice(2, 4)
    if any(dim is not None for dim in dims[filters]):
        function = _as_list(_convolve)
        (result,), (dim,) = _batched_channels(axis_data, function, operands, dims, params)
        return result, dim
    moved = _mapped(axis_data, operands[sequences], dims[sequences], 0)
    folded = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in moved)
    out = _convolve(*folded, *operands[filters], **params)
    return out.reshape(moved[0].shape), 0


def _batch_tangent(
    axis_data: Any, operands: _Arrays, dims: Any, **params: Any
) -> tuple[Array, int]:
    function = _as_list(_tangent_of)
    (result,), (dim,) = _batched_channels(axis_data, function, operands, dims, params)
    return result, dim


def _batch_gradient(
    axis_data: Any, operands: _Arrays, dims: Any, **params: Any
) -> tuple[_Arrays, list[int]]:
    return _batched_channels(axis_data, _gradient_of, operands, dims, params)


def _mapped(
    axis_data: Any, operands: _Arrays, dims: Sequence[int | None], place: int
) -> list[Array]:
    """Put the mapped axis at a place, counted from the end if it is negative."""
    return [
        compat.repeated(axis_data, x, place if place >= 0 else x.ndim + 1 + place)
        if dim is None
        else jnp.moveaxis(x, dim, place)
        for x, dim in zip(operands, dims, strict=True)
    ]


def _batched_channels(
    axis_data: Any,
    function: Callable[..., _Arrays],
    operands: _Arrays,
    dims: Any,
    params: Any,
) -> tuple[list[Array], list[int]]:
    moved = _mapped(axis_data, operands, dims, -2)
    both = moved[0].shape[-2:]
    channels = math.prod(both)
    results = function(*(x.reshape(*x.shape[:-2], channels) for x in moved), **params)
    parted = [x.reshape(*x.shape[:-1], *both) for x in results]
    return parted, [x.ndim - 2 for x in parted]


# Partitioning: sequences and channels are independent.


def _rule(x: Any, state: Any, weights: Any, *_: Any, results: int, **params: Any) -> ShardingRule:
    del state
    of_x: Dims = (_BATCH, None, _CHANNELS)
    four: tuple[Dims, ...] = (of_x, of_x, (None, _CHANNELS), (_CHANNELS,))
    operands = {"forward": four, "tangent": four * 2, "gradient": (*four, of_x)}[params["name"]]
    return ShardingRule(
        operands,
        four if results == 4 else (of_x,),
        {_BATCH: x.shape[0], _CHANNELS: x.shape[2]},
        flops=2.0 * x.size * weights.shape[0] * results,
        names={_BATCH: "batch", _CHANNELS: "channels"},
        each_result_is_a_sum=True,
    )


# Lowering.


def _refusal(x: Any, _: Any, weights: Any, *__: Any, **___: Any) -> Fallback | None:
    if x.dtype not in CONVOLVED_DTYPES:
        return Fallback(f"no kernel convolves {x.dtype}")
    if weights.shape[0] not in WIDTHS:
        return Fallback(f"kernels have {WIDTHS[0]} to {WIDTHS[-1]} weights a channel")
    return None


def _cuda(
    plan: Callable[..., Any], operands: Sequence[Operand], _: Any, *, activation: Any
) -> PlannedKernel | Fallback:
    x, weights = operands[0].aval, operands[2].aval
    batch, length, channels = x.shape
    dtype = np.dtype(x.dtype)
    problem = CausalConv(batch, length, channels, weights.shape[0], dtype, activation)
    return planned_kernel([operand.value for operand in operands], plan, problem)


def _by_xla(function: Callable[..., Any]) -> Planner:
    def plan(*_: Any, **params: Any) -> Rewrite:
        return Rewrite("XLA fuses the terms", functools.partial(function, **params))

    return Planner(no_refusal, plan)


def _defined(
    name: str, reference: Callable[..., Any], results: int = 1, plan: Any = None, **rules: Any
) -> Callable[..., Any]:
    suffix = "" if name == "forward" else f"_{name}"
    by_xla = _by_xla(reference)
    cuda = by_xla if plan is None else Planner(_refusal, functools.partial(_cuda, plan))

    def describe(*, activation: Any) -> str:
        return f"causal_conv1d{suffix}" + (f", {activation}" if activation else "")

    return define(
        Operation(
            f"tilekern_causal_conv1d{suffix}",
            reference,
            sharding_rule=functools.partial(_rule, results=results, name=name),
            planners={"cpu": by_xla, "cuda": cuda},
            describe=describe,
            several_results=results > 1,
            **rules,
        )
    )


_convolve = _defined("forward", _forward, plan=plan_causal_conv1d, batch=_batch, jvp=_jvp)
_tangent_of = _defined(
    "tangent",
    _tangent,
    batch=_batch_tangent,
    jvp=_jvp_of_tangent,
    transposes={(4, 5, 6, 7): _transposed_tangent},
)
_gradient_of = _defined(
    "gradient",
    _gradient,
    results=4,
    plan=plan_causal_conv1d_gradient,
    batch=_batch_gradient,
    jvp=functools.partial(jvp_of, _gradient),
)
