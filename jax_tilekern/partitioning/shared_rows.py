"""Rows of an operand that one product gathers and others read.

Products of the same rows, such as gate and up, and the gradients of their weights, which contract
the rows, need them gathered once. So the first product *gives* the operand that has the rows, as
devices have it then, in a further result. Later calls *take* it as a further operand. In their
sharding rules this array is whole, so that XLA propagates nothing through it. A call that does not
gather the rows reads its own operand, and then XLA gathers nothing for the further one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax_tilekern.partitioning.mesh import Spec
from jax_tilekern.partitioning.partition import Partition, ShardedOperand, ShardedResult
from jax_tilekern.partitioning.reshard import specs_of
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.sharing import Sharing
from jax_tilekern.plans import overlap


def _is_product(rule: ShardingRule) -> bool:
    return len(rule.operands) == 2 and len(rule.results) == 1 and rule.epilogue_from is None


def rows_operand(rule: ShardingRule) -> int | None:
    """Return the operand of a product whose first dimension is that of the result, if one is."""
    if not _is_product(rule):
        return None
    (dims,) = rule.results
    found = [i for i, x in enumerate(rule.operands) if dims[:1] and x[:1] == dims[:1] != (None,)]
    return found[0] if len(found) == 1 else None


def taking(
    partition: Partition, have: Sequence[Spec], sharing: Sharing
) -> tuple[Partition, list[Spec], dict[int, int]]:
    """Return the partition of a call that takes operands, their specs, and where it reads them.

    ``have`` has the present specs of the call's own operands. What the call is given takes the
    place of an operand whose rows devices gather, and which is left as it is then.
    """
    operands, given, places = list(partition.operands), list[Spec](), dict[int, int]()
    for i in sharing.takes:
        x = operands[i]
        given.append(((),) * len(x.spec))
        if [(step.kind, step.source) for step in x.steps] == [("all-gather", 0)]:
            given[-1] = specs_of(have[i], x.steps)[-1]
            places[i] = len(operands) + len(given) - 1
            operands[i] = ShardedOperand(have[i], (), (), 0.0)
    return dataclasses.replace(partition, operands=tuple(operands)), given, places


def giving(
    partition: Partition, bind: Callable[..., Sequence[Any]], operand: int
) -> tuple[Partition, Callable[..., Sequence[Any]]]:
    """Return the partition and the function of a call that also returns an operand as it has it."""

    def and_operand(*operands: Any, **params: Any) -> list[Any]:
        return [*bind(*operands, **params), operands[operand]]

    x = partition.operands[operand]
    return with_result(partition, specs_of(x.spec, x.in_program)[-1]), and_operand


def with_result(partition: Partition, spec: Spec) -> Partition:
    """Return the partition with one more result, which devices have with this spec."""
    result = ShardedResult(spec, (), ((),) * len(spec), (), 0.0)
    return dataclasses.replace(partition, results=(*partition.results, result))


def shared_rows(
    rule: ShardingRule, operands: Sequence[Any], devices: int
) -> tuple[int | None, list[int]]:
    """Return the operand that a call may give, and those that it may take, by the types of all."""

    def is_large(operand: int) -> bool:
        x = operands[operand]
        return overlap.may_exchange(math.prod(x.shape) * x.dtype.itemsize / devices)

    if not _is_product(rule):
        return None, []
    rows = rows_operand(rule)
    with_rows = [
        i for i, x in enumerate(rule.operands) if i == rows or (x and x[0] in rule.reductions)
    ]
    return rows if rows is not None and is_large(rows) else None, [*filter(is_large, with_rows)]
