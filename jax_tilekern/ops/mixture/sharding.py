"""A layer of experts on a mesh whose axes are all explicit: each device computes its part.

The types say how the arrays are split, so the layer is a ``shard_map``: a device sorts its own
tokens, multiplies those of its own experts and adds up their results, and one reduction over
devices makes the layer's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tilekern.interop import compat
from jax_tilekern.ops.explicit import by_automatic_axes, spec_of

Layer = Callable[[dict[str, Array], Array | None, np.dtype[Any]], Array]
Axes = tuple[str, ...]


def on_devices(
    layer: Layer,
    arrays: dict[str, Array],
    offset: Array | None,
    dims: Mapping[str, tuple[str, ...]],
    dtype: np.dtype[Any],
) -> Array:
    """Compute a layer; where types have shardings, each device computes its part.

    ``layer(arrays, offset, dtype)`` computes the part of the experts that the arrays have, the
    first of which is ``offset``. ``dims`` names each array's dimensions.
    """
    leaves = jax.tree.leaves(arrays)
    shardings = (compat.explicit_sharding(jax.typeof(x)) for x in leaves)
    mesh = next((x.mesh for x in shardings if x is not None), None)
    if mesh is None:
        return layer(arrays, offset, dtype)
    split = _Split.of(arrays, dims)
    result: Array
    if set(mesh.axis_types) == {AxisType.Explicit}:
        by_parts = functools.partial(_by_parts, layer, split, mesh, dims, dtype)
        result = jax.jit(by_parts)(arrays, offset)
    else:
        result = by_automatic_axes(
            lambda operands: layer(operands[0], operands[1], dtype),
            (arrays, offset),
            lambda: split.result,
        )
    return result


@dataclass(frozen=True)
class _Split:
    """The mesh axes that split tokens, experts, hidden values and the result's features."""

    tokens: Axes
    experts: Axes
    hidden: Axes
    features: Axes

    @classmethod
    def of(cls, arrays: Mapping[str, Array], dims: Mapping[str, tuple[str, ...]]) -> _Split:
        """Return the axes that the types name.

        Where an axis splits both tokens and matrices, devices gather what takes fewer bytes: the
        tokens, whose results are scattered, or the matrices.
        """
        axes: dict[str, Axes] = {}
        for name, x in arrays.items():
            for dim, entry in zip(dims[name], spec_of(x), strict=True):
                if entry is not None and (dim != "features" or name in ("w_down", "b_down")):
                    axes.setdefault(dim, (entry,) if isinstance(entry, str) else tuple(entry))
        tokens = axes.get("tokens", ())
        matrices = sum(x.nbytes for name, x in arrays.items() if name.startswith("w_"))
        taken = () if 2 * arrays["x"].nbytes <= matrices else tokens
        experts = _without(axes.get("experts", ()), taken)
        hidden = _without(axes.get("hidden", ()), (*taken, *experts))
        features = _without(axes.get("features", ()), (*tokens, *experts, *hidden))
        return cls(tokens, experts, hidden, features)

    @property
    def summed(self) -> Axes:
        """Axes along which devices have parts of sums."""
        return (*self.experts, *self.hidden)

    @property
    def scattered(self) -> Axes:
        """Axes of tokens along which every device has all tokens, and a part of their sums."""
        return tuple(axis for axis in self.tokens if axis in self.summed)

    @property
    def own_tokens(self) -> Axes:
        """Axes of tokens along which a device has its own tokens."""
        return _without(self.tokens, self.summed)

    @property
    def result(self) -> tuple[Any, ...]:
        return self.tokens or None, self.features or None

    def spec(self, name: str, dims: tuple[str, ...]) -> PartitionSpec:
        axes = {
            "tokens": self.own_tokens, "experts": self.experts, "hidden": self.hidden,
            "features": self.features if name.endswith("_down") else (),
        }  # fmt: skip
        return PartitionSpec(*(axes.get(dim, ()) or None for dim in dims))


def _without(axes: Axes, others: Axes) -> Axes:
    return tuple(axis for axis in axes if axis not in others)


def _by_parts(
    layer: Layer,
    split: _Split,
    mesh: Any,
    dims: Mapping[str, tuple[str, ...]],
    dtype: np.dtype[Any],
    arrays: dict[str, Array],
    offset: Array | None,
) -> Array:
    def resharded(x: Array, spec: PartitionSpec) -> Array:
        placed: Array = jax.sharding.reshard(x, NamedSharding(mesh, spec))
        return placed

    def part(arrays: dict[str, Array], first: Array) -> Array:
        if split.experts:
            own = arrays["w_up"].shape[0]
            first = first + lax.axis_index(split.experts).astype(first.dtype) * own
        if split.hidden and "b_down" in arrays:
            # The sum over devices has each bias once.
            is_first = lax.axis_index(split.hidden) == 0
            arrays = {**arrays, "b_down": jnp.where(is_first, arrays["b_down"], 0)}
        # Floats are summed in float32 at least.
        wide = jnp.promote_types(dtype, np.float32) if split.summed else dtype
        result = layer(arrays, first, wide)
        if added := _without(split.summed, split.scattered):
            result = lax.psum(result, added)
        if split.scattered:
            result = lax.psum_scatter(result, split.scattered, scatter_dimension=0, tiled=True)
        return result.astype(dtype)

    specs = {name: split.spec(name, dims[name]) for name in arrays}
    first = jnp.zeros((), np.int32) if offset is None else offset
    rows = (*split.own_tokens, *split.scattered)
    result = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=PartitionSpec(rows or None, split.features or None),
    )(
        {name: resharded(x, specs[name]) for name, x in arrays.items()},
        resharded(first, PartitionSpec()),
    )
    return resharded(result, PartitionSpec(*split.result))
