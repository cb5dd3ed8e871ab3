"""The operations that ``bench`` compares: how a row is called, and what bounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jax_tilekern
from benchmarks.calls import ragged_by_blocks, ragged_calls
from benchmarks.calls.ragged_row import RaggedRow
from benchmarks.calls.row import Row
from jax_tilekern.tuning.random_operands import Operands

# Results are an array or, of several, a tuple.
Function = Callable[..., Any]

# Sides have functions by the same names that take the same arguments.
OURS: Any = jax_tilekern


class XLA:
    """JAX's own functions."""

    dot_general = lax.dot_general
    transpose = jnp.transpose
    sum = jnp.sum
    vdot = jnp.vdot
    matvec = jnp.matmul
    vecmat = jnp.matmul
    add = jnp.add


@dataclass(frozen=True)
class Peer:
    """What ours is compared with.

    Attributes
    ----------
    name
        What tables call it.
    side
        Returns its functions; raises :class:`ModuleNotFoundError` where they are not installed.
    operands
        Returns what it takes in place of a row's operands.
    """

    name: str
    side: Callable[[], Any]
    operands: Callable[[Operands], Operands] = lambda operands: operands


@dataclass(frozen=True)
class Operation:
    """What the rows of an operation have in common.

    Attributes
    ----------
    about
        In a few words.
    operands
        How many of ``lhs`` and ``rhs`` a row has.
    call
        ``call(row, side)`` returns the function of the operands that computes a row by the
        functions of a side, :data:`OURS` or a peer's.
    flops
        Operations for each combination of the row's dimensions.
    bandwidths
        The better of these, of which a record has the bytes per second, is the memory's ceiling.
    bound_by_arithmetic
        Whether arithmetic is a ceiling too.
    row
        The kind of its rows.
    peer
        What every row is compared with.
    others
        What rows may be compared with besides, by name.
    judge
        The side that says what is right, where it is not the peer: results are compared with its
        own as a whole, since they have no terms to sample.
    """

    about: str
    operands: int
    call: Callable[[Any, Any], Function]
    flops: int
    bandwidths: tuple[str, ...]
    bound_by_arithmetic: bool = False
    row: type[Row] = Row
    peer: Peer = Peer("XLA", lambda: XLA)
    others: Mapping[str, Peer] = field(default_factory=dict)
    judge: Any = None


def flops(row: Row) -> int:
    """Return a row's operations, counting a multiplication and an addition as two."""
    return OPERATIONS[row.operation].flops * row.combinations


def _product(row: Row, side: Any) -> Function:
    lhs, rhs = row.operands
    batch = [x for x in lhs if x in rhs and x != "k"]
    contracted = ((lhs.index("k"),), (rhs.index("k"),))
    numbers = contracted, (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch)))
    return lambda a, b: side.dot_general(a, b, numbers, **_types(row))


def _types(row: Row) -> dict[str, Any]:
    """Return a product's arguments besides the operands, of those that the row has."""
    precision = {"precision": row.precision} if row.precision else {}
    return precision | ({"preferred_element_type": row.result_type} if row.result else {})


def _transpose(row: Row, side: Any) -> Function:
    axes = tuple(map(row.lhs.index, row.out))
    return lambda x: side.transpose(x, axes)


def _sum(row: Row, side: Any) -> Function:
    axis = tuple(row.lhs.index(x) for x in row.lhs if x not in row.out)
    dtype = row.result_type if row.result else None
    return lambda x: side.sum(x, axis, dtype)


def _vdot(row: Row, side: Any) -> Function:
    return _mapped(side.vdot, row.operands, row.out, batch=row.out)


def _matvec(row: Row, side: Any) -> Function:
    """Return a product with a vector on the right or, of a matrix with columns, on the left."""
    lhs, rhs = (dimensions.replace("b", "") for dimensions in row.operands)

    def product(a: Array, b: Array) -> Array:
        if "n" in rhs:
            return side.vecmat(a, b if rhs == "kn" else b.T, **_types(row))  # type: ignore[no-any-return]
        return side.matvec(a if lhs == "mk" else a.T, b, **_types(row))  # type: ignore[no-any-return]

    return _mapped(product, row.operands, row.out, batch="b" if "b" in row.out else "")


def _add(row: Row, side: Any) -> Function:
    def broadcast(x: Array, dimensions: str) -> Array:
        return jnp.expand_dims(x, [i for i, d in enumerate(row.out) if d not in dimensions])

    return lambda x, y: side.add(broadcast(x, row.lhs), broadcast(y, row.operands[1]))


def _mapped(function: Function, operands: Sequence[str], out: str, batch: str) -> Function:
    """Map a function over the dimensions ``batch`` of its operands and of its result."""
    if not batch:
        return function
    outer, rest = batch[0], batch[1:]
    inner = [x.replace(outer, "") for x in operands]
    axes = tuple(x.index(outer) if outer in x else None for x in operands)
    mapped: Function = jax.vmap(
        _mapped(function, inner, out.replace(outer, ""), rest), axes, out.index(outer)
    )
    return mapped


OPERATIONS = {
    "matmul": Operation("matrix products", 2, _product, 2, ("read", "copy"), True),
    "transpose": Operation("transposes", 1, _transpose, 0, ("copy",)),
    "vdot": Operation("dot products of vectors", 2, _vdot, 2, ("read",)),
    "sum": Operation("sums over dimensions", 1, _sum, 1, ("read",)),
    "matvec": Operation("products of matrices and vectors", 2, _matvec, 2, ("read",)),
    "add": Operation("sums of two arrays", 2, _add, 1, ("copy",)),
    "ragged_dot": Operation(
        "grouped GEMMs of mixtures of experts", 2, ragged_calls.ragged, 2, ("read", "copy"),
        bound_by_arithmetic=True,
        row=RaggedRow,
        peer=Peer("dense", lambda: ragged_calls.DENSE, ragged_calls.dense_operands),
        others={
            "lax": Peer("lax", lambda: lax),
            "tokamax": Peer("tokamax", ragged_calls.tokamax),
            "tokamax triton": Peer("tokamax triton", ragged_calls.tokamax_triton),
        },
        judge=ragged_by_blocks.BY_BLOCKS,
    ),
}  # fmt: skip
