"""Sums, sums of elements, and transposes."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.catalog.bounds import F32, F64, FP8, NARROW, compared, is_float, unit, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import MOST_TERMS, Draw, text_of


def sum_over(draw: Draw, name: str) -> Call:
    """Draw any axes."""
    labels = draw.labels((0, 1, 2, 3, 3))
    sizes = draw.sizes(labels, 1 << 20)
    (x,) = draw.operands(f"{labels}->", sizes, [draw.dtype()])
    axes = tuple(i for i in range(len(labels)) if draw.chance(0.6))
    options = {"axis": draw.one(None, axes), "keepdims": draw.chance(0.3)}
    if draw.only is not None:  # Some axes, which are not the last ones.
        axes = options["axis"] = tuple(range(0, len(labels) - 1, 2))
    if draw.only is None and draw.chance(0.2) and is_float(x.dtype) and x.dtype not in FP8:
        options["dtype"] = draw.one(F32, *NARROW)
    if draw.only is None and draw.chance(0.2):
        options["initial"] = 3
    over = tuple(range(len(labels))) if options["axis"] is None else axes
    # What is left out may be anything.
    has_mask = draw.chance(0.2) and math.prod(x.shape) <= MOST_TERMS
    where = draw.rng.random(x.shape) < 0.7 if has_mask else None
    masked = {} if where is None else {"where": where}

    def errors(result, x):
        value, magnitude = (
            z.sum(over, keepdims=options["keepdims"], **masked) + options.get("initial", 0)
            for z in (wide(x), np.abs(wide(x)))
        )
        terms = math.prod(np.shape(x)[i] for i in over) + 2
        # As by JAX, a sum into another type is added up in that type, or float32.
        roundoff = unit(x.dtype, options.get("dtype", x.dtype))
        return [compared(result, value, terms * roundoff * magnitude)]

    def cotangent_errors(cotangents, cotangent, x):
        ct = wide(cotangent) if options["keepdims"] else np.expand_dims(wide(cotangent), over)
        ct = np.broadcast_to(ct, x.shape)
        return [compared(cotangents[0], ct if where is None else np.where(where, ct, 0), 0)]

    return Call(
        name,
        f"{text_of(options)}{', where' * bool(masked)}",
        (x,),
        lambda m, x: m.sum(x, **options, **masked),
        errors,
        cotangent_errors if is_float(x.dtype) and x.dtype not in FP8 else None,
    )


def transpose(draw: Draw, name: str) -> Call:
    """Draw any permutation."""
    labels = draw.labels((0, 1, 2, 3, 4))
    (x,) = draw.operands(f"{labels}->", draw.sizes(labels, 1 << 20), [draw.dtype()])
    axes = tuple(draw.rng.permutation(len(labels)).tolist())
    if draw.only is not None:  # The inverse is another permutation.
        axes = tuple(np.roll(range(len(labels)), 1).tolist())
    return Call(
        name,
        f"{axes}",
        (x,),
        lambda m, x: m.transpose(x, axes),
        lambda result, x: [compared(result, wide(x).transpose(axes), 0)],
        (lambda cts, ct, x: [compared(cts[0], wide(ct).transpose(np.argsort(axes)), 0)])
        if is_float(x.dtype)
        else None,
    )


def add(draw: Draw, name: str) -> Call:
    """Draw operands that broadcast."""
    labels = draw.labels((0, 1, 2, 3))
    operands = draw.operands(f"{labels},{labels}->", draw.sizes(labels, 1 << 20), broadcast=labels)

    def errors(result, x, y):
        with np.errstate(invalid="ignore"):
            value, magnitude = wide(x) + wide(y), np.abs(wide(x)) + np.abs(wide(y))
        return [compared(result, value, 2.0**-24 * magnitude if value.dtype != F64 else 0)]

    return Call(name, "", operands, lambda m, x, y: m.add(x, y), errors)


DESCRIPTIONS = [
    *describe(sum_over, "sum", linear=True),
    *describe(transpose, "transpose", linear=True),
    *describe(add, "add"),
]
