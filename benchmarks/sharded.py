"""Programs that several devices share: ours, JAX's own, and the product of one device alone.

Rows of attention have sequences that devices share, against attention of gathered keys.

Sides of a row of ``overlapped`` are XLA's sharded ``jit``, ours with a collective, ours as it is by
default, and ours overlapped in several numbers of parts. One of these is the default's program once
more, which shows the error of the measurement.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from benchmarks.commands import ROWS, RowsCommand, matches
from benchmarks.record import Record
from jax_tilekern.plans.overlap import in_parts

# To dispatch a call to several devices takes 0.3 ms of the host, longer than many of these programs
# run. So each is repeated in one call, as the layers of a model are, and the calls of a block are
# waited for together.
REPEATS = 8
_BLOCK_SECONDS = 0.03
_SETTLING_BLOCKS = 3
_ROWS, _COLUMNS = P("x"), P(None, "x")
_WRONG = 0.05

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Program:
    """One row: a program of ``jnp`` or of this package, and how its arrays are sharded.

    Attributes
    ----------
    name, group
        What it is, and the line of tables that it is part of.
    function
        ``function(matmul, ragged_dot)`` returns the program.
    shapes, specs
        Shape and sharding of each operand.
    out
        Sharding of each result.
    alone
        Shapes of what one device computes, where that is one product; ``None`` otherwise.
    target
        The least of JAX's time, or of the reference's, over ours.
    peer
        Whether JAX's own program is measured, or that program, where other products do not make it
        of ours. If there is none, the reference is ours on one device.
    added
        Shape of the partial results that devices add up, whose ``all-reduce`` is measured by
        itself; ``None`` if there are none, or if JAX's program has the same.
    by_hand
        The program as users of ``shard_map`` write it, if there is one.
    """

    name: str
    group: str
    function: Callable[..., Callable[..., Any]]
    shapes: Shapes
    specs: tuple[P, ...]
    out: Any
    alone: Shapes | None = None
    target: float = 0.97
    peer: bool | Callable[..., Any] = True
    added: tuple[int, ...] | None = None
    by_hand: Callable[..., Any] | None = None


def _product(matmul: Any, _: Any) -> Any:
    return matmul


def _mlp(matmul: Any, _: Any) -> Callable[..., Any]:
    return lambda x, up, down: matmul(jax.nn.silu(matmul(x, up)), down)


def _with_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        *arrays, cotangent = operands
        y, transpose = jax.vjp(forward, *arrays)
        return y, transpose(cotangent)

    return run


def _experts(_: Any, ragged_dot: Any) -> Any:
    return lambda x, w, cotangent, sizes: ragged_dot(x, w, sizes)


def _gradients_of_experts(_: Any, ragged_dot: Any) -> Any:
    def run(x: Any, w: Any, cotangent: Any, sizes: Any) -> Any:
        _, transpose = jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)
        return transpose(cotangent)

    return run


def _gathered(sizes: Sequence[Sequence[int]], devices: int, group: str) -> Iterator[Program]:
    for m, k, n in sizes:
        yield Program(
            f"{m}x{k}x{n}", group, _product, ((m, k), (k, n)), (_ROWS, _COLUMNS), _COLUMNS,
            ((m, k), (k, n // devices)),
        )  # fmt: skip


def _scattered(sizes: Sequence[Sequence[int]], devices: int, group: str) -> Iterator[Program]:
    for m, k, n in sizes:
        yield Program(
            f"{m}x{k}x{n}", group, _product, ((m, k), (k, n)), (_COLUMNS, _ROWS), _ROWS,
            ((m, k // devices), (k // devices, n)),
        )  # fmt: skip


def _gated_mlp(matmul: Any, _: Any) -> Callable[..., Any]:
    return lambda x, gate, up, down: matmul(jax.nn.silu(matmul(x, gate)) * matmul(x, up), down)


_TOKENS, _WIDTH, _HIDDEN = 8192, 4096, 14336
_MLP: Shapes = ((_TOKENS, _WIDTH), (_WIDTH, _HIDDEN), (_HIDDEN, _WIDTH))


def programs(devices: int) -> Iterator[Program]:
    """Yield the rows of ``sharded`` for a number of devices."""
    gathered = [(4096, 4096, 16384), (8192, 8192, 28672), (4096, 4096, 14336), (16384, 4096, 4096)]
    yield from _gathered(gathered, devices, "rows gathered, columns sharded")
    scattered = [
        (4096, 16384, 4096), (8192, 28672, 8192), (4096, 14336, 4096), (16384, 4096, 4096),
    ]  # fmt: skip
    yield from _scattered(scattered, devices, "k sharded, rows scattered")
    for name, (x, up, down) in {
        "data parallel": (P("x"), P(), P()),
        "fully sharded": (P("x"), P("x"), P("x")),
        "tensor parallel": (P(), P(None, "x"), P("x")),
    }.items():
        yield Program(
            f"{name}, {_TOKENS}x{_WIDTH}x{_HIDDEN}", "MLP, forward and backward",
            lambda *products: _with_gradients(_mlp(*products)), (*_MLP, _MLP[0]),
            (x, up, down, x), (x, (x, up, down)),
        )  # fmt: skip

    rows, groups, k, n = 32768, 64, 2048, 1536
    grouped = ((rows, k), (groups, k, n), (rows, n), (groups,))
    x_shape, w_shape, y_shape, _ = grouped
    for name, (x, w, y), added in (
        ("rows sharded", (P("x"), P(), P("x")), (None, w_shape)),
        ("columns sharded", (P(), P(None, None, "x"), P(None, "x")), (None, x_shape)),
        ("experts sharded", (P(), P("x"), P()), (y_shape, x_shape)),
    ):
        for what, function, out, partial in (
            ("forward", _experts, y, added[0]),
            ("gradients", _gradients_of_experts, (x, w), added[1]),
        ):
            communication = "with an all-reduce" if partial else "without communication"
            yield Program(
                f"{name}, {what}, {rows}x{k}x{n}",
                f"`ragged_dot` of 64 groups, parallel efficiency {communication}", function,
                grouped, (x, w, y, P()), out, target=0.85, peer=False, added=partial,
            )  # fmt: skip


def attention_programs(mesh: Mesh) -> Iterator[Program]:
    """Yield attention of a sequence that devices share, and that of gathered keys and values."""
    sequence = P(None, "x")
    specs = (sequence,) * 3
    over = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=specs, out_specs=sequence, check_vma=False
    )
    shape = (2, 4096 * mesh.size, 16, 128)
    how: Any = "cudnn" if mesh.devices.flat[0].platform == "gpu" else "xla"

    def of_gathered(query: Any, key: Any, value: Any) -> Any:
        key, value = (lax.all_gather(x, "x", axis=1, tiled=True) for x in (key, value))
        return jax.nn.dot_product_attention(query, key, value, implementation=how)

    gathered = over(of_gathered)
    forward = over(functools.partial(jtk.ring_attention, axis_name="x"))
    name, group = "x".join(map(str, shape)), "attention of a shared sequence"
    yield Program(
        name, f"{group}, forward", lambda *_: forward, (shape,) * 3, specs, sequence,
        peer=gathered,
    )  # fmt: skip
    yield Program(
        name, f"{group}, forward and backward", lambda *_: _with_gradients(forward), (shape,) * 4,
        (sequence,) * 4, (sequence, specs), peer=_with_gradients(gathered),
    )  # fmt: skip


def random_programs(devices: int, count: int, seed: int) -> Iterator[Program]:
    """Yield products of random sizes whose rows are gathered or scattered."""
    rng = np.random.default_rng(seed)

    def size(least: int, most: int, multiple: int) -> int:
        drawn = math.exp(rng.uniform(math.log(least), math.log(most)))
        return max(1, round(drawn / multiple)) * multiple

    for _ in range(count):
        sizes = size(2048, 32768, 128 * devices), *(size(1024, 16384, 64 * devices) for _ in "kn")
        make, group = (
            (_gathered, "random rows gathered") if rng.integers(2)
            else (_scattered, "random rows scattered")
        )  # fmt: skip
        yield from make([sizes], devices, group)


def overlapped_programs(mesh: Mesh) -> Iterator[Program]:
    """Yield the rows of ``overlapped``."""
    # The last of each is the smallest that is overlapped by default, by prediction.
    gathered = ((16384, 4096, 4096), (4096, 4096, 14336), (8192, 8192, 28672), (8192, 2048, 4096))
    yield from _gathered(gathered, mesh.size, "rows gathered")
    scattered = ((16384, 4096, 4096), (4096, 14336, 4096), (8192, 28672, 8192), (8192, 4096, 2048))
    yield from _scattered(scattered, mesh.size, "rows scattered")
    # The first product gathers the rows for all.
    yield Program(
        "8192x4096x4096", "rows gathered by three products",
        lambda matmul, _: lambda x, q, k, v: (matmul(x, q), matmul(x, k), matmul(x, v)),
        ((8192, 4096), *3 * ((4096, 4096),)), (_ROWS, *3 * (_COLUMNS,)), 3 * (_COLUMNS,),
    )  # fmt: skip

    def along_axis(x: Any, up: Any, down: Any) -> Any:
        hidden = jax.nn.silu(jtk.all_gather_matmul(x, up, "x"))
        return jtk.matmul_reduce_scatter(hidden, down, "x")

    def gated_along_axis(x: Any, gate: Any, up: Any, down: Any) -> Any:
        opened, hidden = jtk.all_gather_matmul(x, [gate, up], "x")
        return jtk.matmul_reduce_scatter(jax.nn.silu(opened) * hidden, down, "x")

    layers = (("MLP", _mlp, along_axis, 1), ("gated MLP", _gated_mlp, gated_along_axis, 2))
    for (group, function, hand, columns), (width, hidden) in itertools.product(
        layers, ((_WIDTH, _HIDDEN), (5120, 13824))
    ):
        specs = (_ROWS, *columns * (_COLUMNS,), _ROWS)
        shapes: Shapes = ((_TOKENS, width), *columns * ((width, hidden),), (hidden, width))
        by_hand: Any = jax.shard_map(hand, mesh=mesh, in_specs=specs, out_specs=_ROWS)
        name = f"{_TOKENS}x{width}x{hidden}"
        yield Program(name, f"{group}, forward", function, shapes, specs, _ROWS, by_hand=by_hand)
        yield Program(
            name, f"{group}, forward and backward",
            lambda *products, function=function: _with_gradients(function(*products)),
            (*shapes, shapes[0]), (*specs, _ROWS), (_ROWS, specs), by_hand=_with_gradients(by_hand),
        )  # fmt: skip


# Measurement.


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    """Measure the programs of ``sharded`` or, with numbers of parts, of ``overlapped``."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    parts = getattr(arguments, "parts", None)
    if parts is not None:
        chosen = overlapped_programs(mesh)
    elif arguments.random:
        chosen = random_programs(mesh.size, arguments.random, arguments.seed)
    else:
        chosen = itertools.chain(programs(mesh.size), attention_programs(mesh))
    for program in chosen:
        group = (
            program.group if parts is None else f"overlapped with communication: {program.group}"
        )
        row: Record = {"name": f"{program.group}, {program.name}", "group": group}
        if not matches(row["name"], arguments.rows):
            continue
        try:
            row |= measured(program, mesh, arguments.seconds, parts)
        except Exception as error:  # The other rows are worth having.
            row["failure"] = f"{type(error).__name__}: {str(error)[:500]}"
        yield row | {"devices": mesh.size}


def _sides(program: Program, parts: Sequence[int] | None) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the name of each side, its function, and the contexts that it is compiled in."""
    ours = program.function(jtk.matmul, jtk.ragged_dot)
    if program.peer is True:
        yield "XLA", program.function(jnp.matmul, lax.ragged_dot), []
    elif program.peer:
        yield "XLA", program.peer, []
    yield "ours", ours, []
    if parts is None:
        return
    yield "collective", ours, [in_parts(0)]
    by_hand = {"shard_map": program.by_hand} if program.by_hand else {}
    for name, function in {"ours": ours, **by_hand}.items():
        yield from ([(name, function, [])] if name != "ours" else [])
        yield from ((f"{name} {count}", function, [in_parts(count)]) for count in parts)


def measured(program: Program, mesh: Mesh, seconds: float, parts: Sequence[int] | None) -> Record:
    """Measure a row; with numbers of parts, ours overlapped in so many of them."""
    rng = np.random.default_rng(0)
    arrays = [_operand(rng, program, shape) for shape in program.shapes]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, program.specs, strict=True)
    ]
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), program.out, is_leaf=lambda x: isinstance(x, P)
    )
    ours, device = program.function(jtk.matmul, jtk.ragged_dot), mesh.devices.flat[0]
    reference = "XLA" if program.peer else "one device"
    compiled: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, function, contexts in _sides(program, parts):
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                results = [out] * REPEATS
                compiled[name] = _compiled(_repeated(function, out), placed, results)
        except Exception as error:  # The other sides are worth having.
            if name in ("ours", "XLA"):
                raise
            failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
    sides = {name: functools.partial(function, *placed) for name, function in compiled.items()}
    if not program.peer:
        single = [jax.device_put(x, device) for x in arrays]
        sides[reference] = functools.partial(_compiled(_repeated(ours), single), *single)
    wanted = sides[reference]()[-1]
    errors = {name: _difference(side()[-1], wanted) for name, side in sides.items()}
    times = interleaved(sides, seconds)
    # Not among the others: after these, the clocks of the devices that waited are lower.
    if program.alone is not None:
        local = [jax.device_put(_operand(rng, program, s), device) for s in program.alone]
        alone = functools.partial(_compiled(_repeated(ours), local), *local)
        times |= interleaved({"alone": alone}, seconds / 4)
    if program.added is not None:
        times |= interleaved({"all-reduce": _all_reduce(rng, program.added, mesh)}, seconds / 4)
    median = {name: statistics.median(own) for name, own in times.items()}
    share = 1 if program.peer else mesh.size
    ratios = [
        theirs / share / mine for theirs, mine in zip(times[reference], times["ours"], strict=True)
    ]
    choices = jtk.explain(jax.jit(ours, out_shardings=out), *placed)
    wrong = {name: x for name, x in errors.items() if not x < _WRONG}
    more: Record = {
        "failures": failures,
        "failure": f"{wrong or ''} {failures or ''}".strip(),
    }
    return {
        "target": {reference: program.target},
        "seconds": median,
        "ratio": {reference: statistics.median(ratios)},
        "error": errors,
        "kernels": [f"{x.call} [{x.partition}] {x.result} {x.kernel or x.reason}" for x in choices],
        **{key: value for key, value in more.items() if value},
    }


def _all_reduce(rng: np.random.Generator, shape: tuple[int, ...], mesh: Mesh) -> Callable[[], Any]:
    """Return a program that adds up an array of this shape over the devices."""
    array = np.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    placed = [jax.device_put(array, NamedSharding(mesh, P()))]
    add = jax.shard_map(
        lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return functools.partial(_compiled(_repeated(add), placed), *placed)


def _operand(rng: np.random.Generator, program: Program, shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        rows = program.shapes[0][0]
        return rng.multinomial(rows, np.full(shape[0], 1 / shape[0])).astype(np.int32)
    scale = 1 / math.sqrt(shape[-2]) if len(shape) == 3 else 1 / 8
    return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16)


def _repeated(function: Callable[..., Any], out: Any = None) -> Callable[..., list[Any]]:
    """Return a program that computes a function ``REPEATS`` times, each after the one before.

    ``out`` is the sharding of each result.
    """

    def run(*operands: Any) -> list[Any]:
        results = []
        for _ in range(REPEATS):
            result = function(*operands)
            if out is not None:
                result = lax.with_sharding_constraint(result, out)
            # All results are returned, so that no repetition is removed.
            operands, result = lax.optimization_barrier((operands, result))
            results.append(result)
        return results

    return run


def _compiled(function: Callable[..., Any], operands: list[Any], out: Any = None) -> Any:
    """Return a compiled program, which has run once."""
    jitted = jax.jit(function) if out is None else jax.jit(function, out_shardings=out)
    compiled = jitted.lower(*operands).compile()
    jax.block_until_ready(compiled(*operands))
    return compiled


def _difference(ours: Any, theirs: Any) -> float:
    """Return the largest relative difference of two programs' results, in the Frobenius norm."""

    def relative(x: Any, y: Any) -> float:
        a, b = (np.asarray(v, np.float32) for v in (x, y))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return max(map(relative, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def interleaved(sides: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Return the seconds of a repetition of each side, one block of calls after the other."""

    def block(side: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = side()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    for side in sides.values():  # The first calls connect the devices and raise the clocks.
        block(side, 3)
    # As many calls for each, since what a block takes besides its calls counts as theirs.
    calls = max(1, int(_BLOCK_SECONDS / min(block(side, 2) for side in sides.values())))
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(min(times.values(), key=len)) < 5:
        for name, side in sides.items():
            # The side before may have left more or less of the power limit, and so other clocks.
            block(side, _SETTLING_BLOCKS * calls)
            times[name].append(block(side, calls) / REPEATS)
    return times


COMMANDS = {
    "sharded": RowsCommand(
        "time programs that all devices share against JAX's own", _rows, 2.0, **ROWS,
        random={"type": int, "default": 0, "help": "so many products of random sizes instead"},
        seed={"type": int, "default": 1, "help": "of the random sizes"},
    ),
    "overlapped": RowsCommand(
        "time products that overlap with their communication", _rows, 2.0, **ROWS,
        parts={"type": int, "nargs": "*", "default": [1, 2, 4], "help": "numbers of parts to time"},
    ),
}  # fmt: skip
