"""The partition that follows from the label that each digit splits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax_tilekern.partitioning.cost import ShardedArray, cost, cost_of_reading
from jax_tilekern.partitioning.digits import Digits, Radix, by_dimension, number_of_parts
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.partitioning.split import Move, Outcome, Split

# The digits that split each dimension of an operand of the local program, and the operand's moves.
Reading = tuple[tuple[tuple[int, ...], ...], tuple[Move, ...]]


def label_of(dims: Dims, digits: Digits, a: int) -> int | None:
    """Return the label of an array that a digit splits."""
    digit = digits[a]
    return None if digit is None else dims[digit.dimension]


class Candidate:
    """The partition that follows from the label that each digit is to split."""

    def __init__(
        self,
        rule: ShardingRule,
        radix: Radix,
        operands: Sequence[ShardedArray],
        results: Sequence[ShardedArray],
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

    def cost(self) -> float:
        """Return the bytes that a device sends, including its work as bytes sent meanwhile."""
        return cost(self.split, self.operands, self.results)

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
            self._outcome(dims, digits, kind == "sum")
            for (dims, digits, _), kind in zip(self.results, combined_by, strict=True)
        ]
        total = None
        if self.rule.epilogue_from is not None and set(self.chosen) & set(self.rule.reductions):
            # One sum is completed. The epilogue reads its operands, and every result lies, there.
            labels = self.rule.epilogue_sum
            total = self._outcome(labels, self.results[0][1], is_sum=True)
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

    def _divides(self, label: int | None, digits: Sequence[int]) -> bool:
        return (
            label is not None and self.rule.sizes[label] % number_of_parts(digits, self.radix) == 0
        )

    def _operand(self, operand: tuple[Dims, Digits, int]) -> Reading:
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
                exchanges.append(Move("exchange", ordered, source, target))
            moves.append(Move("slice", own[own.index(moved[0]) :], source, target))
        if len(moves) == len(exchanges) == 1:
            moves = exchanges
        for move in moves:
            taken[move.target] = taken[move.target][: -len(move.digits)]
            if move.kind == "exchange":
                taken[move.source] = (*taken[move.source], *move.digits)
        # XLA moves digits as well, and does so once for all calls that read the operand.
        by_xla = tuple(() if label is None else self.digits[label] for label in dims)
        now = by_dimension(digits, len(dims))
        readings: list[Reading] = [(tuple(taken), tuple(moves))]
        gathers_nothing = {a for own in now for a in own} <= {a for own in by_xla for a in own}
        if gathers_nothing and all(self._divides(dims[m.source], now[m.source]) for m in moves):
            readings.insert(0, (by_xla, ()))
        readings += self._gathered(dims, now, by_xla)

        def sent(reading: Reading) -> float:
            return cost_of_reading(digits, *reading, size, self.radix)

        return min(readings, key=sent)

    def _gathered(
        self, dims: Dims, now: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]
    ) -> list[Reading]:
        """Return the reading of an operand that is sliced before it is gathered, if there is one.

        XLA gathers an operand first, whole, and slices it then.
        """
        taken: list[tuple[int, ...]] = []
        gathers: list[Move] = []
        for i, (have, want) in enumerate(zip(now, wanted, strict=True)):
            if have == want[: len(have)]:
                taken.append(want)
            elif want == have[: len(want)] and self._divides(dims[i], have):
                taken.append(have)
                gathers.append(Move("gather", have[len(want) :], i, i))
            else:
                return []
        used = [a for own in taken for a in own]
        return [(tuple(taken), tuple(gathers))] if len(set(used)) == len(used) else []

    def _outcome(self, dims: Dims, digits: Digits, is_sum: bool) -> Outcome:
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
                # What devices have copies of is sliced first.
                for a, dim in self._sliced(
                    dims, digits, returned, Move("exchange", tuple(minor), source, target)
                ):
                    returned[dim] = (*returned[dim], a)
                    moves.append(Move("slice", (a,), dim, dim))
                returned[source] = returned[source][: -len(minor)]
                returned[target] = (*returned[target], *minor)
                moves.append(Move("exchange", tuple(minor), source, target))
                break
        return Outcome(tuple(returned), tuple(moves), tuple(scattered), tuple(reduced))

    def _sliced(
        self,
        dims: Dims,
        digits: Digits,
        returned: Sequence[tuple[int, ...]],
        move: Move,
    ) -> list[tuple[int, int]]:
        """Return the digits along which devices have copies of a result, and the dimensions.

        They are those that slices place in the wanted order of a result that an all-to-all moves.
        """
        used = {a for own in self.digits.values() for a in own}
        found: list[tuple[int, int]] = []
        for dim, wanted in enumerate(by_dimension(digits, len(dims))):
            own = returned[dim]
            for a in wanted:
                last = move.digits if dim == move.target else ()
                after = (*own, a, *last)
                if (
                    a not in used
                    and dim != move.source
                    and after == wanted[: len(after)]
                    and self._divides(dims[dim], after)
                ):
                    own = (*own, a)
                    found.append((a, dim))
        return found
