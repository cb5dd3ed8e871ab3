"""Products with epilogues against the same programs of ``jnp``: times, errors and memory.

python -m benchmarks fused --seconds 0.2 --json FILE
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.memory import temporaries
from benchmarks.measurement.side_times import Side, device_times
from benchmarks.records.record import program_record
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.tuning.wall_time import repeated, wall_seconds

HELP = "time products with epilogues against the same programs of jnp"

_ROUNDS = 4
_CHECKED = 64


@dataclass(frozen=True)
class Fused:
    """A product with an epilogue, in bfloat16.

    Attributes
    ----------
    name
        The row's name.
    epilogue
        ``epilogue(accumulator, *operands)``.
    m, n, k
        The product's sizes.
    operands
        Shape and type of each operand.
    gradient
        Whether the gradients of both factors are computed, and not the result alone.
    """

    name: str
    epilogue: Callable[..., Any]
    m: int
    n: int
    k: int
    operands: tuple[tuple[tuple[int, ...], Any], ...]
    gradient: bool = False

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the call on each side."""

        def ours(x: Any, w: Any, *operands: Any) -> Any:
            return jtk.matmul(x, w, epilogue=self.epilogue, operands=operands)

        def xla(x: Any, w: Any, *operands: Any) -> Any:
            return self.epilogue(jnp.matmul(x, w), *operands).astype(x.dtype)

        def unfused(x: Any, w: Any, *operands: Any) -> Any:
            return self.epilogue(jtk.matmul(x, w), *operands).astype(x.dtype)

        sides = {"ours": ours, "XLA": xla, "unfused": unfused}
        if not self.gradient:
            return sides
        return {
            name: jax.grad(lambda *xs, f=f: f(*xs).astype(jnp.float32).sum(), (0, 1))
            for name, f in sides.items()
        }

    def arrays(self) -> list[Any]:
        """Return the operands of a call."""
        shapes = (((self.m, self.k), jnp.bfloat16), ((self.k, self.n), jnp.bfloat16))
        keys = jax.random.split(jax.random.key(0), 2 + len(self.operands))
        return [
            jax.random.normal(key, shape, jnp.bfloat16) * (self.k**-0.5 if i == 1 else 1)
            if dtype == jnp.bfloat16
            else jax.random.bernoulli(key, 0.9, shape)
            for i, (key, (shape, dtype)) in enumerate(
                zip(keys, (*shapes, *self.operands), strict=True)
            )
        ]

    def error(self, result: Any, arrays: list[Any]) -> float:
        """Return the largest error of some rows, relative to the largest result."""
        x, w, *operands = arrays
        rows = slice(_CHECKED)
        exact = self.epilogue(
            jnp.matmul(
                x[rows].astype(jnp.float32),
                w.astype(jnp.float32),
                precision=jax.lax.Precision.HIGHEST,
            ),
            *(y[rows] if y.ndim == 2 and y.shape[0] > 1 else y for y in operands),
        )
        exact = np.asarray(exact, np.float64)
        found = np.asarray(result[rows], np.float64)
        return float(np.abs(found - exact).max() / np.abs(exact).max())


@dataclass(frozen=True)
class GatedLinear:
    """The value of a gated linear unit, in bfloat16.

    Attributes
    ----------
    name
        The row's name.
    m, n, k
        Rows, columns, and the contracted size.
    """

    name: str
    m: int
    n: int
    k: int

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the call on each side."""

        def xla(x: Any, gate: Any, up: Any) -> Any:
            return jax.nn.silu(x @ gate) * (x @ up)

        def two_kernels(x: Any, gate: Any, up: Any) -> Any:
            return jtk.matmul(x, gate, epilogue=_gate, operands=(jtk.matmul(x, up),))

        return {"ours": jtk.gated_linear, "XLA": xla, "two kernels": two_kernels}

    def arrays(self) -> list[Any]:
        """Return the operands of a call."""
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = (self.m, self.k), (self.k, self.n), (self.k, self.n)
        return [
            jax.random.normal(key, shape, jnp.bfloat16) * (self.k**-0.5 if i else 1)
            for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
        ]

    def error(self, result: Any, arrays: list[Any]) -> float:
        """Return the largest error of some rows, relative to the largest result."""
        x, gate, up = (a.astype(jnp.float32) for a in arrays)
        with jax.default_matmul_precision("highest"):
            exact = np.asarray(self.functions()["XLA"](x[:_CHECKED], gate, up), np.float64)
        found = np.asarray(result[:_CHECKED], np.float64)
        return float(np.abs(found - exact).max() / np.abs(exact).max())


@dataclass(frozen=True)
class SwiGlu:
    """The value and all gradients of a SwiGLU perceptron, in bfloat16.

    Attributes
    ----------
    name
        The row's name.
    m, n, k
        Tokens, hidden features and features.
    """

    name: str
    m: int
    n: int
    k: int

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the call on each side."""

        def xla(x: Any, gate: Any, up: Any, down: Any) -> Any:
            return (jax.nn.silu(x @ gate) * (x @ up)) @ down

        def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
            return jtk.matmul(jtk.gated_linear(x, gate, up), down)

        def value_and_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
            def call(cotangent: Any, *arrays: Any) -> Any:
                value, pullback = jax.vjp(f, *arrays)
                return value, *pullback(cotangent)

            return call

        return {
            "ours": jtk.fuse(value_and_gradients(xla)),
            "XLA": value_and_gradients(xla),
            "gated_linear": value_and_gradients(gated),
        }

    def arrays(self) -> list[Any]:
        """Return the operands of a call."""
        keys = jax.random.split(jax.random.key(0), 5)
        m, n, k = self.m, self.n, self.k
        shapes = (m, k), (m, k), (k, n), (k, n), (n, k)
        return [
            jax.random.normal(key, shape, jnp.bfloat16) * (shape[0] ** -0.5 if i > 1 else 1)
            for i, (key, shape) in enumerate(zip(keys, shapes, strict=True))
        ]

    def error(self, result: Any, arrays: list[Any]) -> float:
        """Return the largest error of some rows of x's gradient, relative to the largest one."""
        cotangent, x, *weights = (a.astype(jnp.float32) for a in arrays)
        rows = slice(_CHECKED)
        with jax.default_matmul_precision("highest"):
            exact = self.functions()["XLA"](cotangent[rows], x[rows], *weights)[1]
        found = np.asarray(result[1][rows], np.float64)
        return float(np.abs(found - exact).max() / np.abs(exact).max())


def _gelu_with_bias(accumulator: Any, bias: Any) -> Any:
    return jax.nn.gelu(accumulator + bias)


def _gate(accumulator: Any, up: Any) -> Any:
    return jax.nn.silu(accumulator) * up


def _residual_block(accumulator: Any, bias: Any, mask: Any, residual: Any) -> Any:
    return residual + jnp.where(mask, jax.nn.silu(accumulator + bias) / 0.9, 0)


def _bias(n: int) -> tuple[tuple[int, ...], Any]:
    return (n,), jnp.bfloat16


_Row = Fused | GatedLinear | SwiGlu


def _rows() -> list[_Row]:
    residual = (_bias(4096), ((8192, 4096), jnp.bool_), ((8192, 4096), jnp.bfloat16))
    return [
        Fused("gelu k=4096", _gelu_with_bias, 8192, 14336, 4096, (_bias(14336),)),
        Fused("gelu k=1024", _gelu_with_bias, 8192, 14336, 1024, (_bias(14336),)),
        Fused("relu k=1024", lambda y: jax.nn.relu(y), 8192, 14336, 1024, ()),
        Fused("silu k=4096", lambda y: jax.nn.silu(y), 8192, 4096, 4096, ()),
        Fused("residual, bias, mask, silu", _residual_block, 8192, 4096, 4096, residual),
        Fused("gelu, few rows", _gelu_with_bias, 64, 14336, 4096, (_bias(14336),)),
        Fused("gelu, split-K", _gelu_with_bias, 128, 1024, 16384, (_bias(1024),)),
        Fused("gelu gradient", _gelu_with_bias, 8192, 14336, 4096, (_bias(14336),), gradient=True),
        GatedLinear("gated linear k=4096", 8192, 14336, 4096),
        GatedLinear("gated linear k=1024", 8192, 14336, 1024),
        GatedLinear("gated linear, 2048 rows", 2048, 14336, 4096),
        GatedLinear("gated linear, few rows", 64, 14336, 4096),
        SwiGlu("SwiGLU gradient", 8192, 14336, 4096),
    ]


def measured(row: _Row, seconds: float) -> dict[str, Any]:
    """Measure a row on every side."""
    arrays = row.arrays()
    programs = {name: jax.jit(f).lower(*arrays).compile() for name, f in row.functions().items()}
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(program, *arrays) for name, program in programs.items()
    }
    results = {name: run() for name, run in runs.items()}
    wrong = (
        {}
        if isinstance(row, Fused) and row.gradient
        else {name: row.error(result, arrays) for name, result in results.items()}
    )
    del results
    if jax.default_backend() == "cpu":
        times = {name: [wall_seconds(run) for _ in range(_ROUNDS)] for name, run in runs.items()}
    else:
        sides = {}
        for name, run in runs.items():
            call = min(wall_seconds(functools.partial(repeated, run, 2)) / 2 for _ in range(2))
            calls = max(1, int(seconds / (len(runs) * _ROUNDS * call)))
            sides[name] = Side(run, calls, _ROUNDS)
        times = {name: list(found) for name, found in device_times(sides).device.items()}
    medians = {name: float(np.median(found)) for name, found in times.items()}
    kernels = [
        f"{choice.kernel or '-'} {choice.reason}"
        for choice in jtk.explain(row.functions()["ours"], *arrays)
    ]
    return {
        "name": row.name,
        "sizes": [row.m, row.n, row.k],
        "seconds": medians,
        "error": wrong,
        "ratio": medians["XLA"] / medians["ours"],
        "temporaries": {name: temporaries(program) for name, program in programs.items()},
        "kernels": kernels,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--rows", metavar="PATTERN", default="*", help="rows by their names")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each row")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record."""
    record = program_record(arguments.command_line)
    rows = record["rows"]
    for row in _rows():
        if not fnmatch.fnmatch(row.name, arguments.rows):
            continue
        rows.append(measured(row, arguments.seconds))
        latest = rows[-1]
        times = ", ".join(f"{name} {t * 1e6:.0f} us" for name, t in latest["seconds"].items())
        wrong = ", ".join(f"{name} {e:.1e}" for name, e in latest["error"].items())
        memory = ", ".join(f"{x} {n / 2**20:.0f}" for x, n in latest["temporaries"].items())
        print(f"{row.name:28} {latest['ratio']:.3f}  {times}; errors {wrong}; MiB of temporaries "
              f"{memory}", flush=True)  # fmt: skip
        for kernel in latest["kernels"]:
            print(f"    {kernel}", flush=True)
        if arguments.json:
            write_json(arguments.json, record)
    return 0
