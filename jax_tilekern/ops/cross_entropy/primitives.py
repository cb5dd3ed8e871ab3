"""Primitives on the logits ``h @ w + bias``, which are never in memory as a whole.

``statistics`` gives each row's log-sum-exp, the logit of its label and, if the labels are smoothed,
the sum of its logits. Its tangent is linear in the operands' tangents, and the transpose of that is
``cotangents``, one pass over the vocabulary. Devices may share rows and columns of both.

``cross_entropy`` is a weighted sum of the rows' losses. Its cotangent is a number, so that its
gradient is known up to that factor when the value is computed: its derivative is a call of itself
that gives both.

Forward-mode and second derivatives are those of the references, which form the logits.

Operands are ``h`` of shape ``(..., d)``, ``w`` of ``(d, v)``, ``bias`` of ``(v,)``, integers
``labels`` of ``(...)``, and more of the shape of the labels. The logit of a label that is no column
is 0. ``wanted`` lists whose derivatives are computed: 0, 1, 2 for the first three operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy import row_chunks, vocabulary_chunks
from jax_tilekern.ops.cross_entropy.logits import Layer, Options, row_losses, statistics_type
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
    no_refusal,
)

Results = Sequence[Array]


# The references, with all logits. XLA's partitioner passes the options as a plain tuple.


def _statistics_reference(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Sequence[Any]
) -> Results:
    options, wide = Options(*options), statistics_type(h, w)
    accumulators = jnp.matmul(h, w, precision=options.precision, preferred_element_type=wide)
    logits = options.logit(accumulators, bias)
    is_label = labels[..., None] == lax.iota(labels.dtype, w.shape[1])
    results = [jax.nn.logsumexp(logits, -1), jnp.where(is_label, logits, 0).sum(-1)]
    return [*results, logits.sum(-1)] if options.label_smoothing else results


def _statistics_of(operands: Results, wanted: Sequence[int], **params: Any) -> Callable[..., Any]:
    """Return the statistics as a function of the operands that are wanted."""

    def function(*values: Array) -> Results:
        given = dict(enumerate(operands[:4])) | dict(zip(wanted, values, strict=True))
        return _statistics_reference(*given.values(), **params)

    return function


def _tangents_reference(*operands: Array, wanted: Sequence[int], **params: Any) -> Results:
    """Return tangents of the statistics from those of operands, after the log-sum-exp."""
    function = _statistics_of(operands, wanted, **params)
    tangents: Results = jax.jvp(function, [operands[i] for i in wanted], list(operands[5:]))[1]
    return tangents


def _cotangents_reference(*operands: Array, wanted: Sequence[int], **params: Any) -> Results:
    """Return cotangents from those of the statistics, after the log-sum-exp."""
    function = _statistics_of(operands, wanted, **params)
    found: Results = jax.vjp(function, *(operands[i] for i in wanted))[1](list(operands[5:]))
    return found


def _loss_and_gradient(*operands: Array, wanted: Sequence[int], options: Sequence[Any]) -> Results:
    """Return the sum of the losses of the rows by weights, which come last, and cotangents."""
    options = Options(*options)
    found = statistics(*operands[:4], options=options)

    def total(*found: Array) -> Array:
        return row_losses(options, operands[4], *found).sum()

    if not wanted:
        return [total(*found)]
    value, cotangents = jax.value_and_grad(total, tuple(range(len(found))))(*found)
    return [
        value,
        *_cotangents(*operands[:4], found[0], *cotangents, wanted=wanted, options=options),
    ]


# Derivatives.


def _moving(tangents: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i in range(3) if type(tangents[i]) is not ad.Zero)


def _cross_entropy_jvp(
    primals: Results, tangents: Sequence[Any], *, wanted: Sequence[int], **params: Any
) -> tuple[Results, Results]:
    if wanted:
        return jvp_of(_loss_and_gradient, primals, tangents, wanted=wanted, **params)
    moving = _moving(tangents)
    total, *cotangents = cross_entropy(*primals, wanted=moving, **params)
    moved = [(x.astype(total.dtype), tangents[i]) for i, x in zip(moving, cotangents, strict=True)]
    return [total], [sum((x * dot.astype(x.dtype)).sum() for x, dot in moved)]


def _statistics_jvp(
    primals: Results, tangents: Sequence[Any], **params: Any
) -> tuple[Results, Results]:
    results, moving = statistics(*primals, **params), _moving(tangents)
    dots = [tangents[i] for i in moving]
    return results, _tangents(*primals, results[0], *dots, wanted=moving, **params)


def _transposed_tangents(cotangents: Results, *operands: Any, **params: Any) -> Results:
    result: Results = _cotangents(*operands[:5], *cotangents, **params)
    return result


# Batching.


def _batch_statistics(
    axis_data: Any, operands: Results, dims: Sequence[int | None], **params: Any
) -> tuple[Results, Sequence[int]]:
    h, w, bias, labels = operands
    if dims[1] is not None or dims[2] is not None:
        return _one_by_one(statistics, _statistics_reference, axis_data, operands, dims, **params)
    # Mapped rows are more rows.
    h, labels = (
        jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in ((h, dims[0]), (labels, dims[3]))
    )
    results = statistics(h, w, bias, labels, **params)
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
            w_dims = "dv" if compat.transposed_from(operands[1].value) is None else "vd"
            reduces_rows = platform == "cuda" and _kernels_reduce_rows()

            def chunked(h: Array, w: Array, bias: Array, *others: Array) -> Results:
                layer = Layer(h, w, bias, Options(*options), w_dims, reduces_rows)
                return function(layer, *others, **params)

            return Rewrite("a chunk of the logits at a time", chunked)

        return Planner(no_refusal, plan)

    return {platform: planner(platform) for platform in ("cpu", "cuda")}


def _kernels_reduce_rows() -> bool:
    try:
        return current_gpu().compute_capability == (9, 0)
    except NoGpu:
        return False


def _cross_entropy_in_chunks(layer: Layer, *others: Array, wanted: Sequence[int]) -> Results:
    if wanted and layer.reduces_rows and row_chunks.supports(layer):
        return row_chunks.loss_and_cotangents(layer, *others, wanted=wanted)
    operands = layer.h, layer.w, layer.bias, *others
    return _loss_and_gradient(*operands, wanted=wanted, options=layer.options)


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


def _batch_cross_entropy(*args: Any, wanted: Sequence[int], **params: Any) -> Any:
    # The statistics of mapped rows are one call.
    if not wanted:
        return _mapped(_loss_and_gradient, *args, wanted=wanted, **params)
    return _one_by_one(cross_entropy, _loss_and_gradient, *args, wanted=wanted, **params)


statistics = _defined(
    "logit_statistics",
    _statistics_reference,
    jvp=_statistics_jvp,
    batch=_batch_statistics,
    planners=_planners(vocabulary_chunks.statistics),
)
_tangents = _defined(
    "logit_tangents",
    _tangents_reference,
    transposes=lambda *, wanted, **_: {
        tuple(range(5, 5 + len(wanted))): _transposed_tangents,
    },
    planners={},
)
_cotangents = _defined(
    "logit_cotangents", _cotangents_reference, planners=_planners(vocabulary_chunks.cotangents)
)
cross_entropy = _defined(
    "cross_entropy",
    _loss_and_gradient,
    composed=_loss_and_gradient,
    jvp=_cross_entropy_jvp,
    batch=_batch_cross_entropy,
    sharding_rule=None,
    describe=lambda *, wanted, **_: "cross_entropy_and_gradient" if wanted else "cross_entropy",
    planners=_planners(_cross_entropy_in_chunks),
)
