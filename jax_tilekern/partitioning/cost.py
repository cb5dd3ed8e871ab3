"""The bytes that a partition sends over the links between devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_tilekern.partitioning.digits import Digits, Radix, by_dimension, number_of_parts
from jax_tilekern.partitioning.rule import Dims
from jax_tilekern.partitioning.split import Move, Outcome, Split

# The work of a device, in operations or in bytes of its own memory, while a link sends one byte. An
# H100 or H200 computes 800 TFLOP/s in 16 bits and moves 3 to 4 TB/s; NVLink sends 300 to 400 GB/s.
# What is sent is read and written in memory as well, so that memory counts a fifth of that.
_FLOPS_PER_LINK_BYTE = 2000
_MEMORY_BYTES_PER_LINK_BYTE = 50
# A move of parts to another dimension or device counts more than a gather, which XLA shares among
# the calls that read the operand: the passes of a gradient send a gather twice and a move three
# times.
_MOVE_WEIGHT = 1.5

# Labels and present digits of an array, and its size in bytes.
ShardedArray = tuple[Dims, Digits, int]


def cost(split: Split, operands: Sequence[ShardedArray], results: Sequence[ShardedArray]) -> float:
    """Return the bytes that a device sends, including its work as bytes sent meanwhile."""
    radix = split.radix
    total = _work(split, sum(size for _, _, size in (*operands, *results)))
    for i, (_, digits, size) in enumerate(operands):
        total += cost_of_reading(
            digits, split.operand_digits[i], split.operand_moves[i], size, radix
        )
    # An epilogue's results are functions of one sum.
    if split.sum is not None:
        rule = split.rule
        total += _completed(split, split.sum, rule.epilogue_sum, rule.sum_bytes(results[0][2]))
    for (dims, digits, size), outcome in zip(results, split.results, strict=True):
        total += _completed(split, outcome, dims, size)
        total += _resharded(outcome.digits, by_dimension(digits, len(dims)), size, radix)
    return total


def cost_of_reading(
    digits: Digits,
    taken: Sequence[Sequence[int]],
    moves: Sequence[Move],
    size: int,
    radix: Radix,
) -> float:
    """Return the bytes that are sent to read an operand.

    Parameters
    ----------
    digits
        Its present digits.
    taken
        The digits that split it where the local program takes it.
    moves
        What the local program moves then.
    size
        Its size in bytes, on all devices together.
    radix
        Bases of the digits.
    """
    local = size / _number_of_parts(taken, radix)
    total = _resharded(by_dimension(digits, len(taken)), taken, size, radix)
    for move in moves:
        if move.kind == "exchange":
            total += _MOVE_WEIGHT * local * _share(move.digits, radix)
        elif move.kind == "gather":
            sent = local * (number_of_parts(move.digits, radix) - 1)
            total += _MOVE_WEIGHT * sent
            local += sent
    return total


def _work(split: Split, memory: int) -> float:
    """Return the time of a device's work, in bytes that a link sends."""
    flops = split.rule.flops / _FLOPS_PER_LINK_BYTE
    parts = _number_of_parts(list(split.digits.values()), split.radix)
    return max(flops, memory / _MEMORY_BYTES_PER_LINK_BYTE) / parts


def _completed(split: Split, outcome: Outcome, dims: Dims, size: int) -> float:
    """Return the bytes of an array's reductions over devices and of its moves."""
    radix = split.radix
    local = size / _number_of_parts([() if x is None else split.digits[x] for x in dims], radix)
    total = 0.0
    for digits in outcome.scattered:
        total += local * _share(digits, radix)
        local /= number_of_parts(digits, radix)
    total += 2 * local * _share(outcome.reduced, radix)
    for move in outcome.moves:
        if move.kind == "slice":
            local /= number_of_parts(move.digits, radix)
        else:
            total += _MOVE_WEIGHT * local * _share(move.digits, radix)
    return total


def _resharded(
    have: Sequence[Sequence[int]], want: Sequence[Sequence[int]], size: int, radix: Radix
) -> float:
    """Return the bytes that XLA sends to split an array otherwise.

    They are those of XLA's partitioner between a sharding of a mesh and one of tiles.
    """
    pairs = [(tuple(x), tuple(y)) for x, y in zip(have, want, strict=True)]
    before, after = ({a: i for i, own in enumerate(x) for a in own} for x in (have, want))
    removed, added = before.keys() - after.keys(), after.keys() - before.keys()
    moved = [a for a in before.keys() & after.keys() if before[a] != after[a]]
    local, wanted = size / _number_of_parts(have, radix), size / _number_of_parts(want, radix)
    # An all-to-all exchanges one dimension for one other, and not where devices hold copies
    # before and after.
    ways = {(before[a], after[a]) for a in moved}
    paired = len(ways) == len({x for x, _ in ways}) == len({y for _, y in ways})
    whole = len(after) == len(radix)
    if not removed and paired and (added or whole or not moved):
        placed = [
            (*(a for a in x if a not in moved), *(a for a in y if a not in x)) for x, y in pairs
        ]
        permuted = 0 if placed == [y for _, y in pairs] else wanted
        return _MOVE_WEIGHT * (wanted * _share(moved, radix) + permuted)
    if moved:
        return size - local  # XLA gathers everything.
    if not added:
        permuted = 0 if all(x[: len(y)] == y for x, y in pairs) else local
        return _MOVE_WEIGHT * permuted + wanted - local
    if {before[a] for a in removed} == {after[a] for a in added}:
        return _MOVE_WEIGHT * min(local, wanted) + max(wanted - local, 0)
    # What differs is gathered, and then sliced.
    kept = [[a for a, b in zip(x, y, strict=False) if a == b] for x, y in pairs]
    return size / _number_of_parts(kept, radix) - local


def _share(digits: Sequence[int], radix: Radix) -> float:
    """Return the share of an array's part that other devices along some digits need."""
    return 1 - 1 / number_of_parts(digits, radix)


def _number_of_parts(splits: Sequence[Sequence[int]], radix: Radix) -> int:
    """Return the number of parts of an array that each dimension's digits make."""
    return math.prod(number_of_parts(digits, radix) for digits in splits)
