"""The ladder of the dot product, from sums added on the host to the library's kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from benchmarks.ladder import Problem, Rung, Sizes, blocks, kernel

RANKS = (1,)
SIZES = ("1024", str(1 << 26))

# Enough blocks of 256 threads to fill any GPU several times.
_THREADS, _MOST_BLOCKS = 256, 1024
# What a text that the ladder answers has: docs/ladder.md says which.
_SOURCE_THREADS, _SOURCE_BLOCKS = 512, 32


def _partial_sums(
    file: str, entry: str | None = None, threads: int = _THREADS, most_blocks: int = _MOST_BLOCKS
) -> Any:
    """Return the first stage: a sum for each block."""

    def count(x: Any, y: Any) -> int:
        return min(most_blocks, blocks(x.size, threads))

    return kernel(
        f"dot/{file}",
        name=entry and f"{entry}<{threads}>",
        out=lambda x, y: jax.ShapeDtypeStruct((count(x, y),), x.dtype),
        grid=count,
        block=threads,
        scalars=lambda x, y: (np.int64(x.size),),
        alignment=16,
    )


def _atomic_add(
    file: str, entry: str | None = None, threads: int = _THREADS, most_blocks: int = _MOST_BLOCKS
) -> tuple[Any, ...]:
    """Return the stages of a kernel that adds to a result of zero."""
    return _with_zero, kernel(
        f"dot/{file}",
        name=entry and f"{entry}<{threads}>",
        out=lambda x, y, zero: zero,
        grid=lambda x, y, zero: min(most_blocks, blocks(x.size, threads)),
        block=threads,
        scalars=lambda x, y, zero: (np.int64(x.size),),
        aliases={2: 0},
    )


def _with_zero(x: Array, y: Array) -> tuple[Array, ...]:
    return x, y, jnp.zeros((), x.dtype)


def _add_on_host(partial: Array) -> np.floating[Any]:
    return np.asarray(partial).sum()  # type: ignore[no-any-return]


def _on_host(name: str, stage: Any, file: str) -> Rung:
    return Rung(name, (stage,), f"dot/{file}", on_host=_add_on_host)


_ADD_PARTIAL = kernel(
    "dot/06_two_stages.cu",
    out=lambda partial: jax.ShapeDtypeStruct((), partial.dtype),
    grid=1,
    block=_THREADS,
    scalars=lambda partial: (np.int32(partial.size),),
)

_SERIAL = "01_serial_block_sum.cu", "dot_serial_block_sum"
_TREE = "02_shared_tree.cu", "dot_shared_tree"
_TREE_ATOMIC = "03_tree_atomic_add.cu", "dot_tree_atomic_add"
_SHUFFLES = _partial_sums("04_warp_shuffles.cu")
_SOURCE = _SOURCE_THREADS, _SOURCE_BLOCKS

_RUNGS = (
    _on_host("serial sum of a block, rest on the host", _partial_sums(*_SERIAL), _SERIAL[0]),
    _on_host("tree, rest on the host", _partial_sums(*_TREE), _TREE[0]),
    _on_host(
        "tree, 512 threads, 32 blocks, rest on the host", _partial_sums(*_TREE, *_SOURCE), _TREE[0]
    ),
    _on_host("warp shuffles, rest on the host", _SHUFFLES, "04_warp_shuffles.cu"),
    Rung("tree and atomicAdd", _atomic_add(*_TREE_ATOMIC), "dot/03_tree_atomic_add.cu"),
    Rung(
        "tree and atomicAdd, 512 threads, 32 blocks",
        _atomic_add(*_TREE_ATOMIC, *_SOURCE),
        "dot/03_tree_atomic_add.cu",
    ),
    Rung("warp shuffles and atomicAdd", _atomic_add("05_atomic_add.cu"), "dot/05_atomic_add.cu"),
    Rung("two stages", (_SHUFFLES, _ADD_PARTIAL), "dot/06_two_stages.cu"),
    Rung(
        "two stages, float4",
        (_partial_sums("07_vectorised.cu"), _ADD_PARTIAL),
        "dot/07_vectorised.cu",
    ),
    Rung("jax_tilekern.vdot", (jax_tilekern.vdot,)),
)


def problems(sizes: Sizes) -> tuple[Problem, ...]:
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
