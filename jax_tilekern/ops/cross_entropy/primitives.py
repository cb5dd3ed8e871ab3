"""Primitives on the logits ``h @ w + bias``, which are never in memory as a whole.

``statistics`` gives each row's log-sum-exp, the logit of its label and, if the labels are smoothed,
the sum of its logits. Its tangent is linear in the operands' tangents, and the transpose of that is
``cotangents``, one pass over the vocabulary. Devices may share rows and columns of both.

The cotangent of a weighted sum of the rows' losses is a number, so that its gradient is known up to
that factor when the value is computed: the derivative of ``weighted_loss`` is a call that gives
both.

Forward-mode and second derivatives are those of the references, which form the logits.

Operands are ``h`` of shape ``(..., d)``, ``w`` of ``(d, v)``, ``bias`` of ``(v,)``, integers
``labels`` of ``(...)``, and more of the shape of the labels. The logit of a label that is no column
is 0. ``wanted`` lists whose cotangents are computed: 0, 1, 2 for the first three operands.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy import row_chunks, vocabulary_chunks
from jax_tilekern.ops.cross_entropy.logits import (
    Lowering,
    Options,
    logit,
    row_losses,
    statistics_type,
)
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import Operand, Operation, Planner, Rewrite, define

Results = Sequence[Array]


def weighted_loss(
    h: Array, w: Array, bias: Array, labels: Array, weights: Array, options: Options
) -> Array:
    """Return the sum of ``weights * losses`` over all rows, for constant weights."""
    total: Array
    (total,) = _weighted_loss(h, w, bias, labels, weights, options=options)
    return total


def weighted(weights: Array, losses: Array) -> Array:
    """Return ``weights * losses``, 0 where a weight is 0."""
    return jnp.where(weights == 0, 0, weights * losses)


def statistics(h: Array, w: Array, bias: Array, labels: Array, options: Options) -> Results:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits."""
    results: Results = _statistics(h, w, bias, labels, options=options)
    return results


# The references, with all logits. XLA's partitioner passes the options as a plain tuple.


def _statistics_reference(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Sequence[Any]
) -> Results:
    options = Options(*options)
    wide = statistics_type(h, w)
    accumulators = jnp.matmul(h, w, precision=options.precision, preferred_element_type=wide)
    logits = logit(accumulators, bias, options.softcap)
    is_label = labels[..., None] == lax.iota(labels.dtype, w.shape[1])
    results = [jax.nn.logsumexp(logits, -1), jnp.where(is_label, logits, 0).sum(-1)]
    return [*results, logits.sum(-1)] if options.label_smoothing else results


def _tangents_reference(*operands: Array, **params: Any) -> Results:
    """Return tangents of the statistics from those of the first operands, which come last."""
    function = functools.partial(_statistics_reference, labels=operands[3], **params)
    tangents: Results = jax.jvp(function, operands[:3], operands[5:])[1]
    return tangents


def _cotangents_reference(*operands: Array, wanted: Sequence[int], **params: Any) -> Results:
    """Return cotangents from those of the statistics, which come last, after the log-sum-exp."""
    function = functools.partial(_statistics_reference, labels=operands[3], **params)
    found = jax.vjp(function, *operands[:3])[1](list(operands[5:]))
    return [found[i] for i in wanted]


# In terms of the statistics.


def _total(*operands: Array, options: Sequence[Any], **_: Any) -> Results:
    """Return the sum of the losses of the rows by weights, which come last."""
    options = Options(*options)
    losses = row_losses(options, *_statistics(*operands[:4], options=options))
    return [weighted(operands[4], losses).sum()]


def _losses_and_gradient(
    *operands: Array, wanted: Sequence[int], options: Sequence[Any]
) -> Results:
    """Return the losses of the rows, and cotangents of their sum by weights, which come last."""
    options = Options(*options)
    of_rows = _statistics(*operands[:4], options=options)

    def total(*of_rows: Array) -> tuple[Array, Array]:
        losses = row_losses(options, *of_rows)
        return (operands[4] * losses).sum(), losses

    bars, losses = jax.grad(total, tuple(range(len(of_rows))), has_aux=True)(*of_rows)
    by_row = of_rows[0], *bars
    return [losses, *_cotangents(*operands[:4], *by_row, wanted=wanted, options=options)]


# Derivatives.


def _total_jvp(primals: Results, tangents: Sequence[Any], **params: Any) -> tuple[Results, Results]:
    wanted = tuple(i for i in range(3) if type(tangents[i]) is not ad.Zero)
    losses, *bars = _with_gradient(*primals, wanted=wanted, **params)
    total = weighted(primals[4], losses).sum()
    moved = [(bar.astype(total.dtype), tangents[i]) for i, bar in zip(wanted, bars, strict=True)]
    return [total], [sum((x * dot.astype(x.dtype)).sum() for x, dot in moved)]


def _statistics_jvp(
    primals: Results, tangents: Sequence[Any], **params: Any
) -> tuple[Results, Results]:
    results = _statistics(*primals, **params)
    dots = [ad.instantiate_zeros(x) for x in tangents[:3]]
    return results, _tangents(*primals, results[0], *dots, **params)


def _transposed(*wanted: int) -> Callable[..., Results]:
    def rule(bars: Results, *operands: Any, **params: Any) -> Results:
        result: Results = _cotangents(*operands[:5], *bars, wanted=wanted, **params)
        return result

    return rule


# Batching.


def _batch_statistics(
    axis_data: Any, operands: Results, dims: Sequence[int | None], **params: Any
) -> tuple[Results, Sequence[int]]:
    h, w, bias, labels = operands
    if dims[1] is not None or dims[2] is not None:
        return _one_by_one(_statistics, _statistics_reference, axis_data, operands, dims, **params)
    # Mapped rows are more rows.
    h, labels = (
        jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in ((h, dims[0]), (labels, dims[3]))
    )
    results = _statistics(h, w, bias, labels, **params)
    return results, [0] * len(results)


def _mapped(
    function: Callable[..., Results],
    axis_data: Any,
    operands: Results,
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Results, Sequence[int]]:
    results = jax.vmap(
        functools.partial(function, **params), dims, axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )(*operands)  # fmt: skip
    return results, [0] * len(results)


def _one_by_one(
    bind: Callable[..., Results],
    reference: Callable[..., Results],
    axis_data: Any,
    operands: Results,
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Results, Sequence[int]]:
    """Map by a loop, so that the memory is that of one call.

    A loop would gather a mapped axis that devices share. Where this is known, the reference is
    mapped instead, and each device forms the logits of its own part.
    """
    if compat.is_split(axis_data):
        return _mapped(reference, axis_data, operands, dims, **params)
    moved = {i: jnp.moveaxis(operands[i], dim, 0) for i, dim in enumerate(dims) if dim is not None}

    def call(values: Mapping[int, Array]) -> Results:
        return bind(*(values.get(i, x) for i, x in enumerate(operands)), **params)

    results = lax.map(call, moved)
    return results, [0] * len(results)


# Partitioning: rows are independent, and devices may share the vocabulary.


def _sharding_rule(
    h: Any, w: Any, *others: Any, options: Sequence[Any], wanted: Sequence[int] | None = None
) -> ShardingRule:
    rows = tuple(range(h.ndim - 1))
    column = len(rows)
    operands = ((*rows, None), (None, column), (column,))
    sizes = {**dict(zip(rows, h.shape, strict=False)), column: w.shape[1]}
    combined_by = "logsumexp", "sum", *(["sum"] if Options(*options).label_smoothing else [])
    return ShardingRule(
        (*operands, *(rows for _ in others[1:])),
        (rows,) * len(combined_by) if wanted is None else tuple(operands[i] for i in wanted),
        sizes,
        flops=2.0 * (1 + len(wanted or ())) * math.prod(sizes.values()) * h.shape[-1],
        zero_padding=False,
        names={**{row: f"axis {row}" for row in rows}, column: "vocabulary"},
        each_result_is_a_sum=True,
        combined_by=combined_by if wanted is None else (),
    )


def _localised(shard: Shard, *operands: Array, **_: Any) -> Results:
    """Count labels from the first column of the device."""
    h, w, bias, labels, *by_row = operands
    column = h.ndim - 1
    if shard.is_split(column):
        labels = labels - shard.start(column).astype(labels.dtype)
    return h, w, bias, labels, *by_row


# Lowering.


def _planners(function: Callable[..., Results]) -> dict[str, Planner]:
    def planner(platform: str) -> Planner:
        def plan(operands: Sequence[Operand], _: Any, *, options: Any, **params: Any) -> Rewrite:
            # XLA cancels the transpose that makes w against that which the function makes.
            w = "dv" if compat.transposed_from(operands[1].value) is None else "vd"
            params["lowering"] = Lowering(w, platform == "cuda" and _kernels_reduce_rows())
            chunked = functools.partial(function, options=Options(*options), **params)
            return Rewrite("a chunk of the logits at a time", chunked)

        return Planner(lambda *_, **__: None, plan)

    return {platform: planner(platform) for platform in ("cpu", "cuda")}


def _kernels_reduce_rows() -> bool:
    try:
        return current_gpu().compute_capability == (9, 0)
    except NoGpu:
        return False


def _gradient_in_chunks(*operands: Array, lowering: Lowering, **params: Any) -> Results:
    h, w, *_ = operands
    if lowering.reduces_rows and row_chunks.supports(h, w, params["options"]):
        return row_chunks.losses_and_cotangents(*operands, lowering=lowering, **params)
    return _losses_and_gradient(*operands, **params)


def _defined(name: str, reference: Callable[..., Results], **rules: Any) -> Callable[..., Any]:
    def batch(*args: Any, **params: Any) -> tuple[Results, Sequence[int]]:
        return _one_by_one(bind, reference, *args, **params)

    defaults: dict[str, Any] = {
        "batch": batch,
        "jvp": functools.partial(jvp_of, reference),
        "sharding_rule": _sharding_rule,
        "localised": _localised,
        "describe": lambda **_: name,
    }
    rules = defaults | rules
    bind = define(Operation(f"tilekern_{name}", reference, several_results=True, **rules))
    return bind


_statistics = _defined(
    "logit_statistics",
    _statistics_reference,
    jvp=_statistics_jvp,
    batch=_batch_statistics,
    planners=_planners(vocabulary_chunks.statistics),
)
_tangents = _defined(
    "logit_tangents",
    _tangents_reference,
    # The smallest group that has what is differentiated: a bias that is none has no gradient.
    transposes={
        tuple(5 + i for i in wanted): _transposed(*wanted)
        for size in (1, 2, 3)
        for wanted in itertools.combinations(range(3), size)
    },
    planners={},
)
_cotangents = _defined(
    "logit_cotangents", _cotangents_reference, planners=_planners(vocabulary_chunks.cotangents)
)
_weighted_loss = _defined(
    "cross_entropy",
    _total,
    composed=_total,
    jvp=_total_jvp,
    batch=functools.partial(_mapped, _total),
    sharding_rule=None,
    planners=_planners(_total),
)
_with_gradient = _defined(
    "cross_entropy_and_gradient",
    _losses_and_gradient,
    composed=_losses_and_gradient,
    sharding_rule=None,
    planners=_planners(_gradient_in_chunks),
)
