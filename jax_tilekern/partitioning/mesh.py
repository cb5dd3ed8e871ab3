"""XLA's shardings in terms of the axes of one mesh.

An ``HloSharding`` names no mesh axes. So device numbers are written as the coordinates of a mesh
whose axes are the prime factors of the number of devices, and a sharding states which axes split
each dimension of an array. Axes that split every array together are one axis then, as an axis of
the user's mesh is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_tilekern.partitioning import xla

# Sizes of the mesh axes, in the row-major order of device numbers.
MeshShape = tuple[int, ...]
# The axes that split each dimension of an array, major to minor: a PartitionSpec with numbers of
# axes in place of their names.
Spec = tuple[tuple[int, ...], ...]


def common_mesh(
    shardings: Sequence[Any], ranks: Sequence[int], devices: int = 1
) -> tuple[MeshShape, list[Spec]]:
    """Return a mesh whose axes split the dimensions of every array, and each array's spec.

    A sharding that no common mesh expresses counts as replicated, so that XLA gathers that array.
    If all arrays are replicated, their shardings do not have the number of ``devices``.
    """
    devices = max((s.num_devices() for s in shardings if not s.is_replicated()), default=devices)
    mesh: MeshShape = ()
    found: list[Spec | None] = []
    for mesh in _factored(devices):
        found = [spec_of(s, rank, mesh) for s, rank in zip(shardings, ranks, strict=True)]
        if None not in found:
            break
    whole = [((),) * rank for rank in ranks]
    return _merged(mesh, [x if y is None else y for x, y in zip(whole, found, strict=True)])


def spec_of(sharding: Any, rank: int, mesh: MeshShape) -> Spec | None:
    """Return the axes that split each dimension, or ``None`` if the mesh has no such axes."""
    others = set(sharding.subgroup_types()) - {xla.REPLICATED}
    if sharding.is_manual() or sharding.is_unreduced() or others:
        raise NotImplementedError(f"jax_tilekern does not partition {sharding}")
    if sharding.is_replicated() or sharding.is_maximal() or sharding.is_unknown():
        return ((),) * rank
    tiles = sharding.tile_assignment_dimensions()
    devices = np.array(sharding.tile_assignment_devices()).reshape(tiles)
    tile_of = np.empty((math.prod(mesh), rank), np.int64)
    for index in np.ndindex(*tiles):
        tile_of[devices[index]] = index[:rank]
    # The next device along an axis shows which dimension the axis splits, and its stride there.
    strides: list[dict[int, int]] = [{} for _ in range(rank)]
    for axis in range(len(mesh)):
        step = tile_of[math.prod(mesh[axis + 1 :])]
        for dim in np.flatnonzero(step).tolist():
            strides[dim][axis] = step[dim]
    spec = tuple(tuple(sorted(own, key=own.__getitem__, reverse=True)) for own in strides)
    coordinates = np.indices(mesh).reshape(len(mesh), -1)
    for dim, axes in enumerate(spec):
        tile = np.zeros(math.prod(mesh), np.int64)
        for axis in axes:
            tile = tile * mesh[axis] + coordinates[axis]
        if (tile != tile_of[:, dim]).any():
            return None
    return spec


def hlo_sharding(spec: Spec, mesh: MeshShape) -> Any:
    used = axes_of(spec)
    if not used:
        return xla.replicated()
    rest = [axis for axis in range(len(mesh)) if axis not in used]
    tiles = [number_of_parts(axes, mesh) for axes in spec]
    return xla.tiled(tiles, number_of_parts(rest, mesh), mesh, [*used, *rest])


def local_shape(shape: Sequence[int], spec: Spec, mesh: MeshShape) -> tuple[int, ...]:
    """Return the shape of a device's part of an array."""
    return tuple(
        math.ceil(n / number_of_parts(axes, mesh)) for n, axes in zip(shape, spec, strict=True)
    )


def axes_of(spec: Iterable[Sequence[int]]) -> list[int]:
    return [axis for axes in spec for axis in axes]


def number_of_parts(axes: Sequence[int], mesh: MeshShape) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _merged(mesh: MeshShape, specs: Sequence[Spec]) -> tuple[MeshShape, list[Spec]]:
    """Return the mesh and the specs, neighbours that split every array together as one axis."""
    split = [axes for spec in specs for axes in spec]
    merged: list[list[int]] = []
    for axis in range(len(mesh)):
        pair = axis - 1, axis
        if axis and all(pair in itertools.pairwise(x) for x in split if set(pair) & set(x)):
            merged[-1].append(axis)
        else:
            merged.append([axis])
    number = {axes[0]: i for i, axes in enumerate(merged)}
    sizes = tuple(number_of_parts(axes, mesh) for axes in merged)
    return sizes, [
        tuple(tuple(number[a] for a in axes if a in number) for axes in spec) for spec in specs
    ]


def _factored(number: int) -> Iterator[MeshShape]:
    """Yield the prime factors of a number, in each of their orders."""
    if number == 1:
        yield ()
    divisors = [n for n in range(2, number + 1) if number % n == 0]
    for prime in (n for n in divisors if all(n % x for x in range(2, n))):
        for rest in _factored(number // prime):
            yield (prime, *rest)
