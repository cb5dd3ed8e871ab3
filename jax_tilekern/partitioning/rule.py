"""The sharding rule of a call: which dimensions of its arrays may be split together.

A rule labels the dimensions of the operands and of the results, as ``einsum`` does. XLA calls a
label a *factor*. A label of the operands that no result has is a *reduction*: devices that hold
different parts of it have partial results, whose sum is the result unless the rule says how they
are combined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

# A label, or ``None`` for a dimension that every device needs whole.
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class ShardingRule:
    """The correspondence of the dimensions of a call's arrays."""

    # The labels of each array's dimensions.
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[int, int] = field(hash=False)  # of every label
    flops: float
    # Whether zeros in the operands contribute nothing to a reduction. If not, a reduction is split
    # into equal parts only.
    zero_padding: bool = True
    names: Mapping[int, str] = field(default_factory=dict, hash=False)  # of the labels, in explain
    # Whether every result is a sum over the labels that it lacks, so that a label of some of the
    # results only may be split as well.
    each_result_is_a_sum: bool = False
    # The first operand of an epilogue: every result is an elementwise function of the sum over the
    # reductions and of the operands from this one on, or a reduction of such a function. Without it
    # the results are the sums.
    epilogue_from: int | None = None
    # Labels that an epilogue reduces, the last ones of its sum.
    reduced: frozenset[int] = frozenset()
    # For each result, how devices combine their parts of it: "sum", "max", "min" or "logsumexp".
    # All are sums by default. A result that has every label which is split has no parts.
    combined_by: tuple[str, ...] = ()
    unsplit: frozenset[int] = frozenset()  # Labels that every device needs whole.
    # Labels along which devices may share the work though no array is split along them.
    shared: frozenset[int] = frozenset()
    # Labels whose positions are blocks: in some arrays the dimension is several times as long as
    # ``sizes`` says. They are split into equal parts only.
    blocked: frozenset[int] = frozenset()
    # Labels along which devices may gather operands that are split alike: parts of a result that
    # lacks the label may be larger than the operands.
    gatherable: frozenset[int] = frozenset()
    # The operand whose sharding the results take where operands are sharded differently. If it is
    # None, XLA may replicate the results in this case.
    results_follow: int | None = None

    @property
    def epilogue_operands(self) -> range:
        """Operands of the epilogue, which are read where the sum is."""
        n = len(self.operands)
        return range(n if self.epilogue_from is None else self.epilogue_from, n)

    @property
    def reductions(self) -> tuple[int, ...]:
        """Labels of the operands that no result has."""
        kept = {label for dims in self.results for label in dims} | self.reduced | self.unsplit
        return tuple(label for label in self.sizes if label not in kept)

    @property
    def epilogue_sum(self) -> Dims:
        """Labels of the sum that an epilogue reads."""
        first = self.results[0]
        return (*first, *(label for label in self.reduced if label not in first))

    def sum_bytes(self, result_bytes: int) -> int:
        """Return the size of the sum that an epilogue reads, as wide as the first result."""
        return result_bytes * math.prod(
            self.sizes[label] for label in self.reduced if label not in self.results[0]
        )

    @property
    def summed(self) -> frozenset[int]:
        """Labels that may be split and that some result lacks, so that devices have parts of it."""
        return frozenset(
            label for label in self.splittable if any(label not in dims for dims in self.results)
        )

    @property
    def splittable(self) -> frozenset[int]:
        """Labels that may be split: labels of every result, and labels that results reduce."""
        if self.each_result_is_a_sum:
            return frozenset(self.sizes)
        kept = [set(dims) for dims in self.results]
        return self.reduced | frozenset(
            label
            for label in self.sizes
            if label not in self.unsplit
            and (all(label in dims for dims in kept) or not any(label in dims for dims in kept))
        )

    def in_blocks(self, labels: Iterable[int | None], block: int) -> ShardingRule:
        """Return the rule of a call whose devices share whole blocks of so many positions.

        Every device needs a dimension whole that does not consist of several blocks.
        """
        own = self.sizes.keys() & set(labels) - self.blocked
        blocked = {x for x in own if self.sizes[x] > block and self.sizes[x] % block == 0}
        whole = own - blocked

        def kept(arrays: tuple[Dims, ...]) -> tuple[Dims, ...]:
            return tuple(tuple(None if x in whole else x for x in dims) for dims in arrays)

        return replace(
            self,
            operands=kept(self.operands),
            results=kept(self.results),
            sizes={
                x: size // block if x in blocked else size
                for x, size in self.sizes.items()
                if x not in whole
            },
            blocked=self.blocked | blocked,
        )


def sizes_of(*arrays: tuple[Dims, tuple[int, ...]]) -> dict[int, int]:
    """Return the size of each label from the labels and shapes of arrays."""
    return {
        label: size
        for dims, shape in arrays
        for label, size in zip(dims, shape, strict=True)
        if label is not None
    }


def rule_over_axes(
    operands: tuple[tuple[Dims, tuple[int, ...]], ...], result: Dims, *, flops: float
) -> ShardingRule:
    """Return the rule of an operation of one result whose labels number an array's axes."""
    sizes = sizes_of(*operands)
    names = {axis: f"axis {axis}" for axis in sizes}
    return ShardingRule(tuple(dims for dims, _ in operands), (result,), sizes, flops, names=names)
