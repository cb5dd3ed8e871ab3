"""The partition of a call among devices: which label each digit of the device number splits.

Partitions are compared by the bytes that each of them sends over the links between devices. None
gathers an operand along a label by which all operands are split already. XLA treats its own
operations so, and the user's shardings request it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.partitioning.digits import Digits, Radix
from jax_tilekern.partitioning.rule import Dims, ShardingRule

# The work of a device, in operations or in bytes of its own memory, while a link sends one byte. An
# H100 or H200 computes 800 TFLOP/s in 16 bits and moves 3 to 4 TB/s; NVLink sends 300 to 400 GB/s.
# What is sent is read and written in memory as well, so that memory counts a fifth of that.
_FLOPS_PER_LINK_BYTE = 2000
_MEMORY_BYTES_PER_LINK_BYTE = 50
# More partitions than these are not compared one by one.
_MAX_CANDIDATES = 256
# A move of parts to another dimension or device counts more than a gather, which XLA shares among
# the calls that read the operand: the passes of a gradient send a gather twice and a move three
# times.
_MOVE_WEIGHT = 1.5


class Move(NamedTuple):
    """Digits that move from one dimension of an array to another, by an all-to-all.

    With ``whole`` the array is gathered along the source already, and is only sliced.
    """

    digits: tuple[int, ...]
    source: int
    target: int
    whole: bool = False


class Outcome(NamedTuple):
    """What becomes of an array that devices compute from their parts.

    Attributes
    ----------
    digits
        For each dimension, the digits that split it in the end.
    moves
        The moves between dimensions, in order.
    scattered
        For each dimension, the digits along which a reduce-scatter splits it.
    reduced
        The digits over which an all-reduce adds it, or combines it as the rule says.
    """

    digits: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...] = ()
    scattered: tuple[tuple[int, ...], ...] = ()
    reduced: tuple[int, ...] = ()

    @property
    def is_combined(self) -> bool:
        """Whether devices have parts that are combined."""
        return any(self.scattered) or bool(self.reduced)


@dataclass(frozen=True)
class Split:
    """The partition of a call.

    Attributes
    ----------
    rule
        The sharding rule of the whole call.
    radix
        Bases of the digits of a device number.
    digits
        For each label, the digits that split it, major to minor.
    operand_digits
        The same for each dimension of each operand of the local program.
    operand_moves
        The moves of each operand between dimensions, in order.
    results
        What becomes of each result.
    sum
        What becomes of the sum that an epilogue reads, if devices have terms of it.
    """

    rule: ShardingRule
    radix: Radix
    digits: dict[int, tuple[int, ...]]
    operand_digits: tuple[tuple[tuple[int, ...], ...], ...]
    operand_moves: tuple[tuple[Move, ...], ...]
    results: tuple[Outcome, ...]
    sum: Outcome | None

    @property
    def has_partial_results(self) -> bool:
        """Whether devices have parts of results, or of the sum, that are combined."""
        return any(outcome.is_combined for outcome in self._outcomes)

    @property
    def _outcomes(self) -> tuple[Outcome, ...]:
        return (*self.results, *(() if self.sum is None else (self.sum,)))

    def parts(self, digits: Sequence[int]) -> int:
        """Return the number of parts that some digits make."""
        return math.prod(self.radix[a] for a in digits)

    def local_size(self, label: int) -> int:
        """Return the size of a label in the call on each device."""
        return self.rule.size(label, self.parts(self.digits[label]))

    def operand_shape(self, operand: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an operand of the local program."""
        digits = self.operand_digits[operand]
        return tuple(
            math.ceil(size / self.parts(own)) for size, own in zip(shape, digits, strict=True)
        )

    def described(self, operands: Sequence[Digits]) -> str:
        """Return the partition in words, given the present digits of the operands."""
        names = {label: self.rule.names.get(label, str(label)) for label in self.digits}
        words = [
            f"{names[label]} in {self.parts(digits)}"
            for label, digits in self.digits.items()
            if digits
        ] or ["whole on every device"]
        for i, (now, taken) in enumerate(zip(operands, self.operand_digits, strict=True)):
            kept = {a for digits in taken for a in digits}
            if any(digit is not None and a not in kept for a, digit in enumerate(now)):
                words.append(f"operand {i} gathered")
        outcomes = self._outcomes
        moves = (
            any(self.operand_moves)
            or any(outcome.moves for outcome in outcomes)
            or any(
                digit is not None and a in own and digit.dimension != i
                for now, taken in zip(operands, self.operand_digits, strict=True)
                for a, digit in enumerate(now)
                for i, own in enumerate(taken)
            )
        )
        words += ["all-to-all"] if moves else []
        words += ["reduce-scatter"] if any(any(x.scattered) for x in outcomes) else []
        words += ["all-reduce"] if any(x.reduced for x in outcomes) else []
        if self.sum is not None:
            words.append("the epilogue after the sum")
        return ", ".join(words)


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

    def candidate(labels: Sequence[int | None]) -> _Candidate:
        wanted = {a: label for group, label in zip(groups, labels, strict=True) for a in group}
        return _Candidate(rule, radix, *arrays, [wanted[a] for a in range(len(radix))])

    if math.prod(map(len, options)) <= _MAX_CANDIDATES:
        return min(map(candidate, itertools.product(*options)), key=_Candidate.cost).split
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


def label_of(dims: Dims, digits: Digits, a: int) -> int | None:
    """Return the label of an array that a digit splits."""
    digit = digits[a]
    return None if digit is None else dims[digit.dimension]


# Labels and present digits of an array, and its size in bytes.
_Array = tuple[Dims, Digits, int]


def _groups(radix: Radix, arrays: Sequence[Digits]) -> list[list[int]]:
    """Return the digits in groups that split the same dimension of every array."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for a in range(len(radix)):
        split = tuple(None if digits[a] is None else digits[a].dimension for digits in arrays)  # type: ignore[union-attr]
        groups.setdefault(split, []).append(a)
    return list(groups.values())


def _options(
    rule: ShardingRule, operands: Sequence[_Array], results: Sequence[_Array], a: int
) -> list[int | None]:
    """Return the labels that a digit may split, or the one by which operands are split already."""
    now = [label_of(dims, digits, a) for dims, digits, _ in operands]
    wanted = [label_of(dims, digits, a) for dims, digits, _ in results]
    reductions = rule.reductions
    labels = list(dict.fromkeys(x for x in (*now, *wanted) if x in rule.splittable))
    for label in labels:
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


class _Candidate:
    """The partition that follows from the label that each digit is to split."""

    def __init__(
        self,
        rule: ShardingRule,
        radix: Radix,
        operands: Sequence[_Array],
        results: Sequence[_Array],
        labels: Sequence[int | None],
    ) -> None:
        self.rule, self.radix = rule, radix
        self.operands, self.results = operands, results
        self.chosen: list[int | None] = []
        parts = dict.fromkeys(rule.sizes, 1)
        for a, label in enumerate(labels):
            able = label is not None and self._can_split(label, a, parts)
            self.chosen.append(label if able else None)
            if able:
                parts[label] *= radix[a]  # type: ignore[index]
        orders = {label: self._orders(label) for label in rule.sizes}
        self.digits = {label: own[0] for label, own in orders.items()}
        for label, own in orders.items():
            if len(own) > 1:
                self.digits[label] = min(own, key=functools.partial(self._cost_in_order, label))
        self.split = self._split()

    def _can_split(self, label: int, a: int, parts: dict[int, int]) -> bool:
        size, split = self.rule.sizes[label], parts[label] * self.radix[a]
        if size % split == 0:
            return True
        # The last part is padded. Padded parts are never moved from one dimension to another.
        arrays = self.operands if label in self.rule.reductions else (*self.operands, *self.results)
        labels = {label_of(dims, digits, a) for dims, digits, _ in arrays}
        summed = label in self.rule.summed
        padding_is_harmless = label not in self.rule.reduced and (
            not summed or self.rule.zero_padding
        )
        moved = any(self._is_moved(label, b) for b, x in enumerate(self.chosen) if x == label)
        return padding_is_harmless and labels <= {label, None} and not moved

    # What a partition costs.

    def cost(self) -> float:
        """Return the bytes that a device sends, including its work as bytes sent meanwhile."""
        split = self.split
        total = self._work()
        for i, (_, digits, size) in enumerate(self.operands):
            taken = split.operand_digits[i]
            total += self._taken(digits, taken, split.operand_moves[i], size)
        # An epilogue's results are functions of one sum.
        if split.sum is not None:
            dims, _, size = self._sum()
            total += self._completed(split.sum, dims, size)
        for (dims, digits, size), outcome in zip(self.results, split.results, strict=True):
            total += self._completed(outcome, dims, size)
            total += self._resharded(outcome.digits, self._by_dimension(digits, len(dims)), size)
        return total

    def _sum(self) -> tuple[Dims, Digits, int]:
        """Return the sum that an epilogue reads, as wide as the first result."""
        dims, digits, size = self.results[0]
        labels = self.rule.epilogue_sum
        further = (self.rule.sizes[x] for x in self.rule.reduced if x not in dims)
        return labels, digits, size * math.prod(further)

    def _completed(self, outcome: Outcome, dims: Dims, size: int) -> float:
        """Return the bytes of an array's reductions over devices and of its moves."""
        local = size / self._parts_of([() if x is None else self.digits[x] for x in dims])
        total = 0.0
        for digits in outcome.scattered:
            total += local * self._share(digits)
            local /= self._parts(digits)
        total += 2 * local * self._share(outcome.reduced)
        moved = sum(self._share(move.digits) for move in outcome.moves)
        return total + _MOVE_WEIGHT * local * moved

    def _work(self) -> float:
        """Return the time of a device's work, in bytes that a link sends."""
        memory = sum(size for _, _, size in (*self.operands, *self.results))
        split = math.prod(self.radix[a] for a, x in enumerate(self.chosen) if x is not None)
        flops = self.rule.flops / _FLOPS_PER_LINK_BYTE
        return max(flops, memory / _MEMORY_BYTES_PER_LINK_BYTE) / split

    def _taken(
        self, digits: Digits, taken: Sequence[Sequence[int]], moves: Sequence[Move], size: int
    ) -> float:
        """Return the bytes that are sent to read an operand."""
        local = size / self._parts_of(taken)
        moved = sum(self._share(move.digits) for move in moves if not move.whole)
        by_xla = self._resharded(self._by_dimension(digits, len(taken)), taken, size)
        return by_xla + _MOVE_WEIGHT * local * moved

    def _resharded(
        self, have: Sequence[Sequence[int]], want: Sequence[Sequence[int]], size: int
    ) -> float:
        """Return the bytes that XLA sends to split an array otherwise.

        They are those of XLA's partitioner between a sharding of a mesh and one of tiles.
        """
        pairs = [(tuple(x), tuple(y)) for x, y in zip(have, want, strict=True)]
        before, after = ({a: i for i, own in enumerate(x) for a in own} for x in (have, want))
        removed, added = before.keys() - after.keys(), after.keys() - before.keys()
        moved = [a for a in before.keys() & after.keys() if before[a] != after[a]]
        local, wanted = size / self._parts_of(have), size / self._parts_of(want)
        # An all-to-all exchanges one dimension for one other, and not where devices hold copies
        # before and after.
        ways = {(before[a], after[a]) for a in moved}
        paired = len(ways) == len({x for x, _ in ways}) == len({y for _, y in ways})
        whole = len(after) == len(self.radix)
        if not removed and paired and (added or whole or not moved):
            placed = [
                (*(a for a in x if a not in moved), *(a for a in y if a not in x)) for x, y in pairs
            ]
            permuted = 0 if placed == [y for _, y in pairs] else wanted
            return _MOVE_WEIGHT * (wanted * self._share(moved) + permuted)
        if moved:
            return size - local  # XLA gathers everything.
        if not added:
            permuted = 0 if all(x[: len(y)] == y for x, y in pairs) else local
            return _MOVE_WEIGHT * permuted + wanted - local
        if {before[a] for a in removed} == {after[a] for a in added}:
            return _MOVE_WEIGHT * min(local, wanted) + max(wanted - local, 0)
        # What differs is gathered, and then sliced.
        kept = [[a for a, b in zip(x, y, strict=False) if a == b] for x, y in pairs]
        return size / self._parts_of(kept) - local

    def _by_dimension(self, digits: Digits, rank: int) -> list[tuple[int, ...]]:
        """Return the digits that split each dimension, major to minor."""
        found = [[a for a, x in enumerate(digits) if x and x.dimension == i] for i in range(rank)]
        return [tuple(sorted(own, key=lambda a: -digits[a].weight)) for own in found]  # type: ignore[union-attr]

    def _share(self, digits: Sequence[int]) -> float:
        return 1 - 1 / self._parts(digits)

    def _parts_of(self, splits: Sequence[Sequence[int]]) -> int:
        return math.prod(map(self._parts, splits))

    # The order of a label's digits.

    def _orders(self, label: int) -> list[tuple[int, ...]]:
        """Return orders of the digits of a label, major to minor.

        They are those of an array that is split by some of them already, and those in which the
        digits that an all-to-all moves here come last, where it places them.
        """
        chosen = [a for a, x in enumerate(self.chosen) if x == label]
        orders: list[tuple[int, ...]] = []
        for dims, digits, _ in sorted((*self.operands, *self.results), key=lambda x: -x[2]):
            own = [a for a in chosen if label_of(dims, digits, a) == label]
            own.sort(key=lambda a: -digits[a].weight)  # type: ignore[union-attr]
            others = [a for a in (orders[0] if orders else chosen) if a not in own]
            orders += [(*own, *others), (*others, *own)] if own else []
        for order in [*orders] or [tuple(chosen)]:
            moved = [a for a in order if self._is_moved(label, a)]
            orders.append((*(a for a in order if a not in moved), *moved))
        return list(dict.fromkeys(orders))

    def _cost_in_order(self, label: int, order: tuple[int, ...]) -> float:
        self.digits[label] = order
        self.split = self._split()
        return self.cost()

    def _is_moved(self, label: int, a: int) -> bool:
        return any(
            label in dims and label_of(dims, digits, a) not in (None, label)
            for dims, digits, _ in self.operands
        )

    # The operands, collectives and results of the local program.

    def _split(self) -> Split:
        operands = [self._operand(operand) for operand in self.operands]
        combined_by = self.rule.combined_by or ("sum",) * len(self.results)
        results = [
            self._outcome(*result, kind == "sum")
            for result, kind in zip(self.results, combined_by, strict=True)
        ]
        total = None
        if self.rule.epilogue_from is not None and set(self.chosen) & set(self.rule.reductions):
            # One sum is completed. The epilogue reads its operands, and every result lies, there.
            labels, digits, size = self._sum()
            total = self._outcome(labels, digits, size, is_sum=True)
            placed = dict(zip(labels, total.digits, strict=True))
            for i in self.rule.epilogue_operands:
                operands[i] = tuple(placed.get(label, ()) for label in self.rule.operands[i]), ()
            results = [
                Outcome(
                    tuple(placed.get(label, ()) for label in dims),
                    reduced=tuple(a for x in labels if x not in dims for a in placed[x]),
                )
                for dims, _, _ in self.results
            ]
        operand_digits, operand_moves = zip(*operands, strict=True)
        return Split(
            self.rule,
            self.radix,
            self.digits,
            operand_digits,
            operand_moves,
            tuple(results),
            total,
        )

    def _parts(self, digits: Sequence[int]) -> int:
        return math.prod(self.radix[a] for a in digits)

    def _divides(self, label: int | None, digits: Sequence[int]) -> bool:
        return label is not None and self.rule.sizes[label] % self._parts(digits) == 0

    def _operand(
        self, operand: tuple[Dims, Digits, int]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[Move, ...]]:
        """Return the digits of an operand of the local program, and its moves."""
        dims, digits, size = operand
        taken: list[tuple[int, ...]] = [
            () if label is None else self.digits[label] for label in dims
        ]
        moves: list[Move] = []
        exchanges: list[Move] = []
        for target, label in enumerate(dims):
            if label is None:
                continue
            own = self.digits[label]
            moved = [a for a in own if label_of(dims, digits, a) not in (None, label)]
            sources = {digits[a].dimension for a in moved}  # type: ignore[union-attr]
            if not moved:
                continue
            source = sources.pop()
            ordered = tuple(sorted(moved, key=lambda a: -digits[a].weight))  # type: ignore[union-attr]
            # An array has one all-to-all at most, so that its digits are the last ones of the
            # source. It makes them the last ones of the target.
            last = own[-len(moved) :] == ordered
            if last and not sources and self._divides(dims[source], (*taken[source], *moved)):
                exchanges.append(Move(ordered, source, target))
            moves.append(Move(own[own.index(moved[0]) :], source, target, whole=True))
        if len(moves) == len(exchanges) == 1:
            moves = exchanges
        for move in moves:
            taken[move.target] = taken[move.target][: -len(move.digits)]
            if not move.whole:
                taken[move.source] = (*taken[move.source], *move.digits)
        # XLA moves digits as well, and does so once for all calls that read the operand.
        by_xla = tuple(() if label is None else self.digits[label] for label in dims)
        now = self._by_dimension(digits, len(dims))
        if (
            all(self._divides(dims[move.source], now[move.source]) for move in moves)
            and {a for own in now for a in own} <= {a for own in by_xla for a in own}
            and self._taken(digits, by_xla, (), size) <= self._taken(digits, taken, moves, size)
        ):
            return by_xla, ()
        return tuple(taken), tuple(moves)

    def _outcome(self, dims: Dims, digits: Digits, _: int, is_sum: bool) -> Outcome:
        """Return what becomes of an array of which devices have parts."""
        returned = [() if label is None else self.digits[label] for label in dims]
        scattered: list[tuple[int, ...]] = [() for _ in dims]
        reduced = []
        over = [a for label in self.rule.sizes if label not in dims for a in self.digits[label]]
        for a in sorted(over, key=lambda a: -(digits[a].weight if digits[a] else 0)):  # type: ignore[union-attr]
            digit = digits[a]
            if (
                is_sum
                and digit is not None
                and self._divides(dims[digit.dimension], (*returned[digit.dimension], a))
            ):
                returned[digit.dimension] = (*returned[digit.dimension], a)
                scattered[digit.dimension] = (*scattered[digit.dimension], a)
            else:
                reduced.append(a)
        moves: list[Move] = []
        for source, label in enumerate(dims):
            if label is None:
                continue
            minor: list[int] = []
            for a in reversed(self.digits[label]):
                digit = digits[a]
                if digit is None or digit.dimension == source or scattered[source]:
                    break
                minor.insert(0, a)
            targets = {digits[a].dimension for a in minor}  # type: ignore[union-attr]
            if len(targets) != 1:
                continue
            (target,) = targets
            after = (*returned[target], *minor)
            if self._divides(dims[target], after) and self._divides(label, returned[source]):
                returned[source] = returned[source][: -len(minor)]
                returned[target] = after
                moves.append(Move(tuple(minor), source, target))
                break
        return Outcome(tuple(returned), tuple(moves), tuple(scattered), tuple(reduced))
