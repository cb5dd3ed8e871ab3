"""Random calls of the public operations at the defaults, compared with wider arithmetic.

``python tests/fuzz.py --calls 1000 --seed 7`` prints totals for each operation and the worst
calls. The bound on each element's error follows from the arithmetic that ``docs/design.md``
promises: products of 16-bit and 8-bit types are exact, sums are in float32 at least, and the result
is rounded once. ``unit * terms * sum(|a| |b|)`` bounds the error of a sum in any order.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import string
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import ml_dtypes
import numpy as np
import scipy.linalg
from jax import lax
from numerics import (
    F8E4,
    F8E5,
    FP8_SUM_ROUNDOFF,
    TF32_ROUNDOFF,
    UNIT_ROUNDOFF,
    on_gpu,
    supported,
)

import jax_tilekern as jtk

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F64, F16 = (np.dtype(t) for t in (np.float32, np.float64, np.float16))
FLOATS = tuple(np.dtype(t) for t in (F32, BF16, F16, F64))
FP8 = tuple(np.dtype(t) for t in (F8E4, F8E5))
COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))
OTHERS = tuple(np.dtype(t) for t in ("int8", "uint8", "int16", "int32", "bool"))
NARROW = tuple(np.dtype(t) for t in (BF16, F16))
MODES = ("eager", "jit", "vmap", "grad")
# Multiply-adds of one call, which NumPy computes without a BLAS.
MOST_TERMS = 1 << 22


def is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Shape, type and the order in which the dimensions are stored."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]

    def __str__(self):
        stored = "" if self.order == tuple(range(len(self.shape))) else f" in order {self.order}"
        return f"{self.dtype}{list(self.shape)}{stored}".replace(" in", " in", 1)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call, and how far its result may be from the exact one.

    Attributes
    ----------
    operation, arguments
        Its name, and its arguments besides the operands, in words.
    operands
        What is drawn.
    function
        The call, of a namespace of functions and the operands.
    errors
        ``errors(result, *operands)`` returns an error and its bound, arrays, for each result.
    cotangent_errors
        ``cotangent_errors(cotangents, cotangent, *operands)``, the same for ``jax.vjp``; ``None``
        where it is not checked.
    is_plain
        Whether NaN and infinity propagate as in a sum of products.
    """

    operation: str
    arguments: str
    operands: tuple[Operand, ...]
    function: Callable[..., Any]
    errors: Callable[..., Sequence[tuple[Any, Any]]]
    cotangent_errors: Callable[..., Sequence[tuple[Any, Any]]] | None = None
    is_plain: bool = True

    def __str__(self):
        arguments = f"; {self.arguments}" if self.arguments else ""
        return f"{self.operation}({', '.join(map(str, self.operands))}{arguments})"


# Exact values and bounds.


def wide(x):
    """The value in a type in which sums are exact, or nearly."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        return x.astype(np.clongdouble if x.dtype == np.complex128 else np.complex128)
    if x.dtype.kind in "iub":
        return x.astype(np.int64)
    return x.astype(np.longdouble if x.dtype == F64 else np.float64)


def as_promoted(x, types):
    """The operand with the rounding by which JAX promotes integers to 8-bit floats."""
    narrow = [dtype for dtype in types if dtype in FP8]
    return np.asarray(x).astype(narrow[0]) if narrow and x.dtype.kind in "iub" else x


def unit(*types):
    """Unit roundoff of sums: of float64 if all types are as wide."""
    return 2.0 ** (
        -53 if all(np.dtype(t).name in ("float64", "complex128") for t in types) else -24
    )


def operand_rounding(types, precision, backward=False):
    """By how much the arithmetic of a GPU rounds the operands, beside sums in float32."""
    if not on_gpu():
        return 0.0
    if all(t in FP8 for t in types) and not backward:
        return FP8_SUM_ROUNDOFF
    exact = precision in ("highest", "float32") or all(t in (*NARROW, *FP8) for t in types)
    is_tf32 = backward or not exact
    return 2 * TF32_ROUNDOFF if is_tf32 and not all(t == F64 for t in types) else 0.0


def compared(found, expected, slack):
    """Return error and bound of a result that is rounded to its type once.

    Where the value may exceed the type's largest, anything is right. Booleans and integers are
    exact, modulo their type.
    """
    found = np.asarray(found)
    if found.shape != np.shape(expected):
        return np.full(1, np.inf), np.zeros(1)
    if found.dtype.kind == "b":
        return (found != (np.asarray(expected) != 0)).astype(float), np.zeros(found.shape)
    if found.dtype.kind in "iu":
        return (found != np.asarray(expected).astype(found.dtype)).astype(float), np.zeros(
            found.shape
        )
    info = jnp.finfo(found.dtype)
    rounding = UNIT_ROUNDOFF[np.dtype(np.zeros((), found.dtype).real.dtype)]
    size = np.abs(expected)
    bound = slack + rounding * np.maximum(size, float(info.smallest_normal)) * (1 + 2.0**-20)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(wide(found) - expected)
        may_overflow = size + bound >= float(info.max)
    # The same NaNs and infinities.
    same = (np.isnan(found) & np.isnan(expected)) | (wide(found) == expected)
    error = np.where(same | (may_overflow & np.isfinite(size)), 0, error)
    error = np.where(np.isnan(error), np.inf, error)
    return error, np.where(np.isfinite(bound), bound, 0)


def einsum(subscripts, *operands):
    """NumPy's, which broadcasts sizes of 1; with the sum of the terms' sizes, and their number."""
    inputs, out = subscripts.split("->")
    sizes = defaultdict(int)
    for labels, x in zip(inputs.split(","), operands, strict=True):
        for label, size in zip(labels, x.shape, strict=True):
            sizes[label] = max(sizes[label], size) if 0 not in x.shape else min(size, 1)
    terms = math.prod(size for label, size in sizes.items() if label not in out)
    with np.errstate(invalid="ignore", over="ignore"):
        value = np.einsum(subscripts, *operands)
        magnitude = np.einsum(subscripts, *(np.abs(x).astype(np.longdouble) for x in operands))
    return value, magnitude, terms


def product(operation, arguments, operands, subscripts, function, precision=None, conjugate=False):
    """A contraction of two operands, named by labels."""
    (lhs, rhs), out = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    types = [x.dtype for x in operands]
    complex_factor = 4 if any(t.kind == "c" for t in types) else 1

    def errors(result, a, b):
        a, b = (wide(as_promoted(x, types)) for x in (a, b))
        value, magnitude, terms = einsum(subscripts, a.conj() if conjugate else a, b)
        share = (terms + 1) * unit(*types) + operand_rounding(types, precision)
        return [compared(result, value, complex_factor * share * magnitude)]

    def cotangent_errors(cotangents, cotangent, a, b):
        found = []
        ct, a, b = wide(cotangent), wide(a), wide(b)
        for own, other, x, y, got in (
            (lhs, rhs, a, b, cotangents[0]),
            (rhs, lhs, b, a, cotangents[1]),
        ):
            value, magnitude, terms = einsum(f"{out},{other}->{own}", ct, y)
            broadcast = tuple(
                i for i, size in enumerate(x.shape) if size == 1 and value.shape[i] != 1
            )
            terms *= math.prod(value.shape[i] for i in broadcast)
            value, magnitude = (z.sum(broadcast, keepdims=True) for z in (value, magnitude))
            share = (terms + 1) * unit(*types) + operand_rounding(types, precision, backward=True)
            # As by JAX, the cotangent has the common type of the operands first.
            wider = [dtype for dtype in types if dtype in NARROW]
            first = UNIT_ROUNDOFF[wider[0]] if wider and got.dtype in FP8 else 0.0
            slack = complex_factor * share * magnitude + first * np.abs(value)
            found.append(compared(got, value, slack))
        return found

    # JAX's cotangents of complex operands are not conjugated.
    is_complex = all(t in COMPLEX for t in types) and not conjugate

    return Call(
        operation,
        arguments,
        operands,
        function,
        errors,
        cotangent_errors if all(map(is_float, types)) or is_complex else None,
    )


# Drawing.


class Draw:
    """Random choices of one call."""

    def __init__(self, rng):
        self.rng = rng

    def chance(self, probability):
        return self.rng.random() < probability

    def one(self, *values):
        return values[int(self.rng.integers(len(values)))]

    def size(self, most=300):
        low, high = self.one((1, 1), (2, 9), (2, 9), (10, 70), (10, 70), (70, 300))
        size = int(self.rng.integers(low, high + 1))
        return 0 if self.chance(0.02) else min(size, most)

    def sizes(self, labels, most_terms=MOST_TERMS):
        """A size for each label, of a limited product."""
        found = {label: self.size() for label in sorted(labels)}
        if found and self.chance(0.2):
            found[self.one(*found)] *= self.one(3, 10, 30)
        while math.prod(found.values()) > most_terms:
            largest = max(found, key=found.get)
            found[largest] = max(1, found[largest] // 2)
        return found

    def labels(self, ranks=(0, 1, 1, 2), but=""):
        """Distinct labels."""
        free = [label for label in string.ascii_lowercase if label not in but]
        return "".join(free[: self.one(*ranks)])

    def shuffled(self, labels):
        return "".join(self.rng.permutation(list(labels)).tolist())

    def dtype(self):
        group = self.rng.choice(4, p=(0.7, 0.05, 0.1, 0.15))
        dtype = self.one(*(FLOATS, FP8, COMPLEX, OTHERS)[group])
        return dtype if supported(dtype) else F32

    def types(self, count=2):
        first = self.dtype()
        return [first, *(self.dtype() if self.chance(0.15) else first for _ in range(count - 1))]

    def operand(self, shape, dtype):
        rank = len(shape)
        order = self.rng.permutation(rank).tolist() if self.chance(0.4) else range(rank)
        return Operand(tuple(shape), dtype, tuple(order))

    def operands(self, subscripts, sizes, types=None, broadcast=""):
        """Operands of an einsum, of which some dimensions of some labels are 1."""
        inputs = subscripts.split("->")[0].split(",")
        types = types or self.types(len(inputs))
        narrowed = {
            label: int(self.rng.integers(len(inputs))) for label in broadcast if self.chance(0.4)
        }
        return tuple(
            self.operand([1 if narrowed.get(x) == i else sizes[x] for x in labels], dtype)
            for i, (labels, dtype) in enumerate(zip(inputs, types, strict=True))
        )

    def options(self, operands, *, element_type=True):
        """Keywords of a product: precision and type of the result."""
        options = {}
        if self.chance(0.3):
            options["precision"] = self.one("highest", "high", "default", "float32")
        kinds = {("f" if is_float(x.dtype) else x.dtype.kind) for x in operands}
        if element_type and self.chance(0.3) and kinds <= {"f"}:
            wider = (F64,) if any(x.dtype == F64 for x in operands) else ()
            options["preferred_element_type"] = self.one(F32, *NARROW, *wider)
        elif element_type and self.chance(0.5) and kinds <= {"i"}:
            options["preferred_element_type"] = self.one(F32, *map(np.dtype, ("int32", "int16")))
        return options

    def value(self, operand, special):
        """Return normal numbers, or integers that floats of 8 bits of significand hold."""
        shape, dtype = operand.shape, operand.dtype
        if dtype.kind in "iu":
            low, high = max(np.iinfo(dtype).min, -128), min(np.iinfo(dtype).max, 127)
            return self.rng.integers(low, high, shape, dtype=np.int64, endpoint=True).astype(dtype)
        if dtype.kind == "b":
            return self.rng.integers(0, 2, shape).astype(bool)
        x = self.rng.standard_normal(shape)
        if dtype.kind == "c":
            return (x + 1j * self.rng.standard_normal(shape)).astype(dtype)
        if special and x.size:
            values = (np.nan,) if dtype == F8E4 else (np.nan, np.inf, -np.inf, 0.0)
            for _ in range(int(self.rng.integers(1, 4))):
                x[tuple(self.rng.integers(0, size) for size in shape)] = self.one(*values)
        return x.astype(dtype)


def text_of(options):
    return ", ".join(f"{key}={getattr(x, 'name', x)}" for key, x in options.items())


def matmul(draw):
    batch = draw.labels((0, 0, 1, 2), but="mnk")
    rows, columns = draw.one("m", "m", "m", ""), draw.one("n", "n", "n", "")
    batches = batch if rows else "", batch if columns else ""
    if draw.chance(0.3) and all((rows, columns)):
        batches = draw.one((batch, ""), ("", batch))
    subscripts = f"{batches[0]}{rows}k,{batches[1]}k{columns}->{max(batches)}{rows}{columns}"
    sizes = draw.sizes(batch + "mnk")
    shared = batch if batches[0] == batches[1] else ""
    operands = draw.operands(subscripts, sizes, broadcast=shared)
    options = draw.options(operands)
    return product(
        "matmul",
        text_of(options),
        operands,
        subscripts,
        lambda m, a, b: m.matmul(a, b, **options),
        options.get("precision"),
    )


def contraction_labels(draw):
    """Labels of a general contraction: of lhs, of rhs, contracted, batch."""
    batch, contracted = draw.labels((0, 0, 1, 2)), ""
    rows, columns = "", ""
    used = batch
    for name, ranks in (("k", (0, 1, 1, 2)), ("m", (0, 1, 1, 2)), ("n", (0, 1, 1, 2))):
        found = draw.labels(ranks, but=used)
        used += found
        contracted, rows, columns = (
            found if name == x else old
            for x, old in (("k", contracted), ("m", rows), ("n", columns))
        )
    return (
        draw.shuffled(batch + rows + contracted),
        draw.shuffled(batch + contracted + columns),
        (
            contracted,
            batch,
        ),
    )


def dot_general(draw):
    lhs, rhs, (contracted, batch) = contraction_labels(draw)
    free = [x for x in lhs + rhs if x not in contracted + batch]
    subscripts = f"{lhs},{rhs}->{batch}{''.join(free)}"
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)))
    options = draw.options(operands)
    dimensions = tuple(
        tuple(tuple(labels.index(x) for x in named) for labels in (lhs, rhs))
        for named in (contracted, batch)
    )
    return product(
        "dot_general",
        f"{dimensions}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.dot_general(a, b, dimensions, **options),
        options.get("precision"),
    )


def einsum_of_two(draw):
    lhs, rhs, (contracted, _) = contraction_labels(draw)
    out = draw.shuffled({x for x in lhs + rhs if x not in contracted})
    subscripts = f"{lhs},{rhs}->{out}"
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)))
    options = draw.options(operands)
    return product(
        "einsum",
        f"{subscripts}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.einsum(subscripts, a, b, **options),
        options.get("precision"),
    )


def tensordot(draw):
    rows, columns = draw.labels((0, 1, 2), but="kl"), draw.labels((0, 1, 2), but="klab")
    contracted = draw.one("", "k", "kl")
    lhs, rhs = draw.shuffled(rows + contracted), draw.shuffled(contracted + columns)
    out = "".join(x for x in lhs + rhs if x not in contracted)
    subscripts = f"{lhs},{rhs}->{out}"
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)))
    options = draw.options(operands)
    axes = [[labels.index(x) for x in contracted] for labels in (lhs, rhs)]
    return product(
        "tensordot",
        f"{axes}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.tensordot(a, b, axes, **options),
        options.get("precision"),
    )


def with_vectors(draw):
    """The operations whose shapes leave no other choice."""
    name, subscripts, conjugate = draw.one(
        ("dot", "k,k->", False),
        ("dot", "mk,k->m", False),
        ("dot", "k,kn->n", False),
        ("dot", "amk,bkn->ambn", False),
        ("dot", ",kn->kn", False),
        ("vdot", "k,k->", True),
        ("vdot", "ij,ij->", True),
        ("inner", "k,k->", False),
        ("inner", "amk,nk->amn", False),
        ("matvec", "mk,k->m", False),
        ("matvec", "bmk,bk->bm", False),
        ("vecmat", "k,kn->n", True),
        ("vecmat", "bk,bkn->bn", True),
        ("vecdot", "k,k->", True),
        ("vecdot", "abk,abk->ab", True),
    )
    operands = draw.operands(subscripts, draw.sizes(set(subscripts) - set(",->")))
    options = draw.options(operands)
    if name in ("matvec", "vecmat"):  # JAX's own have no such keywords.
        options = {}
    return product(
        name,
        text_of(options),
        operands,
        subscripts,
        lambda m, a, b: getattr(m, name)(a, b, **options),
        options.get("precision"),
        conjugate,
    )


def multi_dot(draw):
    subscripts = "ij,jk,kl->il"
    sizes = draw.sizes("ijkl", MOST_TERMS)
    operands = draw.operands(subscripts, sizes, types=[draw.one(F32, BF16, F16)] * 3)

    def errors(result, *arrays):
        with np.errstate(invalid="ignore"):
            value = np.linalg.multi_dot([np.asarray(x, np.float64) for x in arrays])
            magnitude = np.linalg.multi_dot([np.abs(np.asarray(x, np.float64)) for x in arrays])
        share = (sizes["j"] + sizes["k"] + 2) * 2.0**-24
        share += 2 * operand_rounding([x.dtype for x in operands], None)
        # The inner product is rounded to the type, too.
        share += 2 * UNIT_ROUNDOFF[operands[0].dtype]
        return [compared(result, value, share * magnitude)]

    by = draw.one("multi_dot", "einsum")
    call = (
        (lambda m, *arrays: m.multi_dot(arrays))
        if by == "multi_dot"
        else (lambda m, *arrays: m.einsum(subscripts, *arrays))
    )
    return Call(by, "of three", operands, call, errors, is_plain=False)


def ragged_dot(draw):
    sizes = draw.sizes("mkn")
    groups = draw.one(1, 2, 3, 8)
    m, k, n = (sizes[x] for x in "mkn")
    types = draw.types()
    operands = draw.operand((m, k), types[0]), draw.operand((groups, k, n), types[1])
    bounds = np.sort(draw.rng.integers(0, m + 1, groups))
    counts = np.diff(bounds, prepend=0).astype(np.int32)
    options = draw.options(operands)
    of_row = np.searchsorted(bounds, np.arange(m), side="right")

    def in_groups(x):
        """Rows as a matrix for each group, with zeros in place of others' rows."""
        masks = of_row == np.arange(groups)[:, None]
        return np.where(masks[..., None], x, np.zeros((), x.dtype))

    def sums(subscripts, a, b, backward):
        value, magnitude, terms = einsum(subscripts, a, b)
        share = (terms + 1) * unit(*types)
        share += operand_rounding(types, options.get("precision"), backward)
        return value, share * magnitude

    # No product of another group: zeros of a mask times NaN.
    def errors(result, a, b):
        a, b = (wide(as_promoted(x, types)) for x in (a, b))
        return [compared(result, *sums("gmk,gkn->mn", in_groups(a), b, False))]

    def cotangent_errors(cotangents, cotangent, a, b):
        ct = in_groups(wide(cotangent))
        return [
            compared(cotangents[0], *sums("gmn,gkn->mk", ct, wide(b), True)),
            compared(cotangents[1], *sums("gmk,gmn->gkn", in_groups(wide(a)), ct, True)),
        ]

    return Call(
        "ragged_dot",
        f"group_sizes={counts.tolist()}, {text_of(options)}",
        operands,
        lambda m, a, b: m.ragged_dot(a, b, counts, **options),
        errors,
        cotangent_errors if all(map(is_float, types)) else None,
        is_plain=False,
    )


def sum_over(draw):
    labels = draw.labels((0, 1, 2, 3, 3))
    sizes = draw.sizes(labels, 1 << 20)
    (x,) = draw.operands(f"{labels}->", sizes, [draw.dtype()])
    axes = tuple(i for i in range(len(labels)) if draw.chance(0.6))
    options = {"axis": draw.one(None, axes), "keepdims": draw.chance(0.3)}
    if draw.chance(0.2) and is_float(x.dtype) and x.dtype not in FP8:
        options["dtype"] = draw.one(F32, *NARROW)
    if draw.chance(0.2):
        options["initial"] = 3
    over = tuple(range(len(labels))) if options["axis"] is None else axes

    def errors(result, x):
        value, magnitude = (
            z.sum(over, keepdims=options["keepdims"]) + options.get("initial", 0)
            for z in (wide(x), np.abs(wide(x)))
        )
        terms = math.prod(np.shape(x)[i] for i in over) + 2
        # As by JAX, a sum into another type is added up in that type, or float32.
        roundoff = unit(x.dtype, options.get("dtype", x.dtype))
        return [compared(result, value, terms * roundoff * magnitude)]

    def cotangent_errors(cotangents, cotangent, x):
        ct = wide(cotangent) if options["keepdims"] else np.expand_dims(wide(cotangent), over)
        return [compared(cotangents[0], np.broadcast_to(ct, x.shape), 0)]

    return Call(
        "sum",
        text_of(options),
        (x,),
        lambda m, x: m.sum(x, **options),
        errors,
        cotangent_errors if is_float(x.dtype) and x.dtype not in FP8 else None,
    )


def transpose(draw):
    labels = draw.labels((0, 1, 2, 3, 4))
    (x,) = draw.operands(f"{labels}->", draw.sizes(labels, 1 << 20), [draw.dtype()])
    axes = tuple(draw.rng.permutation(len(labels)).tolist())
    return Call(
        "transpose",
        f"{axes}",
        (x,),
        lambda m, x: m.transpose(x, axes),
        lambda result, x: [compared(result, wide(x).transpose(axes), 0)],
        (lambda cts, ct, x: [compared(cts[0], wide(ct).transpose(np.argsort(axes)), 0)])
        if is_float(x.dtype)
        else None,
    )


def add(draw):
    labels = draw.labels((0, 1, 2, 3))
    operands = draw.operands(f"{labels},{labels}->", draw.sizes(labels, 1 << 20), broadcast=labels)

    def errors(result, x, y):
        with np.errstate(invalid="ignore"):
            value, magnitude = wide(x) + wide(y), np.abs(wide(x)) + np.abs(wide(y))
        return [compared(result, value, 2.0**-24 * magnitude if value.dtype != F64 else 0)]

    return Call("add", "", operands, lambda m, x, y: m.add(x, y), errors)


def dense(draw, activation, derivative):
    """``linear``, and the same by an epilogue and by ``fuse``."""
    types = [draw.one(F32, BF16, F16)] * 3
    subscripts = "mk,kn,n->mn"
    operands = draw.operands(subscripts, draw.sizes("mkn"), types)
    way = draw.one("linear", "matmul", "fuse")
    call = {
        "linear": lambda m, x, w, b: m.linear(x, w, b, activation),
        "matmul": lambda m, x, w, b: m.matmul(
            x, w, epilogue=lambda y, bias: activation(y + bias), operands=(b,)
        ),
        "fuse": lambda m, x, w, b: m.fuse(lambda x, w, b: activation(x @ w + b))(x, w, b),
    }[way]

    def errors(result, x, w, b):
        value, magnitude, terms = einsum("mk,kn->mn", wide(x), wide(w))
        value, magnitude = value + wide(b), magnitude + np.abs(wide(b))
        share = (terms + 4) * 2.0**-24 + operand_rounding(types, None)
        # `fuse` rounds the product and the sum to their types.
        share += 3 * UNIT_ROUNDOFF[types[0]] if way == "fuse" else 0
        slack = derivative * share * magnitude + 2.0**-20
        with jax.enable_x64(True):
            exact = np.asarray(activation(jnp.asarray(value, F64)))
        return [compared(result, exact, slack)]

    return Call(way, f"epilogue {activation.__name__}", operands, call, errors, is_plain=False)


def linear(draw):
    return dense(draw, *draw.one((jax.nn.relu, 1), (jnp.tanh, 1), (jax.nn.silu, 1.1)))


def gated_linear(draw):
    types = [draw.one(F32, BF16, F16)] * 3
    operands = draw.operands("mk,kn,kn->mn", draw.sizes("mkn"), types)

    def errors(result, x, gate, up):
        (g, g_size, terms), (u, u_size, _) = (
            einsum("mk,kn->mn", wide(x), wide(w)) for w in (gate, up)
        )
        share = (terms + 4) * 2.0**-24 + operand_rounding(types, None)
        of_gate, of_up = share * g_size, share * u_size + UNIT_ROUNDOFF[types[0]] * np.abs(u)
        silu = g / (1 + np.exp(-g))
        slack = 1.1 * of_gate * (np.abs(u) + of_up) + np.abs(silu) * of_up
        return [compared(result, silu * u, slack + 2.0**-20 * (1 + np.abs(silu * u)))]

    return Call(
        "gated_linear", "", operands, lambda m, *xs: m.gated_linear(*xs), errors, is_plain=False
    )


def strassen_matmul(draw):
    levels = draw.one(1, 2)
    dtype = draw.one(F32, F64, BF16)
    operands = draw.operands("mk,kn->mn", draw.sizes("mkn"), [dtype] * 2)

    def errors(result, a, b):
        a, b = wide(a), wide(b)
        # The bound of Winograd's form is on the largest elements.
        largest = np.abs(a).max(initial=0) * np.abs(b).max(initial=0)
        share = a.shape[1] * UNIT_ROUNDOFF[dtype] + operand_rounding([dtype] * 2, None)
        return [compared(result, a @ b, 18.0**levels * share * largest)]

    return Call(
        "strassen_matmul",
        f"levels={levels}",
        operands,
        lambda m, a, b: m.strassen_matmul(a, b, levels=levels),
        errors,
        is_plain=False,
    )


def out_of_core(draw):
    types = [draw.one(F32, F64, BF16, np.dtype("int8"))] * 2
    operands = tuple(
        dataclasses.replace(x, order=(0, 1))
        for x in draw.operands(
            "mk,kn->mn", {k: max(1, v) for k, v in draw.sizes("mkn").items()}, types
        )
    )
    call = product(
        "out_of_core.matmul",
        "memory_limit=2000000",
        operands,
        "mk,kn->mn",
        lambda m, a, b: m.out_of_core.matmul(np.asarray(a), np.asarray(b), memory_limit=2_000_000),
    )
    return dataclasses.replace(call, cotangent_errors=None, is_plain=False)


def linear_cross_entropy(draw):
    sizes = draw.sizes("mdv")
    rows, depth, columns = (max(1, sizes[x]) for x in "mdv")
    types = [draw.one(F32, BF16)] * 2
    operands = draw.operand((rows, depth), types[0]), draw.operand((depth, columns), types[1])
    labels = draw.rng.integers(0, columns, rows).astype(np.int32)

    def errors(result, h, w):
        y, magnitude, terms = einsum("md,dv->mv", wide(h), wide(w))
        share = (terms + 1) * 2.0**-24 + operand_rounding(types, None)
        top = y.max(1)
        lse = top + np.log(np.exp(y - top[:, None]).sum(1))
        slack = 2 * share * magnitude.max(1) + (columns + 16) * 2.0**-24 * (
            1 + np.abs(lse) + np.abs(top)
        )
        return [compared(result, lse - y[np.arange(rows), labels], slack)]

    return Call(
        "linear_cross_entropy",
        "reduction=none",
        operands,
        lambda m, h, w: m.linear_cross_entropy(h, w, labels, reduction="none"),
        errors,
        is_plain=False,
    )


def linear_algebra(draw):
    """Residuals, relative to what the computed factors and solutions allow (Higham)."""
    n, columns = max(1, draw.size(100)), max(1, draw.size(20))
    batch = draw.one((), (), (3,), (17,))
    dtype = draw.one(F32, F64)
    u = 16 * max(8, n) * UNIT_ROUNDOFF[dtype]
    name = draw.one("inv", "solve", "cholesky", "slogdet", "lu", "solve_triangular")
    shapes = [(*batch, n, n)] + ([(*batch, n, columns)] if name.startswith("solve") else [])
    operands = tuple(draw.operand(shape, dtype) for shape in shapes)
    eye = np.eye(n)

    def call(m, a, *others):
        a = jnp.matmul(a, a.mT, precision="highest") / n if name == "cholesky" else a
        a = a + (1 if name == "cholesky" else 2 * math.sqrt(n)) * jnp.eye(n, dtype=dtype)
        function = getattr(m.linalg, name)
        if name == "solve_triangular":
            return a, function(a, *others, lower=True)
        return a, function(a, *others)

    def errors(result, _, *others):
        a, found = (jax.tree.map(wide, x) for x in result)
        size = np.abs(a)
        if name == "inv":
            return [(np.abs(a @ found - eye), u * (size @ np.abs(found)))]
        if name == "solve":
            return [(np.abs(a @ found - wide(others[0])), u * (size @ np.abs(found)))]
        if name == "solve_triangular":
            residual = np.tril(a) @ found - wide(others[0])
            return [(np.abs(residual), u * (np.tril(size) @ np.abs(found)))]
        if name == "cholesky":
            transposed = np.swapaxes(found, -1, -2)
            return [(np.abs(found @ transposed - a), u * (np.abs(found) @ np.abs(transposed)))]
        if name == "lu":
            p, lower, upper = found
            return [(np.abs(p @ lower @ upper - a), u * (p @ (np.abs(lower) @ np.abs(upper))))]
        sign, logarithm = np.linalg.slogdet(a.astype(np.float64))
        return [
            (np.abs(found[0] - sign), np.zeros_like(sign)),
            (np.abs(found[1] - logarithm), u * n * np.ones_like(logarithm)),
        ]

    return Call(f"linalg.{name}", "", operands, call, errors, is_plain=False)


def segments(draw):
    """Reductions of rows to segments, of which some are empty and one has many edges."""
    edges, count, columns = draw.size(), draw.size(), max(1, draw.size(20))
    dtype = draw.one(F32, BF16, F16, F64)
    name = draw.one("segment_sum", "segment_max", "segment_min")
    ids = draw.rng.integers(-2, count + 2, edges).astype(draw.one("int8", "int16", "int32"))
    middle = min(count // 2, np.iinfo(ids.dtype).max)
    ids = np.where(draw.rng.random(edges) < draw.one(0.0, 0.5, 1.0), middle, ids)
    is_sorted, has_plan, mode = draw.chance(0.3), draw.chance(0.4), draw.one(None, "clip")
    ids = np.sort(ids) if is_sorted else ids
    (rows,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])
    own = np.clip(ids, 0, count - 1) if mode == "clip" and count else ids
    belongs = own[:, None] == np.arange(count)

    def call(m, x):
        if has_plan and m is jtk:
            plan = m.segment_plan(ids, count, indices_are_sorted=is_sorted, mode=mode)
            return getattr(m, name)(x, plan)
        return getattr(m, name)(x, ids, count, indices_are_sorted=is_sorted, mode=mode)

    def errors(result, x):
        if name != "segment_sum":
            neutral = -np.inf if name == "segment_max" else np.inf
            reduce = np.max if name == "segment_max" else np.min
            each = np.where(belongs[..., None], wide(x)[:, None], neutral)
            return [compared(result, reduce(each, 0, initial=neutral), 0)]
        value, magnitude, _ = einsum("es,ec->sc", belongs.astype(float), wide(x))
        return [compared(result, value, (edges + 1) * unit(dtype) * magnitude)]

    def cotangent_errors(cotangents, cotangent, x):
        value, _, _ = einsum("es,sc->ec", belongs.astype(float), wide(cotangent))
        return [compared(cotangents[0], value, 0)]

    return Call(
        name,
        f"ids={ids.dtype}{ids.tolist()[:20]}, {count}, {is_sorted=}, {has_plan=}, {mode=}",
        (rows,),
        call,
        errors,
        cotangent_errors if name == "segment_sum" else None,
        is_plain=False,
    )


def rows_of_table(draw):
    """``take`` and ``scatter_add``, of which each is the derivative of the other."""
    edges, rows, columns = draw.size(), max(1, draw.size()), max(1, draw.size(20))
    dtype, name = draw.one(F32, BF16, F16, F64), draw.one("take", "scatter_add")
    index = draw.rng.integers(-rows, rows, edges).astype(np.int32)
    picks = (index % rows)[:, None] == np.arange(rows)
    (table,) = draw.operands("rc->", {"r": rows, "c": columns}, [dtype])
    (updates,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])

    def taken(result, x):
        return [compared(result, wide(x)[index % rows], 0)]

    def sums(result, x, start):
        value, magnitude, _ = einsum("er,ec->rc", picks.astype(float), wide(x))
        slack = (edges + 1) * unit(dtype) * (magnitude + np.abs(start))
        return [compared(result, value + start, slack)]

    if name == "take":
        return Call(
            name, f"{index.tolist()[:20]}", (table,), lambda m, x: m.take(x, index, axis=0), taken,
            lambda cts, ct, x: sums(cts[0], ct, np.zeros(x.shape)), is_plain=False,
        )  # fmt: skip
    return Call(
        name,
        f"{index.tolist()[:20]}",
        (table, updates),
        lambda m, x, y: m.scatter_add(x, index, y),
        lambda result, x, y: sums(result, y, wide(x)),
        lambda cts, ct, x, y: [compared(cts[0], wide(ct), 0), *taken(cts[1], ct)],
        is_plain=False,
    )


def symmetric_matmul(draw):
    """A product with the transpose, or a polynomial of a symmetric matrix."""
    sizes, batch = draw.sizes("mk"), draw.one((), (), (3,))
    dtype = draw.one(*FLOATS)
    is_gram = draw.chance(0.5)
    (operand,) = draw.operands(
        "bmk->" if batch else "mk->",
        {"b": 3, "m": sizes["m"], "k": sizes["k" if is_gram else "m"]},
        [dtype],
    )
    options = draw.options([operand], element_type=is_gram)
    share = (operand.shape[-1] + 1) * unit(dtype)
    share += operand_rounding([dtype], options.get("precision"))
    backward = (operand.shape[-2] + 1) * unit(dtype) + operand_rounding([dtype], None, True)

    if is_gram:

        def errors(result, a):
            a = wide(a)
            return [compared(result, a @ a.mT, share * (np.abs(a) @ np.abs(a.mT)))]

        def cotangent_errors(cotangents, cotangent, a):
            ct, a = wide(cotangent), wide(a)
            terms = [(x @ a, np.abs(x) @ np.abs(a)) for x in (ct, ct.mT)]
            slack = sum(backward * size + UNIT_ROUNDOFF[dtype] * np.abs(x) for x, size in terms)
            return [compared(cotangents[0], sum(x for x, _ in terms), slack)]

        return Call(
            "symmetric_matmul",
            text_of(options),
            (operand,),
            lambda m, a: m.symmetric_matmul(a, **options),
            errors,
            cotangent_errors,
            is_plain=False,
        )

    def polynomial(m, a):
        # XLA would not round what the epilogue reads.
        x = lax.optimization_barrier(a + a.mT)
        y = m.symmetric_matmul(
            x, x, epilogue=lambda product, scale, x: scale * product - x, operands=(0.5, x),
            **options,
        )  # fmt: skip
        return x, y

    def errors(result, _):
        x, size = wide(result[0]), np.abs(wide(result[0]))
        slack = (share + 2 * unit(dtype)) * (size @ size / 2 + size)
        return [compared(result[1], x @ x / 2 - x, slack)]

    return Call(
        "symmetric_matmul", f"polynomial, {text_of(options)}", (operand,), polynomial, errors,
        is_plain=False,
    )  # fmt: skip


def norms(a):
    """The Frobenius norm of each matrix, of shape ``(..., 1, 1)``."""
    return np.sqrt((np.abs(a) ** 2).sum((-2, -1), keepdims=True)).astype(np.float64)


def of_columns(x):
    """The products of columns, without the identity."""
    return np.abs(x.mT @ x - np.eye(x.shape[-1]))


def decompositions(draw):
    """Factors that multiply to the matrix up to rounding errors of its norm, and are orthogonal."""
    rows, columns = max(1, draw.size(70)), max(1, draw.size(70))
    name = draw.one("svd", "svdvals", "eigh", "eigvalsh", "qr")
    rows = columns if name.startswith("eig") else rows
    batch, dtype = draw.one((), (4,), (2, 9)), draw.one(F32, F64)
    operand = draw.operand((*batch, rows, columns), dtype)
    options = {}
    if name == "svd":
        options["full_matrices"] = draw.chance(0.5)
    if name == "qr":
        options["mode"] = draw.one("reduced", "complete", "r")
    scale = 10.0 ** draw.one(np.zeros(columns), np.linspace(0, -5, columns), np.full(columns, 12))
    rank = draw.one(None, None, 0, 1)
    share = 12 * max(rows, columns) * UNIT_ROUNDOFF[dtype]

    def call(m, a):
        a = a if rank is None else a[..., :, :rank] @ a[..., :rank, :]
        a = a * scale.astype(dtype)
        a = (a + a.mT) / 2 if name.startswith("eig") else a
        return a, getattr(m.linalg, name)(a, **options)

    def errors(result, _):
        a = np.asarray(result[0], np.float64)
        found = [np.asarray(x, np.float64) for x in jax.tree.leaves(result[1])]
        bound = share * norms(a)
        if name in ("svdvals", "eigvalsh"):
            expected = getattr(np.linalg, name)(a)
            return [(np.abs(found[0] - expected), bound[..., 0])]
        if name == "eigh":
            w, v = found
            product, orthogonal = (v * w[..., None, :]) @ v.mT, [v]
        elif name == "svd":
            u, w, vh = found
            count = w.shape[-1]
            product = (u[..., :count] * w[..., None, :]) @ vh[..., :count, :]
            orthogonal = [u, vh.mT]
            w = -w
            if (w > 0).any():
                return [(np.full(1, np.inf), np.zeros(1))]
        elif options["mode"] == "r":
            # The factor of the product of columns is the same up to signs.
            r = found[0]
            return [
                (np.abs(r.mT @ r - a.mT @ a), 2 * bound * norms(a)),
                (np.abs(np.tril(r, -1)), 0 * bound),
            ]
        else:
            q, r = found
            product, orthogonal, w = q @ r, [q], np.zeros(1)
            if np.tril(r, -1).any():
                return [(np.full(1, np.inf), np.zeros(1))]
        # Values are in order.
        return [
            (np.abs(product - a), bound),
            *((of_columns(x), np.full(1, share)) for x in orthogonal),
            ((np.diff(w) < 0).astype(float), np.zeros(1)),
        ]

    return Call(
        f"linalg.{name}",
        f"{text_of(options)}, columns times {scale[0]:.0e} to {scale[-1]:.0e}, {rank=}",
        (operand,),
        call,
        errors,
        is_plain=False,
    )


def matrix_functions(draw):
    """``expm`` and ``pinv``, whose condition numbers bound the error (Higham)."""
    name = draw.one("expm", "pinv")
    rows, columns = max(1, draw.size(40)), max(1, draw.size(40))
    rows = columns if name == "expm" else rows
    batch, dtype = draw.one((), (5,)), draw.one(F32, F64)
    size = draw.one(0.01, 1.0, 6.0) if name == "expm" else 1.0
    operand = draw.operand((*batch, rows, columns), dtype)
    share = 16 * max(8, rows, columns) * UNIT_ROUNDOFF[dtype]

    def call(m, a):
        if name == "expm":
            a = a * (size / math.sqrt(columns))
        else:
            a = a + 2 * math.sqrt(max(rows, columns)) * jnp.eye(rows, columns, dtype=dtype)
        return a, getattr(m.linalg, name)(a)

    def errors(result, _):
        a, found = (np.asarray(x, np.float64) for x in result)
        if name == "expm":
            expected = scipy.linalg.expm(a)
            norm = np.linalg.norm(a, 2, axis=(-2, -1), keepdims=True)
            return [(np.abs(found - expected), share * (1 + norm) * np.exp(norm))]
        expected = np.linalg.pinv(a, rcond=1e-14)
        s = np.linalg.svdvals(a)
        condition = (s[..., 0] / s[..., -1])[..., None, None]
        # Beyond this, singular values count as zeros.
        condition = np.where(condition * share < 0.1, condition, np.inf)
        return [(np.abs(found - expected), share * condition / s[..., -1:, None])]

    return Call(
        f"linalg.{name}", f"size {size}", (operand,), call, errors, is_plain=False
    )  # fmt: skip


def lanes(draw):
    """Functions of an element with a loop or a branch, by ``kernel``."""
    dtype, count = draw.one(F32, F64), draw.size()
    degree = draw.one(0, 1, 3, 12)
    kind = draw.one("polynomial", "branch", "Collatz")
    u = UNIT_ROUNDOFF[dtype]
    if kind == "Collatz":
        operand = draw.operand((count,), np.dtype("int32"))

        def steps(n):
            def step(state):
                n, count = state
                return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

            start = jnp.abs(n) + 1, jnp.zeros_like(n)
            return lax.while_loop(lambda state: state[0] != 1, step, start)[1]

        def exact(n):
            n, found = int(abs(n)) + 1, 0
            while n != 1:
                n, found = (n // 2 if n % 2 == 0 else 3 * n + 1), found + 1
            return found

        return Call(
            "kernel", kind, (operand,), lambda m, n: m.kernel(steps)(n),
            lambda result, n: [compared(result, np.array([exact(x) for x in n], np.int64), 0)],
            is_plain=False,
        )  # fmt: skip
    if kind == "branch":
        operands = tuple(draw.operand((count,), dtype) for _ in range(2))

        def branch(x, y):
            return lax.cond(x > y, lambda x, y: x * x + y, lambda x, y: x - y * y, x, y)

        def errors(result, x, y):
            x, y = wide(x), wide(y)
            size = np.abs(x) + np.abs(y) + x * x + y * y
            return [compared(result, np.where(x > y, x * x + y, x - y * y), 2 * u * size)]

        def cotangent_errors(cotangents, ct, x, y):
            x, y, ct = wide(x), wide(y), wide(ct)
            slacks = 4 * u * np.abs(ct) * (1 + np.abs(x)), 4 * u * np.abs(ct) * (1 + np.abs(y))
            return [
                compared(cotangents[0], ct * np.where(x > y, 2 * x, 1), slacks[0]),
                compared(cotangents[1], ct * np.where(x > y, 1, -2 * y), slacks[1]),
            ]

        return Call(
            "kernel", kind, operands, lambda m, *xs: m.kernel(branch)(*xs), errors,
            cotangent_errors, is_plain=False,
        )  # fmt: skip
    operands = draw.operand((count,), dtype), draw.operand((degree + 1,), dtype)

    def horner(x, c):
        def step(i, y):
            return y * x + c[degree - i]

        return lax.fori_loop(0, degree + 1, step, jnp.zeros_like(x))

    def powers(x):
        return wide(x)[:, None] ** np.arange(degree + 1)

    def errors(result, x, c):
        size = np.abs(powers(x)) @ np.abs(wide(c))
        return [compared(result, powers(x) @ wide(c), 2 * (degree + 2) * u * size)]

    def cotangent_errors(cotangents, ct, x, c):
        ct, p, i = wide(ct), powers(x), np.arange(1, degree + 1)
        slope, size = p[:, :-1] @ (i * wide(c)[1:]), np.abs(p[:, :-1]) @ (i * np.abs(wide(c)[1:]))
        share = 4 * (degree + 2) * u
        of_c = (share + (count + 1) * u) * (np.abs(ct) @ np.abs(p))
        return [
            compared(cotangents[0], ct * slope, share * np.abs(ct) * size),
            compared(cotangents[1], ct @ p, of_c),
        ]

    return Call(
        "kernel", f"{kind} of degree {degree}", operands,
        lambda m, x, c: m.kernel(horner, in_axes=(0, None))(x, c), errors, cotangent_errors,
        is_plain=False,
    )  # fmt: skip


def moe(draw):
    """A layer of gated experts; some indices are out of bounds."""
    tokens, features, hidden = (max(1, draw.size(50)) for _ in range(3))
    experts, chosen = draw.one(1, 3, 8), draw.one(1, 2, 3)
    dtype = draw.one(F32, BF16, F16)
    indices = draw.rng.integers(-1, experts + 1, (tokens, chosen)).astype(np.int32)
    shapes = [(tokens, features), *[(experts, features, hidden)] * 2, (experts, hidden, features)]
    operands = tuple(draw.operand(shape, dtype) for shape in (*shapes, (tokens, chosen)))
    u, rounding = 2.0**-24, UNIT_ROUNDOFF[dtype]
    backward = operand_rounding([dtype], None)

    def errors(result, x, gate, up, down, weights):
        x, gate, up, down, weights = map(wide, (x, gate, up, down, weights))
        share = (features + 4) * u + backward
        (g, g_size), (v, v_size) = (
            (np.einsum("td,edh->eth", a, w), np.einsum("td,edh->eth", np.abs(a), np.abs(w)))
            for a, w in ((x, gate), (x, up))
        )
        silu = g / (1 + np.exp(-g))
        h = silu * v
        of_up = share * v_size + rounding * np.abs(v)
        slack = 1.1 * share * g_size * (np.abs(v) + of_up) + np.abs(silu) * of_up
        slack += (2 * rounding + 2.0**-20) * np.abs(h) + 2.0**-20
        out = np.einsum("eth,ehd->etd", h, down)
        of_down = (hidden + 4) * u + backward + 2 * rounding
        size = np.einsum("eth,ehd->etd", slack + of_down * np.abs(h), np.abs(down))
        valid = (indices >= 0) & (indices < experts)
        w = np.where(valid, weights, 0)
        at = np.where(valid, indices, 0), np.arange(tokens)[:, None]
        value = (w[..., None] * out[at]).sum(1)
        bound = (np.abs(w)[..., None] * (size + 2 * rounding * np.abs(out))[at]).sum(1)
        return [compared(result, value, bound)]

    return Call(
        "moe",
        f"{experts} experts, indices={indices.tolist()[:5]}",
        operands,
        lambda m, x, gate, up, down, weights: m.moe(x, up, down, weights, indices, w_gate=gate),
        errors,
        is_plain=False,
    )


def messages(draw):
    """``segment_reduce`` of a function of rows that edges gather and of a number of each edge."""
    edges, nodes, count, columns = draw.size(), max(1, draw.size()), draw.size(), draw.size(20)
    dtype, reduction = draw.one(F32, BF16, F16, F64), draw.one("sum", "sum", "max")
    ids = draw.rng.integers(-1, count + 1, edges).astype(np.int32)
    source = draw.rng.integers(0, nodes, edges).astype(np.int32)
    operands = draw.operand((nodes, columns), dtype), draw.operand((edges, 1), dtype)
    belongs = ids[:, None] == np.arange(count)

    def errors(result, x, w):
        each = np.tanh(wide(x)[source]) * wide(w)
        slack = 8 * UNIT_ROUNDOFF[dtype] * np.abs(each)
        if reduction == "max":
            value = np.where(belongs[..., None], each[:, None], -np.inf).max(0, initial=-np.inf)
            of_any = np.where(belongs[..., None], slack[:, None], 0).max(0, initial=0)
            return [compared(result, value, of_any)]
        slack += (edges + 1) * unit(dtype) * np.abs(each)
        picks = belongs.T.astype(float)
        return [compared(result, picks @ each, picks @ slack)]

    return Call(
        "segment_reduce",
        f"{reduction}, ids={ids.tolist()[:20]}, {count}",
        operands,
        lambda m, x, w: m.segment_reduce(
            lambda x, w: jnp.tanh(x) * w, x, w, segment_ids=ids, num_segments=count,
            gather=(source, None), reduction=reduction,
        ),
        errors,
        is_plain=False,
    )  # fmt: skip


def orders(draw):
    """``top_k``, the largest in order, and of equal ones the first."""
    rows, columns = draw.size(), max(1, draw.size())
    k = int(draw.rng.integers(0, min(columns, draw.one(2, 70)) + 1))
    dtype = draw.one(*FLOATS, *map(np.dtype, ("int8", "uint8", "int32")))
    operand = draw.operand((rows, columns), dtype)
    axis = draw.one(-1, 0)
    axis = axis if k <= operand.shape[axis] else -1

    def errors(result, x):
        order = np.argsort(-wide(x), axis, kind="stable").take(range(k), axis)
        values = np.take_along_axis(wide(x), order, axis)
        return [compared(result[0], values, 0), compared(result[1], order, 0)]

    return Call(
        "top_k", f"{k}, {axis=}", (operand,), lambda m, x: m.top_k(x, k, axis=axis), errors,
        is_plain=False,
    )  # fmt: skip


def integers(draw):
    """``bincount`` and ``sort_by_key`` of small integers, some out of bounds."""
    count, bins = draw.size(), max(1, draw.size())
    name = draw.one("bincount", "sort_by_key")
    keys = draw.rng.integers(-2, bins + 2, count).astype(np.int32)
    operand = draw.operand((count,), draw.one(F32, np.dtype("int32")))
    if name == "bincount":
        # Negative integers count as zeros, as in jnp.bincount.
        inside = np.maximum(keys, 0)
        expected = np.bincount(inside[inside < bins], minlength=bins)
        return Call(
            name, f"{keys.tolist()[:20]}, {bins}", (operand,),
            lambda m, x: m.bincount(keys, length=bins) + jnp.zeros_like(x, np.int32).sum(),
            lambda result, x: [compared(result, expected, 0)], is_plain=False,
        )  # fmt: skip
    keys = np.clip(keys, 0, bins - 1)
    order = np.argsort(keys, kind="stable")
    return Call(
        name, f"{keys.tolist()[:20]}, {bins}", (operand,),
        lambda m, x: m.sort_by_key(keys, x, num_keys=bins)[1],
        lambda result, x: [compared(result, wide(x)[order], 0)], is_plain=False,
    )  # fmt: skip


GENERATORS = {
    "matmul": matmul,
    "dot_general": dot_general,
    "einsum": einsum_of_two,
    "tensordot": tensordot,
    "with_vectors": with_vectors,
    "multi_dot": multi_dot,
    "ragged_dot": ragged_dot,
    "sum": sum_over,
    "transpose": transpose,
    "add": add,
    "linear": linear,
    "gated_linear": gated_linear,
    "strassen_matmul": strassen_matmul,
    "linear_cross_entropy": linear_cross_entropy,
    "out_of_core": out_of_core,
    "linalg": linear_algebra,
    "segments": segments,
    "rows of tables": rows_of_table,
    "symmetric_matmul": symmetric_matmul,
    "decompositions": decompositions,
    "matrix functions": matrix_functions,
    "kernel": lanes,
    "moe": moe,
    "segment_reduce": messages,
    "top_k": orders,
    "integers": integers,
}

# Running.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes
    ----------
    ratio
        The largest error in units of its bound; infinite where the call or its result is wrong
        altogether, and ``None`` where JAX refuses the call, too.
    detail
        The exception, if there is one, and what computes the call.
    """

    call: Call
    mode: str
    ratio: float | None
    detail: str

    @property
    def failed(self):
        return self.ratio is not None and self.ratio > 1

    @property
    def known(self):
        """Why the error is larger than it should be, or ``None`` if nobody knows."""
        types = {x.dtype for x in self.call.operands}
        if types & set(FP8) and any(t.kind in "iu" for t in types):
            return "an integer is rounded to the float of 8 bits that it is multiplied with"
        return None

    def __str__(self):
        ratio = "refused" if self.ratio is None else f"{self.ratio:.3g}"
        return f"{ratio:>8}  {self.mode:5}  {self.call}\n          {self.detail}"


def namespace_of_jax():
    """JAX's functions of the same names, and none where there is no such function."""
    found = argparse.Namespace(linalg=argparse.Namespace())
    for ours, theirs, modules in (
        (jtk, found, (jnp, jnp.linalg, lax)),
        (jtk.linalg, found.linalg, (jnp.linalg, jax.scipy.linalg)),
    ):
        for name in ours.__all__:
            for module in modules:
                if hasattr(module, name):
                    setattr(theirs, name, getattr(module, name))
                    break
    return found


JAX = namespace_of_jax()


def draw_call(draw, operation=None):
    often = ("with_vectors", "with_vectors", "matmul")
    return GENERATORS[operation or draw.one(*GENERATORS, *often)](draw)


def run(draw, call):
    """Compute a call in a mode that is drawn, and compare."""
    host = call.operation.startswith("out_of_core")
    modes = ["eager"] if host else [m for m in MODES if m != "grad" or call.cotangent_errors]
    mode = draw.one(*modes)
    special = call.is_plain and mode in ("eager", "jit") and draw.chance(0.15)
    special = special and all(is_float(x.dtype) for x in call.operands)
    count = draw.one(1, 2, 5) if mode == "vmap" else 1
    axes = [draw.one(None, *range(len(x.shape) + 1)) for x in call.operands]
    if all(axis is None for axis in axes):
        axes[0] = 0
    # The values of each operand, of which an unmapped one has one.
    mapped = [mode == "vmap" and axis is not None for axis in axes]
    values = [
        [draw.value(x, special) for _ in range(count if is_mapped else 1)]
        for x, is_mapped in zip(call.operands, mapped, strict=True)
    ]
    stored = [
        np.stack([v.transpose(x.order) for v in each], axis)
        if is_mapped
        else each[0].transpose(x.order)
        for x, each, axis, is_mapped in zip(call.operands, values, axes, mapped, strict=True)
    ]
    in_axes = tuple(axis if m else None for axis, m in zip(axes, mapped, strict=True))
    note = f" in_axes={in_axes}" if mode == "vmap" else " NaN, inf" if special else ""

    def function(m, *arrays):
        restored = (
            jnp.transpose(x, np.argsort(operand.order))
            if operand.order != (0, 1) or not host
            else x
            for x, operand in zip(arrays, call.operands, strict=True)
        )
        return call.function(m, *restored)

    def computed(m):
        def ours(*arrays):
            return function(m, *arrays)

        if mode == "grad":
            result, pull = jax.vjp(jax.jit(ours), *stored)
            cotangent = draw_cotangent.standard_normal(result.shape)
            if result.dtype in COMPLEX:
                cotangent = cotangent + 1j * draw_cotangent.standard_normal(result.shape)
            cotangent = cotangent.astype(result.dtype)
            cotangents = [
                np.transpose(x, np.argsort(operand.order))
                for x, operand in zip(pull(jnp.asarray(cotangent)), call.operands, strict=True)
            ]
            return result, cotangent, cotangents
        mapped = jax.vmap(ours, in_axes) if mode == "vmap" else ours
        return jax.block_until_ready((jax.jit(mapped) if mode == "jit" else mapped)(*stored))

    draw_cotangent = np.random.default_rng(int(draw.rng.integers(2**32)))
    wide_types = any(x.dtype.name in ("float64", "complex128") for x in call.operands)
    # Small complex products are XLA's at the defaults.
    as_real = any(x.dtype in COMPLEX for x in call.operands) and draw.chance(0.5)
    policy = jtk.policy("kernels" if as_real else "auto")
    with policy, jax.enable_x64(True) if wide_types else contextlib.nullcontext():
        try:
            result = computed(jtk)
        except Exception as error:
            return _of_error(call, mode + note, error, computed)
        firsts = [each[0] for each in values]
        if mode == "grad":
            result, cotangent, cotangents = result
            found = [*call.errors(result, *firsts)]
            found += call.cotangent_errors(cotangents, cotangent, *firsts)
        elif mode == "vmap":
            found = []
            for i in range(count):
                of_call = [each[min(i, len(each) - 1)] for each in values]
                found += call.errors(jax.tree.map(lambda x, i=i: x[i], result), *of_call)
        else:
            found = call.errors(result, *firsts)
        ratio = max(
            (
                float(np.max(np.where(error == 0, 0, error / np.maximum(bound, 1e-300)), initial=0))
                for error, bound in found
            )
        )
        detail = note.strip()
        if ratio > 1 and not host:
            chosen = (
                jtk.explain(jax.vmap(lambda *x: function(jtk, *x), in_axes), *stored)
                if (mode == "vmap")
                else jtk.explain(lambda *x: function(jtk, *x), *stored)
            )
            detail = f"{detail} {chosen}".strip()
        return Outcome(call, mode, ratio, detail)


def _of_error(call, mode, error, computed):
    """The outcome of an exception, which is JAX's own if its function raises one of the type."""
    try:
        computed(JAX)
    except Exception as theirs:
        if type(theirs) is type(error):
            return Outcome(call, mode, None, f"{type(error).__name__}: {error}")
    lines = " ".join(str(error).split())[:300]
    return Outcome(call, mode, math.inf, f"{type(error).__name__}: {lines}")


def outcomes(rng, calls, operation=None):
    """Yield the outcome of random calls."""
    for _ in range(calls):
        draw = Draw(rng)
        yield run(draw, draw_call(draw, operation))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operation", choices=GENERATORS)
    parser.add_argument("--worst", type=int, default=10, help="how many calls to print")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    found = []
    for outcome in outcomes(rng, options.calls, options.operation):
        found.append(outcome)
        if outcome.failed:
            print(outcome, flush=True)
    print(f"{'operation':22}  calls  refused  failed  largest error / bound")
    for operation in sorted({x.call.operation for x in found}):
        own = [x for x in found if x.call.operation == operation]
        refused = sum(x.ratio is None for x in own)
        largest = max((x.ratio for x in own if x.ratio is not None), default=0.0)
        failed = sum(x.failed for x in own)
        print(f"{operation:22} {len(own):6} {refused:8} {failed:7}  {largest:.3g}")
    worst = sorted((x for x in found if x.ratio is not None), key=lambda x: -x.ratio)
    print("\nworst:")
    for outcome in worst[: options.worst]:
        print(outcome)
    raise SystemExit(any(x.failed for x in found))


if __name__ == "__main__":
    main()
