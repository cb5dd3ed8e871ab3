"""How arrays share labels on a mesh with explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jax_tilekern.interop import compat
from jax_tilekern.partitioning.rule import Dims


def label_partitions(labels: Sequence[Dims], avals: Sequence[Any]) -> dict[int | None, Any]:
    """Return the explicit axes that split each label, if the arrays agree on them."""
    found: dict[int | None, Any] = {}
    for dims, aval in zip(labels, avals, strict=True):
        sharding = compat.explicit_sharding(aval)
        partitions = () if sharding is None else sharding.spec.partitions
        for label, axes in zip(dims, partitions, strict=False):
            if axes is None:
                continue
            types = ", ".join(x.str_short(short_dtypes=True) for x in avals)
            if label is None:
                raise compat.ShardingTypeError(
                    f"axis {axes!r} splits a dimension that must be whole, of {types}; use "
                    "jax.sharding.reshard"
                )
            if found.setdefault(label, axes) != axes:
                raise compat.ShardingTypeError(
                    f"axes {found[label]!r} and {axes!r} split the same dimension of {types}; use "
                    "jax.sharding.reshard on one of them"
                )
    return found


def split_alike(labels: Sequence[Dims], arrays: Sequence[Array]) -> list[Array]:
    """Return arrays that all split a label over the explicit axes over which any does."""
    avals = [jax.typeof(x) for x in arrays]
    found = label_partitions(labels, avals)
    if not found:
        return list(arrays)
    meshes = (aval.sharding.mesh for aval in avals)
    mesh = next(mesh for mesh in meshes if not mesh.empty)

    def split(x: Array, dims: Dims, aval: Any) -> Array:
        partitions = tuple(aval.sharding.spec.partitions)
        wanted = tuple(map(found.get, dims))
        if partitions == wanted:
            return x
        resharded: Array = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*wanted)))
        return resharded

    return [split(*each) for each in zip(arrays, labels, avals, strict=True)]
