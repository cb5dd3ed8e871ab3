"""The primitives of attention.

``attention`` gives the result, and the log of the sum of exponentials of each query in one or two
arrays (:mod:`jax_tilekern.ops.attention.residual`). Its tangent is linear in the tangents of
operands (``attention_tangent``), and the transpose of that is ``attention_backward``, which
computes the probabilities again from the logarithms. The derivatives of these two are those of
their programs in blocks (:mod:`jax_tilekern.ops.attention.blocks`).

Operands of ``attention`` are ``query`` of shape ``(batch, queries, heads, features)``, ``key`` and
``value`` of ``(batch, keys, key heads, ...)``, and the arrays that scores and masks read. Those of
the other two come between ``value`` and the arrays: the results of ``attention``, and behind them
the cotangents of the output and of the logarithm, or the tangents of the operands ``wanted``,
positions of the operands of ``attention``. A tangent has those of the output and of the logarithm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention import blocks, residual
from jax_tilekern.ops.attention.call import operands_before_arrays
from jax_tilekern.ops.attention.choice import planner_of
from jax_tilekern.ops.attention.scores import Scores
from jax_tilekern.partitioning import params_text
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
    no_refusal,
)
from jax_tilekern.primitives.remat import Saved

Results = Sequence[Array]
# Checkpoint policies that save this name save the results of a call.
NAME = "attention"
_BATCH, _QUERIES, _HEADS = range(3)


# Types of results.


def _like_results(query: Array, key: Array, value: Array, *_: Array, scores: Scores) -> list[Array]:
    out, lse = _like_tangents(query, key, value)
    return [out, *residual.without_base(scores, lse)]


def _like_tangents(query: Array, key: Array, value: Array, *_: Array, **__: Any) -> list[Array]:
    del key
    wide = blocks.score_type(query)
    rows = jnp.zeros_like(query.sum(-1))
    out = jnp.broadcast_to(rows[..., None], (*rows.shape, value.shape[-1]))
    return [out, rows.astype(wide).transpose(0, 2, 1)]


def _like_wanted(*operands: Array, scores: Scores, wanted: Sequence[int]) -> list[Array]:
    own = (*operands[:3], *operands[operands_before_arrays("backward", scores) :])
    return [jnp.zeros_like(own[i]) for i in wanted]


# Derivatives.


def _jvp(
    primals: Results, tangents: Sequence[Any], *, scores: Scores
) -> tuple[Results, Sequence[Any]]:
    results = attention(*primals, scores=scores)
    wanted = tuple(i for i, x in enumerate(tangents) if type(x) is not ad.Zero)
    if not wanted:
        return results, [*map(compat.zero_tangent, results)]
    dots = [tangents[i] for i in wanted]
    operands = *primals[:3], *results, *dots, *primals[3:]
    moved = attention_tangent(*operands, scores=scores, wanted=wanted)
    # All of the derivative of the logarithm is that of its first array.
    return results, [*moved, *map(compat.zero_tangent, results[2:])]


def _jvp_of_tangent(
    primals: Results, tangents: Sequence[Any], *, scores: Scores, wanted: Sequence[int]
) -> tuple[Any, Any]:
    params: dict[str, Any] = {"scores": scores, "wanted": wanted}
    linear = _tangents_of(scores, wanted)
    if any(type(x) is not ad.Zero for i, x in enumerate(tangents) if i not in linear):
        return jvp_of(blocks.tangent, primals, tangents, **params)
    moved = list(primals)
    for i in linear:
        moved[i] = ad.instantiate_zeros(tangents[i])
    return attention_tangent(*primals, **params), attention_tangent(*moved, **params)


def _transposed_tangent(
    cotangents: Results, *operands: Any, scores: Scores, wanted: Sequence[int]
) -> Results:
    linear = _tangents_of(scores, wanted)
    given = *operands[: linear.start], *cotangents, *operands[linear.stop :]
    results: Results = attention_backward(*given, scores=scores, wanted=wanted)
    return results


def _tangents_of(scores: Scores, wanted: Sequence[int]) -> range:
    """Return the positions of tangents among the operands of ``attention_tangent``."""
    first = operands_before_arrays("tangent", scores)
    return range(first, first + len(wanted))


# Batching: mapped calls are more elements of the batch.

_Form = Callable[[Array], Array]


def _batch_of(name: str) -> Callable[..., tuple[Results, Sequence[int]]]:
    """Return the rule of a primitive, which binds it again."""

    def batch(
        axis_data: Any, operands: Results, dims: Sequence[int | None], *, scores: Scores,
        **params: Any,
    ) -> tuple[Results, Sequence[int]]:  # fmt: skip
        count, wanted = axis_data.size, params.get("wanted", ())
        is_mapped = [dim is not None for dim in dims]
        moved = [
            x if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        size = moved[0].shape[int(is_mapped[0])]
        first = len(operands) - len(scores.kinds)
        # The tangent of an array is mapped if the array is, and its cotangent always.
        is_tangent = name == "tangent"
        of_tangents = zip(_tangents_of(scores, wanted), wanted, strict=True)
        tangents = {i - 3: position for position, i in of_tangents if i >= 3 and is_tangent}
        leads = [
            is_mapped[first + i]
            or (i in tangents and is_mapped[tangents[i]])
            or (name == "backward" and i + 3 in wanted)
            for i in range(len(scores.kinds))
        ]

        def mapped(i: int) -> Array:
            x = moved[i]
            return x if is_mapped[i] else jnp.broadcast_to(x, (count, *x.shape))

        scores, forms = _merged(scores, count, size, leads, moved[first:], is_mapped[first:])
        of_operands: list[_Form | None] = [*[_joined] * first, *forms]
        for i, position in tangents.items():
            of_operands[position] = forms[i]
        merged = [form(mapped(i)) if form else moved[i] for i, form in enumerate(of_operands)]
        results = BINDS[name](*merged, scores=scores, **params)
        if name != "backward":
            return [_parted(x, count) for x in results], [0] * len(results)
        parted = []
        for i, x in zip(wanted, results, strict=True):
            if i < 3:
                parted.append(_parted(x, count))
                continue
            form, given = forms[i - 3], mapped(first + i - 3)
            assert form is not None
            parted += jax.linear_transpose(form, jax.typeof(given))(x)
        return parted, [0] * len(parted)

    return batch


def _joined(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _parted(x: Array, count: int) -> Array:
    return x.reshape(count, x.shape[0] // count, *x.shape[1:])


def _merged(
    scores: Scores, count: int, batch: int, leads: Sequence[bool], arrays: Results,
    is_mapped: Sequence[bool],
) -> tuple[Scores, list[_Form | None]]:  # fmt: skip
    """Return the description of ``count`` calls as one, and what arrays become.

    An array that has a part of each call, which leads its dimensions, becomes an operand of the one
    call by a function; ``None`` for the others.
    """
    divisors, named = {}, dict(scores.named)
    forms: list[_Form | None] = []
    for kind, leading, x, has_axis in zip(scores.kinds, leads, arrays, is_mapped, strict=True):
        if kind not in named:
            forms.append((lambda x: x) if leading else None)
            continue
        size, divisor = x.shape[int(has_axis)], named[kind]
        if not leading:
            divisors[kind] = 1 if divisor is None and size > 1 else divisor
            forms.append(None)
        elif size == 1 and batch > 1:
            divisors[kind] = batch
            forms.append(_joined)
        elif divisor is None or divisor * size == batch:
            divisors[kind] = divisor
            forms.append(_joined)
        else:
            divisors[kind] = None
            rows = np.arange(batch) // divisor % size
            forms.append(functools.partial(lambda rows, x: _joined(x[:, rows]), rows))
    n = scores.score_arrays
    of_score = [x for x, kind in zip(leads[:n], scores.kinds, strict=False) if kind == "of_score"]
    of_mask = [x for x, kind in zip(leads, scores.kinds, strict=True) if kind == "of_mask"]
    return dataclasses.replace(
        scores,
        named=tuple((name, divisors[name]) for name, _ in scores.named),
        score_mod=scores.score_mod and scores.score_mod.mapped(count, batch, of_score),
        mask_mod=scores.mask_mod and scores.mask_mod.mapped(count, batch, of_mask),
    ), forms


# Partitioning: elements of the batch, heads and queries are independent.


def _rule_of(name: str) -> Callable[..., ShardingRule]:
    def rule(*operands: Any, scores: Scores, wanted: Sequence[int] = ()) -> ShardingRule:
        query, key, value = operands[:3]
        batch, queries, heads, features = query.shape
        of_query: Dims = (_BATCH, _QUERIES, _HEADS, None)
        of_key: Dims = (_BATCH, None, _HEADS, None)
        of_lse: Dims = (_BATCH, _HEADS, _QUERIES)
        of_results = of_query, *[of_lse] * residual.count(scores)
        first = len(operands) - len(scores.kinds)
        sizes = {_BATCH: batch, _QUERIES: queries, _HEADS: key.shape[2]}
        labels = [of_query, of_key, of_key]
        labels += [
            _labels_of_array(scores, kind, x, (batch, heads, queries))
            for kind, x in zip(scores.kinds, operands[first:], strict=True)
        ]
        moved = [labels[i] for i in wanted]
        of_others: dict[str, list[Dims]] = {
            "forward": [],
            "tangent": [*of_results, *moved],
            "backward": [*of_results, of_query, of_lse],
        }
        results = {"forward": of_results, "tangent": of_results[:2], "backward": tuple(moved)}
        products = {"forward": 2, "tangent": 5, "backward": 5}[name]
        flops = 1.0 * products * batch * heads * queries * key.shape[1]
        return ShardingRule(
            (*labels[:3], *of_others[name], *labels[3:]),
            results[name],
            sizes,
            flops=flops * (features + value.shape[3]),
            zero_padding=False,
            names={_BATCH: "batch", _QUERIES: "queries", _HEADS: "heads"},
            each_result_is_a_sum=True,
            # Several heads of queries belong to one of keys.
            blocked=frozenset({_HEADS} if heads != key.shape[2] else ()),
        )

    return rule


def _labels_of_array(scores: Scores, kind: str, x: Any, sizes: tuple[int, int, int]) -> Dims:
    if kind in ("of_score", "of_mask"):
        return tuple([None] * x.ndim)
    first = _BATCH if scores.divisor(kind) is None else None
    labels = (first, _HEADS, _QUERIES, None)[: x.ndim]
    whole = dict(zip((_BATCH, _HEADS, _QUERIES), sizes, strict=True))
    return tuple(
        label if label is not None and size == whole[label] > 1 else None
        for label, size in zip(labels, x.shape, strict=True)
    )


def _localised(shard: Shard, *operands: Array, scores: Scores, **_: Any) -> Results:
    """Add the first element of the batch, head and query of the device."""
    batch, queries, heads = (shard.is_split(x) for x in (_BATCH, _QUERIES, _HEADS))
    if not scores.reads_origins(batch=batch, queries=queries, heads=heads):
        return operands

    def start(label: int) -> Any:
        return shard.start(label) if shard.is_split(label) else np.int32(0)

    group = operands[0].shape[2] // operands[1].shape[2]
    origins = jnp.stack([start(_BATCH), start(_HEADS) * group, start(_QUERIES)])
    return *operands, origins


# Lowering.


def _by_blocks(function: Callable[..., Results]) -> Planner:
    def plan(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
        if function is blocks.forward:
            params["of_features"] = _of_features(operands)
        return Rewrite("blocks of scores by XLA", functools.partial(function, **params))

    return Planner(no_refusal, plan)


def _of_features(operands: Sequence[Operand]) -> list[int]:
    """Return which of key and value are stored with the features of a key apart, by position."""
    sources = {i: compat.transposed_from(operands[i].value) for i in (1, 2)}
    orders = {i: source[1] for i, source in sources.items() if source is not None}
    return [i for i, order in orders.items() if order[3] < order[1]]


def _defined(name: str, function: Callable[..., Results], **rules: Any) -> Callable[..., Any]:
    defaults: dict[str, Any] = {
        "batch": _batch_of(name),
        "jvp": functools.partial(jvp_of, function),
        "sharding_rule": _rule_of(name),
        "localised": _localised,
        "like_results": _like_results,
        "planners": {"cpu": _by_blocks(function), "cuda": planner_of(name)},
    }
    suffix = "" if name == "forward" else f"_{name}"

    def describe(*, scores: Scores, **_: Any) -> str:
        words = str(scores)
        return f"attention{suffix}" + (f" ({words})" if words else "")

    rules = defaults | {"describe": describe} | rules
    return define(Operation(f"tilekern_attention{suffix}", function, several_results=True, **rules))


def _stands_for(*, scores: Scores) -> tuple[compat.Primitive, dict[str, Any]]:
    dims = (((3,), (3,)), ((0, 2), (0, 2)))
    params = {
        "dimension_numbers": dims,
        "precision": scores.precision,
        "preferred_element_type": None,
        "out_sharding": None,
    }
    return compat.dot_general_p, params


attention = _defined(
    "forward",
    blocks.forward,
    jvp=_jvp,
    stands_for=_stands_for,
    saved=lambda **_: Saved(None, names=(NAME,)),
)
attention_tangent = _defined(
    "tangent",
    blocks.tangent,
    jvp=_jvp_of_tangent,
    like_results=_like_tangents,
    transposes=lambda *, scores, wanted: {
        tuple(_tangents_of(scores, wanted)): _transposed_tangent,
    },
)
attention_backward = _defined("backward", blocks.backward, like_results=_like_wanted)
BINDS = {"forward": attention, "tangent": attention_tangent, "backward": attention_backward}

params_text.register(
    Scores,
    lambda scores: tuple(getattr(scores, x.name) for x in dataclasses.fields(scores)),
    lambda fields: Scores(*fields),
)
