"""Primitives on the logits ``h @ w + bias``, which are never in memory as a whole.

``statistics`` gives each row's log-sum-exp, the logit of its label and, if the labels are smoothed,
the sum of its logits. Its tangent is linear in the operands' tangents, and the transpose of that is
one pass over the vocabulary for all operands that are differentiated. The loops are those of
``vocabulary_chunks.py``.

Forward-mode and second derivatives are those of the references, which form the logits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy import vocabulary_chunks
from jax_tilekern.ops.cross_entropy.logits import (
    Lowering,
    Options,
    logit,
    logit_cotangent,
    statistics_type,
)
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
)

# Which of h, w and bias.
Wanted = tuple[int, ...]


def statistics(h: Array, w: Array, bias: Array, labels: Array, **params: Any) -> Sequence[Array]:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits.

    Parameters
    ----------
    h
        Shape ``(..., d)``.
    w
        Shape ``(d, v)``.
    bias
        Shape ``(v,)``.
    labels
        Integers of shape ``(...)``. The logit of a label that is no column is 0.
    params
        The fields of :class:`~jax_tilekern.ops.cross_entropy.logits.Options`.
    """
    results: Sequence[Array] = _statistics(h, w, bias, labels, **params)
    return results


def cotangents(
    h: Array, w: Array, bias: Array, labels: Array, *by_row: Array, wanted: Wanted, **params: Any
) -> Sequence[Array]:
    """Return cotangents of some of ``h``, ``w`` and ``bias``.

    Parameters
    ----------
    h, w, bias, labels, params
        As for :func:`statistics`.
    by_row
        The log-sum-exp, and the cotangent of each of the statistics.
    wanted
        Which cotangents, in order: 0, 1, 2.
    """
    results: Sequence[Array] = _cotangents(h, w, bias, labels, *by_row, wanted=wanted, **params)
    return results


# The references, with all logits.


def _accumulators(h: Array, w: Array, precision: Any) -> Array:
    return jnp.matmul(h, w, precision=precision, preferred_element_type=statistics_type(h, w))


def _is_label(labels: Array, accumulators: Array) -> Array:
    column = lax.broadcasted_iota(labels.dtype, (accumulators.shape[-1],), 0)
    return labels[..., None] == column


def statistics_reference(
    h: Array, w: Array, bias: Array, labels: Array, **params: Any
) -> list[Array]:
    """Return the statistics from all logits."""
    options = Options(**params)
    accumulators = _accumulators(h, w, options.precision)
    logits = logit(accumulators, bias, softcap=options.softcap)
    at_label = jnp.where(_is_label(labels, logits), logits, 0).sum(-1)
    return _if_smoothed(options, jax.nn.logsumexp(logits, -1), at_label, logits.sum(-1))


def _if_smoothed(options: Options, lse: Array, at_label: Array, total: Array) -> list[Array]:
    return [lse, at_label, total] if options.smoothed else [lse, at_label]


def _tangents_reference(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    lse: Array,
    h_dot: Array,
    w_dot: Array,
    bias_dot: Array,
    **params: Any,
) -> list[Array]:
    options = Options(**params)

    def logits(h: Array, w: Array, bias: Array) -> Array:
        return logit(_accumulators(h, w, options.precision), bias, softcap=options.softcap)

    values, values_dot = jax.jvp(logits, (h, w, bias), (h_dot, w_dot, bias_dot))
    probabilities = jnp.exp(values - lse[..., None])
    at_label = jnp.where(_is_label(labels, values), values_dot, 0).sum(-1)
    lse_dot = (probabilities * values_dot).sum(-1)
    return _if_smoothed(options, lse_dot, at_label, values_dot.sum(-1))


def cotangents_reference(
    h: Array, w: Array, bias: Array, labels: Array, *by_row: Array, wanted: Wanted, **params: Any
) -> list[Array]:
    """Return the cotangents from all logits."""
    options = Options(**params)
    accumulators = _accumulators(h, w, options.precision)
    column = lax.broadcasted_iota(labels.dtype, (w.shape[-1],), 0)
    logits_bar = logit_cotangent(
        accumulators, bias, column, *(x[..., None] for x in (labels, *by_row)),
        softcap=options.softcap,
    )  # fmt: skip

    def product(subscripts: str, *factors: Array, like: Array) -> Array:
        cotangent: Array = jnp.einsum(
            subscripts,
            *factors,
            precision=options.precision,
            preferred_element_type=accumulators.dtype,
            out_sharding=compat.cotangent_sharding(jax.typeof(like)),
        )
        return cotangent.astype(like.dtype)

    results = (
        product("...v,dv->...d", logits_bar, w, like=h),
        product("...d,...v->dv", h, logits_bar, like=w),
        logits_bar.sum(tuple(range(labels.ndim))).astype(bias.dtype),
    )
    return [results[i] for i in wanted]


# Derivatives.


def _statistics_jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[Array], Sequence[Array]]:
    results = _statistics(*primals, **params)
    dots = [ad.instantiate_zeros(x) for x in tangents[:3]]
    return results, _tangents(*primals, results[0], *dots, **params)


def _rule_for(*wanted: int) -> Callable[..., Sequence[Array]]:
    """Return the transpose of the tangents with respect to some of the operands."""

    def rule(cotangents: Sequence[Array], *operands: Any, **params: Any) -> Sequence[Array]:
        result: Sequence[Array] = _cotangents(*operands[:5], *cotangents, wanted=wanted, **params)
        return result

    return rule


def _like_statistics(
    h: Array, w: Array, bias: Array, labels: Array, *, smoothed: bool, **_: Any
) -> list[Array]:
    return [h[..., 0].astype(statistics_type(h, w))] * (2 + smoothed)


# Batching.


def _batch_statistics(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    h, w, bias, labels = operands
    if dims[1] is not None or dims[2] is not None:
        by = _statistics, statistics_reference
        return batch_one_by_one(*by, axis_data, operands, dims, **params)
    # Mapped rows are more rows.
    rows = (_in_front(x, dim, axis_data.size) for x, dim in ((h, dims[0]), (labels, dims[3])))
    h, labels = rows
    results = _statistics(h, w, bias, labels, **params)
    return results, [0] * len(results)


def _batch_tangents(*args: Any, **params: Any) -> tuple[Sequence[Array], Sequence[int]]:
    return batch_one_by_one(_tangents, _tangents_reference, *args, **params)


def _batch_cotangents(*args: Any, **params: Any) -> tuple[Sequence[Array], Sequence[int]]:
    return batch_one_by_one(_cotangents, cotangents_reference, *args, **params)


def batch_one_by_one(
    bind: Callable[..., Sequence[Array]],
    reference: Callable[..., Sequence[Array]],
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int]]:
    """Map by a loop, so that the memory is that of one call.

    A loop would gather a mapped axis that devices share. Where this is known, the reference is
    mapped instead, and each device forms the logits of its own part.
    """
    if compat.is_split(axis_data):
        results = jax.vmap(
            functools.partial(reference, **params), dims, axis_size=axis_data.size,
            spmd_axis_name=axis_data.spmd_name,
        )(*operands)  # fmt: skip
        return results, [0] * len(results)
    mapped = {i: dim for i, dim in enumerate(dims) if dim is not None}

    def call(values: Sequence[Array]) -> Sequence[Array]:
        local = list(operands)
        for i, value in zip(mapped, values, strict=True):
            local[i] = value
        return bind(*local, **params)

    moved = [jnp.moveaxis(operands[i], dim, 0) for i, dim in mapped.items()]
    results = lax.map(call, moved)
    return results, [0] * len(results)


def _in_front(x: Array, dim: int | None, size: int) -> Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


# Partitioning: rows are independent, and devices may share the vocabulary.


def _sharding_rule(
    h: Any, w: Any, *by_row: Any, smoothed: bool, wanted: Wanted | None = None, **_: Any
) -> ShardingRule:
    rows = tuple(range(h.ndim - 1))
    column = len(rows)
    operands = ((*rows, None), (None, column), (column,))
    sizes = {**dict(zip(rows, h.shape, strict=False)), column: w.shape[1]}
    products = 1 if wanted is None else 1 + len(wanted)
    return ShardingRule(
        (*operands, *(rows for _ in by_row[1:])),
        (rows,) * (2 + smoothed) if wanted is None else tuple(operands[i] for i in wanted),
        sizes,
        flops=2.0 * products * math.prod(sizes.values()) * h.shape[-1],
        zero_padding=False,
        names={**{row: f"axis {row}" for row in rows}, column: "vocabulary"},
        each_result_is_a_sum=True,
        combined_by=("logsumexp", *("sum",) * (1 + smoothed)) if wanted is None else (),
    )


def _localised(shard: Shard, *operands: Array, **_: Any) -> Sequence[Array]:
    """Count labels from the first column of the device."""
    h, w, bias, labels, *by_row = operands
    column = h.ndim - 1
    if shard.is_split(column):
        labels = labels - shard.start(column).astype(labels.dtype)
    return h, w, bias, labels, *by_row


# Lowering.


def _by_rows(operands: Sequence[Operand]) -> bool:
    # XLA cancels the transpose that makes w against that which the function makes.
    return compat.transposed_from(operands[1].value) is not None


def lowering_on_cuda(operands: Sequence[Operand]) -> Lowering:
    """Return what is known of a call that is lowered for a GPU, if its second operand is ``w``."""
    try:
        reduces_rows = current_gpu().compute_capability == (9, 0)
    except NoGpu:
        reduces_rows = False
    return Lowering(_by_rows(operands), reduces_rows)


def _planner(platform: str, function: Callable[..., Sequence[Array]]) -> Planner:
    def plan(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
        on_cuda = platform == "cuda"
        lowering = lowering_on_cuda(operands) if on_cuda else Lowering(_by_rows(operands), False)
        options = Options(**{name: params.pop(name) for name in Options._fields})
        chunked = functools.partial(function, options=options, lowering=lowering, **params)
        return Rewrite("a chunk of the vocabulary at a time", chunked)

    def refusal(*_: Any, **__: Any) -> Fallback | None:
        return None

    return Planner(refusal, plan)


def _planners(function: Callable[..., Sequence[Array]]) -> dict[str, Planner]:
    return {platform: _planner(platform, function) for platform in ("cpu", "cuda")}


_statistics = define(
    Operation(
        name="tilekern_logit_statistics",
        reference=statistics_reference,
        like_results=_like_statistics,
        several_results=True,
        jvp=_statistics_jvp,
        batch=_batch_statistics,
        sharding_rule=_sharding_rule,
        localised=_localised,
        planners=_planners(vocabulary_chunks.statistics),
        describe=lambda **_: "logit_statistics",
    )
)

_tangents = define(
    Operation(
        name="tilekern_logit_tangents",
        reference=_tangents_reference,
        several_results=True,
        jvp=functools.partial(jvp_of, _tangents_reference),
        # The smallest group that has what is differentiated: a bias that is none has no gradient.
        transposes={
            tuple(5 + i for i in wanted): _rule_for(*wanted)
            for size in (1, 2, 3)
            for wanted in itertools.combinations(range(3), size)
        },
        batch=_batch_tangents,
        sharding_rule=_sharding_rule,
        planners={},
        describe=lambda **_: "logit_tangents",
    )
)

_cotangents = define(
    Operation(
        name="tilekern_logit_cotangents",
        reference=cotangents_reference,
        like_results=lambda *operands, wanted, **_: [operands[i] for i in wanted],
        several_results=True,
        jvp=functools.partial(jvp_of, cotangents_reference),
        batch=_batch_cotangents,
        sharding_rule=_sharding_rule,
        localised=_localised,
        planners=_planners(vocabulary_chunks.cotangents),
        describe=lambda **_: "logit_cotangents",
    )
)
