"""The partition of a call among devices: what splits its arrays, and what devices exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_tilekern.partitioning.digits import Digits, Radix, number_of_parts
from jax_tilekern.partitioning.rule import ShardingRule


class Move(NamedTuple):
    """Digits that split another dimension of an array afterwards, or none.

    Attributes
    ----------
    kind
        ``"exchange"`` is an all-to-all between two dimensions. ``"slice"`` splits the target of an
        array that is whole along the source. ``"gather"`` is an all-gather along one dimension,
        source and target.
    digits
        The digits, the last ones of the dimension that they split.
    source, target
        Dimensions of the array.
    """

    kind: Literal["exchange", "slice", "gather"]
    digits: tuple[int, ...]
    source: int
    target: int


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
        return number_of_parts(digits, self.radix)

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
            gathered = {a for m in self.operand_moves[i] if m.kind == "gather" for a in m.digits}
            kept = {a for digits in taken for a in digits} - gathered
            if any(digit is not None and a not in kept for a, digit in enumerate(now)):
                words.append(f"operand {i} gathered")
        outcomes = self._outcomes
        of_operands = [move for moves in self.operand_moves for move in moves]
        moved = (
            any(move.kind != "gather" for move in of_operands)
            or any(outcome.moves for outcome in outcomes)
            or any(
                digit is not None and a in own and digit.dimension != i
                for now, taken in zip(operands, self.operand_digits, strict=True)
                for a, digit in enumerate(now)
                for i, own in enumerate(taken)
            )
        )
        words += ["all-to-all"] if moved else []
        words += ["reduce-scatter"] if any(any(x.scattered) for x in outcomes) else []
        words += ["all-reduce"] if any(x.reduced for x in outcomes) else []
        if self.sum is not None:
            words.append("the epilogue after the sum")
        return ", ".join(words)
