"""``linalg``: batches of small matrices, or large matrices, against ``jnp.linalg``."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

import jax_tilekern as jtk
from benchmarks.catalog.oracles import PEERS
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import KERNELS, Arrays, Errors, Program, random_arrays

_OPERATIONS = (
    "inv", "solve", "cholesky", "svd", "eigh", "qr", "svdvals", "eigvalsh", "det", "expm",
    "lu_factor", "triangular_solve",
)  # fmt: skip
# Operations that take longer have a tenth of the matrices above some rows, and the kernels are
# timed where the policy does not choose them, too.
_DECOMPOSITIONS, _SMALL = _OPERATIONS[3:8], 16
_DEFINITE, _RECTANGULAR = ("cholesky", "eigh", "eigvalsh"), ("svd", "qr", "svdvals")
_WITH_SIDES = ("solve", "triangular_solve")
_OPTIONS = {"triangular_solve": {"left_side": True, "lower": True}}
_SAMPLED = 64
# Rows, and right-hand sides of solve.
_LARGE = {
    "inv": [(4096, 0), (8192, 0), (1000, 0)],
    "solve": [(1000, 1), (4096, 1), (4096, 4096), (8192, 4096)],
    "cholesky": [(1000, 0), (4096, 0), (8192, 0)],
}


class MatrixCall(NamedTuple):
    """An operation on a batch of matrices.

    ``columns`` are the right-hand sides of ``solve``, or those of rectangular matrices, or 0.
    """

    operation: str
    n: int
    matrices: int
    columns: int
    dtype: str

    @property
    def name(self) -> str:
        columns = f", {self.columns} columns" if self.columns else ""
        return f"{self.operation} {self.matrices} of {self.n}{columns}, {self.dtype}"

    @property
    def has_sides(self) -> bool:
        return self.operation in _WITH_SIDES

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The types of the operands."""
        width = self.n if self.has_sides or self.columns == 0 else self.columns
        shapes = [(self.matrices, self.n, width)]
        shapes += [(self.matrices, self.n, self.columns)] if self.has_sides else []
        return tuple(jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes)

    def function(self, side: Any) -> Callable[..., Any]:
        """Return what computes it: the package's function, or that of ``PEERS``."""
        options = _OPTIONS.get(self.operation, {})
        return functools.partial(getattr(side.linalg, self.operation), **options)

    def types_enabled(self) -> Any:
        return jax.enable_x64(self.dtype == "float64")


def _operands(call: MatrixCall) -> Arrays:
    """Return random matrices, definite ones for some operations, and right-hand sides."""
    a, *sides = random_arrays(*((x.shape, x.dtype) for x in call.structs))
    if call.operation in _DEFINITE:
        # A product of the default precision might not be positive definite.
        gram = functools.partial(jnp.matmul, precision="highest")
        return (jax.jit(lambda a: gram(a, a.mT) / call.n + jnp.eye(call.n, dtype=a.dtype))(a),)
    return (a, *sides)


def _errors(name: str, args: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return each side's largest residual of a sample, relative to what makes it up."""
    return {side: _error(name, args, result) for side, result in results.items()}


def _error(name: str, args: Arrays, result: Any) -> float:
    # The last ones are in a block of their own.
    chosen = _sampled(len(args[0]))
    a, x, *more = (np.asarray(v[chosen], np.float64) for v in (args[0], *jax.tree.leaves(result)))
    if name in ("det", "expm"):
        exact = np.linalg.det(a) if name == "det" else scipy.linalg.expm(a)
        axes = tuple(range(1, exact.ndim))
        return float((np.abs(x - exact).max(axes) / np.abs(exact).max(axes)).max())
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
    elif name == "lu_factor":
        left, right, expected = _factors(x, more[0].astype(int), a)
    elif name in _WITH_SIDES:
        a = np.tril(a) if name == "triangular_solve" else a
        left, right, expected = a[:, rows], x, np.asarray(args[1][chosen], np.float64)[:, rows]
    else:
        left, right, expected = x[:, rows], x.swapaxes(-1, -2), a[:, rows]
    wrong, scale = left @ right - expected, np.abs(left) @ np.abs(right)
    return float((np.abs(wrong).max((-2, -1)) / scale.max((-2, -1))).max())


def _factors(factors: Any, pivots: Any, a: Any) -> tuple[Any, Any, Any]:
    """Return the lower and the upper factors of matrices, and the permuted matrices."""
    permuted, which = a.copy(), np.arange(len(a))
    for row in range(pivots.shape[-1]):
        other = pivots[:, row]
        swapped = permuted[which, other]
        permuted[which, other] = permuted[:, row]
        permuted[:, row] = swapped
    lower = np.tril(factors, -1) + np.eye(factors.shape[-1])
    return lower, np.triu(factors), permuted


def _sampled(size: int) -> Any:
    return np.unique(np.r_[np.arange(0, size, max(1, size // _SAMPLED)), size - 1])


def _calls(arguments: argparse.Namespace) -> Iterator[MatrixCall]:
    for dtype in arguments.types:
        if arguments.large:
            for name, sizes in _LARGE.items():
                yield from (MatrixCall(name, n, 1, columns, dtype) for n, columns in sizes)
            continue
        for name, count in itertools.product(arguments.operations, arguments.count):
            for rows, columns in arguments.sizes:
                if columns == 0 or name in _RECTANGULAR:
                    few = name in _DECOMPOSITIONS and max(rows, columns) > _SMALL
                    matrices = max(1, count // 10) if few else count
                    columns = int(name in _WITH_SIDES) or columns
                    yield MatrixCall(name, rows, matrices, columns, dtype)


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    for call in _calls(arguments):
        name, size = call.operation, f"{call.matrices:,} small matrices"
        if call.matrices == 1:
            size = "one large matrix" if arguments.large else "one small matrix"
        yield Program(
            call.name,
            functools.partial(_operands, call),
            {"ours": call.function(jtk), "XLA": call.function(PEERS)},
            functools.partial(_errors, name), f"`{name}` of {size}, {call.dtype}",
            fields={"matrices": list(call)},
            wide=call.dtype == "float64", margin=10,
            contexts={"ours": KERNELS if name in _DECOMPOSITIONS else nullcontext},
        )  # fmt: skip


def _size(text: str) -> tuple[int, int]:
    """Return rows and columns of a size such as ``8`` or ``64x8``; 0 columns if it is square."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns or 0)


COMMAND = ProgramsCommand(
    "batches of small matrices, or large matrices, against jnp.linalg", _programs, 0.3,
    count={"type": int, "nargs": "*", "default": [100_000], "help": "matrices of a batch"},
    operations={"choices": _OPERATIONS, "nargs": "*", "default": _OPERATIONS[:6]},
    sizes={
        "type": _size, "nargs": "*", "default": [(n, 0) for n in (2, 3, 4, 8, 16, 32, 64)],
        "help": "such as 8 or 64x8",
    },
    large={"action": "store_true", "help": "large matrices instead of batches"},
    types={"nargs": "*", "default": ["float32"]},
)  # fmt: skip
