"""``sharded_bytes``: what programs with random shardings communicate, beside JAX's own.

    python -m benchmarks sharded_bytes --seed 7

The programs are calls that ``benchmarks/catalog`` draws, compiled for a mesh of 2 x 4 CPU devices.
A row of the table has the programs of an operation: how many send more than 1.05 times JAX's bytes,
the largest quotient of a program, and that of the sums over all programs. Every result is compared
with that of one device.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.bounds import F32
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import ORACLES
from benchmarks.errors import BenchmarkError

HELP = "compare the bytes of collectives with JAX's, of programs with random shardings"
SLACK = 1.05
MESH = {"d": 2, "m": 4}
_LARGEST_ERROR = 1e-3
# By operation, an eighth of the largest sizes. Kernels solve systems of small matrices.
OPERATIONS = {
    "matmul": 16, "einsum": 16, "dot_general": 16, "linalg.solve": 2, "linalg.solve_triangular": 2
}  # fmt: skip

# What a compiled program of several devices communicates.

_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


class Collective(NamedTuple):
    """One collective of a compiled program, and the bytes that each device sends for it."""

    kind: str
    bytes_sent: float


def collectives(compiled: Any) -> list[Collective]:
    """Return the collectives of a program with what each device sends, by ring algorithms."""
    found = []
    for line in compiled.as_text().splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            types = match[1]
            if match[3] and (match[2] != "all-reduce" or types.startswith("((")):
                # The start of an asynchronous one has operands, results and what else it needs.
                _, types, *_ = _elements(types)
            size, group = _bytes(types), _group_size(line)
            share = (group - 1) / group
            factor = {
                "all-gather": share,
                "all-reduce": 2 * share,
                "reduce-scatter": group - 1,
                "all-to-all": share,
                "collective-permute": 1,
            }[match[2]]
            found.append(Collective(match[2], factor * size))
    return found


def bytes_sent(compiled: Any) -> float:
    """Return the bytes that each device sends for all collectives of a program."""
    return total_bytes(collectives(compiled))


def total_bytes(found: Iterable[Collective]) -> float:
    """Return the bytes that each device sends for some collectives."""
    return sum(collective.bytes_sent for collective in found)


def _elements(tuple_type: str) -> list[str]:
    """Return the types in a tuple's type."""
    elements, depth = [""], 0
    for character in tuple_type[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bytes(arrays: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(arrays):
        bits = _BITS.get(kind) or int(re.sub(r"\D+", "", kind.split("e")[0]) or 8)
        total += bits // 8 * math.prod(int(size) for size in dims.split(",") if size)
    return total


def _group_size(line: str) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 8


# Programs with random shapes and shardings.


class Program(NamedTuple):
    """A call of an operation, or its gradient.

    Attributes
    ----------
    name
        Of the operation, and whether it is its gradient.
    function
        ``function(namespace, *operands)``, of a namespace of functions.
    operands
        Random numbers.
    specs
        The sharding of each operand.
    out
        The sharding of the results, or ``None`` if XLA chooses it.
    """

    name: str
    function: Callable[..., Any]
    operands: Sequence[Any]
    specs: tuple[P, ...]
    out: Any


def drawn(operation: str, seed: int, count: int) -> Iterator[Program]:
    """Yield calls of an operation, each forward and with its gradients."""
    for index in range(count):
        rng = np.random.default_rng([seed, index, *operation.encode()])
        draw: Any = Draw(rng, F32, scale=OPERATIONS[operation])
        call = DESCRIPTIONS[operation].draw(draw)
        operands = [draw.value(x, special=False) for x in call.operands]
        specs = tuple(_random_spec(rng, x.shape) for x in operands)
        result = jax.eval_shape(functools.partial(call.function, ORACLES), *operands)
        out = jax.tree.map(lambda x, rng=rng: _random_spec(rng, x.shape), result)
        # Half of the programs state the shardings of their results: gradients have the operands'.
        stated = bool(rng.integers(2))
        yield Program(f"`{operation}`, forward", call.function, operands, specs,
                      out if stated else None)  # fmt: skip
        gradients = functools.partial(_gradients, call.function)
        yield Program(f"`{operation}`, gradients", gradients, operands, specs,
                      specs if stated else None)  # fmt: skip


def _gradients(function: Callable[..., Any], namespace: Any, *operands: Any) -> Any:
    def loss(*operands: Any) -> Any:
        results = jax.tree.leaves(function(namespace, *operands))
        return sum(jnp.square(x).sum() for x in results)

    return jax.grad(loss, tuple(range(len(operands))))(*operands)


def _random_spec(rng: np.random.Generator, shape: tuple[int, ...]) -> P:
    """Return a sharding: each mesh axis splits a dimension that it divides, or none."""
    axes: list[list[str]] = [[] for _ in shape]
    for axis in rng.permutation(list(MESH)):
        sizes = [
            size // math.prod(MESH[a] for a in own) for size, own in zip(shape, axes, strict=True)
        ]
        able = [i for i, n in enumerate(sizes) if n % MESH[axis] == 0]
        choice = rng.integers(-1, len(able))
        if choice >= 0:
            axes[able[choice]].append(str(axis))
    return P(*(tuple(own) or None for own in axes))


# The command.


class Compared(NamedTuple):
    """A program of ours beside JAX's own, both compiled.

    Attributes
    ----------
    ours, theirs
        The collectives of the compiled programs.
    error
        The largest difference of our results from those of one device, relative to the largest
        element.
    """

    ours: Sequence[Collective]
    theirs: Sequence[Collective]
    error: float

    @property
    def quotient(self) -> float:
        """Our bytes over JAX's."""
        return _quotient(total_bytes(self.ours), total_bytes(self.theirs))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operation", choices=tuple(OPERATIONS), action="append", help="only this one"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--count", type=int, default=100, help="programs of an operation (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="show every program that sends more")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if results are wrong."""
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    devices = jax.devices("cpu")[: math.prod(MESH.values())]
    if len(devices) < math.prod(MESH.values()):
        raise BenchmarkError(f"{len(devices)} CPU devices, where {dict(MESH)} are needed")
    mesh = jax.make_mesh(
        tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH), devices=devices
    )
    right = True
    print("| programs | above 1.05 | largest | sum of bytes |\n|---|---|---|---|")
    for operation in arguments.operation or OPERATIONS:
        rows: dict[str, list[Compared]] = {}
        for program in drawn(operation, arguments.seed, arguments.count):
            with jax.default_device(devices[0]):
                compared = compare(mesh, program)
            rows.setdefault(program.name, []).append(compared)
            wrong = compared.error > _LARGEST_ERROR
            right = right and not wrong
            if wrong or (arguments.verbose and compared.quotient > SLACK):
                print(_described(program, compared))
        for name, found in rows.items():
            print(_row(name, found), flush=True)
    return 0 if right else 1


def compare(mesh: Mesh, program: Program) -> Compared:
    """Compile a program of ours and of JAX's, and compare our results with those of one device."""
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(program.operands, program.specs, strict=True)
    ]
    # None, which leaves the choice to XLA, has no leaves.
    out = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), program.out, is_leaf=lambda x: isinstance(x, P)
    )
    ours, theirs = (
        jax.jit(functools.partial(program.function, namespace), out_shardings=out)
        .lower(*placed)
        .compile()
        for namespace in (jax_tilekern, ORACLES)
    )
    wanted = jax.jit(functools.partial(program.function, ORACLES))(*program.operands)
    pairs = zip(jax.tree.leaves(ours(*placed)), jax.tree.leaves(wanted), strict=True)
    error = max(_difference(np.asarray(x), np.asarray(y)) for x, y in pairs)
    return Compared(collectives(ours), collectives(theirs), error)


def _difference(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    return float(np.abs(x - y).max() / max(1.0, np.abs(y).max()))


def _quotient(ours: float, theirs: float) -> float:
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


def _row(name: str, found: Sequence[Compared]) -> str:
    quotients = [x.quotient for x in found]
    ours, theirs = (
        sum(map(total_bytes, side)) for side in zip(*(x[:2] for x in found), strict=True)
    )
    total = _quotient(ours, theirs)
    above = sum(x > SLACK for x in quotients)
    return f"| {name} | {above} of {len(found)} | {max(quotients):.2f} | {total:.2f} |"


def _described(program: Program, compared: Compared) -> str:
    def sent(found: Sequence[Collective]) -> str:
        return ", ".join(f"{kind} {size:.0f}" for kind, size in found)

    return (
        f"{program.name}: {[x.shape for x in program.operands]}, {program.specs}, results "
        f"{program.out}: "
        f"error {compared.error:.1e}, {compared.quotient:.2f} times JAX's bytes\n"
        f"  ours: {sent(compared.ours)}\n  JAX's: {sent(compared.theirs)}"
    )
