"""``selection``: the largest elements and orders of rows against JAX's own."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import Arrays, Errors, Program, on_gpu, random_arrays

_F32, _BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
# On a CPU rows have this part of the columns.
_CPU_PART = 64
# k, rows, columns and type: the logits of vocabularies, the scores of experts and long rows.
_TOP_K = (
    (20, 64, 151_936, _F32),
    (50, 64, 128_256, _F32),
    (40, 8, 50_257, _BF16),
    (256, 256, 32_768, _F32),
    (1000, 1, 2**24, _F32),
    (8, 16_384, 128, _F32),
    (6, 4096, 384, _BF16),
    (8, 32_768, 256, _F32),
    (64, 8192, 4096, _F32),
)
# Rows, columns and type of sorts.
_SORTS = (
    (4096, 2048, _F32),
    (16_384, 128, _F32),
    (512, 16_384, _F32),
    (8192, 1024, _BF16),
    (64, 512, _F32),
    (1, 2**20, _F32),
    (1, 2**16, _F32),
    (1, 2**24, _F32),
    (8, 2**20, _F32),
    (1, 2**22, jnp.dtype(jnp.int64)),
)
_MEDIANS = (1000, 10_000), (4096, 1000)


def _different(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the share of elements whose bits are not those of the other side."""
    ours, theirs = (jax.tree.leaves(results[side]) for side in ("ours", "XLA"))
    shares = [
        np.mean(np.asarray(x).view(np.uint8) != np.asarray(y).view(np.uint8))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return {"ours": float(max(shares)), "XLA": 0.0}


def _program(
    name: str, group: str, ours: Any, theirs: Any, *structs: Any, **options: Any
) -> Program:
    arguments = functools.partial(_arrays, *structs)
    sides = {"ours": ours, "XLA": theirs}
    return Program(name, arguments, sides, _different, group, margin=1.0, **options)


def _arrays(*structs: Any) -> Arrays:
    """Return normal numbers, and integers of all bits."""
    found = []
    for shape, dtype in structs:
        if jnp.issubdtype(dtype, jnp.integer):
            found.append(jax.random.bits(jax.random.key(0), shape, f"u{dtype}").astype(dtype))
        else:
            found += random_arrays((shape, dtype))
    return found


def _columns(columns: int, at_least: int = 1) -> int:
    return columns if on_gpu() else max(columns // _CPU_PART, at_least)


def _first_sorted(a: Any, *others: Any) -> Arrays:
    return jnp.sort(a), *others


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    for k, rows, columns, dtype in _TOP_K:
        size = _columns(columns, k)
        yield _program(
            f"top_k {k} of {rows:,} x {size:,} {dtype}", "`top_k`",
            lambda x, k=k: jtk.top_k(x, k), lambda x, k=k: jax.lax.top_k(x, k),
            ((rows, size), dtype),
        )  # fmt: skip
    for rows, columns, dtype in _SORTS:
        size = _columns(columns)
        for name in ("sort", "argsort"):
            yield _program(
                f"{name} {rows:,} x {size:,} {dtype}", f"`{name}`", getattr(jtk, name),
                getattr(jnp, name), ((rows, size), dtype), wide=dtype.itemsize == 8,
            )  # fmt: skip
    size = _columns(2**20)
    yield _program(
        f"lexsort of two keys of {size:,} int32", "`lexsort`",
        lambda x, y: jtk.lexsort((x, y)), lambda x, y: jnp.lexsort((x, y)),
        *[((size,), jnp.dtype(jnp.int32))] * 2,
    )  # fmt: skip
    for rows, columns in _MEDIANS:
        size = _columns(columns)
        yield _program(
            f"median {rows:,} x {size:,} float32", "`median`", lambda x: jtk.median(x, 1),
            lambda x: jnp.median(x, 1), ((rows, size), _F32),
        )  # fmt: skip
    size = _columns(2**20)
    searches = _program(
        f"searchsorted {size:,} in {size:,} float32", "`searchsorted`", jtk.searchsorted,
        jnp.searchsorted, ((size,), _F32), ((size,), _F32),
    )  # fmt: skip
    yield dataclasses.replace(searches, arguments=lambda: _first_sorted(*searches.arguments()))


COMMAND = ProgramsCommand("the largest elements and orders of rows", _programs)
