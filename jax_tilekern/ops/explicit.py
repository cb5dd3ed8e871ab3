"""Segments on meshes with explicit axes: computed with automatic ones, results as JAX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jax_tilekern.interop import compat

Sharding = NamedSharding | PartitionSpec


def resharded(x: Array, out_sharding: Sharding | None) -> Array:
    """Return an array with the sharding that was asked for, if one was."""
    if out_sharding is None:
        return x
    placed: Array = jax.sharding.reshard(x, out_sharding)
    return placed


def spec_of(x: Any) -> tuple[Any, ...]:
    """Return how explicit axes split the dimensions of an array."""
    sharding = compat.explicit_sharding(jax.typeof(x))
    spec = () if sharding is None else tuple(sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def by_automatic_axes(
    function: Callable[..., Any], operands: Any, out_specs: Callable[[], Any]
) -> Any:
    """Call a function of one tree of operands, whose types have no shardings inside it.

    ``out_specs()`` gives how explicit axes split the dimensions of the result, or of a list of
    results.
    """
    leaves = jax.tree.leaves(operands)
    shardings = (compat.explicit_sharding(jax.typeof(x)) for x in leaves)
    mesh = next((x.mesh for x in shardings if x is not None), None)
    # JAX has no derivatives of auto_axes inside a manual axis, so it is left out where it can be.
    is_whole = mesh is not None and mesh.manual_axes and not any(map(any, map(spec_of, leaves)))
    if mesh is None or is_whole:
        return function(operands)
    specs = out_specs()
    several = isinstance(specs, list)
    out = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (specs if several else [specs])]
    return compat.with_automatic_axes(function, out if several else out[0])(operands)
