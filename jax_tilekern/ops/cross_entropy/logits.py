"""The logits ``h @ w + bias`` of a chunk, and the loss of a row in terms of its logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.ops.fused_contraction import contract_with_epilogue
from jax_tilekern.plans.contraction import Contraction

Carry = TypeVar("Carry")


class Options(NamedTuple):
    """What a call depends on beside arrays.

    Attributes
    ----------
    softcap, z_loss, label_smoothing
        As for :func:`~jax_tilekern.linear_cross_entropy`.
    columns
        Number of logits of a row, on all devices.
    precision
        Of the products, canonical.
    chunk_bytes
        Size of a chunk of logits. It is exceeded where a chunk would have too few rows or columns.
    """

    softcap: float | None
    z_loss: float
    label_smoothing: float
    columns: int
    precision: Any
    chunk_bytes: int


class Lowering(NamedTuple):
    """What is known of a call when it is lowered.

    Attributes
    ----------
    w
        The dimensions of ``w`` as it lies in memory: ``"vd"`` if it has a row for each label.
    reduces_rows
        Whether kernels reduce the rows of a product in their epilogues.
    """

    w: str
    reduces_rows: bool

    def oriented(self, w: Array) -> Array:
        """Return ``w`` of shape ``(d, v)`` as it lies in memory, or the reverse."""
        return w.T if self.w == "vd" else w


def statistics_type(h: Any, w: Any) -> np.dtype[Any]:
    """Return the type of logits and statistics."""
    return np.dtype(jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32))


def logit(accumulator: Array, bias: Array, softcap: float | None) -> Array:
    """Return the logit of an accumulator of ``h @ w``."""
    raw = accumulator + bias.astype(accumulator.dtype)
    return raw if softcap is None else softcap * jnp.tanh(raw / softcap)


def slope(value: Array, softcap: float | None) -> Array | float:
    """Return the derivative of a logit with respect to what the softcap bounds."""
    return 1.0 if softcap is None else 1 - (value / softcap) ** 2


def row_losses(options: Options, lse: Array, at_label: Array, *total: Array) -> Array:
    """Return the loss of each row from its statistics; the last one is of smoothed labels alone."""
    losses = lse - (1 - options.label_smoothing) * at_label
    for x in total:
        losses -= options.label_smoothing / options.columns * x
    return losses + options.z_loss * lse**2 if options.z_loss else losses


def product(
    dims: str,
    lhs: Array,
    rhs: Array,
    epilogue: Callable[..., Any],
    operands: Sequence[Array] = (),
    *,
    precision: Any,
    in_place: Sequence[tuple[int, int]] = (),
) -> Any:
    """Return ``epilogue(accumulator, *operands)`` of each element of ``einsum(dims, lhs, rhs)``.

    The dimensions are rows, features ``d`` and the vocabulary ``v``.
    """
    of_lhs, of_rhs, of_out = re.split(",|->", dims)
    labels = [tuple(map("rdv".index, x)) for x in (of_lhs, of_rhs, of_out)]
    sizes = dict(zip(of_lhs + of_rhs, lhs.shape + rhs.shape, strict=True))
    return contract_with_epilogue(
        lhs,
        rhs,
        contraction=Contraction(labels[0], labels[1], labels[2]),
        precision=precision,
        product=statistics_type(lhs, rhs),
        shape=[sizes[dim] for dim in of_out],
        epilogue=epilogue,
        operands=operands,
        in_place=tuple(in_place),
    )


def over_chunks(
    size: int, chunk: int, body: Callable[[Any, int, Carry], Carry], carry: Carry
) -> Carry:
    """Run ``body(start, size, carry)`` for equal chunks, and for what remains."""

    def step(state: tuple[Any, Carry], size: int) -> tuple[Any, Carry]:
        # Chunks wait for each other: logits made early would be in memory beside earlier ones.
        start, carry = lax.optimization_barrier(state)
        return start + size, body(start, size, carry)

    count, remainder = divmod(size, chunk)
    if count == 0 or (count == 1 and not remainder):
        return body(0, size, carry)
    # In a shard_map the barrier makes all that passes it vary over the same axes (jax 0.10).
    first, *_ = compat.unify_varying(jnp.int32(0), *jax.tree.leaves(carry))
    state = lax.fori_loop(0, count, lambda _, state: step(state, chunk), (first, carry))
    return (step(state, remainder) if remainder else state)[1]
