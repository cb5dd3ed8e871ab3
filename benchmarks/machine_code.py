"""Compare the machine code of the library's kernels between two checkouts, with no GPU.

    python -m benchmarks machine_code record before.json    # in one checkout
    python -m benchmarks machine_code record after.json     # in the other
    python -m benchmarks machine_code compare before.json after.json

``record`` lowers calls drawn at random, of samples and of the descriptions of every operation, for
several architectures, and writes a digest of the machine code of every kernel that NVRTC compiles
for them. ``compare`` lists the calls whose kernels differ, and fails if there are any: names, files
and line numbers may change between the checkouts, machine code may not. Both records need the same
NVRTC.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.draw import Draw
from benchmarks.rows import OURS, jitted
from benchmarks.samples import DRAWS, draw_sample
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.compilation.nvrtc import Nvrtc

HELP = "record and compare the machine code of kernels, with no GPU"

# Calls of an operation by architecture: of a sample, and of a description.
_COUNTS = {"sm_90a": (24, 3), "sm_80": (6, 1), "sm_89": (6, 1), "sm_120": (6, 1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    record = commands.add_parser("record", help="compile the sample of this checkout")
    record.add_argument("file", type=output_file)
    record.add_argument("--only", default="", help="calls whose label contains this text")
    compare = commands.add_parser("compare", help="compare two records")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if records differ."""
    if arguments.action == "record":
        # An empty disk cache: every kernel is compiled once, by the first call that needs it.
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            write_json(arguments.file, _record(arguments.only))
        return 0
    before, after = (json.loads(x.read_text()) for x in (arguments.before, arguments.after))
    return _compare(before, after)


def _record(only: str) -> dict[str, Any]:
    digests: list[str] = []
    compile_once = Nvrtc.compile

    def compile_and_digest(self: Any, source: str, **settings: Any) -> Any:
        output = compile_once(self, source, **settings)
        digests.append(kernel_digest(output.cubin, output.symbol))
        return output

    kernels = {}
    with mock.patch.object(Nvrtc, "compile", compile_and_digest), jax.enable_x64(True):
        for arch, counts in _COUNTS.items():
            for label, function, operands in _calls(*counts):
                label = f"{arch} {label}"
                if only not in label:
                    continue
                digests.clear()
                with jtk.gpu_target(arch), jtk.policy("kernels"):
                    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
                kernels[label] = sorted(digests)
                print(f"{label}: {len(digests)} new kernels", flush=True)
    found = [d for d in distributions() if d.metadata["Name"].startswith("nvidia-cuda-nvrtc")]
    versions = ", ".join(f"{d.metadata['Name']} {d.version}" for d in found)
    return {"nvrtc": versions, "kernels": kernels}


def _calls(sampled: int, described: int) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for operation in DRAWS:
        for row in draw_sample(operation, "gpu", sampled, 0).rows:
            yield f"{operation} {row.name}", jitted(row, OURS), row.structs
    for name, description in DESCRIPTIONS.items():
        for seed in range(0 if description.on_host else described):
            call = description.draw(Draw(np.random.default_rng(seed)))
            structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.operands]
            yield f"{name} {seed} {call}", lambda *xs, call=call: call.function(jtk, *xs), structs


def kernel_digest(cubin: bytes, symbol: str) -> str:
    """Return a digest of a kernel's machine code, which has neither names nor line numbers."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, names_index = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<I20xQQ", cubin, table + i * 64) for i in range(count)]
    wanted = f".text.{symbol}".encode() + b"\0"
    for name, offset, length in headers:
        if cubin.startswith(wanted, headers[names_index][1] + name):
            return hashlib.sha256(cubin[offset : offset + length]).hexdigest()[:16]
    raise ValueError(f"the cubin has no section of machine code for {symbol}")


def _compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    if before["nvrtc"] != after["nvrtc"]:
        print(f"the records are of different compilers: {before['nvrtc']}, {after['nvrtc']}")
        return 1
    labels = [*dict.fromkeys([*before["kernels"], *after["kernels"]])]
    different = [
        label for label in labels if before["kernels"].get(label) != after["kernels"].get(label)
    ]
    for label in different:
        print(f"{label}: {before['kernels'].get(label)} -> {after['kernels'].get(label)}")
    total = sum(len(kernels) for kernels in before["kernels"].values())
    print(
        f"{len(labels) - len(different)} of {len(labels)} calls have identical machine code "
        f"({total} kernels; {before['nvrtc']})"
    )
    return 1 if different else 0
