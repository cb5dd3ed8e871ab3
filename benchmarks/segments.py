"""``segments``: reductions to segments, tables and their gradients against JAX's own."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import Arrays, Program, differences_from

_BF16, _F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_ERRORS = functools.partial(differences_from, "XLA")


def _ids(rows: int, segments: int, *, is_sorted: bool = False, seed: int = 0) -> Any:
    ids = jax.random.randint(jax.random.key(seed), (rows,), 0, segments)
    return jnp.sort(ids) if is_sorted else ids


def _normal(*shape: int, dtype: Any = _F32, seed: int = 1) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _program(name: str, group: str, ours: Any, theirs: Any, operands: Any) -> Program:
    return Program(name, operands, {"ours": ours, "XLA": theirs}, _ERRORS, group)


def _reduction(
    title: str, group: str, name: str, rows: int, columns: int, segments: int, dtype: Any,
    is_sorted: bool = False,
) -> Program:  # fmt: skip
    def operands() -> Arrays:
        x = 100 * _normal(rows, *((columns,) if columns else ()))
        return x.astype(dtype), _ids(rows, segments, is_sorted=is_sorted)

    def of(module: Any) -> Callable[..., Any]:
        function = getattr(module, f"segment_{name}")
        return lambda x, ids: function(x, ids, segments, indices_are_sorted=is_sorted)

    return _program(title, group, of(jtk), of(jax.ops), operands)


def _embedding(title: str, tokens: int, rows: int, columns: int) -> Program:
    def operands() -> Arrays:
        cotangent = _normal(tokens, columns, dtype=_BF16, seed=2)
        return _normal(rows, columns, dtype=_BF16), _ids(tokens, rows), cotangent

    def of(take: Callable[..., Any]) -> Callable[..., Any]:
        return lambda t, ids, c: jax.vjp(lambda t: take(t, ids, axis=0), t)[1](c)[0]

    return _program(title, "gradient of `take`", of(jtk.take), of(jnp.take), operands)


def _messages(edges: int, nodes: int, features: int) -> Iterator[Program]:
    """Yield messages of a graph, and their gradient."""

    def operands(gradient: bool) -> Arrays:
        ids = _ids(edges, nodes), _ids(edges, nodes, seed=3)
        return _normal(nodes, features), *ids, *([_normal(nodes, features)] if gradient else [])

    def ours(h: Any, src: Any, dst: Any) -> Any:
        return jtk.segment_reduce(
            lambda a, b: jax.nn.silu(a * b),
            h, h, segment_ids=dst, num_segments=nodes, gather=(src, dst),
        )  # fmt: skip

    def theirs(h: Any, src: Any, dst: Any) -> Any:
        return jax.ops.segment_sum(jax.nn.silu(h[src] * h[dst]), dst, nodes)

    def pulled(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda h, src, dst, c: jax.vjp(lambda h: f(h, src, dst), h)[1](c)[0]

    yield _program(
        "silu(h[src] * h[dst]), 4M edges, 1M nodes, 64 features", "`segment_reduce`, messages",
        ours, theirs, functools.partial(operands, False),
    )  # fmt: skip
    yield _program(
        "its gradient", "`segment_reduce`, gradient of messages", pulled(ours), pulled(theirs),
        functools.partial(operands, True),
    )  # fmt: skip


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    for name, segments, ordered in (
        ("sum", 65536, False), ("sum", 65536, True), ("sum", 64, False), ("max", 65536, False)
    ):  # fmt: skip
        for dtype in (_F32, _BF16):
            suffix = ", sorted" if ordered else ""
            yield _reduction(f"{name} 2^20 x 256 to {segments}{suffix}, {dtype}",
                             f"`segment_{name}`{suffix}", name, 2**20, 256, segments, dtype,
                             ordered)  # fmt: skip
    for segments in (24, 50_000):
        yield _reduction(f"sum 400,000 scalars to {segments:,}", "`segment_sum` of scalars", "sum",
                         400_000, 0, segments, _F32)  # fmt: skip
    yield _embedding("gradient of take, 32,768 of 128,256 x 4096, bfloat16", 32768, 128256, 4096)
    yield from _messages(4 * 2**20, 2**20, 64)


COMMAND = ProgramsCommand("reductions to segments", _programs)
