"""The program that each device runs for its part of a call.

It takes the operands in XLA's sharding, reshards them where XLA would send more, binds the call's
own primitive on the local operands, and combines partial results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.partitioning.partition import Partition, ShardedResult
from jax_tilekern.partitioning.reshard import ReshardStep

# A sum is two collectives where a device sends so many bytes less. NVLink takes 30 us for these
# (docs/tuning-log.md); that a second collective costs less is an estimate.
_LEAST_BYTES_SAVED = 8 << 20


class FunctionOfSum(NamedTuple):
    """A call that computes a sum, and then an elementwise function of it."""

    sum: Callable[..., Any]  # sum(*operands) returns a device's term of the sum.
    dtype: np.dtype[Any]  # The sum is rounded to it after the devices' terms are added.
    # ``epilogue(sum, *operands)`` returns the results. The operands of the epilogue are the parts
    # that belong to the part of the sum.
    epilogue: Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Shard:
    """One device's part of a call.

    Operations whose operands hold indices along a label, such as the bounds of groups, query the
    start of their part.
    """

    partition: Partition
    # For each label, the mesh axes that split it, major to minor: those of the call, or of the sum
    # that an epilogue reads.
    axes: Mapping[int | None, tuple[int, ...]]

    def is_split(self, label: int) -> bool:
        return bool(self.axes.get(label))

    def size(self, label: int) -> int:
        return math.ceil(self.partition.rule.sizes[label] / self.parts(label))

    def axis_names(self, label: int) -> tuple[str, ...]:
        return axis_names(self.axes.get(label, ()))

    def parts(self, label: int) -> int:
        return self.partition.parts(self.axes.get(label, ()))

    def start(self, label: int) -> Array:
        """Return the first index of this device's part, an ``int32``."""
        index: Array = lax.axis_index(self.axis_names(label))
        return index.astype(np.int32) * self.size(label)


def axis_names(axes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of mesh axes in the local program."""
    return tuple(f"axis{axis}" for axis in axes)


def local_program(
    partition: Partition,
    dtypes: Sequence[np.dtype[Any]],
    function: Callable[..., Sequence[Array]] | FunctionOfSum,
    localised: Callable[..., Sequence[Array]],
) -> Callable[..., list[Array]]:
    """Return the function from one device's operands to its results, of types ``dtypes``.

    ``function`` computes the call on local shapes, in two steps if devices have terms of a sum that
    an epilogue reads. ``localised(shard, *operands)`` rewrites operands that hold indices along a
    label; the epilogue's operands are those of the part of the sum.
    """

    def program(*operands: Array) -> list[Array]:
        local = _local_operands(partition, operands)
        own = localised(Shard(partition, partition.axes), *local)
        if isinstance(function, FunctionOfSum):
            assert partition.sum is not None
            term = function.sum(*own[: partition.rule.epilogue_from])
            total = _completed(partition, partition.sum, term, function.dtype)
            labels = partition.rule.epilogue_sum
            sum_shard = Shard(partition, dict(zip(labels, partition.sum.spec, strict=True)))
            results = function.epilogue(total, *localised(sum_shard, *local))
        else:
            results = function(*own)
        combined_by = partition.rule.combined_by or ("sum",) * len(results)
        completed = zip(partition.results, results, dtypes, combined_by, strict=True)
        return [_completed(partition, *x) for x in completed]

    return program


def _local_operands(partition: Partition, operands: Sequence[Array]) -> list[Array]:
    return [
        _padded_with_zeros(partition, i, _resharded(partition, x, operand.in_program))
        for i, (x, operand) in enumerate(zip(operands, partition.operands, strict=True))
    ]


def _resharded(partition: Partition, x: Array, steps: Sequence[ReshardStep]) -> Array:
    for step in steps:
        names = axis_names(step.axes)
        if step.kind == "slice":
            assert step.target is not None
            size = x.shape[step.target] // partition.parts(step.axes)
            start = lax.axis_index(names) * size
            x = lax.dynamic_slice_in_dim(x, start, size, step.target)
        elif step.kind == "all-gather":
            x = lax.all_gather(x, names, axis=step.source, tiled=True)
        else:
            x = lax.all_to_all(x, names, step.target, step.source, tiled=True)
    return x


def _padded_with_zeros(partition: Partition, operand: int, x: Array) -> Array:
    """Clear the padding of a reduction whose last part is not full."""
    for dim, label in enumerate(partition.rule.operands[operand]):
        if label is None or label not in partition.rule.summed:
            continue
        shard = Shard(partition, partition.axes)
        size, parts = partition.rule.sizes[label], shard.parts(label)
        if size % parts == 0:
            continue
        index = lax.broadcasted_iota(np.int32, x.shape, dim)
        x = jnp.where(index < size - shard.start(label), x, jnp.zeros((), x.dtype))
    return x


def _completed(
    partition: Partition,
    result: ShardedResult,
    x: Array,
    dtype: np.dtype[Any],
    combined_by: str = "sum",
) -> Array:
    """Combine the parts of an array over devices, and reshard it."""
    for dim, axes in enumerate(result.scattered):
        if axes:
            x = lax.psum_scatter(x, axis_names(axes), scatter_dimension=dim, tiled=True)
    if result.reduced:
        names, parts = axis_names(result.reduced), partition.parts(result.reduced)
        saved = x.size * (x.dtype.itemsize - dtype.itemsize) * (1 - 1 / parts)
        if combined_by == "sum" and x.size % parts == 0 and saved >= _LEAST_BYTES_SAVED:
            x = _rounded_sum(x, names, dtype)
        else:
            x = _COMBINE[combined_by](x, names)
    return _resharded(partition, x.astype(dtype), result.steps)


def _rounded_sum(x: Array, names: tuple[str, ...], dtype: np.dtype[Any]) -> Array:
    """Add up terms over devices; each device rounds its part of the sum before all gather it."""
    part = lax.psum_scatter(x.ravel(), names, tiled=True).astype(dtype)
    total: Array = lax.all_gather(part, names, tiled=True)
    return total.reshape(x.shape)


def _max(x: Array, names: tuple[str, ...]) -> Array:
    """Return the maximum over devices, NaN if one of them has NaN."""
    largest: Array
    if not jnp.issubdtype(x.dtype, jnp.floating):
        largest = lax.pmax(x, names)
        return largest
    # An all-reduce of floats may ignore NaN. Integers in the order of floats have it last.
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")

    def reordered(bits: Array) -> Array:
        return jnp.where(bits < 0, bits ^ np.iinfo(integers).max, bits)

    positive = jnp.where(jnp.isnan(x), jnp.array(np.nan, x.dtype), x)
    largest = lax.pmax(reordered(lax.bitcast_convert_type(positive, integers)), names)
    return lax.bitcast_convert_type(reordered(largest), x.dtype)


def _min(x: Array, names: tuple[str, ...]) -> Array:
    """Return the minimum over devices, NaN if one of them has NaN."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return -_max(-x, names)
    # The complement reverses the order of every type of integers.
    return ~_max(~x, names)


def _logsumexp(x: Array, names: tuple[str, ...]) -> Array:
    largest = lax.pmax(x, names)
    # Infinities do not cancel.
    origin = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(lax.psum(jnp.exp(x - origin), names)) + origin


_COMBINE: Mapping[str, Callable[[Array, tuple[str, ...]], Array]] = {
    "sum": lax.psum,
    "max": _max,
    "min": _min,
    "logsumexp": _logsumexp,
}
