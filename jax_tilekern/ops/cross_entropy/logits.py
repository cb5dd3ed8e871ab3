"""The logits ``h @ w + bias`` of a chunk, and the loss of a row in terms of its logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
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

    def logit(self, accumulator: Array, bias: Array) -> Array:
        """Return the logit of an accumulator of ``h @ w``."""
        raw = accumulator + bias.astype(accumulator.dtype)
        return raw if self.softcap is None else self.softcap * jnp.tanh(raw / self.softcap)

    def slope(self, logit: Array) -> Array | float:
        """Return the derivative of a logit with respect to what the softcap bounds."""
        return 1.0 if self.softcap is None else 1 - (logit / self.softcap) ** 2


def statistics_type(h: Any, w: Any) -> np.dtype[Any]:
    """Return the type of logits and statistics."""
    return np.dtype(jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32))


def row_losses(
    options: Options, weights: Array, lse: Array, label_logit: Array, *logit_sum: Array
) -> Array:
    """Return the weighted loss of each row from its statistics, 0 where the weight is 0.

    The sum of the logits is a statistic of smoothed labels alone.
    """
    losses = lse - (1 - options.label_smoothing) * label_logit
    for x in logit_sum:
        losses -= options.label_smoothing / options.columns * x
    if options.z_loss:
        losses += options.z_loss * lse**2
    return jnp.where(weights == 0, 0, weights * losses)


@dataclass(frozen=True)
class Layer:
    """The layer ``h @ w + bias`` when it is lowered, and the products of chunks of its operands.

    Attributes
    ----------
    h, w, bias, options
        Those of the call.
    w_dims
        The dimensions of ``w`` as it lies in memory: ``"vd"`` if it has a row for each label.
    reduces_rows
        Whether kernels reduce the rows of a product in their epilogues.
    """

    h: Array
    w: Array
    bias: Array
    options: Options
    w_dims: str
    reduces_rows: bool

    @property
    def rows(self) -> Array:
        """``h`` as a matrix."""
        return self.h.reshape(-1, self.h.shape[-1])

    @property
    def table(self) -> Array:
        """``w`` as it lies in memory."""
        return self._oriented(self.w)

    @property
    def wide(self) -> np.dtype[Any]:
        """The type of logits and statistics."""
        return statistics_type(self.h, self.w)

    @property
    def narrow(self) -> np.dtype[Any]:
        """The type of what stands for the cotangent of the logits in products."""
        return np.dtype(jnp.promote_types(self.h.dtype, self.w.dtype))

    def product(
        self, dims: str, lhs: Array, rhs: Array, epilogue: Callable[..., Any], *operands: Array,
        in_place: bool = False,
    ) -> Any:  # fmt: skip
        """Return ``epilogue(accumulator, *operands)`` of the elements of a product.

        The dimensions are those of ``einsum``: rows, ``d`` and ``v``. ``dv`` stands for those of
        ``w`` as it lies in memory. Results that are in place take the memory of the operands.
        """
        lhs_dims, rhs_dims, out_dims = re.split(",|->", dims.replace("dv", self.w_dims))
        labels = [tuple(map("rdv".index, x)) for x in (lhs_dims, rhs_dims, out_dims)]
        sizes = dict(zip(lhs_dims + rhs_dims, lhs.shape + rhs.shape, strict=True))
        return contract_with_epilogue(
            lhs,
            rhs,
            contraction=Contraction(labels[0], labels[1], labels[2]),
            precision=self.options.precision,
            product=self.wide,
            shape=[sizes[dim] for dim in out_dims],
            epilogue=epilogue,
            operands=operands,
            in_place=tuple((i, i) for i in range(len(operands) if in_place else 0)),
        )

    def zero_cotangents(self, wanted: Sequence[int], h_dtype: Any) -> list[Any]:
        """Return zeros to which chunks add, ``None`` for operands that are not wanted."""
        zeros = (
            jnp.zeros_like(self.rows, h_dtype),
            jnp.zeros_like(self.table),
            jnp.zeros_like(self.bias, self.wide),
        )
        return [x if i in wanted else None for i, x in enumerate(zeros)]

    def cotangents(self, wanted: Sequence[int], found: Sequence[Any]) -> list[Array]:
        """Return cotangents of the operands from those of the matrices."""
        finish: Sequence[Callable[[Array], Array]] = (
            lambda x: x.reshape(self.h.shape).astype(self.h.dtype),
            self._oriented,
            lambda x: x.astype(self.bias.dtype),
        )
        return [finish[i](found[i]) for i in wanted]

    def _oriented(self, w: Array) -> Array:
        """Return ``w`` as it lies in memory, or the reverse."""
        return w.T if self.w_dims == "vd" else w


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
