"""The steps that reshard an array, and the bytes that they send."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jax_tilekern.partitioning.mesh import MeshShape, Spec, axes_of, number_of_parts

# A permute or an all-to-all counts more than an all-gather, which XLA shares among the calls that
# read an array: the passes of a gradient send a gather twice and an all-to-all three times.
_EXCHANGE_WEIGHT = 1.5


class ReshardStep(NamedTuple):
    """One step of a reshard."""

    # ``"slice"`` splits the target. ``"all-to-all"`` splits the target instead of the source.
    # ``"all-gather"`` joins the parts of the source. ``"permute"`` is a collective-permute that
    # puts the axes of a dimension, its source and target, in another order.
    kind: Literal["slice", "all-to-all", "all-gather", "permute"]
    # The minor ones of the source before the step and of the target after it.
    axes: tuple[int, ...]
    # Dimensions of the array.
    source: int | None
    target: int | None

    def applied(self, spec: Spec) -> Spec:
        found = list(spec)
        if self.source is not None:
            found[self.source] = found[self.source][: -len(self.axes)]
        if self.target is not None:
            found[self.target] = (*found[self.target], *self.axes)
        return tuple(found)


def reshard_steps(have: Spec, want: Spec) -> list[ReshardStep]:
    """Return the steps from one spec to another; steps that make an array smaller come first."""
    steps: list[ReshardStep] = []
    while have != want:
        steps.append(_next_step(have, want))
        have = steps[-1].applied(have)
    return steps


def _next_step(have: Spec, want: Spec) -> ReshardStep:
    used, kept = axes_of(have), axes_of(want)
    missing = [
        tuple(axis for axis in wanted if axis not in now)
        for now, wanted in zip(have, want, strict=True)
    ]
    for dim, axes in enumerate(missing):
        if axes and axes[0] not in used:
            return ReshardStep("slice", axes[:1], None, dim)
    for dim, now in enumerate(have):
        count = len(list(itertools.takewhile(lambda axis: axis not in kept, reversed(now))))
        if count:
            return ReshardStep("all-gather", now[-count:], dim, None)
    exchanges = [
        (
            now[first:] != axes[: len(now) - first],
            ReshardStep("all-to-all", now[first:], source, target),
        )
        for target, axes in enumerate(missing)
        for source, now in enumerate(have)
        for first in range(len(now))
        if set(now[first:]) <= set(axes)
    ]
    if exchanges:  # One that leaves the axes in the wanted order is first.
        return min(exchanges, key=lambda found: found[0])[1]
    for dim, (now, wanted) in enumerate(zip(have, want, strict=True)):
        order = tuple(sorted(now, key=lambda a: wanted.index(a) if a in wanted else len(wanted)))
        if order != now:
            return ReshardStep("permute", order, dim, dim)
    raise AssertionError((have, want))


def specs_of(spec: Spec, steps: Sequence[ReshardStep]) -> list[Spec]:
    """Return the specs of an array before and after each step."""
    return list(itertools.accumulate(steps, lambda now, step: step.applied(now), initial=spec))


def bytes_sent(steps: Sequence[ReshardStep], local: float, mesh: MeshShape) -> float:
    """Return the bytes that a device sends to reshard an array of which it has ``local`` bytes."""
    total = 0.0
    for step in steps:
        parts = number_of_parts(step.axes, mesh)
        if step.kind == "slice":
            local /= parts
        elif step.kind == "all-gather":
            total += local * (parts - 1)
            local *= parts
        else:
            total += _EXCHANGE_WEIGHT * local * (1 if step.kind == "permute" else 1 - 1 / parts)
    return total
