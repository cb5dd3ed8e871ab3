"""The partition of a call among devices: which label each digit of the device number splits.

The choice is made digit by digit, by the bytes that each option sends over the links between
devices. It never gathers an operand along a label by which all operands are split already. XLA
treats its own operations so, and the user's shardings request it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.partitioning.digits import Digits, Radix
from jax_tilekern.partitioning.rule import Dims, ShardingRule

# The work of a device, in operations or in bytes of its own memory, while a link sends one byte. An
# H100 or H200 computes 800 TFLOP/s in 16 bits and moves 3 to 4 TB/s; NVLink sends 300 to 400 GB/s.
_FLOPS_PER_LINK_BYTE = 2000
_MEMORY_BYTES_PER_LINK_BYTE = 10


class Move(NamedTuple):
    """Digits that move from one dimension of an array to another, by an all-to-all.

    With ``whole`` the array is gathered along the source already, and is only sliced.
    """

    digits: tuple[int, ...]
    source: int
    target: int
    whole: bool = False


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
    operand_digits, result_digits
        The same for each dimension of each operand and result of the local program.
    operand_moves, result_moves
        The moves that the local program makes between dimensions, in order.
    scattered
        For each result and each dimension, the digits along which a reduce-scatter splits it.
    summed
        For each result, the digits over which an all-reduce adds it.
    """

    rule: ShardingRule
    radix: Radix
    digits: dict[int, tuple[int, ...]]
    operand_digits: tuple[tuple[tuple[int, ...], ...], ...]
    result_digits: tuple[tuple[tuple[int, ...], ...], ...]
    operand_moves: tuple[tuple[Move, ...], ...]
    result_moves: tuple[tuple[Move, ...], ...]
    scattered: tuple[tuple[tuple[int, ...], ...], ...]
    summed: tuple[tuple[int, ...], ...]

    @property
    def has_partial_results(self) -> bool:
        """Whether devices compute partial sums."""
        return any(map(any, self.scattered)) or any(self.summed)

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
        moves = any(map(any, (*self.operand_moves, *self.result_moves)))
        words += ["all-to-all"] if moves else []
        words += ["reduce-scatter"] if any(map(any, self.scattered)) else []
        words += ["all-reduce"] if any(self.summed) else []
        if self.rule.epilogue_from is not None and self.has_partial_results:
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
    choice = _Choice(rule, radix, tuple(operands), tuple(results), operand_bytes, result_bytes)
    return choice.split()


def label_of(dims: Dims, digits: Digits, a: int) -> int | None:
    """Return the label of an array that a digit splits."""
    digit = digits[a]
    return None if digit is None else dims[digit.dimension]


class _Choice:
    """The state of one choice: the present digits, and the label chosen for each."""

    def __init__(
        self,
        rule: ShardingRule,
        radix: Radix,
        operands: tuple[Digits, ...],
        results: tuple[Digits, ...],
        operand_bytes: Sequence[int],
        result_bytes: Sequence[int],
    ) -> None:
        self.rule, self.radix = rule, radix
        self.operands = tuple(zip(rule.operands, operands, operand_bytes, strict=True))
        self.results = tuple(zip(rule.results, results, result_bytes, strict=True))
        self.chosen: list[int | None] = []
        parts = dict.fromkeys(rule.sizes, 1)
        for a in range(len(radix)):
            label = self._choose(a, parts)
            if label is not None:
                parts[label] *= radix[a]
            self.chosen.append(label)
        self.digits = {label: self._ordered(label) for label in rule.sizes}

    # The label of each digit.

    def _choose(self, a: int, parts: dict[int, int]) -> int | None:
        now = [label_of(dims, digits, a) for dims, digits, _ in self.operands]
        wanted = [label_of(dims, digits, a) for dims, digits, _ in self.results]
        splittable = self.rule.splittable
        labels = list(dict.fromkeys(x for x in (*now, *wanted) if x in splittable))
        reductions = self.rule.reductions
        able = [
            x
            for x in labels
            if self._can_split(x, a, parts, {*now, *(() if x in reductions else wanted)})
        ]
        for label in able:
            # An epilogue after a sum reads its operands where the sum is.
            read = [
                (dims, current)
                for i, ((dims, _, _), current) in enumerate(zip(self.operands, now, strict=True))
                if label not in reductions or i not in self.rule.epilogue_operands
            ]
            if all(
                current == label if label in dims else current is None for dims, current in read
            ) and (label in reductions or sum(x is not None for _, x in read) > 1):
                return label
        # Redundant computation on several devices may cost less than sending results.
        options: list[int | None] = [*able, None]
        return min(options, key=lambda label: self._cost(label, a, parts))

    def _can_split(
        self, label: int, a: int, parts: dict[int, int], labels: set[int | None]
    ) -> bool:
        size, split = self.rule.sizes[label], parts[label] * self.radix[a]
        if size % split == 0:
            return True
        # The last part is padded. Padded parts are never moved from one dimension to another.
        padding_is_harmless = label not in self.rule.summed or self.rule.zero_padding
        moved = any(self._is_moved(label, b) for b, x in enumerate(self.chosen) if x == label)
        return padding_is_harmless and labels <= {label, None} and not moved

    def _cost(self, label: int | None, a: int, parts: dict[int, int]) -> float:
        """Return the bytes that a device sends, including its work as bytes sent meanwhile."""
        base = self.radix[a]
        share = (base - 1) / base
        total = self._work(a) * (1 if label is None else 1 / base)
        for i, (dims, digits, size) in enumerate(self.operands):
            current = label_of(dims, digits, a)
            if label in self.rule.reductions and i in self.rule.epilogue_operands:
                continue
            if current is not None and current != label:
                # XLA gathers the operand. Or it is moved to another dimension, after it is sliced.
                local = self._local(digits, size, a)
                moved = label in dims
                total += local * share / (base * self._slices(dims, digits) if moved else 1)
        # An epilogue's results are functions of one sum.
        one_sum = self.rule.epilogue_from is not None and label in self.rule.reductions
        for dims, digits, size in self.results[:1] if one_sum else self.results:
            wanted = label_of(dims, digits, a)
            local = size / math.prod(
                self.radix[b] for b in range(len(self.radix)) if b != a and self._splits_results(b)
            )
            if label is not None and label not in dims:
                even = wanted is not None and (
                    self.rule.sizes[wanted] % (parts[wanted] * base) == 0
                )
                total += local * share * (1 if even else 2)
            elif label is not None and wanted != label:
                total += local * share
        return total

    def _work(self, a: int) -> float:
        """Return the time of a device's work without a digit, in bytes that a link sends."""
        arrays = (*self.operands, *self.results)
        split = math.prod(
            self.radix[b]
            for b in range(len(self.radix))
            if b != a and any(digits[b] is not None for _, digits, _ in arrays)
        )
        memory = sum(size for _, _, size in arrays) / _MEMORY_BYTES_PER_LINK_BYTE
        return max(self.rule.flops / _FLOPS_PER_LINK_BYTE, memory) / split

    def _local(self, digits: Digits, size: int, a: int) -> float:
        others = (self.radix[b] for b in range(len(self.radix)) if b != a and digits[b] is not None)
        return size / math.prod(others)

    def _slices(self, dims: Dims, digits: Digits) -> int:
        """Return into how many parts the digits chosen so far slice an operand."""
        chosen = [b for b, label in enumerate(self.chosen) if label is not None and label in dims]
        return self._parts([b for b in chosen if digits[b] is None])

    def _splits_results(self, b: int) -> bool:
        kept = {label for dims in self.rule.results for label in dims}
        return any(
            label_of(dims, digits, b) in kept
            for dims, digits, _ in (*self.operands, *self.results)
            if digits[b] is not None
        )

    def _ordered(self, label: int) -> tuple[int, ...]:
        """Order the digits of a label, major to minor, so that the fewest bytes are permuted.

        Digits that an operand moves here from another dimension come last, where an all-to-all
        places them. The others have the order of an array that is split by them already.
        """
        chosen = [a for a, x in enumerate(self.chosen) if x == label]
        moved = [a for a in chosen if self._is_moved(label, a)]
        others = [a for a in chosen if a not in moved]
        arrays = [
            ([a for a in others if label_of(dims, digits, a) == label], digits, size)
            for dims, digits, size in (*self.operands, *self.results)
        ]

        def by_weight(own: Sequence[int], digits: Digits) -> list[int]:
            return sorted(own, key=lambda a: -digits[a].weight)  # type: ignore[union-attr]

        orders = [tuple(others)]
        for own, digits, _ in sorted(arrays, key=lambda array: -array[2]):
            first = by_weight(own, digits)
            rest = [a for order in orders[-1:] for a in order if a not in own]
            orders += [(*first, *rest), (*rest, *first)]

        def permuted_bytes(order: tuple[int, ...]) -> int:
            # An array with the major digits alone is sliced further, or gathered.
            return sum(
                size
                for own, digits, size in arrays
                if own and by_weight(own, digits) != list(order[: len(own)])
            )

        return (*min(reversed(orders), key=permuted_bytes), *moved)

    def _is_moved(self, label: int, a: int) -> bool:
        return any(
            label in dims and label_of(dims, digits, a) not in (None, label)
            for dims, digits, _ in self.operands
        )

    # The operands, collectives and results of the local program.

    def split(self) -> Split:
        operands = [self._operand(operand) for operand in self.operands]
        outcomes = [self._result(*result) for result in self.results]
        if self.rule.epilogue_from is not None and set(self.chosen) & set(self.rule.reductions):
            # One sum is completed. The epilogue reads its operands, and every result lies, there.
            outcomes = outcomes[:1] * len(outcomes)
            digits = dict(zip(self.rule.results[0], outcomes[0][0], strict=True))
            for i in self.rule.epilogue_operands:
                operands[i] = tuple(digits.get(label, ()) for label in self.rule.operands[i]), ()
        operand_digits, operand_moves = zip(*operands, strict=True)
        result_digits, result_moves, scattered, summed = zip(*outcomes, strict=True)
        return Split(
            self.rule,
            self.radix,
            self.digits,
            operand_digits,
            result_digits,
            operand_moves,
            result_moves,
            scattered,
            summed,
        )

    def _parts(self, digits: Sequence[int]) -> int:
        return math.prod(self.radix[a] for a in digits)

    def _divides(self, label: int | None, digits: Sequence[int]) -> bool:
        return label is not None and self.rule.sizes[label] % self._parts(digits) == 0

    def _operand(
        self, operand: tuple[Dims, Digits, int]
    ) -> tuple[tuple[tuple[int, ...], ...], tuple[Move, ...]]:
        """Return the digits of an operand of the local program, and its moves."""
        dims, digits, _ = operand
        taken: list[tuple[int, ...]] = [
            () if label is None else self.digits[label] for label in dims
        ]
        moves: list[Move] = []
        for target, label in enumerate(dims):
            if label is None:
                continue
            moved = [a for a in taken[target] if label_of(dims, digits, a) not in (None, label)]
            sources = {digits[a].dimension for a in moved}  # type: ignore[union-attr]
            if not moved:
                continue
            taken[target] = tuple(a for a in taken[target] if a not in moved)
            source = sources.pop()
            ordered = tuple(sorted(moved, key=lambda a: -digits[a].weight))  # type: ignore[union-attr]
            # An array has one all-to-all at most, so that its digits are the last ones of the
            # source.
            together = not sources and ordered == tuple(moved) and not any(moves)
            if together and self._divides(dims[source], (*taken[source], *moved)):
                taken[source] = (*taken[source], *ordered)
                moves.append(Move(ordered, source, target))
            else:
                moves.append(Move(tuple(moved), source, target, whole=True))
        return tuple(taken), tuple(sorted(moves, key=lambda move: move.whole))

    def _result(
        self, dims: Dims, digits: Digits, _: int
    ) -> tuple[
        tuple[tuple[int, ...], ...],
        tuple[Move, ...],
        tuple[tuple[int, ...], ...],
        tuple[int, ...],
    ]:
        """Return a result's digits, its moves, and the sums over devices."""
        returned = [() if label is None else self.digits[label] for label in dims]
        scattered: list[tuple[int, ...]] = [() for _ in dims]
        summed = []
        over = [a for label in self.rule.sizes if label not in dims for a in self.digits[label]]
        for a in sorted(over, key=lambda a: -(digits[a].weight if digits[a] else 0)):  # type: ignore[union-attr]
            digit = digits[a]
            if digit is not None and self._divides(
                dims[digit.dimension], (*returned[digit.dimension], a)
            ):
                returned[digit.dimension] = (*returned[digit.dimension], a)
                scattered[digit.dimension] = (*scattered[digit.dimension], a)
            else:
                summed.append(a)
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
        return tuple(returned), tuple(moves), tuple(scattered), tuple(summed)
