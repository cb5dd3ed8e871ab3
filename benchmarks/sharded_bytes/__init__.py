"""``sharded_bytes``: what programs with random shardings communicate, beside JAX's own.

    python -m benchmarks sharded_bytes --seed 7

The programs are compiled for a mesh of 2 x 4 CPU devices. A row of the table has the programs of a
kind: how many send more than 1.05 times JAX's bytes, the largest quotient of a program, and that of
the sums over all programs. Every result is compared with that of one device.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern
from benchmarks.errors import BenchmarkError
from benchmarks.sharded_bytes.collectives import Collective, collectives, total_bytes
from benchmarks.sharded_bytes.programs import KINDS, MESH, Program, drawn, operands

HELP = "compare the bytes of collectives with JAX's, of programs with random shardings"
SLACK = 1.05
_LARGEST_ERROR = 1e-3


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
    """Declare the command's arguments."""
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="only this kind")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--count", type=int, default=100, help="programs of a kind (default: %(default)s)"
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
    for kind in arguments.kind or KINDS:
        rows: dict[str, list[Compared]] = {}
        for index, program in enumerate(drawn(kind, arguments.seed, arguments.count)):
            with jax.default_device(devices[0]):
                compared = compare(mesh, program, np.random.default_rng([arguments.seed, index]))
            rows.setdefault(program.name, []).append(compared)
            wrong = compared.error > _LARGEST_ERROR
            right = right and not wrong
            if wrong or (arguments.verbose and compared.quotient > SLACK):
                print(_described(program, compared))
        for name, found in rows.items():
            print(_row(name, found), flush=True)
    return 0 if right else 1


def compare(mesh: Mesh, program: Program, rng: np.random.Generator) -> Compared:
    """Compile a program of ours and of JAX's, and compare our results with those of one device."""
    arrays = operands(rng, program)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, program.specs, strict=True)
    ]
    out = program.out and jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), program.out, is_leaf=lambda x: isinstance(x, P)
    )
    ours, theirs = (
        jax.jit(program.function(module), out_shardings=out).lower(*placed).compile()
        for module in (jax_tilekern, jnp)
    )
    wanted = jax.jit(program.function(jnp))(*arrays)
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
        f"{program.name}: {program.shapes}, {program.specs}, results {program.out}: "
        f"error {compared.error:.1e}, {compared.quotient:.2f} times JAX's bytes\n"
        f"  ours: {sent(compared.ours)}\n  JAX's: {sent(compared.theirs)}"
    )
