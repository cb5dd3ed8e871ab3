"""The logits ``h @ w + bias``: their elementwise parts, and the products that they take part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.fused_contraction import contract_with_epilogue
from jax_tilekern.ops.fused_lowering import InPlace
from jax_tilekern.plans.contraction import Contraction

# Labels of the contractions.
_ROW, _FEATURE, _COLUMN = range(3)
_H, _LOGITS = (_ROW, _FEATURE), (_ROW, _COLUMN)


class Options(NamedTuple):
    """What a call depends on beside arrays.

    Attributes
    ----------
    softcap
        Bounds logits by ``softcap * tanh(logit / softcap)``.
    precision
        Of the products, canonical.
    smoothed
        Whether the sums of the logits are among the statistics.
    chunk_bytes
        Size of a chunk of logits. It is exceeded where a chunk would have too few rows or columns.
    """

    softcap: float | None
    precision: Any
    smoothed: bool
    chunk_bytes: int


class Lowering(NamedTuple):
    """What is known of a call when it is lowered.

    Attributes
    ----------
    by_rows
        Whether ``w`` is the transpose of an array in memory, which has a row for each label.
    reduces_rows
        Whether kernels reduce the rows of a product in their epilogues.
    """

    by_rows: bool
    reduces_rows: bool


def statistics_type(h: Any, w: Any) -> np.dtype[Any]:
    """Return the type of logits and statistics."""
    return np.dtype(jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32))


# The elementwise parts, each a function of the accumulator of a product and of one element of each
# operand.


def logit(accumulator: Array, bias: Array, *, softcap: float | None) -> Array:
    """Return the logit of an accumulator."""
    raw = accumulator + bias.astype(accumulator.dtype)
    return raw if softcap is None else softcap * jnp.tanh(raw / softcap)


def logit_cotangent(
    accumulator: Array,
    bias: Array,
    column: Array,
    label: Array,
    lse: Array,
    lse_bar: Array,
    label_bar: Array,
    sum_bar: Array | None = None,
    *,
    softcap: float | None,
) -> Array:
    """Return the cotangent of an accumulator from those of its row's statistics."""
    value = logit(accumulator, bias, softcap=softcap)
    result = lse_bar * jnp.exp(value - lse) + jnp.where(column == label, label_bar, 0)
    if sum_bar is not None:
        result += sum_bar
    return result if softcap is None else result * (1 - (value / softcap) ** 2)


class LogitProducts(NamedTuple):
    """The products of ``h``, ``w`` and logits, with ``w`` in the orientation that it has in memory.

    Attributes
    ----------
    by_rows
        As in :class:`Lowering`.
    precision
        Of the products.
    wide
        Type of the accumulators.
    """

    by_rows: bool
    precision: Any
    wide: np.dtype[Any]

    @property
    def _labels(self) -> tuple[int, int]:
        return (_COLUMN, _FEATURE) if self.by_rows else (_FEATURE, _COLUMN)

    @property
    def _axis(self) -> int:
        return 0 if self.by_rows else 1

    def oriented(self, w: Array) -> Array:
        """Return ``w`` of shape ``(d, v)`` as it lies in memory, or the reverse."""
        return w.T if self.by_rows else w

    def chunk(self, w: Array, start: Any, size: int) -> Array:
        """Return columns of ``w``."""
        return lax.dynamic_slice_in_dim(w, start, size, self._axis)

    def with_chunk(self, w: Array, chunk: Array, start: Any) -> Array:
        """Return ``w`` with other columns."""
        return lax.dynamic_update_slice_in_dim(w, chunk, start, self._axis)

    def logits(
        self, h: Array, w: Array, epilogue: Callable[..., Any], operands: Sequence[Array]
    ) -> Any:
        """Return ``epilogue(accumulator, *operands)`` for each element of ``h @ w``."""
        labels = Contraction(_H, self._labels, _LOGITS)
        shape = (h.shape[0], w.shape[self._axis])
        return self._fused(h, w, labels, shape, epilogue, operands)

    def accumulators(self, h: Array, w: Array) -> Array:
        """Return ``h @ w``."""
        labels = Contraction(_H, self._labels, _LOGITS)
        return contract(h, w, contraction=labels, precision=self.precision, out_dtype=self.wide)

    def h_cotangent(
        self,
        logits_bar: Array,
        w: Array,
        epilogue: Callable[..., Any],
        operands: Sequence[Array],
        in_place: InPlace = (),
    ) -> Any:
        """Return ``epilogue(accumulator, *operands)`` for each element of ``logits_bar @ w.T``."""
        labels = Contraction(_LOGITS, self._labels, _H)
        shape = (logits_bar.shape[0], w.shape[1 - self._axis])
        return self._fused(logits_bar, w, labels, shape, epilogue, operands, in_place)

    def w_cotangent(
        self,
        h: Array,
        logits_bar: Array,
        epilogue: Callable[..., Any],
        operands: Sequence[Array] = (),
        in_place: InPlace = (),
    ) -> Any:
        """Return ``epilogue(accumulator, *operands)`` for each element of ``h.T @ logits_bar``."""
        labels = Contraction(_H, _LOGITS, self._labels)
        shape = (h.shape[1], logits_bar.shape[1])
        if self.by_rows:
            shape = shape[::-1]
        return self._fused(h, logits_bar, labels, shape, epilogue, operands, in_place)

    def _fused(
        self,
        lhs: Array,
        rhs: Array,
        labels: Contraction,
        shape: tuple[int, ...],
        epilogue: Callable[..., Any],
        operands: Sequence[Array],
        in_place: InPlace = (),
    ) -> Any:
        return contract_with_epilogue(
            lhs,
            rhs,
            contraction=labels,
            precision=self.precision,
            product=self.wide,
            shape=shape,
            epilogue=epilogue,
            operands=operands,
            in_place=in_place,
        )
