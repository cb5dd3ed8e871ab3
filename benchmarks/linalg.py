"""Batches of small matrices, or large matrices, against ``jnp.linalg``, side by side.

    python -m benchmarks linalg --json benchmarks/results/<device>/linalg.json
    python -m benchmarks linalg --large --json benchmarks/results/<device>/linalg_large.json
    python -m benchmarks linalg --operations svd eigh qr --sizes 8 32 64x8 --types float32 float64

A row counts only if the results are as accurate as JAX's. Times are device times on a GPU, and wall
times on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.side_times import pairs, times_of_sides
from benchmarks.records.record import program_record, spreads
from jax_tilekern.cli.console import output_file, write_json

HELP = "time batches of small matrices, or large matrices, against jnp.linalg"

SIZES = (2, 3, 4, 8, 16, 32, 64)
OPERATIONS = ("inv", "solve", "cholesky", "svd", "eigh", "qr", "svdvals", "eigvalsh")
# Operations that take longer have smaller batches of matrices of more rows than this.
_DECOMPOSITIONS = ("svd", "eigh", "qr", "svdvals", "eigvalsh")
_RECTANGULAR = ("svd", "qr", "svdvals")
_SMALL = 16
_SAMPLED = 64


@dataclass(frozen=True)
class Case:
    """An operation on a batch of matrices.

    Attributes
    ----------
    operation
        One of ``OPERATIONS``.
    n
        Rows of a matrix.
    count
        Matrices of the batch.
    columns
        Right-hand sides of each for ``solve``, columns of a rectangular matrix for others, or 0.
    """

    operation: str
    n: int
    count: int
    columns: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the batch."""
        square = self.operation == "solve" or self.columns == 0
        return self.count, self.n, self.n if square else self.columns


LARGE = (
    Case("inv", 4096, 1),
    Case("inv", 8192, 1),
    Case("inv", 1000, 1),
    Case("solve", 1000, 1, 1),
    Case("solve", 4096, 1, 1),
    Case("solve", 4096, 1, 4096),
    Case("solve", 8192, 1, 4096),
    Case("cholesky", 1000, 1),
    Case("cholesky", 4096, 1),
    Case("cholesky", 8192, 1),
)


def batches(operations: Sequence[str], sizes: Sequence[tuple[int, int]], count: int) -> list[Case]:
    """Return operations on batches of matrices of each size that they have."""

    def case(name: str, rows: int, columns: int) -> Case:
        few = name in _DECOMPOSITIONS and max(rows, columns) > _SMALL
        return Case(name, rows, count // 10 if few else count, int(name == "solve") or columns)

    return [
        case(name, rows, columns)
        for name in operations
        for rows, columns in sizes
        if columns == 0 or name in _RECTANGULAR
    ]


def size(text: str) -> tuple[int, int]:
    """Return rows and columns of a size such as ``8`` or ``64x8``; 0 columns if it is square."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns or 0)


def operands(case: Case, dtype: Any) -> tuple[Any, ...]:
    """Return random matrices, definite ones for ``cholesky`` and ``eigh``, and right-hand sides."""
    name, n, count, columns = case.operation, case.n, case.count, case.columns
    keys = jax.random.split(jax.random.key(n), 2)
    a = jax.random.normal(keys[0], case.shape, dtype)
    if name in ("cholesky", "eigh", "eigvalsh"):
        # A product of the default precision might not be positive definite.
        gram = functools.partial(jnp.matmul, precision="highest")
        return (jax.jit(lambda a: gram(a, a.mT) / n + jnp.eye(n, dtype=dtype))(a),)
    if name == "solve":
        return a, jax.random.normal(keys[1], (count, n, columns), dtype)
    return (a,)


def errors(name: str, args: Sequence[Any], result: Any) -> float:
    """Return the largest residual of a sample, relative to what makes it up."""
    # The last ones are in a block of their own.
    chosen = _sampled(len(args[0]))
    a, x, *more = (np.asarray(v[chosen], np.float64) for v in (args[0], *jax.tree.leaves(result)))
    rows = _sampled(a.shape[-2])
    if name in ("svdvals", "eigvalsh"):
        exact = getattr(np.linalg, name)(a)
        return float((np.abs(x - exact).max(-1) / np.abs(exact).max(-1)).max())
    if name == "svd":
        k = more[0].shape[-1]
        left, right, expected = x[:, rows, :k] * more[0][:, None], more[1][:, :k], a[:, rows]
    elif name == "eigh":
        left, right, expected = more[0][:, rows] * x[:, None], more[0].swapaxes(-1, -2), a[:, rows]
    elif name == "qr":
        left, right, expected = x[:, rows], more[0], a[:, rows]
    elif name == "inv":
        left, right, expected = a[:, rows], x, np.eye(a.shape[-1])[rows]
    elif name == "solve":
        left, right, expected = a[:, rows], x, np.asarray(args[1][chosen], np.float64)[:, rows]
    else:
        left, right, expected = x[:, rows], x.swapaxes(-1, -2), a[:, rows]
    wrong, scale = left @ right - expected, np.abs(left) @ np.abs(right)
    return float((np.abs(wrong).max((-2, -1)) / scale.max((-2, -1))).max())


def _sampled(size: int) -> Any:
    return np.unique(np.r_[np.arange(0, size, max(1, size // _SAMPLED)), size - 1])


def row(case: Case, dtype: Any, seconds: float) -> dict[str, Any]:
    """Check and measure one operation on matrices of one size."""
    name = case.operation
    args = operands(case, dtype)
    ours, peer = (jax.jit(getattr(module, name)) for module in (jtk.linalg, jnp.linalg))
    results = {"ours": ours(*args), "peer": peer(*args)}
    wrong = {side: errors(name, args, result) for side, result in results.items()}
    moved = sum(x.nbytes for x in jax.tree.leaves((args, results["ours"])))
    choice, *inside = jtk.explain(getattr(jtk.linalg, name), *args)
    why = choice.reason if inside else f"XLA: {choice.reason}"
    found: dict[str, Any] = {
        **vars(case), "type": str(np.dtype(dtype)),
        "kernel": choice.kernel or why, "error": wrong,
        "bytes": moved,
    }  # fmt: skip
    # Either may lose a factor to the other's luck, but not an order of magnitude.
    if wrong["ours"] > 10 * wrong["peer"] + 1e-6:
        return found | {"failure": f"error {wrong['ours']:.1e}, of JAX's {wrong['peer']:.1e}"}
    sides = {"ours": functools.partial(ours, *args), "peer": functools.partial(peer, *args)}
    times, method = times_of_sides(sides, seconds)
    return found | {"method": method, "seconds": spreads(pairs(times.device, "peer"))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--count", type=int, default=100_000, help="matrices of a batch")
    parser.add_argument("--operations", choices=OPERATIONS, nargs="*", default=OPERATIONS[:6])
    parser.add_argument(
        "--sizes", type=size, nargs="*", default=[(n, 0) for n in SIZES], help="such as 8 or 64x8"
    )
    parser.add_argument("--large", action="store_true", help="large matrices instead of batches")
    parser.add_argument("--types", nargs="*", default=["float32"])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each row")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record; return how many rows are wrong."""
    record = program_record(arguments.command_line)
    rows: list[dict[str, Any]] = record["rows"]
    cases = (
        LARGE
        if arguments.large
        else batches(arguments.operations, arguments.sizes, arguments.count)
    )
    for dtype, case in itertools.product(arguments.types, cases):
        name, n = case.operation, "x".join(map(str, dict.fromkeys(case.shape[1:])))
        start = time.perf_counter()
        # The kernels are timed where the policy does not choose them, too.
        policy: Any = "kernels" if name in _DECOMPOSITIONS else "auto"
        with jax.enable_x64(dtype == "float64"), jtk.policy(policy):
            rows.append(row(case, np.dtype(dtype), arguments.seconds))
        last = rows[-1]
        if "failure" in last:
            print(f"{name:9} {n:5} {dtype}  {last['failure']}", flush=True)
        else:
            ours, peer, ratio = (last["seconds"][k]["median"] for k in ("ours", "peer", "ratio"))
            rate, took = last["bytes"] / ours / 1e9, time.perf_counter() - start
            wrong = " ".join(f"{last['error'][side]:.1e}" for side in ("ours", "peer"))
            print(
                f"{name:9} {n:5} {dtype}  ours {ours * 1e6:9.1f} us {rate:7.1f} GB/s  "
                f"jnp {peer * 1e6:9.1f} us  ratio {ratio:6.2f}  errors {wrong}  {last['kernel']}  "
                f"({took:.1f} s)",
                flush=True,
            )
        if arguments.json:
            write_json(arguments.json, record)
    return sum("failure" in x for x in rows)
