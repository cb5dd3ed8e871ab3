"""Rows that devices exchange while they compute a product, in place of a collective beside it."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from jax_tilekern.partitioning.local_program import Shard, axis_names
from jax_tilekern.partitioning.partition import Partition
from jax_tilekern.partitioning.shared_rows import rows_operand, with_result
from jax_tilekern.partitioning.sharing import Sharing
from jax_tilekern.plans.overlap import MeshAxis


class RowExchange(NamedTuple):
    """An exchange of the rows of a product along one mesh axis."""

    operand: int  # the operand whose first dimension has the rows
    axis: MeshAxis
    # Whether rows of the result are scattered, and not rows of the operand gathered.
    scatters: bool
    is_shared: bool  # whether other calls of this kind read the gathered operand
    keeps: bool  # whether another call takes the gathered operand, which is the last result then
    # Shapes of the operands on a device, the rows of ``operand`` not gathered.
    shapes: tuple[tuple[int, ...], ...]
    bytes_sent: float
    partition: Partition  # of the call without the collective


def row_exchange(partition: Partition, sharing: Sharing) -> RowExchange | None:
    """Return the exchange that replaces a collective of a product, if one can.

    The collective is the all-gather of the first dimension of an operand, or the reduce-scatter of
    the first dimension of the result, over one mesh axis.
    """
    rule = partition.rule
    operand = rows_operand(rule)
    if operand is None:
        return None
    (result,), (dims,) = partition.results, rule.results
    rows_label = dims[0]
    if result.reduced or rows_label is None:
        return None
    shard = Shard(partition, partition.axes)
    shapes = [
        tuple(1 if label is None else shard.size(label) for label in own) for own in rule.operands
    ]
    operands, results = list(partition.operands), partition.results
    if result.is_combined:
        axes, *others = result.scattered
        if any(others):
            return None
        results = (result._replace(scattered=((),) * len(dims)),)
    else:
        x = operands[operand]
        if [step.kind for step in x.steps] != ["all-gather"] or x.steps[0].source != 0:
            return None
        axes = x.steps[0].axes
        split = (*partition.axes[rows_label], *axes)
        if rule.sizes[rows_label] % partition.parts(split):
            return None
        operands[operand] = x._replace(spec=(split, *x.spec[1:]), in_program=())
        rows, *columns = shapes[operand]
        shapes[operand] = (rows // partition.parts(axes), *columns)
    if len(axes) != 1:
        return None
    (axis,) = axes
    (name,) = axis_names(axes)
    stride = math.prod(partition.mesh[axis + 1 :])
    exchanged = dataclasses.replace(partition, operands=tuple(operands), results=results)
    gathers, x = not result.is_combined, partition.operands[operand]
    keeps = gathers and sharing.is_taken
    return RowExchange(
        operand,
        MeshAxis(name, partition.mesh[axis], stride),
        result.is_combined,
        gathers and bool(sharing.readers) and sharing.readers[operand] > 1,
        keeps,
        tuple(shapes),
        x.bytes_sent if gathers else result.bytes_sent,
        with_result(exchanged, x.spec) if keeps else exchanged,
    )
