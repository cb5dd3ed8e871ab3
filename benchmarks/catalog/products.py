"""Products of two arrays and more."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax import lax

from benchmarks.catalog.bounds import (
    BF16,
    COMPLEX,
    F16,
    F32,
    F64,
    FLOATS,
    FP8,
    NARROW,
    UNIT_ROUNDOFF,
    as_promoted,
    compared,
    einsum,
    is_float,
    operand_rounding,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import MOST_TERMS, Draw, text_of


def product(operation, arguments, operands, subscripts, function, precision=None, conjugate=False):
    """Return a contraction of two operands, named by labels."""
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


def matmul(draw: Draw, name: str) -> Call:
    """Draw vectors, matrices, and batches that broadcast."""
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
        name,
        text_of(options),
        operands,
        subscripts,
        lambda m, a, b: m.matmul(a, b, **options),
        options.get("precision"),
    )


def contraction_labels(draw):
    """Return labels of a general contraction: of lhs, of rhs, contracted, batch."""
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


def dot_general(draw: Draw, name: str) -> Call:
    """Draw any dimension numbers."""
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
        name,
        f"{dimensions}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.dot_general(a, b, dimensions, **options),
        options.get("precision"),
    )


def einsum_of_two(draw: Draw, name: str) -> Call:
    """Draw any subscripts of two operands."""
    lhs, rhs, (contracted, _) = contraction_labels(draw)
    out = draw.shuffled([x for x in dict.fromkeys(lhs + rhs) if x not in contracted])
    subscripts = f"{lhs},{rhs}->{out}"
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)))
    options = draw.options(operands)
    return product(
        name,
        f"{subscripts}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.einsum(subscripts, a, b, **options),
        options.get("precision"),
    )


def tensordot(draw: Draw, name: str) -> Call:
    """Draw any axes."""
    rows, columns = draw.labels((0, 1, 2), but="kl"), draw.labels((0, 1, 2), but="klab")
    contracted = draw.one("", "k", "kl")
    lhs, rhs = draw.shuffled(rows + contracted), draw.shuffled(contracted + columns)
    out = "".join(x for x in lhs + rhs if x not in contracted)
    subscripts = f"{lhs},{rhs}->{out}"
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)))
    options = draw.options(operands)
    axes = [[labels.index(x) for x in contracted] for labels in (lhs, rhs)]
    return product(
        name,
        f"{axes}, {text_of(options)}",
        operands,
        subscripts,
        lambda m, a, b: m.tensordot(a, b, axes, **options),
        options.get("precision"),
    )


# The operations whose shapes leave no other choice.
_WITH_VECTORS = {
    "dot": ("k,k->", "mk,k->m", "k,kn->n", "amk,bkn->ambn", ",kn->kn", "mk,kn->mn"),
    "vdot": ("k,k->", "ij,ij->"),
    "inner": ("k,k->", "amk,nk->amn"),
    "matvec": ("mk,k->m", "bmk,bk->bm"),
    "vecmat": ("k,kn->n", "bk,bkn->bn"),
    "vecdot": ("k,k->", "abk,abk->ab"),
}


def with_vectors(draw: Draw, name: str) -> Call:
    """Draw a product of vectors and matrices."""
    subscripts = draw.one(*_WITH_VECTORS[name])
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
        name in ("vdot", "vecmat", "vecdot"),
    )


def multi_dot(draw: Draw, name: str) -> Call:
    """Draw a chain of three products."""
    subscripts = "ij,jk,kl->il"
    sizes = draw.sizes("ijkl", MOST_TERMS)
    operands = draw.operands(subscripts, sizes, types=[draw.type(F32, BF16, F16)] * 3)

    def errors(result, *arrays):
        with np.errstate(invalid="ignore"):
            value = np.linalg.multi_dot([np.asarray(x, np.float64) for x in arrays])
            magnitude = np.linalg.multi_dot([np.abs(np.asarray(x, np.float64)) for x in arrays])
        share = (sizes["j"] + sizes["k"] + 2) * 2.0**-24
        share += 2 * operand_rounding([x.dtype for x in operands], None)
        # The inner product is rounded to the type, too.
        share += 2 * UNIT_ROUNDOFF[operands[0].dtype]
        return [compared(result, value, share * magnitude)]

    call = (
        (lambda m, *arrays: m.multi_dot(arrays))
        if name == "multi_dot"
        else (lambda m, *arrays: m.einsum(subscripts, *arrays))
    )
    return Call(name, "", operands, call, errors, is_plain=False)


def strassen_matmul(draw: Draw, name: str) -> Call:
    """Draw one level or two."""
    levels = draw.one(1, 2)
    dtype = draw.type(F32, F64, BF16)
    operands = draw.operands("mk,kn->mn", draw.sizes("mkn"), [dtype] * 2)

    def errors(result, a, b):
        a, b = wide(a), wide(b)
        # The bound of Winograd's form is on the largest elements.
        largest = np.abs(a).max(initial=0) * np.abs(b).max(initial=0)
        share = a.shape[1] * UNIT_ROUNDOFF[dtype] + operand_rounding([dtype] * 2, None)
        return [compared(result, a @ b, 18.0**levels * share * largest)]

    return Call(
        name,
        f"levels={levels}",
        operands,
        lambda m, a, b: m.strassen_matmul(a, b, levels=levels),
        errors,
        is_plain=False,
    )


def symmetric_matmul(draw: Draw, name: str) -> Call:
    """Draw a product with the transpose."""
    sizes, dtype, batch = draw.sizes("mk"), draw.type(*FLOATS), draw.one("", "", "b")
    (operand,) = draw.operands(f"{batch}mk->", {"b": 3, **sizes}, [dtype])
    options = draw.options([operand])
    share = (operand.shape[-1] + 1) * unit(dtype)
    share += operand_rounding([dtype], options.get("precision"))
    backward = (operand.shape[-2] + 1) * unit(dtype) + operand_rounding([dtype], None, True)

    def errors(result, a):
        a = wide(a)
        return [compared(result, a @ a.mT, share * (np.abs(a) @ np.abs(a.mT)))]

    def cotangent_errors(cotangents, cotangent, a):
        ct, a = wide(cotangent), wide(a)
        terms = [(x @ a, np.abs(x) @ np.abs(a)) for x in (ct, ct.mT)]
        slack = sum(backward * size + UNIT_ROUNDOFF[dtype] * np.abs(x) for x, size in terms)
        return [compared(cotangents[0], sum(x for x, _ in terms), slack)]

    return Call(
        name,
        text_of(options),
        (operand,),
        lambda m, a: m.symmetric_matmul(a, **options),
        errors,
        cotangent_errors,
        is_plain=False,
    )


def symmetric_polynomial(draw: Draw, name: str) -> Call:
    """Draw a polynomial of a symmetric matrix."""
    sizes, dtype, batch = draw.sizes("m"), draw.type(*FLOATS), draw.one("", "", "b")
    (operand,) = draw.operands(f"{batch}mm->", {"b": 3, **sizes}, [dtype])
    options = draw.options([operand], element_type=False)
    share = (operand.shape[-1] + 3) * unit(dtype)
    share += operand_rounding([dtype], options.get("precision"))

    def scaled_difference(product, scale, x):
        return scale * product - x

    def call(m, a):
        # XLA would not round what the epilogue reads.
        x = lax.optimization_barrier(a + a.mT)
        y = m.symmetric_matmul(x, x, epilogue=scaled_difference, operands=(0.5, x), **options)
        return x, y

    def errors(result, _):
        x, size = wide(result[0]), np.abs(wide(result[0]))
        return [compared(result[1], x @ x / 2 - x, share * (size @ size / 2 + size))]

    return Call(name, text_of(options), (operand,), call, errors, is_plain=False)


def out_of_core(draw: Draw, name: str) -> Call:
    """Draw matrices that exceed the memory limit, or do not."""
    types = [draw.type(F32, F64, BF16, np.dtype("int8"))] * 2
    operands = tuple(
        dataclasses.replace(x, order=(0, 1))
        for x in draw.operands(
            "mk,kn->mn", {k: max(1, v) for k, v in draw.sizes("mkn").items()}, types
        )
    )
    call = product(
        name,
        "memory_limit=2000000",
        operands,
        "mk,kn->mn",
        lambda m, a, b: m.out_of_core.matmul(np.asarray(a), np.asarray(b), memory_limit=2_000_000),
    )
    return dataclasses.replace(call, cotangent_errors=None, is_plain=False)


def collective(draw: Draw, name: str) -> Call:
    """Draw a product of rows that devices gather, or of columns whose sums they scatter."""
    dtype, axis = draw.type(F32, BF16), draw.one(1, 2, 4)
    m, k, n = (max(1, size) for size in (draw.size(40), draw.size(40), draw.size(40)))
    gathers = name == "all_gather_matmul"
    shapes = ((axis, m, k), (k, n)) if gathers else ((axis, m * axis, k), (axis, k, n))
    operands = tuple(draw.operand(shape, dtype) for shape in shapes)

    def call(m, x, w):
        function = getattr(m, name)
        if gathers:
            return jax.vmap(lambda x: function(x, w, "i"), axis_name="i")(x)
        return jax.vmap(lambda x, w: function(x, w, "i"), axis_name="i")(x, w)

    def errors(result, x, w):
        subscripts = "ik,kn->in" if gathers else "aik,akn->in"
        x = wide(x).reshape(-1, k) if gathers else wide(x)
        value, magnitude, terms = einsum(subscripts, x, wide(w))
        share = (terms + axis) * 2.0**-24 + operand_rounding([dtype] * 2, None)
        # Parts of the sum are rounded to the type.
        share += 0 if gathers else axis * UNIT_ROUNDOFF[dtype]
        if gathers:
            value, magnitude = (np.broadcast_to(z, (axis, *z.shape)) for z in (value, magnitude))
        else:
            value, magnitude = (z.reshape(axis, m, n) for z in (value, magnitude))
        return [compared(result, value, share * magnitude)]

    return Call(name, f"{axis} devices", operands, call, errors, is_plain=False)


DESCRIPTIONS = [
    *describe(collective, "all_gather_matmul", "matmul_reduce_scatter", linear=True),
    *describe(matmul, "matmul", linear=True),
    *describe(dot_general, "dot_general", linear=True),
    *describe(einsum_of_two, "einsum", linear=True),
    *describe(multi_dot, "einsum, of three", "multi_dot", linear=True),
    *describe(tensordot, "tensordot", linear=True),
    *describe(with_vectors, *_WITH_VECTORS, linear=True),
    *describe(strassen_matmul, "strassen_matmul", linear=True, tolerance=1e-3),
    *describe(symmetric_matmul, "symmetric_matmul"),
    *describe(symmetric_polynomial, "symmetric_matmul, polynomial"),
    *describe(out_of_core, "out_of_core.matmul", derivatives=0, on_host=True),
]
