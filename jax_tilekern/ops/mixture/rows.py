"""Rows of tokens as rows of pairs of a token and an expert, sorted by expert, and back.

Each operation is the other's transpose. Every token has equally many pairs, so nothing is sorted
by token, and sums have the order of a token's choices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import lax
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.grouped_gemm.expert_rows import (
    WIDEST_LOAD,
    ExpertRows,
    plan_combine,
    plan_spread,
)
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


def spread_rows(x: Array, places: Array, tokens: Array, copies: int = 1) -> list[Array]:
    """Return the row of each pair's token, ``copies`` times.

    ``places`` are the rows of each token's pairs, int32 of shape ``(tokens, chosen)``, each row
    once; ``tokens`` has the token of each pair. Cotangents of copies are added as they are summed.
    """
    rows: list[Array] = _spread(x, places, tokens, copies=copies)
    return rows


def combine_rows(*rows: Array, places: Array, tokens: Array) -> Array:
    """Return the sum of the rows of each token's pairs, over all arrays ``rows``.

    Floats are summed in float32 at least, in the order of ``places``, and rounded once.
    """
    total: Array = _combine(*rows, places, tokens, arrays=len(rows))
    return total


# Meaning.


def _spread_by_xla(x: Array, _: Array, tokens: Array, *, copies: int) -> list[Array]:
    return [x.at[tokens].get(mode="promise_in_bounds")] * copies


def _combine_by_xla(*operands: Array, **_: Any) -> Array:
    *rows, places, _tokens = operands
    dtype = rows[0].dtype
    wide = jnp.promote_types(dtype, np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    gathered = (x.at[places].get(mode="promise_in_bounds").astype(wide) for x in rows)
    total: Array = functools.reduce(lax.add, gathered).sum(1).astype(dtype)
    return total


# Rules.


def _spread_cotangent(
    cotangents: Sequence[Array], _: Any, places: Array, tokens: Array, **__: Any
) -> Array:
    return combine_rows(*cotangents, places=places, tokens=tokens)


def _combine_cotangents(cotangent: Array, *operands: Any, arrays: int) -> list[Array]:
    *_, places, tokens = operands
    return spread_rows(cotangent, places, tokens, arrays)


def _in_front(
    operands: Sequence[Array], dims: Sequence[int | None]
) -> tuple[list[Array], Array, Array, int]:
    """Concatenate the rows of batches; return them, the places, the tokens and the batch size."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    *rows, places, tokens = (
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    )
    number = lax.broadcasted_iota(np.int32, (size, 1), 0)
    count, chosen = places.shape[1:]
    return (
        [x.reshape(math.prod(x.shape[:2]), *x.shape[2:]) for x in rows],
        (places + number[:, :, None] * (count * chosen)).reshape(-1, chosen),
        (tokens + number * count).ravel(),
        size,
    )


def _spread_batch(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], *, copies: int
) -> tuple[list[Array], list[int]]:
    if compat.is_split_explicitly(axis_data):
        # Each device has the rows of its part of the batch.
        spread = functools.partial(_spread_by_xla, copies=copies)
        return jax.vmap(spread, dims)(*operands), [0] * copies
    (x,), places, tokens, size = _in_front(operands, dims)
    rows = spread_rows(x, places, tokens, copies)
    return [each.reshape(size, -1, *each.shape[1:]) for each in rows], [0] * copies


def _combine_batch(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **__: Any
) -> tuple[Array, int]:
    if compat.is_split_explicitly(axis_data):
        return jax.vmap(_combine_by_xla, dims)(*operands), 0
    rows, places, tokens, size = _in_front(operands, dims)
    total = combine_rows(*rows, places=places, tokens=tokens)
    return total.reshape(size, -1, *total.shape[1:]), 0


def _columns(rows: Any) -> tuple[tuple[int, ...], dict[int, int], dict[int, str]]:
    """Return the labels of the dimensions of a row, their sizes and their names."""
    labels = tuple(range(1, rows.ndim))
    return labels, dict(zip(labels, rows.shape[1:], strict=True)), dict.fromkeys(labels, "columns")


def _spread_sharding(x: Any, *_: Any, copies: int) -> ShardingRule:
    """Every device has all rows of its columns."""
    labels, sizes, names = _columns(x)
    rows = (None, *labels)
    operands = (rows, (None, None), (None,))
    return ShardingRule(operands, (rows,) * copies, sizes, flops=0, names=names)


def _combine_sharding(*operands: Any, arrays: int) -> ShardingRule:
    """Every device has all rows of its columns, and sums those of its tokens."""
    labels, sizes, names = _columns(operands[0])
    token = 0
    return ShardingRule(
        (*((None, *labels),) * arrays, (token, None), (None,)),
        ((token, *labels),),
        {**sizes, token: operands[arrays].shape[0]},
        flops=sum(x.size for x in operands[:arrays]),
        names={**names, token: "tokens"},
    )


def _stated(places: Any, rows: Any) -> ExpertRows:
    tokens, chosen = places.shape
    return ExpertRows(
        tokens, chosen, rows.shape[0], math.prod(rows.shape[1:]), np.dtype(rows.dtype)
    )


def _spread_on_cuda(
    operands: Sequence[Operand], results: Sequence[Any], *, copies: int
) -> PlannedKernel | Rewrite | Fallback:
    x, places, _tokens = operands
    if copies > 1:

        def repeated(x: Array, places: Array, tokens: Array) -> list[Array]:
            return list(spread_rows(x, places, tokens)) * copies

        return Rewrite("the copies are one array", repeated)
    rows = _stated(places.aval, results[0])
    return planned_kernel((x.value, places.value), plan_spread, rows)


def _combine_on_cuda(
    operands: Sequence[Operand], _: Any, *, arrays: int
) -> PlannedKernel | Fallback:
    *rows, places, _tokens = operands
    values = (*(x.value for x in rows), places.value)
    return planned_kernel(values, plan_combine, _stated(places.aval, rows[0].aval), arrays)


def _operation(name: str, reference: Callable[..., Any], cuda: Any, **rules: Any) -> Any:
    def by_xla(*_: Any, **params: Any) -> Rewrite:
        return Rewrite("XLA gathers rows", functools.partial(reference, **params))

    def on_cuda(operands: Sequence[Operand], results: Sequence[Any], **params: Any) -> Outcome:
        x = operands[0].aval
        row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
        # XLA fuses its gather of numbers with what reads them.
        if row_bytes < WIDEST_LOAD and current_policy() != "kernels":
            return by_xla(**params)
        outcome: Outcome = cuda(operands, results, **params)
        return outcome

    return define(
        Operation(
            name=f"tilekern_{name}_rows",
            reference=reference,
            planners={
                "cpu": Planner(no_refusal, by_xla),
                "cuda": Planner(no_refusal, on_cuda),
            },
            describe=lambda **_: f"{name} rows of experts",
            **rules,
        )
    )


_spread = _operation(
    "spread",
    _spread_by_xla,
    _spread_on_cuda,
    several_results=True,
    transposes={0: _spread_cotangent},
    batch=_spread_batch,
    sharding_rule=_spread_sharding,
)
_combine = _operation(
    "combine",
    _combine_by_xla,
    _combine_on_cuda,
    transposes=lambda arrays: {tuple(range(arrays)): _combine_cotangents},
    batch=_combine_batch,
    sharding_rule=_combine_sharding,
)
