"""The sharding rule of a ``cuda_kernel``, and its meaning for one call."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from jax_tilekern.interop import compat
from jax_tilekern.partitioning.explicit import label_partitions
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.cuda_kernel import Array, Batch

_NAME = re.compile(r"[A-Za-z]\w*$")
_WHOLE = "_"


class NamedDims(NamedTuple):
    """Names of the dimensions of each array, ``"_"`` for one that every device needs whole."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]


def parsed(kernel: str, text: Any) -> NamedDims:
    """Read a rule such as ``"rows k, k columns -> rows columns"``, or raise an error."""
    if not isinstance(text, str):
        raise TypeError(f"kernel {kernel}: sharding_rule is {text!r}, not a string")
    sides = [tuple(tuple(array.split()) for array in side.split(",")) for side in text.split("->")]
    names = [name for side in sides for array in side for name in array]
    wrong = [name for name in names if name != _WHOLE and not _NAME.match(name)]
    repeated = [
        array
        for side in sides
        for array in side
        if len({*array} - {_WHOLE}) < len(array) - array.count(_WHOLE)
    ]
    if len(sides) != 2 or wrong or repeated:
        raise ValueError(
            f"kernel {kernel}: sharding_rule {text!r} is not of the form 'rows k, k columns -> "
            "rows columns': a name for each dimension of each input and output, each once in an "
            f"array, and {_WHOLE} for a dimension that every device needs whole"
        )
    return NamedDims(*sides)


def sharding_rule(
    kernel: str,
    text: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    batches: Sequence[Batch] = (),
) -> ShardingRule:
    """Return the sharding rule of a call, of the user's text; raise an error if it does not fit."""
    named = parsed(kernel, text)
    shapes = " -> ".join(
        ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in arrays)
        for arrays in (inputs, outputs)
    )

    def refusal(why: str) -> ValueError:
        return ValueError(f"kernel {kernel}: sharding_rule {text!r} does not fit {shapes}: {why}")

    sizes: dict[str, int] = {}
    for what, dims, arrays in (
        ("input", named.inputs, inputs),
        ("output", named.outputs, outputs),
    ):
        if len(dims) != len(arrays):
            raise refusal(f"it has {len(dims)} {what}s")
        for i, (names, array) in enumerate(zip(dims, arrays, strict=True)):
            if len(names) != len(array.shape):
                raise refusal(f"it has {len(names)} dimensions for {what} {i}")
            for name, size in zip(names, array.shape, strict=True):
                if name != _WHOLE and sizes.setdefault(name, size) != size:
                    raise refusal(f"{name} has the sizes {sizes[name]} and {size}")
    read = {name for names in named.inputs for name in names}
    made = {name for names in named.outputs for name in names}
    if missing := made - read - {_WHOLE}:
        raise refusal(f"no input has {', '.join(sorted(missing))}; write {_WHOLE}")

    numbers = {name: i for i, name in enumerate(sizes)}
    batch_labels = [len(numbers) + i for i in range(len(batches))]

    def labels(names: Sequence[str], mapped: Sequence[bool]) -> tuple[int | None, ...]:
        leading = (x for x, has in zip(batch_labels, mapped, strict=True) if has)
        return (*leading, *(numbers.get(name) for name in names))

    label_sizes: Mapping[int, int] = {numbers[name]: size for name, size in sizes.items()} | {
        label: batch.size for label, batch in zip(batch_labels, batches, strict=True)
    }
    return ShardingRule(
        tuple(
            labels(names, [batch.mapped[i] for batch in batches])
            for i, names in enumerate(named.inputs)
        ),
        tuple(labels(names, [True] * len(batches)) for names in named.outputs),
        label_sizes,
        flops=math.prod(label_sizes.values()),
        zero_padding=False,
        names={i: name for name, i in numbers.items()}
        | {label: f"batch {i}" for i, label in enumerate(batch_labels)},
    )


def explicit_shardings(
    kernel: str, text: str, rule: ShardingRule, avals: Sequence[Any]
) -> list[NamedSharding] | None:
    """Return the outputs' shardings on a mesh with explicit axes, ``None`` on others."""
    shardings = filter(None, map(compat.explicit_sharding, avals))
    mesh = next((sharding.mesh for sharding in shardings), None)
    if mesh is None:
        return None
    try:
        found = label_partitions(rule.operands, avals)
    except compat.ShardingTypeError:
        found = None
    if found is None or not found.keys() <= rule.splittable:
        types = ", ".join(aval.str_short(short_dtypes=True) for aval in avals)
        raise compat.ShardingTypeError(
            f"kernel {kernel}: the shardings of its inputs, {types}, do not go together by its "
            f"sharding_rule {text!r}; use jax.sharding.reshard on an input"
        )
    specs = [PartitionSpec(*map(found.get, dims)) for dims in rule.results]
    return [NamedSharding(mesh, spec) for spec in specs]
