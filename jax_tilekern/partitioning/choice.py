"""The choice of a partition: which label each digit of the device number splits.

Partitions are compared by the bytes that each of them sends over the links between devices. None
gathers operands along a label by which all of them are split alike. XLA treats its own operations
so, and the user's shardings request it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jax_tilekern.partitioning.candidate import Candidate, label_of
from jax_tilekern.partitioning.cost import ShardedArray
from jax_tilekern.partitioning.digits import Digits, Radix, by_dimension
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.split import Split

# More partitions than these are not compared one by one.
_MAX_CANDIDATES = 256


def choose_split(
    rule: ShardingRule,
    radix: Radix,
    operands: Sequence[Digits],
    results: Sequence[Digits],
    operand_bytes: Sequence[int],
    result_bytes: Sequence[int],
) -> Split:
    """Choose the partition of a call.

    Parameters
    ----------
    rule
        Its sharding rule.
    radix
        Bases of the digits.
    operands, results
        The present digits of each operand, and the wanted digits of each result.
    operand_bytes, result_bytes
        Sizes of the whole arrays in bytes.
    """
    arrays = (
        tuple(zip(rule.operands, operands, operand_bytes, strict=True)),
        tuple(zip(rule.results, results, result_bytes, strict=True)),
    )
    groups = _groups(radix, (*operands, *results))
    options = [_options(rule, *arrays, group[0]) for group in groups]

    def candidate(labels: Sequence[int | None]) -> Candidate:
        wanted = {a: label for group, label in zip(groups, labels, strict=True) for a in group}
        return Candidate(rule, radix, *arrays, [wanted[a] for a in range(len(radix))])

    if math.prod(map(len, options)) <= _MAX_CANDIDATES:
        return min(map(candidate, itertools.product(*options)), key=Candidate.cost).split
    # Otherwise one group is changed after the other, as long as that helps.
    labels = [own[0] for own in options]
    best = candidate(labels)
    improved = True
    while improved:
        improved = False
        for i, own in enumerate(options):
            for label in own:
                other = candidate([*labels[:i], label, *labels[i + 1 :]])
                if other.cost() < best.cost():
                    best, labels[i], improved = other, label, True
    return best.split


def _groups(radix: Radix, arrays: Sequence[Digits]) -> list[list[int]]:
    """Return the digits in groups that split the same dimension of every array."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for a in range(len(radix)):
        split = tuple(None if digits[a] is None else digits[a].dimension for digits in arrays)  # type: ignore[union-attr]
        groups.setdefault(split, []).append(a)
    return list(groups.values())


def _options(
    rule: ShardingRule, operands: Sequence[ShardedArray], results: Sequence[ShardedArray], a: int
) -> list[int | None]:
    """Return the labels that a digit may split, or the one by which operands are split already."""
    now = [label_of(dims, digits, a) for dims, digits, _ in operands]
    wanted = [label_of(dims, digits, a) for dims, digits, _ in results]
    reductions = rule.reductions
    labels = list(dict.fromkeys(x for x in (*now, *wanted) if x in rule.splittable))
    for label in labels:
        if len(set(_splits(operands, label))) > 1:
            continue
        # An epilogue after a sum reads its operands where the sum is.
        read = [
            (dims, current)
            for i, ((dims, _, _), current) in enumerate(zip(operands, now, strict=True))
            if label not in reductions or i not in rule.epilogue_operands
        ]
        if all(
            current == label if label in dims else current is None for dims, current in read
        ) and (label in reductions or sum(x is not None for _, x in read) > 1):
            return [label]
    return [*labels, None]


def _splits(arrays: Sequence[ShardedArray], label: int) -> list[tuple[int, ...]]:
    """Return the digits that split a label in each array that has it."""
    return [
        by_dimension(digits, len(dims))[dims.index(label)]
        for dims, digits, _ in arrays
        if label in dims
    ]
