"""Compare the machine code of the library's kernels between two checkouts, with no GPU.

    python -m benchmarks machine_code record before.json    # in one checkout
    python -m benchmarks machine_code record after.json     # in the other
    python -m benchmarks machine_code compare before.json after.json

``record`` lowers a sample of calls for several architectures and writes a digest of the machine
code of every kernel that NVRTC compiles for them. ``compare`` lists the calls whose kernels differ,
and fails if there are any: names, files and line numbers may change between the checkouts, machine
code may not. Both records need the same NVRTC.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
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
import jax.numpy as jnp

import jax_tilekern as jtk
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.compilation.nvrtc import Nvrtc
from jax_tilekern.plans.policy.setting import Policy

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


HELP = "record and compare the machine code of kernels, with no GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
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
        write_json(arguments.file, _record(arguments.only))
        return 0
    return _compare(
        json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text())
    )


def _record(only: str) -> dict[str, Any]:
    # An empty disk cache: every kernel is compiled once, by the first call that needs it.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        return _compiled_for_calls(only)


def _compiled_for_calls(only: str) -> dict[str, Any]:
    digests: list[str] = []
    compile_once = Nvrtc.compile

    def compile_and_digest(self: Any, source: str, **settings: Any) -> Any:
        output = compile_once(self, source, **settings)
        digests.append(kernel_digest(output.cubin, output.symbol))
        return output

    kernels = {}
    calls: list[tuple[Policy, Call]]
    with mock.patch.object(Nvrtc, "compile", compile_and_digest), jax.enable_x64(True):
        for arch in ("sm_90a", "sm_80", "sm_89", "sm_120"):
            calls = [("auto", call) for call in _calls(arch)]
            calls += [("kernels", call) for call in _calls_asked_for(arch)]
            for policy, (label, function, operands) in calls:
                label = f"{arch} {label}"
                if only not in label:
                    continue
                digests.clear()
                with jtk.gpu_target(arch), jtk.policy(policy):
                    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
                kernels[label] = sorted(digests)
                print(f"{label}: {len(digests)} new kernels", flush=True)
    return {"nvrtc": _nvrtc_version(), "kernels": kernels}


def _nvrtc_version() -> str:
    found = [d for d in distributions() if d.metadata["Name"].startswith("nvidia-cuda-nvrtc")]
    return ", ".join(f"{d.metadata['Name']} {d.version}" for d in found)


def _calls(arch: str) -> Iterator[Call]:
    yield from _products(arch)
    yield from _grouped_products(arch)
    yield from _other_operations(arch)
    yield from _lanes()


# Sizes that select different tiles, split-K, swapped operands and partial tiles.
_SIZES = (
    (4096, 4096, 4096),
    (8192, 1024, 512),
    (512, 512, 512),
    (128, 4096, 4096),
    (16, 4096, 8192),
    (64, 200, 16384),
    (1000, 1000, 1000),
    (300, 5001, 77),
    (1, 4096, 4096),
    (4096, 1, 2048),
)
_TYPES = (
    ("bfloat16", "bfloat16", None),
    ("float16", "float32", None),
    ("float32", "float32", "highest"),
    ("float32", "float32", None),
    ("float64", "float64", None),
    ("int8", "int32", None),
    ("float8_e4m3fn", "bfloat16", None),
    ("float8_e5m2", "float32", None),
)
# Major orders of lhs, rhs and the output, as subscripts of einsum.
_ORDERS = ("mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->nm")


def _products(arch: str) -> Iterator[Call]:
    every = [
        *((size, types, _ORDERS[0]) for size, types in itertools.product(_SIZES, _TYPES)),
        *((_SIZES[0], types, order) for types in _TYPES for order in _ORDERS[1:]),
        *((_SIZES[2], types, order) for types in _TYPES[:2] for order in _ORDERS[1:]),
    ]
    for number, (size, (dtype, out, precision), order) in enumerate(every):
        if arch != "sm_90a" and number % 5:
            continue
        sizes = dict(zip("mnk", size, strict=True))
        inputs, _ = order.split("->")
        operands = tuple(
            jax.ShapeDtypeStruct(tuple(sizes[x] for x in labels), jnp.dtype(dtype))
            for labels in inputs.split(",")
        )

        def product(
            a: Any, b: Any, order: str = order, precision: str | None = precision, out: str = out
        ) -> Any:
            return jtk.einsum(order, a, b, precision=precision, preferred_element_type=out)

        yield f"einsum {order} {dtype}->{out} {precision} {size}", product, operands

    batched = jax.ShapeDtypeStruct((6, 5, 640, 320), jnp.bfloat16)
    shared = jax.ShapeDtypeStruct((5, 320, 256), jnp.bfloat16)
    yield "einsum batched", lambda a, b: jtk.einsum("abmk,bkn->abmn", a, b), (batched, shared)


def _grouped_products(arch: str) -> Iterator[Call]:
    def loss(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return jtk.ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

    for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
        for rows, k, n, groups in ((4096, 1024, 2048, 8), (512, 2048, 768, 64), (77, 130, 33, 3)):
            operands = (
                jax.ShapeDtypeStruct((rows, k), dtype),
                jax.ShapeDtypeStruct((groups, k, n), dtype),
                jax.ShapeDtypeStruct((groups,), jnp.int32),
            )
            label = f"ragged_dot {dtype} {rows}x{k}x{n}x{groups}"
            yield label, jtk.ragged_dot, operands
            if "8" not in dtype:
                yield f"grad {label}", jax.grad(loss, (0, 1)), operands


def _other_operations(arch: str) -> Iterator[Call]:
    for dtype in ("float32", "bfloat16", "float64", "int8"):
        matrix = jax.ShapeDtypeStruct((4096, 4104), dtype)
        small = jax.ShapeDtypeStruct((1000, 3, 77), dtype)
        yield f"transpose {dtype}", jtk.transpose, (matrix,)
        yield f"transpose 3D {dtype}", lambda x: jtk.transpose(x, (0, 2, 1)), (small,)
        yield f"transpose reversed {dtype}", jtk.transpose, (small,)
        yield f"sum columns {dtype}", lambda x: jtk.sum(x, 0), (matrix,)
        yield f"add {dtype}", jtk.add, (matrix, matrix)
    for dtype in ("float32", "float64"):
        for n in (3, 8, 31, 64):
            matrices = jax.ShapeDtypeStruct((1000, n, n), dtype)
            yield f"inv {dtype} {n}", jtk.linalg.inv, (matrices,)
            yield f"cholesky {dtype} {n}", jtk.linalg.cholesky, (matrices,)
            right = jax.ShapeDtypeStruct((1000, n, 2), dtype)
            yield f"solve {dtype} {n}", jtk.linalg.solve, (matrices, right)


def _calls_asked_for(arch: str) -> Iterator[Call]:
    """Yield calls whose kernels ``policy("kernels")`` alone chooses."""
    for dtype in ("float32", "float64"):
        for n in (3, 8, 17, 32):
            matrices = jax.ShapeDtypeStruct((1000, n, n), dtype)
            for name in ("svd", "eigh", "qr"):
                yield f"{name} {dtype} {n}", getattr(jtk.linalg, name), (matrices,)
    if arch != "sm_90a":
        return
    for dtype in ("bfloat16", "float16", "float32"):
        for shape in ((512, 512), (2048, 2048), (8192, 8192), (16, 1024, 1024)):
            x = jax.ShapeDtypeStruct(shape, dtype)
            yield f"symmetric_matmul {dtype} {shape}", jtk.symmetric_matmul, (x,)
        for method in ("standard", "gram"):
            ns = functools.partial(jtk.linalg.newton_schulz, method=method)
            x = jax.ShapeDtypeStruct((4, 1024, 4096), dtype)
            yield f"newton_schulz {method} {dtype}", ns, (x,)


def _lanes() -> Iterator[Call]:
    def collatz(n: Any) -> Any:
        def step(state: Any) -> Any:
            n, count = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        return jax.lax.while_loop(lambda state: state[0] != 1, step, (n, 0))[1]

    def oscillator(y: Any, key: Any) -> Any:
        def step(_: Any, state: Any) -> Any:
            y, v = state
            return y + 0.01 * v, v - 0.01 * jnp.sin(y)

        noise = jax.random.normal(jax.random.wrap_key_data(key), dtype=y.dtype)
        return jax.lax.fori_loop(0, 100, step, (y + noise, jnp.zeros_like(y)))[0]

    y = jax.ShapeDtypeStruct((10_000,), jnp.float32)
    key = jax.ShapeDtypeStruct((10_000, 2), jnp.uint32)
    yield "kernel while", jtk.kernel(collatz), (jax.ShapeDtypeStruct((10_000,), jnp.int32),)
    yield "kernel scan", jtk.kernel(oscillator), (y, key)
    yield "kernel gradient", jax.grad(lambda y, key: jtk.kernel(oscillator)(y, key).sum()), (y, key)


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
