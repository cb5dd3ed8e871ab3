"""Rows of an operand that one product gathers and others read.

Products of the same rows, such as gate and up, and the gradients of their weights, which contract
the rows, need them gathered once. So the first product *gives* the operand that has the rows, as
devices have it then, in a further result. Later calls, with an epilogue or without, *take* it as a
further operand. In their sharding rules this array is whole, so that XLA propagates nothing through
it. A call that does not gather the rows reads its own operand, and then XLA gathers nothing for the
further one.
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


def rows_operand(rule: ShardingRule) -> int | None:
    """Return the operand of a product whose first dimension is that of the result, if one is."""
    if len(rule.operands) != 2 or len(rule.results) != 1 or rule.epilogue_from is not None:
        return None
    (dims,) = rule.results
    found = [i for i, x in enumerate(rule.operands) if dims[:1] and x[:1] == dims[:1] != (None,)]
    return found[0] if len(found) == 1 else None


def taking(
    partition: Partition, have: Sequence[Spec], sharing: Sharing
) -> tuple[Partition, list[Spec], dict[int, int]]:
    """Return the partition of a call that takes operands, their specs, and where it reads them.

    ``have`` has the present specs of the call's own operands, and the wanted ones of its results.
    What the call is given takes the place of an operand whose rows devices gather, and which is
    left as it is then.
    """
    rule, operands = partition.rule, list(partition.operands)
    arrays = list(zip([*rule.operands, *rule.results], have, strict=True))
    given, places = list[Spec](), dict[int, int]()
    for i in sharing.takes:
        label, steps = rule.operands[i][0], operands[i].steps
        rows, *columns = specs_of(have[i], steps)[-1]
        # Where devices keep parts of the rows, those who give have the same if other arrays do.
        others = [
            spec[x.index(label)] for x, spec in arrays if label in x and x != rule.operands[i]
        ]
        is_gathered = [(step.kind, step.source) for step in steps] == [("all-gather", 0)]
        given.append(((),) * len(have[i]))
        if is_gathered and not any(columns) and (not rows or rows in others):
            given[-1] = (rows, *columns)
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

    if len(rule.operands[: rule.epilogue_from]) != 2:
        return None, []
    large, rows = [*filter(is_large, range(2))], rows_operand(rule)
    return rows if rows in large else None, large
