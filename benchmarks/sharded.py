"""Programs shared among devices: ours, JAX's own, and the product of one device alone."""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern
from benchmarks.records.record import program_record
from benchmarks.records.report import markdown_table
from jax_tilekern.cli.console import make_console, output_file, write_json

if TYPE_CHECKING:
    from rich.console import Console

KIND = "sharded"
# To dispatch a call to several devices takes 0.3 ms of the host, longer than many of these programs
# run. So each is repeated in one call, as the layers of a model are, and the calls of a block are
# waited for together.
REPEATS = 8
_BLOCK_SECONDS = 0.03
_SETTLING_BLOCKS = 3


@dataclass(frozen=True)
class Program:
    """One row: a program of ``jnp`` or of this package, and how its arrays are sharded.

    Attributes
    ----------
    group, name
        What it is.
    target
        The least of JAX's time, or of the reference's, over ours.
    function
        ``function(matmul, ragged_dot)`` returns the program.
    shapes, specs
        Shape and sharding of each operand.
    out
        Sharding of each result.
    alone
        Shapes of what one device computes, where that is one product; ``None`` otherwise.
    peer
        Whether JAX's own program is measured. If not, the reference is ours on one device.
    added
        Shape of the partial results that devices add up, whose ``all-reduce`` is measured by
        itself; ``None`` if there are none, or if JAX's program has the same.
    """

    group: str
    name: str
    target: float
    function: Callable[..., Callable[..., Any]]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: Any
    alone: tuple[tuple[int, ...], ...] | None = None
    peer: bool = True
    added: tuple[int, ...] | None = None


def programs(devices: int) -> Iterator[Program]:
    """Yield the rows for a number of devices."""

    def product(matmul: Any, _: Any) -> Any:
        return matmul

    gathered = [(4096, 4096, 16384), (8192, 8192, 28672), (4096, 4096, 14336), (16384, 4096, 4096)]
    for m, k, n in gathered:
        yield Program(
            "rows gathered, columns sharded", f"{m}x{k}x{n}", 0.97, product,
            ((m, k), (k, n)), (P("x"), P(None, "x")), P(None, "x"),
            ((m, k), (k, n // devices)),
        )  # fmt: skip
    scattered = [
        (4096, 16384, 4096), (8192, 28672, 8192), (4096, 14336, 4096), (16384, 4096, 4096),
    ]  # fmt: skip
    for m, k, n in scattered:
        yield Program(
            "k sharded, rows scattered", f"{m}x{k}x{n}", 0.97, product,
            ((m, k), (k, n)), (P(None, "x"), P("x")), P("x"),
            ((m, k // devices), (k // devices, n)),
        )  # fmt: skip

    tokens, width, hidden = 8192, 4096, 14336

    def mlp(matmul: Any, _: Any) -> Any:
        def forward(x: Any, up: Any, down: Any) -> Any:
            return matmul(jax.nn.silu(matmul(x, up)), down)

        def run(x: Any, up: Any, down: Any, cotangent: Any) -> Any:
            y, transpose = jax.vjp(forward, x, up, down)
            return y, transpose(cotangent)

        return run

    shapes = ((tokens, width), (width, hidden), (hidden, width), (tokens, width))
    for name, (x, up, down) in {
        "data parallel": (P("x"), P(), P()),
        "fully sharded": (P("x"), P("x"), P("x")),
        "tensor parallel": (P(), P(None, "x"), P("x")),
    }.items():
        yield Program(
            "MLP, forward and backward", f"{name}, {tokens}x{width}x{hidden}", 0.97, mlp,
            shapes, (x, up, down, x), (x, (x, up, down)),
        )  # fmt: skip

    rows, groups, k, n = 32768, 64, 2048, 1536

    def experts(_: Any, ragged_dot: Any) -> Any:
        return lambda x, w, cotangent, sizes: ragged_dot(x, w, sizes)

    def gradients(_: Any, ragged_dot: Any) -> Any:
        def run(x: Any, w: Any, cotangent: Any, sizes: Any) -> Any:
            _, transpose = jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)
            return transpose(cotangent)

        return run

    grouped = ((rows, k), (groups, k, n), (rows, n), (groups,))
    x_shape, w_shape, y_shape, _ = grouped
    for name, (x, w, y), added in (
        ("rows sharded", (P("x"), P(), P("x")), (None, w_shape)),
        ("columns sharded", (P(), P(None, None, "x"), P(None, "x")), (None, x_shape)),
        ("experts sharded", (P(), P("x"), P()), (y_shape, x_shape)),
    ):
        for what, function, out, partial in (
            ("forward", experts, y, added[0]),
            ("gradients", gradients, (x, w), added[1]),
        ):
            yield Program(
                "ragged_dot of 64 experts", f"{name}, {what}, {rows}x{k}x{n}", 0.85, function,
                grouped, (x, w, y, P()), out, peer=False, added=partial,
            )  # fmt: skip


HELP = "time programs that all devices share against JAX's own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--rows", metavar="PATTERN", help="only rows whose 'group: name' matches")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed."""
    _, whole = measure_sharded(make_console(), arguments)
    return 0 if whole else 1


def measure_sharded(
    console: Console, arguments: argparse.Namespace
) -> tuple[Mapping[str, Any], bool]:
    """Measure the rows that the command line asks for; say whether all succeeded."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,))
    record = program_record(arguments.command_line)
    record |= {"kind": KIND, "devices": len(devices)}
    whole = True
    for program in programs(len(devices)):
        if arguments.rows and not fnmatch.fnmatch(
            f"{program.group}: {program.name}", arguments.rows
        ):
            continue
        try:
            row = _measure(program, mesh, arguments.seconds)
        except Exception as error:  # The other rows are worth having.
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        whole = whole and not row.get("error")
        row = {"group": program.group, "name": program.name, "target": program.target, **row}
        record["rows"].append(row)
        console.print(describe(row))
        if arguments.json is not None:
            write_json(arguments.json, record)
    return record, whole


def describe(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text."""
    head = f"{row['group']}: {row['name']}: "
    if row.get("error"):
        return f"{head}{row['error']}"
    times = ", ".join(f"{name} {micros:.0f} us" for name, micros in row["microseconds"].items())
    same = ", the same program" if row.get("same_program") else ""
    bound = f", bound {row['bound']:.3f}" if row["bound"] < 1 else ""
    return f"{head}{times}; ratio {row['ratio']:.3f} (target {row['target']}{bound}){same}"


def markdown(record: Mapping[str, Any]) -> str:
    """Return a record as a markdown table."""
    shown = ("jnp", "one device", "all-reduce", "alone", "ours")
    lines = []
    for row in record["rows"]:
        times = row.get("microseconds", {})
        cells = [f"{times[key]:.0f}" if key in times else "" for key in shown]
        cells.append("failed" if row.get("error") else f"{row['ratio']:.3f}")
        cells.append(f"{row['bound']:.3f}" if row.get("bound", 1) < 1 else "")
        lines.append((row["group"], row["name"], *cells))
    about = (
        f"{record['devices']} x {record['device']}, microseconds; ratio: JAX's time over ours, or "
        "for `ragged_dot` one device's time over its share and ours. The bound is what it would be "
        "if nothing but the share of one device's time and the all-reduce took any."
    )
    table = markdown_table(("program", "", *shown, "ratio", "bound"), lines)
    return "\n".join([about, "", *table])


def _measure(program: Program, mesh: Mesh, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng()
    arrays = [_operand(rng, program, shape) for shape in program.shapes]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, program.specs, strict=True)
    ]
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), program.out, is_leaf=lambda x: isinstance(x, P)
    )
    results = [out] * REPEATS
    ours = program.function(jax_tilekern.matmul, jax_tilekern.ragged_dot)
    reference = "jnp" if program.peer else "one device"
    device = mesh.devices.flat[0]
    compiled = {"ours": compiled_program(repeated(ours, out), placed, results)}
    if program.peer:
        theirs = program.function(jnp.matmul, lax.ragged_dot)
        compiled["jnp"] = compiled_program(repeated(theirs, out), placed, results)
    sides = {name: functools.partial(function, *placed) for name, function in compiled.items()}
    if not program.peer:
        single = [jax.device_put(x, device) for x in arrays]
        sides[reference] = functools.partial(compiled_program(repeated(ours), single), *single)
    error = difference(*(sides[name]()[-1] for name in ("ours", reference)))
    times = interleaved(sides, seconds)
    if program.alone is not None:
        # Not among the others: after it, the clocks of the devices that waited are lower.
        local = [jax.device_put(_operand(rng, program, s), device) for s in program.alone]
        alone = functools.partial(compiled_program(repeated(ours), local), *local)
        times |= interleaved({"alone": alone}, seconds / 4)
    if program.added is not None:
        times |= interleaved({"all-reduce": _all_reduce(rng, program.added, mesh)}, seconds / 4)
    median = {name: statistics.median(own) * 1e6 for name, own in times.items()}
    share = 1 if program.peer else mesh.size
    ratios = [
        theirs / share / mine for theirs, mine in zip(times[reference], times["ours"], strict=True)
    ]
    ratio = statistics.median(ratios)
    # What the ratio would be if the local products took no more than their share of one device's
    # time and nothing but them and the all-reduce took any, one after the other.
    added = median.get("all-reduce", 0)
    bound = 1 if program.peer else median[reference] / (median[reference] + share * added)
    choices = jax_tilekern.explain(jax.jit(ours, out_shardings=out), *placed)
    return {
        "microseconds": median,
        "ratio": ratio,
        "bound": bound,
        "rounds": len(ratios),
        "difference": error,
        "same_program": program.peer and are_same(compiled["ours"], compiled["jnp"]),
        "calls": [
            {"call": c.call, "partition": c.partition, "result": c.result, "kernel": c.kernel}
            for c in choices
        ],
    } | ({} if error < 0.05 else {"error": f"results differ by {error}"})


def _all_reduce(rng: np.random.Generator, shape: tuple[int, ...], mesh: Mesh) -> Callable[[], Any]:
    """Return a program that adds up an array of this shape over the devices."""
    array = np.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    placed = [jax.device_put(array, NamedSharding(mesh, P()))]
    add = jax.shard_map(
        lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    return functools.partial(compiled_program(repeated(add), placed), *placed)


def _operand(rng: np.random.Generator, program: Program, shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        rows = program.shapes[0][0]
        return rng.multinomial(rows, np.full(shape[0], 1 / shape[0])).astype(np.int32)
    scale = 1 / math.sqrt(shape[-2]) if len(shape) == 3 else 1
    return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16)


def repeated(function: Callable[..., Any], out: Any = None) -> Callable[..., list[Any]]:
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


def compiled_program(function: Callable[..., Any], operands: list[Any], out: Any = None) -> Any:
    """Return a compiled program, which has run once."""
    jitted = jax.jit(function) if out is None else jax.jit(function, out_shardings=out)
    compiled = jitted.lower(*operands).compile()
    jax.block_until_ready(compiled(*operands))
    return compiled


def are_same(one: Any, other: Any) -> bool:
    """Return whether two compiled programs have the same instructions in the same order.

    Their times differ by chance then, or by what the autotuner chose for the products of each.
    """
    return _instructions(one) == _instructions(other)


def _instructions(compiled: Any) -> tuple[list[str], list[str]]:
    """Return the instructions of the main computation, and those of the others, without names."""
    text = re.sub(
        r", (metadata|frontend_attributes|sharding|backend_config)=.*", "", compiled.as_text()
    )
    text = re.sub(
        r"replica_groups=.*?(?=, [a-z_]+=)|, channel_id=\d+", "", re.sub(r"%[\w.-]+", "%", text)
    )
    others, _, main = text.partition("\nENTRY")
    lines = (line for line in others.splitlines() if " = " in line)
    return main.splitlines()[1:], sorted(line.replace("ROOT ", "") for line in lines)


def difference(ours: Any, theirs: Any) -> float:
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
