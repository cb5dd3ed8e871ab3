"""What operations on the rows of one array share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.partitioning.rule import ShardingRule


def rule_of_rows(x: Any, results: int, *, vectors: int = 0) -> ShardingRule:
    """Give every device whole rows of an operand, and of results of the same rows.

    ``vectors`` is the number of further operands, which every device has.
    """
    outer = tuple(range(x.ndim - 1))
    labels = (*outer, None)
    sizes = {i: x.shape[i] for i in outer}
    names = {i: f"axis {i}" for i in outer}
    operands = (labels, *((None,),) * vectors)
    return ShardingRule(operands, (labels,) * results, sizes, flops=x.size, names=names)


def columns_of(x: Array) -> Array:
    """Return the column of each element.

    It is an ``iota`` and nothing else: by it XLA knows that a sort is stable, which takes another
    ``iota`` otherwise.
    """
    sharding = jax.typeof(x).sharding
    return lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1, out_sharding=sharding)
