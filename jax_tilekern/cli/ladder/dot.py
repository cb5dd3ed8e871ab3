"""The ladder of the dot product, from sums added on the host to the library's kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from jax_tilekern.cli.ladder.rung import Ladder, Problem, Rung, Sizes, blocks, kernel

# Enough blocks of 256 threads to fill any GPU several times.
_THREADS, _MOST_BLOCKS = 256, 1024


def _blocks(x: Any) -> int:
    return min(_MOST_BLOCKS, blocks(x.size, _THREADS))


def _partial_sums(source: str) -> Any:
    """Return the first stage: a sum for each block."""
    return kernel(
        source,
        out=lambda x, y: jax.ShapeDtypeStruct((_blocks(x),), x.dtype),
        grid=lambda x, y: _blocks(x),
        block=_THREADS,
        scalars=lambda x, y: (np.int64(x.size),),
        alignment=16,
    )


def _add_on_host(partial: Array) -> np.floating[Any]:
    return np.asarray(partial).sum()  # type: ignore[no-any-return]


def _with_zero(x: Array, y: Array) -> tuple[Array, ...]:
    return x, y, jnp.zeros((), x.dtype)


_ATOMIC_ADD = kernel(
    "dot/03_atomic_add.cu",
    out=lambda x, y, zero: zero,
    grid=lambda x, y, zero: _blocks(x),
    block=_THREADS,
    scalars=lambda x, y, zero: (np.int64(x.size),),
    aliases={2: 0},
)

_ADD_PARTIAL = kernel(
    "dot/04_two_stages.cu",
    out=lambda partial: jax.ShapeDtypeStruct((), partial.dtype),
    grid=1,
    block=_THREADS,
    scalars=lambda partial: (np.int32(partial.size),),
)

_SHUFFLES = _partial_sums("dot/02_warp_shuffles.cu")

_RUNGS = (
    Rung(
        "tree in shared memory, rest on the host",
        (_partial_sums("dot/01_shared_tree.cu"),),
        "dot/01_shared_tree.cu",
        on_host=_add_on_host,
    ),
    Rung(
        "warp shuffles, rest on the host",
        (_SHUFFLES,),
        "dot/02_warp_shuffles.cu",
        on_host=_add_on_host,
    ),
    Rung("atomicAdd", (_with_zero, _ATOMIC_ADD), "dot/03_atomic_add.cu"),
    Rung("two stages", (_SHUFFLES, _ADD_PARTIAL), "dot/04_two_stages.cu"),
    Rung(
        "two stages, float4",
        (_partial_sums("dot/05_vectorised.cu"), _ADD_PARTIAL),
        "dot/05_vectorised.cu",
    ),
    Rung("jax_tilekern.vdot", (jax_tilekern.vdot,)),
)


def _problems(sizes: Sizes) -> tuple[Problem, ...]:
    (size,) = sizes
    vector = jax.ShapeDtypeStruct((size,), np.dtype(np.float32))
    return (
        Problem(
            f"dot product of {size} float32",
            {"size": size},
            (vector, vector),
            _RUNGS,
            (Rung("jnp.vdot", (jnp.vdot,)),),
            bytes=2 * 4 * size,
            bound="read",
            sums=True,
        ),
    )


LADDER = Ladder((("size",),), (str(1 << 26),), _problems)
