"""``overlapped``: products that overlap with their communication, on every GPU of the machine.

Sides of a row run one after the other: XLA's sharded ``jit``, ours with a collective, ours as it is
by default, and ours overlapped in several numbers of parts. One of these is the default's program
once more, which shows the error of the measurement.
``--soak`` runs one product many times instead, beside other collectives, and compares the bits of
its results.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from benchmarks.records.record import program_record
from benchmarks.sharded import REPEATS, compiled_program, difference, interleaved, repeated
from jax_tilekern.cli.console import make_console, output_file, write_json
from jax_tilekern.plans.overlap import in_parts

if TYPE_CHECKING:
    from rich.console import Console

KIND = "overlapped"
HELP = "time products that overlap with their communication"
ROWS, COLUMNS = P("x"), P(None, "x")
_TARGET = "jax_tilekern_cuda_launch_overlapped"


@dataclass(frozen=True)
class Program:
    """One row.

    Attributes
    ----------
    name
        What it is.
    functions
        By side, the program of one repetition.
    shapes, specs
        Shape and sharding of each operand.
    out
        Shardings of the results.
    alone
        The product of one device without communication: the shapes of its operands.
    """

    name: str
    functions: dict[str, Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: Any
    alone: tuple[tuple[int, int], tuple[int, int]] | None = None


def _programs(mesh: Mesh) -> Iterator[Program]:
    n_devices = mesh.size
    products = {"XLA": jnp.matmul, "ours": jtk.matmul}
    # The last of each is the smallest that is overlapped by default, by prediction.
    gathered = ((16384, 4096, 4096), (4096, 4096, 14336), (8192, 8192, 28672), (8192, 2048, 4096))
    for m, k, n in gathered:
        yield Program(
            f"rows gathered, {m}x{k}x{n}", products, ((m, k), (k, n)), (ROWS, COLUMNS), COLUMNS,
            ((m, k), (k, n // n_devices)),
        )  # fmt: skip
    scattered = ((16384, 4096, 4096), (4096, 14336, 4096), (8192, 28672, 8192), (8192, 4096, 2048))
    for m, k, n in scattered:
        yield Program(
            f"rows scattered, {m}x{k}x{n}", products, ((m, k), (k, n)), (COLUMNS, ROWS), ROWS,
            ((m, k // n_devices), (k // n_devices, n)),
        )  # fmt: skip

    def three(matmul: Any) -> Callable[..., Any]:
        return lambda x, q, k, v: (matmul(x, q), matmul(x, k), matmul(x, v))

    # XLA gathers the rows once, and overlapped products gather them three times.
    yield Program(
        "rows gathered by three products, 8192x4096x4096",
        {side: three(matmul) for side, matmul in products.items()},
        ((8192, 4096), *3 * ((4096, 4096),)),
        (ROWS, *3 * (COLUMNS,)),
        3 * (COLUMNS,),
    )

    def plain(matmul: Any) -> Callable[..., Any]:
        return lambda x, up, down: matmul(jax.nn.silu(matmul(x, up)), down)

    def along_axis(x: Any, up: Any, down: Any) -> Any:
        hidden = jax.nn.silu(jtk.all_gather_matmul(x, up, "x"))
        return jtk.matmul_reduce_scatter(hidden, down, "x")

    specs = (ROWS, COLUMNS, ROWS)
    functions = {
        "XLA": plain(jnp.matmul),
        "ours": plain(jtk.matmul),
        "shard_map": jax.shard_map(along_axis, mesh=mesh, in_specs=specs, out_specs=ROWS),
    }
    tokens, width, hidden = 8192, 4096, 14336
    shapes = ((tokens, width), (width, hidden), (hidden, width))
    yield Program(f"MLP, forward, {tokens}x{width}x{hidden}", functions, shapes, specs, ROWS)

    def with_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any, up: Any, down: Any, cotangent: Any) -> Any:
            y, transpose = jax.vjp(forward, x, up, down)
            return y, transpose(cotangent)

        return run

    yield Program(
        f"MLP, forward and backward, {tokens}x{width}x{hidden}",
        {side: with_gradients(f) for side, f in functions.items()},
        (*shapes, (tokens, width)),
        (*specs, ROWS),
        (ROWS, specs),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--rows", metavar="PATTERN", help="only rows whose name matches")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--parts", type=int, nargs="*", default=[1, 2, 4],
        help="numbers of parts to time (default: 1 2 4)",
    )  # fmt: skip
    parser.add_argument(
        "--soak", type=int, metavar="N", help="run so many executions, and compare their bits"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed."""
    console = make_console()
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(AxisType.Auto,))
    if arguments.soak:
        return _soak(console, mesh, arguments.soak)
    record = program_record(arguments.command_line)
    record |= {"kind": KIND, "devices": mesh.size}
    whole = True
    for program in _programs(mesh):
        if arguments.rows and not fnmatch.fnmatch(program.name, arguments.rows):
            continue
        try:
            row = _measure(program, mesh, arguments)
        except Exception as error:  # The other rows are worth having.
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        whole = whole and not row.get("error")
        record["rows"].append({"name": program.name, **row})
        console.print(_described(record["rows"][-1]))
        if arguments.json is not None:
            write_json(arguments.json, record)
    return 0 if whole else 1


def _described(row: dict[str, Any]) -> str:
    times = row.get("microseconds", {})
    parts = [
        f"{side} {micros:.0f} us ({times['XLA'] / micros:.3f})" for side, micros in times.items()
    ]
    parts += [f"{side} has no overlapped call" for side in row.get("not overlapped", ())]
    parts += [f"results differ: {row['differences']}"] if row.get("error") and times else []
    return f"{row['name']}: " + ", ".join(parts or [row["error"]])


def _sides(program: Program, parts: list[int]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the name of each side, of its function, and the contexts that it is compiled in."""
    yield "XLA", "XLA", []
    yield "collective", "ours", [in_parts(0)]
    for side in list(program.functions)[1:]:
        yield side, side, []
        for count in parts:
            yield f"{side} {count}", side, [in_parts(count)]


def _measure(program: Program, mesh: Mesh, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    placed = [
        jax.device_put(_operand(rng, shape), NamedSharding(mesh, spec))
        for shape, spec in zip(program.shapes, program.specs, strict=True)
    ]
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), program.out, is_leaf=lambda x: isinstance(x, P)
    )
    sides: dict[str, Callable[[], Any]] = {}
    without, errors = [], {}
    for name, function, contexts in _sides(program, arguments.parts):
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                compiled = compiled_program(
                    repeated(program.functions[function], out), placed, [out] * REPEATS
                )
        except Exception as error:  # The other sides are worth having.
            errors[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        sides[name] = functools.partial(compiled, *placed)
        if function != "XLA" and name != "collective" and _TARGET not in compiled.as_text():
            without.append(name)
    wanted = sides["XLA"]()[-1]
    differences = {name: difference(side()[-1], wanted) for name, side in sides.items()}
    times = interleaved(sides, arguments.seconds)
    if program.alone is not None:
        device = mesh.devices.flat[0]
        local = [jax.device_put(_operand(rng, s), device) for s in program.alone]
        alone = functools.partial(compiled_program(repeated(jtk.matmul), local), *local)
        times |= interleaved({"product alone": alone}, arguments.seconds / 4)
    ratios = [theirs / mine for theirs, mine in zip(times["XLA"], times["ours"], strict=True)]
    row = {
        "ratio": statistics.median(ratios),
        "microseconds": {name: statistics.median(own) * 1e6 for name, own in times.items()},
        "not overlapped": without,
        "differences": differences,
        "errors": errors,
    }
    wrong = {name: x for name, x in differences.items() if not x < 0.05}
    return row | ({"error": f"{wrong or ''} {errors or ''}"} if wrong or errors else {})


def _operand(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return (rng.standard_normal(shape, np.float32) / 8).astype(jnp.bfloat16)


def _soak(console: Console, mesh: Mesh, executions: int) -> int:
    """Run overlapped products beside other collectives; return 1 if a result differs."""
    rng = np.random.default_rng(0)
    placed = [
        jax.device_put(_operand(rng, shape), NamedSharding(mesh, spec))
        for shape, spec in (((2048, 1024), ROWS), ((1024, 4096), COLUMNS), ((4096, 1024), ROWS))
    ]

    def program(x: Any, up: Any, down: Any) -> Any:
        rows = NamedSharding(mesh, ROWS)
        hidden = lax.with_sharding_constraint(jtk.matmul(x, up), NamedSharding(mesh, COLUMNS))
        y = lax.with_sharding_constraint(jtk.matmul(hidden, down), rows)
        return y, y.astype(np.float32).sum()

    with in_parts(2):
        compiled = jax.jit(program).lower(*placed).compile()
    calls = str(compiled.as_text()).count(f'custom_call_target="{_TARGET}"')
    console.print(f"{calls} overlapped calls in a program")
    other = jax.jit(lambda x, w: (x @ w).sum())
    first = [np.asarray(x) for x in compiled(*placed)]
    wrong, start, block = 0, time.perf_counter(), 500
    for done in range(0, executions, block):
        for i in range(block):
            results = compiled(*placed)
            if i % 3 == 0:
                between = other(placed[0], placed[1])
        jax.block_until_ready(between)
        same = (np.array_equal(x, np.asarray(y)) for x, y in zip(first, results, strict=True))
        wrong += not all(same)
        if done % (20 * block) == 0:
            micros = (time.perf_counter() - start) / (done + block) * 1e6
            console.print(f"{done + block} executions, {wrong} wrong, {micros:.0f} us each")
    console.print(f"{executions} executions, {wrong} of {-(-executions // block)} results differ")
    return int(wrong > 0 or calls == 0)
