"""The partition of a call among devices: what splits its arrays, and what devices exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.partitioning.mesh import MeshShape, Spec, number_of_parts
from jax_tilekern.partitioning.reshard import ReshardStep
from jax_tilekern.partitioning.rule import ShardingRule


class ShardedOperand(NamedTuple):
    """How an operand is resharded before the call."""

    spec: Spec  # when XLA passes it to the local program
    steps: tuple[ReshardStep, ...]  # in order
    # The last of these steps, if the local program takes them in place of XLA.
    in_program: tuple[ReshardStep, ...]
    bytes_sent: float  # by a device, for the steps


class ShardedResult(NamedTuple):
    """How devices combine and reshard an array that they compute in parts."""

    spec: Spec  # in the end
    steps: tuple[ReshardStep, ...]  # after it is reduced
    scattered: Spec  # for each dimension, the axes over which a reduce-scatter splits it
    reduced: tuple[int, ...]  # the axes over which an all-reduce combines it
    bytes_sent: float  # by a device, until the result has the wanted spec

    @property
    def is_combined(self) -> bool:
        """Whether devices have parts that are combined."""
        return any(self.scattered) or bool(self.reduced)


@dataclass(frozen=True)
class Partition:
    """The partition of a call."""

    rule: ShardingRule  # of the whole call
    mesh: MeshShape
    # For each label, the axes that split it, major to minor.
    axes: Mapping[int | None, tuple[int, ...]]
    operands: tuple[ShardedOperand, ...]
    results: tuple[ShardedResult, ...]
    sum: ShardedResult | None  # the sum that an epilogue reads, if devices have terms of it

    @property
    def has_partial_results(self) -> bool:
        """Whether devices have parts of results, or of the sum, that are combined."""
        return any(result.is_combined for result in self.computed)

    @property
    def computed(self) -> tuple[ShardedResult, ...]:
        """The results, and the sum that an epilogue reads."""
        return self.results if self.sum is None else (*self.results, self.sum)

    def parts(self, axes: Sequence[int]) -> int:
        return number_of_parts(axes, self.mesh)

    def described(self) -> str:
        words = [
            f"{self.rule.names.get(label, str(label))} in {self.parts(axes)}"
            for label, axes in self.axes.items()
            if label is not None and axes
        ] or ["whole on every device"]
        for i, operand in enumerate(self.operands):
            if any(step.kind == "all-gather" for step in operand.steps):
                words.append(f"operand {i} gathered")
        steps = [step for x in self.operands for step in x.steps]
        steps += [step for x in self.computed for step in x.steps]
        words += ["all-to-all"] if any(step.kind == "all-to-all" for step in steps) else []
        words += ["reduce-scatter"] if any(any(x.scattered) for x in self.computed) else []
        words += ["all-reduce"] if any(x.reduced for x in self.computed) else []
        if self.sum is not None:
            words.append("the epilogue after the sum")
        return ", ".join(words)
