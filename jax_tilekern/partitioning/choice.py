"""The choice of a partition: which label each mesh axis splits.

An axis splits the label along which all operands are split alike, as in XLA's own operations and as
the user's shardings request, unless the rule lets devices gather them. Otherwise it splits the
label with which a device sends the fewest bytes, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.partitioning.mesh import MeshShape, Spec, axes_of, number_of_parts
from jax_tilekern.partitioning.partition import Partition, ShardedOperand, ShardedResult
from jax_tilekern.partitioning.reshard import bytes_sent, reshard_steps, specs_of
from jax_tilekern.partitioning.rule import Dims, ShardingRule

# The work of a device, in operations or in bytes of its own memory, while a link sends one byte. An
# H100 or H200 computes 800 TFLOP/s in 16 bits and moves 3 to 4 TB/s; NVLink sends 300 to 400 GB/s.
# Bytes that are sent are read and written in memory as well, so that memory counts a fifth of that.
_FLOPS_PER_LINK_BYTE = 2000
_MEMORY_BYTES_PER_LINK_BYTE = 50
# The axes that split each label. A dimension without a label is whole.
_Axes = Mapping[int | None, tuple[int, ...]]
# Axes are chosen one after the other. In the first round an axis does not know the choices of the
# later axes.
_ROUNDS = 2


def choose_partition(
    rule: ShardingRule,
    mesh: MeshShape,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    operand_bytes: Sequence[int],
    result_bytes: Sequence[int],
    readers: Sequence[int],
    sent_meanwhile: Callable[[Partition], float] = lambda _: 0.0,
) -> Partition:
    """Choose the partition of a call.

    The operands have present specs, the results wanted ones, and sizes are those of whole arrays in
    bytes. ``readers`` says how many calls of this kind read each operand: XLA reshards it once for
    all of them, so each is charged with its share. ``sent_meanwhile(partition)`` returns the bytes
    that a device sends while it computes.
    """
    call = _Call(
        rule,
        mesh,
        [_Sharded(*x) for x in zip(rule.operands, operands, operand_bytes, strict=True)],
        [_Sharded(*x) for x in zip(rule.results, results, result_bytes, strict=True)],
        readers,
        sent_meanwhile,
    )
    options = [call.options(axis) for axis in range(len(mesh))]
    labels = [own[0] for own in options]
    for _ in range(_ROUNDS):
        for axis, own in enumerate(options):
            choices = [[*labels[:axis], label, *labels[axis + 1 :]] for label in own]
            labels = min(choices, key=lambda x: call.cost(call.partition(x)))
    return call.partition(labels)


class _Sharded(NamedTuple):
    """An operand and its present spec, or a result and its wanted one."""

    dims: Dims
    spec: Spec
    nbytes: int

    def axes(self, label: int) -> tuple[int, ...]:
        return self.spec[self.dims.index(label)]

    def label(self, axis: int) -> int | None:
        return next((x for x, own in zip(self.dims, self.spec, strict=True) if axis in own), None)


@dataclass(frozen=True)
class _Call:
    rule: ShardingRule
    mesh: MeshShape
    operands: Sequence[_Sharded]
    results: Sequence[_Sharded]
    readers: Sequence[int]
    sent_meanwhile: Callable[[Partition], float]

    @property
    def arrays(self) -> tuple[_Sharded, ...]:
        return (*self.operands, *self.results)

    def options(self, axis: int) -> list[int | None]:
        """Return the labels that an axis may split, or the one that it splits alike already."""
        labels = dict.fromkeys([*(x.label(axis) for x in self.arrays), *self.rule.shared])
        splittable = [label for label in labels if label in self.rule.splittable]
        alike = [label for label in splittable if label is not None and self._alike(label, axis)]
        if alike:
            return [alike[0], *([None] if alike[0] in self.rule.gatherable else [])]
        return [*splittable, None]

    def _alike(self, label: int, axis: int) -> bool:
        """Return whether an axis splits all operands along a label, and in the same way."""
        is_reduction = label in self.rule.reductions
        # An epilogue after a sum reads its operands where the sum is.
        read = self.operands[: self.rule.epilogue_from if is_reduction else None]
        split = [x.axes(label) for x in read if label in x.dims]
        others = [x.label(axis) for x in read if label not in x.dims]
        return (
            len(set(split)) == 1
            and axis in split[0]
            and all(other is None for other in others)
            and (is_reduction or len(split) > 1)
        )

    def cost(self, partition: Partition) -> float:
        """Return the bytes that a device sends, including its work as bytes sent meanwhile.

        The work counts so that devices do not repeat it.
        """
        flops = self.rule.flops / _FLOPS_PER_LINK_BYTE
        memory = sum(x.nbytes for x in self.arrays) / _MEMORY_BYTES_PER_LINK_BYTE
        work = max(flops, memory) / partition.parts(axes_of(tuple(partition.axes.values())))
        sent = sum(
            x.bytes_sent / count for x, count in zip(partition.operands, self.readers, strict=True)
        )
        sent += sum(x.bytes_sent for x in partition.computed)
        return work + sent - min(work, self.sent_meanwhile(partition))

    def partition(self, labels: Sequence[int | None]) -> Partition:
        """Return the partition in which each axis splits a label, if it can."""
        rule = self.rule
        axes: dict[int | None, tuple[int, ...]] = dict.fromkeys(rule.sizes, ())
        for axis, label in enumerate(labels):
            if label is not None and self._can_split(label, (*axes[label], axis)):
                axes[label] = self._in_order(label, (*axes[label], axis))
        placed, total = axes, None
        if rule.epilogue_from is not None and any(axes[label] for label in rule.reductions):
            # One sum is completed. The epilogue reads its operands, and every result lies, there.
            dims, first = rule.epilogue_sum, self.results[0]
            wanted = (*first.spec, *(axes[label] for label in dims[len(first.dims) :]))
            whole = _Sharded(dims, wanted, rule.sum_bytes(first.nbytes))
            total = self._result(whole, axes, is_sum=True)
            placed = dict(zip(dims, total.spec, strict=True))
        combined_by = rule.combined_by or ("sum",) * len(self.results)
        return Partition(
            rule,
            self.mesh,
            axes,
            tuple(
                self._operand(x, placed if i in rule.epilogue_operands else axes)
                for i, x in enumerate(self.operands)
            ),
            tuple(
                self._result(x, placed, kind == "sum")
                for x, kind in zip(self.results, combined_by, strict=True)
            ),
            total,
        )

    def _can_split(self, label: int, axes: tuple[int, ...]) -> bool:
        rule = self.rule
        if self._is_even(label, axes):
            return True
        if label in rule.blocked:
            return False
        # The last part is padded. Padded parts are never moved from one dimension to another.
        arrays = self.operands if label in rule.reductions else self.arrays
        stays = all(x.label(axis) in (label, None) for x in arrays for axis in axes)
        is_harmless = label not in rule.reduced and (label not in rule.summed or rule.zero_padding)
        return stays and is_harmless

    def _is_even(self, label: int | None, axes: Sequence[int]) -> bool:
        size = 1 if label is None else self.rule.sizes[label]
        return size % number_of_parts(axes, self.mesh) == 0

    def _in_order(self, label: int, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the axes of a label in the order in which they split the largest array."""
        arrays = sorted((x for x in self.arrays if label in x.dims), key=lambda x: -x.nbytes)
        order = [axis for x in arrays for axis in x.axes(label) if axis in axes]
        return tuple(dict.fromkeys([*order, *axes]))

    def _operand(self, x: _Sharded, axes: _Axes) -> ShardedOperand:
        want = tuple(axes.get(label, ()) for label in x.dims)
        steps = reshard_steps(x.spec, want)
        specs = specs_of(x.spec, steps)
        kinds = [step.kind for step in steps]
        # XLA reshards an operand once for all calls that read it. It has one all-to-all at most,
        # and none where devices have copies before and after. It gathers what it slices later.
        has_copies = "slice" not in kinds and len(axes_of(want)) < len(self.mesh)
        if (
            "permute" in kinds
            or not all(all(map(self._is_even, x.dims, spec)) for spec in specs)
            or (kinds.count("all-to-all") == 1 and "all-gather" not in kinds and not has_copies)
        ):
            by_xla = len(steps)
        else:
            same = itertools.takewhile(lambda kind: kind == kinds[0] != "all-to-all", kinds)
            by_xla = len(list(same))
        sent = bytes_sent(steps, x.nbytes / self._parts(x.spec), self.mesh)
        return ShardedOperand(specs[by_xla], tuple(steps), tuple(steps[by_xla:]), sent)

    def _result(self, x: _Sharded, axes: _Axes, is_sum: bool) -> ShardedResult:
        """Return what becomes of an array of which devices have parts."""
        over = [axis for label, own in axes.items() if label not in x.dims for axis in own]
        spec = [axes.get(label, ()) for label in x.dims]
        scattered: list[tuple[int, ...]] = [() for _ in x.dims]
        local, sent = x.nbytes / self._parts(spec), 0.0
        for dim, wanted in enumerate(x.spec):
            for axis in wanted if is_sum else ():
                split = (*spec[dim], axis)
                if axis in over and self._is_even(x.dims[dim], split):
                    spec[dim], scattered[dim] = split, (*scattered[dim], axis)
                    sent += local * (1 - 1 / self.mesh[axis])
                    local /= self.mesh[axis]
        reduced = tuple(axis for axis in over if axis not in axes_of(scattered))
        sent += 2 * local * (1 - 1 / number_of_parts(reduced, self.mesh))
        steps = reshard_steps(tuple(spec), x.spec)
        sent += bytes_sent(steps, local, self.mesh)
        # XLA takes what follows the last all-to-all, and everything if it pads or permutes before.
        # Where it would have to slice and to gather, it gathers the whole array first.
        last = list(itertools.takewhile(lambda x: x.kind != "all-to-all", reversed(steps)))
        if len({step.kind for step in last}) == 1:
            del steps[-len(last) :]
        specs = specs_of(tuple(spec), steps)
        if any(step.kind == "permute" for step in steps) or not all(
            all(map(self._is_even, x.dims, now)) for now in specs
        ):
            steps = []
        return ShardedResult(specs[len(steps)], tuple(steps), tuple(scattered), reduced, sent)

    def _parts(self, spec: Sequence[Sequence[int]]) -> int:
        return number_of_parts(axes_of(spec), self.mesh)
