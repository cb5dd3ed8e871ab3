"""A sample: a suite whose rows are drawn at random, each by the seed and its index alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.calls.operations import OPERATIONS, flops
from benchmarks.calls.row import Row
from benchmarks.samples import arrays, grouped, products, vectors
from benchmarks.samples.draw import Draw
from benchmarks.suites.suite import Suite, SuiteError, product_out

# A row loses below this, unless its draw says otherwise.
TARGET = 0.97
_GIB = 1 << 30
# Calls that exceed a limit are drawn again, and few do so often.
_ATTEMPTS = 1000

DRAWS: Mapping[str, Callable[[Draw], dict[str, Any]]] = {
    "matmul": products.matmul,
    "matvec": vectors.matvec,
    "vdot": vectors.vdot,
    "sum": arrays.sum_over,
    "transpose": arrays.transpose,
    "add": arrays.add,
    "ragged_dot": grouped.ragged_dot,
    "decode": products.decode,
}
# The operation of draws with another name.
_OPERATIONS = {"decode": "matmul"}


@dataclass(frozen=True)
class Limits:
    """What a row may take, so that it is quick.

    Attributes
    ----------
    bytes
        Of operands and results.
    operations
        Of a product of float32, or of bfloat16 on a GPU.
    """

    bytes: int
    operations: float


_LIMITS = {"gpu": Limits(3 * _GIB // 2, 2e12), "cpu": Limits(_GIB // 16, 2e9)}
# How many operations of these types take about as long as one of the limit's.
_SLOWNESS = {
    ("gpu", "float32"): 2.0,
    ("gpu", "float64"): 15.0,
    ("cpu", "float64"): 2.0,
    ("cpu", "bfloat16"): 4.0,
    ("cpu", "float16"): 4.0,
    ("cpu", "int8"): 4.0,
    ("cpu", "float8_e4m3fn"): 4.0,
}


def purpose(seed: int) -> str:
    """Return what a seed is for: even ones for fitting the library's choices, odd for reporting."""
    return "report" if seed % 2 else "fit"


def draw_sample(operation: str, device: str, count: int, seed: int) -> Suite:
    """Draw calls of an operation.

    The first rows of a larger sample of the same seed are the same.

    Parameters
    ----------
    operation
        A key of :data:`DRAWS`.
    device
        ``"cpu"`` or ``"gpu"``.
    count
        How many.
    seed
        Which: an integer of at least 0.

    Raises
    ------
    SuiteError
        If there is no distribution of the operation's calls, or an argument is out of range.
    """
    if operation not in DRAWS:
        raise SuiteError(f"{operation} has no samples; {', '.join(DRAWS)} have")
    if count < 1 or seed < 0:
        raise SuiteError(f"a sample has at least 1 row and a seed of at least 0: {count}, {seed}")
    rows = tuple(_row(operation, device, seed, index) for index in range(count))
    name = f"{operation}-{device}-sample-{seed}"
    about = f"Calls of {operation} drawn at random"
    return Suite(name, about, _OPERATIONS.get(operation, operation), rows, {})


def _row(operation: str, device: str, seed: int, index: int) -> Row:
    draw = Draw(seed, index, device)
    for _ in range(_ATTEMPTS):
        entry = {"rhs": None, "target": TARGET} | DRAWS[operation](draw)
        if "out" not in entry:
            entry["out"] = product_out(entry["lhs"], entry["rhs"])
        entry["name"] = f"{index}: {_described(entry)}"
        drawn = _OPERATIONS.get(operation, operation)
        row = OPERATIONS[drawn].row(operation=drawn, **entry)
        if _is_quick(row, _LIMITS[device], device):
            return row
    raise SuiteError(f"row {index} of seed {seed} of {operation} exceeds every limit")


def _is_quick(row: Row, limits: Limits, device: str) -> bool:
    slowness = _SLOWNESS.get((device, row.type), 1.0)
    return row.bytes <= limits.bytes and flops(row) * slowness <= limits.operations


def _described(entry: Mapping[str, Any]) -> str:
    """Return a call in short, such as ``bfloat16 bmk,bkn->bmn b48 m384 n352 k416``."""
    types = [entry["type"], entry.get("rhs_type"), entry.get("precision")]
    if entry.get("result"):
        types.append(f"to {entry['result']}")
    operands = ",".join(filter(None, (entry["lhs"], entry["rhs"])))
    sizes = (f"{name}{size}" for name, size in entry["sizes"].items())
    split = [entry["split"]] if "split" in entry else []
    return " ".join([*filter(None, types), f"{operands}->{entry['out']}", *sizes, *split])
