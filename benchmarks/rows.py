"""Calls of an operation as text, and the functions of each side that compute them.

``float8_e4m3fn to bfloat16 mk,nk->mn m64 n4096 k1024`` is a product of rows by rows: types (of the
operands, of the right one where that differs, a precision, and after ``to`` the result), the
dimensions of the operands and of the result in the order in which they lie, their sizes and, for
grouped GEMMs, how rows are split into groups. Products have batch ``b``, rows ``m``, columns ``n``,
contracted ``k`` and groups ``g``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern
from benchmarks.errors import BenchmarkError
from jax_tilekern.tuning.random_operands import Operands, random_array

# Results are an array or, of several, a tuple.
Function = Callable[..., Any]
# A gated layer has three products, and with its gradients nine.
_LAYER_OPERANDS = ("mk", "gkn", "gkn", "gnk", "g")
_LAYERS = {"mk": 3, "mk,gkn,gkn,gnk": 9}


@dataclass(frozen=True)
class Row:
    """A call.

    Attributes
    ----------
    name, group
        What tables call it, and the group that it belongs to.
    operation
        A key of :data:`OPERATIONS`.
    type, rhs_type, result, precision, lhs, rhs, out, sizes, split
        What its text has. ``rhs`` is ``None`` where there is one operand; several results are
        separated by commas.
    target
        By peer, the least ratio of its time to ours that is no loss.
    share
        The least share of the memory's bandwidth that is no loss.
    temporary
        The most temporary bytes that are no loss, if anything is said of them.
    """

    name: str
    operation: str
    type: str
    lhs: str
    rhs: str | None
    out: str
    sizes: Mapping[str, int] = field(hash=False)
    rhs_type: str | None = None
    result: str | None = None
    precision: str | None = None
    split: str | None = None
    group: str = ""
    target: Mapping[str, float] = field(default_factory=dict, hash=False)
    share: float = 0.0
    temporary: int | None = None

    @classmethod
    def of(cls, text: str, operation: str, **fields: Any) -> Row:
        """Return the row of a text, which is its name unless there is another.

        Raises
        ------
        BenchmarkError
            If the text is no call of the operation.
        """
        parts = re.fullmatch(
            r"(\w+)(?: (b?float\w+))?(?: (?!to )(\w+))?(?: to (\w+))? (\S*)->(\S*)((?: [a-z]\d+)*)"
            r"(?: ([a-z-]+))?",
            text,
        )
        if parts is None:
            raise BenchmarkError(f"{text!r} is no call: types operands->result sizes")
        kind, rhs_type, precision, result, operands, out, sizes, split = parts.groups()
        lhs, comma, rhs = operands.partition(",")
        two = OPERATIONS[operation].operands == 2
        row = cls(
            fields.pop("name", text), operation, kind, lhs, rhs if two or comma else None, out,
            {word[0]: int(word[1:]) for word in sizes.split()}, rhs_type, result, precision, split,
            **fields,
        )  # fmt: skip
        if set(row.sizes) != set("".join(row.operands)) or not set(out) <= {*row.sizes, ","}:
            raise BenchmarkError(f"{text!r}: each dimension of an operand needs a size")
        return row

    @property
    def text(self) -> str:
        """The call."""
        types = [self.type, self.rhs_type, self.precision, self.result and f"to {self.result}"]
        operands = f"{','.join(filter(None, (self.lhs, self.rhs)))}->{self.out}"
        sizes = (f"{name}{size}" for name, size in self.sizes.items())
        return " ".join(filter(None, (*types, operands, *sizes, self.split)))

    @property
    def is_layer(self) -> bool:
        """Whether it is a gated layer of grouped GEMMs, with or without its gradients."""
        return self.split is not None and (self.lhs, self.rhs) == ("mk", "gkn") and self.out != "mn"

    @property
    def operands(self) -> tuple[str, ...]:
        """The dimensions of each operand."""
        if self.is_layer:
            return _LAYER_OPERANDS
        found = (self.lhs,) if self.rhs is None else (self.lhs, self.rhs)
        return (*found, "g") if self.split else found

    @property
    def types(self) -> tuple[np.dtype[Any], ...]:
        """Types of the operands."""
        first, second = jnp.dtype(self.type), jnp.dtype(self.rhs_type or self.type)
        count = len(self.operands) - bool(self.split)
        sizes = [np.dtype(np.int32)] if self.split else []
        return (first, *[second] * (count - 1), *sizes)

    @property
    def results(self) -> tuple[str, ...]:
        """The dimensions of each result."""
        return tuple(self.out.split(","))

    @property
    def result_type(self) -> np.dtype[Any]:
        """Type of the results."""
        return jnp.dtype(self.result or self.type)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the operands."""
        return tuple(map(jax.ShapeDtypeStruct, map(self.shape, self.operands), self.types))

    @property
    def group_sizes(self) -> np.ndarray[Any, Any]:
        """How many rows each group of a grouped GEMM has, the same in every run."""
        rows, groups = self.sizes["m"], self.sizes["g"]
        rng = np.random.default_rng(0)
        if self.split == "balanced":
            return np.diff(np.arange(groups + 1) * rows // groups)
        if self.split == "multinomial":
            return rng.multinomial(rows, np.full(groups, 1 / groups))
        if self.split == "zipf":
            weights = 1 / np.arange(1, groups + 1)
            return rng.multinomial(rows, rng.permutation(weights / weights.sum()))
        if self.split == "one-hot":
            return np.where(np.arange(groups) == groups // 2, rows, 0)
        raise BenchmarkError(f"{self.text}: {self.split!r} is no split of rows")

    @property
    def flops(self) -> int:
        """Operations, a multiplication and an addition being two."""
        sizes = self.shape("mkn") if self.split else self.sizes.values()
        products = _LAYERS[self.out] if self.is_layer else 1
        return OPERATIONS[self.operation].flops * products * math.prod(sizes)

    @property
    def bytes(self) -> int:
        """Bytes of operands and results, which must move; weights of empty groups are not read."""
        arrays = [*zip(self.operands, self.types, strict=True)]
        total = sum(
            math.prod(self.shape(dims)) * dtype.itemsize
            for dims, dtype in (*arrays, *((dims, self.result_type) for dims in self.results))
        )
        if self.split:
            empty = int(sum(self.group_sizes == 0))
            weights = (x for x in arrays[:-1] if x[0][0] == "g")
            total -= sum(math.prod(self.shape(x[1:])) * t.itemsize for x, t in weights) * empty
        return total

    @property
    def call(self) -> Row:
        """The row without what the function that computes it does not depend on."""
        split = self.split and "balanced"
        return Row("", self.operation, self.type, self.lhs, self.rhs, self.out, {}, self.rhs_type,
                   self.result, self.precision, split)  # fmt: skip

    def group_slices(
        self, group: int, arrays: Sequence[Any], dimensions: Sequence[str]
    ) -> list[Any]:
        """Return the rows or matrices that arrays of these dimensions have of a group."""
        end = int(self.group_sizes[: group + 1].sum())
        rows = slice(end - int(self.group_sizes[group]), end)
        return [
            x[rows if names[0] == "m" else group]
            for x, names in zip(arrays, dimensions, strict=True)
        ]

    def shape(self, dimensions: str) -> tuple[int, ...]:
        """Return the sizes of ``dimensions``."""
        return tuple(self.sizes[x] for x in dimensions)

    def random_operands(self, seed: int = 0) -> Operands:
        """Return normal numbers, or integers of the whole range; a layer's weights are scaled."""
        structs = self.structs[:-1] if self.split else self.structs
        keys = jax.random.split(jax.random.key(seed), len(structs))
        arrays = [random_array(key, x.shape, x.dtype) for key, x in zip(keys, structs, strict=True)]
        if self.is_layer:
            arrays[1:] = map(_scaled, arrays[1:])
        return (*arrays, jnp.asarray(self.group_sizes, jnp.int32)) if self.split else (*arrays,)

    @property
    def is_wide(self) -> bool:
        """Whether the row has 64-bit types."""
        return np.zeros((), self.types[0]).real.itemsize == 8

    @contextlib.contextmanager
    def types_enabled(self) -> Iterator[None]:
        """Let JAX have 64-bit types inside the context if the row has them."""
        with jax.enable_x64(self.is_wide):
            yield


@jax.jit
def _scaled(weights: Array) -> Array:
    """Return weights over the root of the size that a product with them contracts."""
    return (weights / math.sqrt(weights.shape[1])).astype(weights.dtype)


# What is called: functions of a row and a side, which has functions by the names of this package's.


def _types(row: Row) -> dict[str, Any]:
    """Return a product's arguments besides the operands, of those that the row has."""
    precision = {"precision": row.precision} if row.precision else {}
    return precision | ({"preferred_element_type": row.result_type} if row.result else {})


def _product(row: Row, side: Any) -> Function:
    lhs, rhs = row.operands
    batch = [x for x in lhs if x in rhs and x != "k"]
    contracted = ((lhs.index("k"),), (rhs.index("k"),))
    numbers = contracted, (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch)))
    return lambda a, b: side.dot_general(a, b, numbers, **_types(row))


def _transpose(row: Row, side: Any) -> Function:
    return lambda x: side.transpose(x, tuple(map(row.lhs.index, row.out)))


def _sum(row: Row, side: Any) -> Function:
    axis = tuple(row.lhs.index(x) for x in row.lhs if x not in row.out)
    return lambda x: side.sum(x, axis, row.result_type if row.result else None)


def _vdot(row: Row, side: Any) -> Function:
    return _mapped(side.vdot, row.operands, row.out, batch=row.out)


def _matvec(row: Row, side: Any) -> Function:
    """Return a product with a vector on the right or, of a matrix with columns, on the left."""
    lhs, rhs = (dimensions.replace("b", "") for dimensions in row.operands)

    def product(a: Array, b: Array) -> Any:
        if "n" in rhs:
            return side.vecmat(a, b if rhs == "kn" else b.T, **_types(row))
        return side.matvec(a if lhs == "mk" else a.T, b, **_types(row))

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
    below = _mapped(function, inner, out.replace(outer, ""), rest)
    mapped: Function = jax.vmap(below, axes, out.index(outer))
    return mapped


FORWARD, ROW_GRADIENT, WEIGHT_GRADIENT = (
    lax.RaggedDotDimensionNumbers((contracted, ((), ())), (0,), groups)
    for contracted, groups in ((((1,), (1,)), (0,)), (((1,), (2,)), (0,)), (((0,), (0,)), ()))
)
_GROUPED = {"mn": FORWARD, "mk": ROW_GRADIENT, "gkn": WEIGHT_GRADIENT}


def _ragged(row: Row, side: Any) -> Function:
    """Return a grouped GEMM, a gated layer ``(silu(x @ w1) * (x @ w3)) @ w2``, or its gradients.

    Gradients are those of half the sum of the squares of the layer's result.
    """
    types = _types(row)
    if not row.is_layer:
        numbers = _GROUPED[row.out]
        return lambda lhs, rhs, sizes: side.ragged_dot_general(lhs, rhs, sizes, numbers, **types)

    def layer(x: Array, w1: Array, w3: Array, w2: Array, sizes: Array) -> Any:
        def product(x: Array, w: Array) -> Any:
            return side.ragged_dot_general(x, w, sizes, FORWARD, **types)

        return product(jax.nn.silu(product(x, w1)) * product(x, w3), w2)

    def gradients(x: Array, w1: Array, w3: Array, w2: Array, sizes: Array) -> Any:
        y, pullback = jax.vjp(functools.partial(layer, sizes=sizes), x, w1, w3, w2)
        return pullback(y)

    return layer if row.out == "mk" else gradients


# Sides.


class Functions:
    """Functions by the names of this package's."""

    def __init__(self, **functions: Function) -> None:
        vars(self).update(functions)


def _one_product(lhs: Array, rhs: Array, _: Array, numbers: Any, **types: Any) -> Array:
    """Return one product of the same operations, all rows by one group's weights."""
    (lhs_contracted, rhs_contracted), batch = numbers.dot_dimension_numbers
    grouped = len(numbers.rhs_group_dimensions)
    contracted = lhs_contracted, [axis - grouped for axis in rhs_contracted]
    return lax.dot_general(lhs, rhs, (contracted, batch), **types)


def dense_operands(operands: Sequence[Any]) -> Operands:
    """Return what one product takes in place of a grouped GEMM's operands."""
    return tuple(x[0] if x.ndim == 3 else x for x in operands)


@functools.cache
def tokamax() -> Any:
    """Return tokamax's functions; ModuleNotFoundError where it is not installed."""
    module: Any = importlib.import_module("tokamax")
    return Functions(ragged_dot_general=module.ragged_dot_general)


# Sides have functions by the same names that take the same arguments.
OURS: Any = jax_tilekern
XLA: Any = Functions(
    dot_general=lax.dot_general, transpose=jnp.transpose, sum=jnp.sum, vdot=jnp.vdot,
    matvec=jnp.matmul, vecmat=jnp.matmul, add=jnp.add,
)  # fmt: skip
DENSE: Any = Functions(ragged_dot_general=_one_product)


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
        ``call(row, side)`` returns the function of the operands.
    flops
        Operations for each combination of the row's dimensions.
    bandwidths
        The better of these is the memory's ceiling.
    arithmetic
        Whether arithmetic is a ceiling too.
    peer
        What every row is compared with.
    sides
        The functions of the peer, and of others that rows may be compared with besides.
    """

    about: str
    operands: int
    call: Callable[[Row, Any], Function]
    flops: int
    bandwidths: tuple[str, ...]
    arithmetic: bool = False
    peer: str = "XLA"
    sides: Mapping[str, Callable[[], Any]] = field(default_factory=lambda: {"XLA": lambda: XLA})


OPERATIONS = {
    "matmul": Operation("matrix products", 2, _product, 2, ("read", "copy"), arithmetic=True),
    "transpose": Operation("transposes", 1, _transpose, 0, ("copy",)),
    "vdot": Operation("dot products of vectors", 2, _vdot, 2, ("read",)),
    "sum": Operation("sums over dimensions", 1, _sum, 1, ("read",)),
    "matvec": Operation("products of matrices and vectors", 2, _matvec, 2, ("read",)),
    "add": Operation("sums of two arrays", 2, _add, 1, ("copy",)),
    "ragged_dot": Operation(
        "grouped GEMMs of mixtures of experts", 2, _ragged, 2, ("read", "copy"), arithmetic=True,
        peer="dense", sides={"dense": lambda: DENSE, "lax": lambda: lax, "tokamax": tokamax},
    ),
}  # fmt: skip


@functools.cache
def _jitted(call: Row, side: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(OPERATIONS[call.operation].call(call, side), compiler_options=dict(options))


def jitted(row: Row, side: Any, **options: Any) -> Any:
    """Return the function of a row by a side, jitted; rows of the same call share it."""
    return _jitted(row.call, side, tuple(options.items()))


def in_float64(row: Row) -> Row:
    """Return the row in the type of operands that were converted, whatever it asks for."""
    return replace(row, precision=None, result=None)
