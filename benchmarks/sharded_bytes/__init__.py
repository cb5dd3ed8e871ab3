"""``sharded_bytes``: what programs with random shardings communicate, beside JAX's own."""

from __future__ import annotations

import argparse
import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern
from benchmarks.sharded_bytes.collectives import bytes_sent, collectives
from benchmarks.sharded_bytes.programs import KINDS, MESH, Program, drawn, operands

HELP = "compare the bytes of collectives with JAX's, of programs with random shardings"
_SLACK = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="only this kind")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--count", type=int, default=100, help="programs of a kind (default: %(default)s)"
    )
    parser.add_argument("--verbose", action="store_true", help="show every program that sends more")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if values differ."""
    jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices("cpu")
    mesh = jax.make_mesh(
        tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2, devices=devices
    )
    wrong = 0
    print("| programs | above 1.05 | largest | sum of bytes |\n|---|---|---|---|")
    for kind in arguments.kind or KINDS:
        rows: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for index, program in enumerate(drawn(kind, arguments.seed, arguments.count)):
            ours, theirs, error = compared(mesh, program, arguments.seed)
            sent = bytes_sent(ours), bytes_sent(theirs)
            rows[program.name].append(sent)
            wrong += error > 1e-3
            if error > 1e-3 or (arguments.verbose and sent[0] > _SLACK * sent[1]):
                print(json.dumps({"index": index, "name": program.name, "shapes": program.shapes, "specs": str(program.specs), "out": str(program.out), "error": float(error), "ours": sent[0], "theirs": sent[1]}), [tuple(x) for x in collectives(ours)], [tuple(x) for x in collectives(theirs)], flush=True)
        for name, found in rows.items():
            ratios = [ratio(*x) for x in found]
            above = sum(x > _SLACK for x in ratios)
            total = ratio(*(sum(x) for x in zip(*found, strict=True)))
            print(f"| {name} | {above} of {len(found)} | {max(ratios):.2f} | {total:.2f} |", flush=True)
    return 1 if wrong else 0


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("inf") if ours else 1.0


def compared(mesh: Mesh, program: Program, seed: int) -> tuple[Any, Any, float]:
    """Compile a program of ours and of JAX's, and compare ours with the whole one of JAX."""
    arrays = operands(np.random.default_rng(seed), program)
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
    error = max(
        float(np.abs(np.asarray(x) - y).max() / np.abs(y).max())
        for x, y in zip(jax.tree.leaves(ours(*placed)), jax.tree.leaves(jax.device_get(wanted)), strict=True)
    )
    return ours, theirs, error
