"""The partition of a call among devices: what splits its arrays, and what devices exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.partitioning.mesh import MeshShape, Spec, number_of_parts
from jax_tilekern.partitioning.reshard import ReshardStep
from jax_tilekern.partitioning.rule import ShardingRule


class ShardedOperand(NamedTuple):
    """What becomes of an operand before the call.

    Attributes
    ----------
    spec
        Its spec when XLA passes it to the local program.
    steps
        The steps that reshard it, in order.
    in_program
        The last of these steps, which the local program takes. XLA takes the others.
    bytes_sent
        The bytes that a device sends for the steps.
    """

    spec: Spec
    steps: tuple[ReshardStep, ...]
    in_program: tuple[ReshardStep, ...]
    bytes_sent: float


class ShardedResult(NamedTuple):
    """What becomes of an array that devices compute from their parts.

    Attributes
    ----------
    spec
        Its spec in the end.
    steps
        The steps that reshard it after it is reduced.
    scattered
        For each dimension, the axes over which a reduce-scatter splits it.
    reduced
        The axes over which an all-reduce adds it, or combines it as the rule says.
    bytes_sent
        The bytes that a device sends until it has the wanted spec.
    """

    spec: Spec
    steps: tuple[ReshardStep, ...]
    scattered: Spec
    reduced: tuple[int, ...]
    bytes_sent: float

    @property
    def is_combined(self) -> bool:
        """Whether devices have parts that are combined."""
        return any(self.scattered) or bool(self.reduced)


@dataclass(frozen=True)
class Partition:
    """The partition of a call.

    Attributes
    ----------
    rule
        The sharding rule of the whole call.
    mesh
        Sizes of the mesh axes.
    axes
        For each label, the axes that split it, major to minor.
    operands, results
        What becomes of each operand and result.
    sum
        What becomes of the sum that an epilogue reads, if devices have terms of it.
    """

    rule: ShardingRule
    mesh: MeshShape
    axes: Mapping[int | None, tuple[int, ...]]
    operands: tuple[ShardedOperand, ...]
    results: tuple[ShardedResult, ...]
    sum: ShardedResult | None

    @property
    def has_partial_results(self) -> bool:
        """Whether devices have parts of results, or of the sum, that are combined."""
        return any(result.is_combined for result in self.computed)

    @property
    def computed(self) -> tuple[ShardedResult, ...]:
        """The results, and the sum that an epilogue reads."""
        return self.results if self.sum is None else (*self.results, self.sum)

    def parts(self, axes: Sequence[int]) -> int:
        """Return the number of parts that some axes make."""
        return number_of_parts(axes, self.mesh)

    def operand_shape(self, operand: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of an operand of the local program."""
        spec = self.operands[operand].spec
        return tuple(math.ceil(n / self.parts(axes)) for n, axes in zip(shape, spec, strict=True))

    def described(self) -> str:
        """Return the partition in words."""
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
