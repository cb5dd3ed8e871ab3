"""``segments``: reductions to segments, tables and their gradients against JAX's own.

The named rows are those of models; ``--drawn`` adds reductions of random sizes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand

# Ours, JAX's, and what makes the operands.
Call = tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Any, ...]]]


def ids_of(rows: int, segments: int, *, is_sorted: bool = False, seed: int = 0) -> Any:
    """Return random segments of rows."""
    ids = jax.random.randint(jax.random.key(seed), (rows,), 0, segments)
    return jnp.sort(ids) if is_sorted else ids


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 1) -> Any:
    """Return random numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def reduction(
    name: str, rows: int, columns: int, segments: int, dtype: Any, *, is_sorted: bool = False
) -> Call:
    """Return a call of a reduction of random rows."""

    def operands() -> tuple[Any, ...]:
        x = 100 * normal(rows, *((columns,) if columns else ()))
        return x.astype(dtype), ids_of(rows, segments, is_sorted=is_sorted)

    def of(module: Any) -> Callable[..., Any]:
        function = getattr(module, f"segment_{name}")
        return lambda x, ids: function(x, ids, segments, indices_are_sorted=is_sorted)

    return of(jtk), of(jax.ops), operands


def embedding(tokens: int, rows: int, columns: int, dtype: Any) -> Call:
    """Return the gradient of a table of which rows are taken."""

    def operands() -> tuple[Any, ...]:
        cotangent = normal(tokens, columns, dtype=dtype, seed=2)
        return normal(rows, columns, dtype=dtype), ids_of(tokens, rows), cotangent

    def of(take: Callable[..., Any]) -> Callable[..., Any]:
        return lambda t, ids, c: jax.vjp(lambda t: take(t, ids, axis=0), t)[1](c)[0]

    return of(jtk.take), of(jnp.take), operands


def messages(edges: int, nodes: int, features: int, *, gradient: bool = False) -> Call:
    """Return messages of a graph, or their gradient."""

    def operands() -> tuple[Any, ...]:
        ids = ids_of(edges, nodes), ids_of(edges, nodes, seed=3)
        return normal(nodes, features), *ids, *([normal(nodes, features)] if gradient else [])

    def ours(h: Any, src: Any, dst: Any) -> Any:
        return jtk.segment_reduce(
            lambda a, b: jax.nn.silu(a * b),
            h, h, segment_ids=dst, num_segments=nodes, gather=(src, dst),
        )  # fmt: skip

    def theirs(h: Any, src: Any, dst: Any) -> Any:
        return jax.ops.segment_sum(jax.nn.silu(h[src] * h[dst]), dst, nodes)

    if gradient:

        def pulled(f: Callable[..., Any]) -> Callable[..., Any]:
            return lambda h, src, dst, c: jax.vjp(lambda h: f(h, src, dst), h)[1](c)[0]

        return pulled(ours), pulled(theirs), operands
    return ours, theirs, operands


def top_k(rows: int, columns: int, k: int) -> Call:
    """Return the largest elements of rows."""
    return (
        lambda x: jtk.top_k(x, k),
        lambda x: jax.lax.top_k(x, k),
        lambda: (normal(rows, columns),),
    )


BF16, F32 = jnp.bfloat16, jnp.float32
CALLS: dict[str, Callable[[], Call]] = {
    **{
        f"{name} 2^20 x 256 to {segments}{', sorted' if ordered else ''}, {np.dtype(dtype)}":
        functools.partial(reduction, name, 2**20, 256, segments, dtype, is_sorted=ordered)
        for name, segments, ordered in (
            ("sum", 65536, False), ("sum", 65536, True), ("sum", 64, False), ("max", 65536, False)
        )
        for dtype in (F32, BF16)
    },
    "sum 400,000 scalars to 24": lambda: reduction("sum", 400_000, 0, 24, F32),
    "sum 400,000 scalars to 50,000": lambda: reduction("sum", 400_000, 0, 50_000, F32),
    "gradient of take, 32,768 of 128,256 x 4096, bfloat16":
        lambda: embedding(32768, 128256, 4096, BF16),
    "silu(h[src] * h[dst]), 4M edges, 1M nodes, 64 features":
        lambda: messages(4 * 2**20, 2**20, 64),
    "its gradient": lambda: messages(4 * 2**20, 2**20, 64, gradient=True),
    "top_k 8 of 32,768 x 256": lambda: top_k(32768, 256, 8),
    "top_k 8 of 16,384 x 64": lambda: top_k(16384, 64, 8),
}  # fmt: skip


def drawn(seed: int, most: int) -> tuple[str, Call]:
    """Return a reduction of random sizes, with up to so many elements."""
    random = np.random.default_rng(seed)
    columns = int(random.choice([0, 1, 3, 8, 16, 33, 64, 128, 256, 512]))
    rows = int(2 ** random.uniform(8, max(8.0, np.log2(most / max(1, columns)))))
    segments = int(2 ** random.uniform(1, np.log2(rows)))
    dtype = jnp.dtype(random.choice(["float32", "bfloat16", "int32"]))
    name, ordered = str(random.choice(["sum", "sum", "max"])), bool(random.random() < 0.25)
    text = f"{name} {rows} x {columns} to {segments}{', sorted' if ordered else ''}, {dtype}"
    return text, reduction(name, rows, columns, segments, dtype, is_sorted=ordered)


def _errors(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference between the first elements of both results."""
    ours, theirs = (
        np.asarray(jax.tree.leaves(results[side])[0].ravel()[: 2**20].astype(np.float32))
        for side in ("ours", "XLA")
    )
    finite = np.isfinite(ours) & np.isfinite(theirs)
    return {"ours": float(np.max(np.abs(ours - theirs)[finite], initial=0))}


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    named = ((name, make()) for name, make in CALLS.items())
    others = (drawn(1000 * arguments.seed + i, arguments.most) for i in range(arguments.drawn))
    for name, (ours, theirs, operands) in itertools.chain(named, others):
        yield Program(name, operands, {"ours": ours, "XLA": theirs}, _errors)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="calls drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of those")
    parser.add_argument("--most", type=float, default=2**26, help="elements of those at most")


COMMAND = ProgramCommand("reductions to segments", _programs, 0.5, _arguments)
