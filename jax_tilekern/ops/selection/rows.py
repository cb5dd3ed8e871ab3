"""What operations on the rows of one array share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.partitioning.rule import ShardingRule


def rule_of_rows(
    x: Any, results: int, *, axis: int = -1, operands: int = 1, vectors: int = 0
) -> ShardingRule:
    """Give every device whole rows of operands of one shape, and of results of the same rows.

    ``vectors`` is the number of further operands, which every device has.
    """
    labels = tuple(None if i == axis % x.ndim else i for i in range(x.ndim))
    sizes = {i: x.shape[i] for i in labels if i is not None}
    names = {i: f"axis {i}" for i in sizes}
    read = ((labels,) * operands) + ((None,),) * vectors
    return ShardingRule(read, (labels,) * results, sizes, flops=x.size, names=names)


def columns_of(x: Array, axis: int = -1) -> Array:
    """Return the position of each element along an axis.

    It is an ``iota`` and nothing else: by it XLA knows that a sort is stable, which takes another
    ``iota`` otherwise.
    """
    sharding = jax.typeof(x).sharding
    return lax.broadcasted_iota(np.int32, x.shape, axis % x.ndim, out_sharding=sharding)
