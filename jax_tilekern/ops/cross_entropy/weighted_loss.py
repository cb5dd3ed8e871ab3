"""Primitives of a weighted sum of the rows' losses, for which one pass gives the gradient as well.

The cotangent of such a sum is a number, so that the gradient is known up to that factor when the
value is computed: the derivative of the sum is a call that returns the value and the gradient.
Where `row_chunks.py` does not compute them, and in programs of several devices, both primitives are
composed of those in `statistics.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy import row_chunks
from jax_tilekern.ops.cross_entropy.logits import Options, statistics_type
from jax_tilekern.ops.cross_entropy.statistics import (
    Wanted,
    batch_one_by_one,
    cotangents,
    cotangents_reference,
    lowering_on_cuda,
    statistics,
    statistics_reference,
)
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import Fallback, Operand, Operation, Planner, Rewrite, define


def weighted_loss(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    weights: Array,
    options: Options,
    z_loss: float,
) -> Array:
    """Return the sum of ``weights * (lse - at_label + z_loss * lse ** 2)`` over all rows.

    Parameters
    ----------
    h, w, bias, labels
        As for :func:`~jax_tilekern.ops.cross_entropy.statistics.statistics`.
    weights
        Shape ``(...)``. Rows of weight 0 do not count, whatever their losses are.
    options
        Of the statistics, which are not smoothed.
    z_loss
        Weight of the square of ``lse``.
    """
    weights = jax.lax.stop_gradient(weights)
    total: Array = _weighted_loss(h, w, bias, labels, weights, z_loss=z_loss, **options._asdict())
    return total


def _total(lse: Array, at_label: Array, weights: Array, z_loss: float) -> Array:
    losses = lse - at_label
    if z_loss:
        losses += z_loss * lse**2
    return jnp.where(weights == 0, 0, weights * losses).sum()


def _bars(lse: Array, weights: Array, z_loss: float) -> tuple[Array, Array]:
    """Return the cotangents of the log-sum-exp and of the label's logit of each row."""
    return weights * (1 + 2 * z_loss * lse), -weights


def _loss_by(statistics: Callable[..., Sequence[Array]]) -> Callable[..., Array]:
    """Return the loss in terms of the rows' statistics."""

    def loss(*operands: Array, z_loss: float, **params: Any) -> Array:
        *of_logits, weights = operands
        lse, at_label = statistics(*of_logits, **params)
        return _total(lse, at_label, weights, z_loss)

    return loss


def _gradient_by(
    statistics: Callable[..., Sequence[Array]], cotangents: Callable[..., Sequence[Array]]
) -> Callable[..., list[Array]]:
    """Return the statistics and the loss's gradient in terms of the rows' statistics."""

    def gradient(*operands: Array, z_loss: float, wanted: Wanted, **params: Any) -> list[Array]:
        *of_logits, weights = operands
        lse, at_label = statistics(*of_logits, **params)
        bars = _bars(lse, weights, z_loss)
        return [lse, at_label, *cotangents(*of_logits, lse, *bars, wanted=wanted, **params)]

    return gradient


_loss_reference = _loss_by(statistics_reference)
_loss_composed = _loss_by(statistics)
_gradient_reference = _gradient_by(statistics_reference, cotangents_reference)
_gradient_composed = _gradient_by(statistics, cotangents)


def _like_gradient(h: Array, w: Array, bias: Array, *_: Array, wanted: Wanted, **__: Any) -> Any:
    of_rows = h[..., 0].astype(statistics_type(h, w))
    return [of_rows, of_rows, *((h, w, bias)[i] for i in wanted)]


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    h, w, *_, weights = primals
    wide = statistics_type(h, w)
    wanted = tuple(i for i in range(3) if type(tangents[i]) is not ad.Zero)
    lse, at_label, *bars = _with_gradient(*primals, wanted=wanted, **params)
    total = _total(lse, at_label, weights, params["z_loss"])
    terms = [
        (bar.astype(wide) * tangents[i].astype(wide)).sum()
        for i, bar in zip(wanted, bars, strict=True)
    ]
    return total, functools.reduce(jnp.add, terms)


def _batch(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    """Map the operations that it is composed of: rows of a batch are more rows."""
    mapped = jax.vmap(
        functools.partial(_loss_composed, **params), dims, axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )  # fmt: skip
    return mapped(*operands), 0


def _batch_gradient(*args: Any, **params: Any) -> tuple[Sequence[Array], Sequence[int]]:
    return batch_one_by_one(_with_gradient, _gradient_reference, *args, **params)


def _refusal(*_: Any, **__: Any) -> Fallback | None:
    return None


def _plan_composed(function: Any) -> Planner:
    def plan(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
        return Rewrite("a chunk of the vocabulary at a time", functools.partial(function, **params))

    return Planner(_refusal, plan)


def _plan_gradient_on_cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    h, w = (x.aval for x in operands[:2])
    lowering = lowering_on_cuda(operands)
    if not (lowering.reduces_rows and row_chunks.supports(h, w)):
        composed = functools.partial(_gradient_composed, **params)
        return Rewrite("a chunk of the vocabulary at a time", composed)
    options = Options(**{name: params.pop(name) for name in Options._fields})
    function = functools.partial(
        row_chunks.loss_and_cotangents, options=options, lowering=lowering, **params
    )
    return Rewrite("a chunk of the rows at a time", function)


_weighted_loss = define(
    Operation(
        name="tilekern_cross_entropy",
        reference=_loss_reference,
        composed=_loss_composed,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=None,
        planners=dict.fromkeys(("cpu", "cuda"), _plan_composed(_loss_composed)),
        describe=lambda **_: "cross_entropy",
    )
)

_with_gradient = define(
    Operation(
        name="tilekern_cross_entropy_and_gradient",
        reference=_gradient_reference,
        composed=_gradient_composed,
        like_results=_like_gradient,
        several_results=True,
        jvp=functools.partial(jvp_of, _gradient_reference),
        batch=_batch_gradient,
        sharding_rule=None,
        planners={
            "cpu": _plan_composed(_gradient_composed),
            "cuda": Planner(_refusal, _plan_gradient_on_cuda),
        },
        describe=lambda **_: "cross_entropy_and_gradient",
    )
)
