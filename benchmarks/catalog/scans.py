"""Cumulative reductions, linear recurrences, and scans by other functions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from benchmarks.catalog.bounds import (
    BF16,
    COMPLEX,
    F16,
    F32,
    F64,
    FLOATS,
    UNIT_ROUNDOFF,
    compared,
    is_float,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import OTHERS, Draw

_UFUNCS = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum}


def _along(function, axis, reverse, *arrays):
    """Apply a function along the first axis of arrays whose axis is moved there, in its order."""
    order = slice(None, None, -1 if reverse else 1)
    result = function(*(np.moveaxis(x, axis, 0)[order] for x in arrays))
    return np.moveaxis(result[order], 0, axis)


def _direction(draw: Draw, rank: int) -> tuple[int, bool]:
    # The first axis is what devices share.
    axis = rank - 1 if draw.only is not None else int(draw.rng.integers(rank))
    return axis, draw.chance(0.5)


def _rounded_twice(x, dtype):
    """Return what a cast of float64 may differ by where it goes through float32, as on CPUs."""
    if x.dtype != F64 or dtype.itemsize >= 4:
        return np.zeros(x.shape)
    middle = x.astype(F32)
    below, above = (np.nextafter(middle, F32.type(to)).astype(dtype) for to in (-np.inf, np.inf))
    return np.abs(wide(above) - wide(below))


def cumulative(draw: Draw, name: str) -> Call:
    """Draw any axis, either direction, and types that are cast."""
    labels = draw.labels((1, 2, 2, 3)) if draw.only is None else "ab"
    whole = OTHERS[:-1] if draw.for_tests and name != "cumlogsumexp" else ()
    complex_ = COMPLEX if name in ("cumsum", "cumprod") else ()
    (x,) = draw.operands(
        f"{labels}->", draw.moved_sizes(labels, 1 << 18), [draw.type(*FLOATS, *whole, *complex_)]
    )
    axis, reverse = _direction(draw, len(labels))
    options = {"axis": axis, "reverse": reverse}
    if draw.only is None and draw.chance(0.2) and name in ("cumsum", "cumprod"):
        options["dtype"] = draw.one(F32, BF16) if is_float(x.dtype) else x.dtype
    length = x.shape[axis]

    def scanned(x, ufunc=None):
        accumulate = (ufunc or _UFUNCS[name]).accumulate
        with np.errstate(all="ignore"):
            return _along(lambda x: accumulate(x, 0), axis, reverse, x)

    def errors(result, x):
        if name in ("cummax", "cummin"):
            return [compared(result, scanned(wide(x)), 0)]
        types = x.dtype, options.get("dtype", x.dtype)
        value = wide(x.astype(types[1]) if name != "cumlogsumexp" else x)
        terms = 4 * (length + 2) * unit(*types)
        casts = _rounded_twice(x, types[1])
        if name == "cumlogsumexp":
            sums = _along(lambda x: np.logaddexp.accumulate(x, 0), axis, reverse, value)
            largest = np.abs(value).max(axis, keepdims=True, initial=0) + np.log(length + 1) + 1
            return [compared(result, sums, 2 * terms * largest)]
        if name == "cumprod":
            # A part of the product may underflow, and the other factors are larger than 1.
            products, above = scanned(value), scanned(np.maximum(np.abs(value), 1))
            with np.errstate(all="ignore"):
                underflow = 4 * (length + 2) * 2.0**-126 * above
                relative = terms + scanned(casts / np.maximum(np.abs(value), 2.0**-126), np.add)
                return [compared(result, products, relative * np.abs(products) + underflow)]
        slack = terms * scanned(np.abs(value), np.add) + scanned(casts, np.add)
        return [compared(result, scanned(value), slack)]

    def cotangent_errors(cotangents, cotangent, x):
        def sums(x):
            return _along(lambda x: np.cumsum(x, 0), axis, not reverse, x)

        ct = wide(cotangent)
        types = x.dtype, options.get("dtype", x.dtype)
        slack = (length + 2) * unit(*types) * sums(np.abs(ct))
        # A cotangent of another type is rounded to it first.
        slack = slack + max(UNIT_ROUNDOFF[x] for x in types) * np.abs(sums(ct))
        return [compared(cotangents[0], sums(ct), slack)]

    linear = name == "cumsum" and is_float(x.dtype)
    return Call(
        name,
        ", ".join(f"{key}={getattr(value, 'name', value)}" for key, value in options.items()),
        (x,),
        lambda m, x: getattr(m, name)(x, **options),
        errors,
        cotangent_errors if linear else None,
        is_plain=False,
        # Which of two NaN, or of zeros of both signs, is larger is not defined.
        has_jaxs_bits=x.dtype.kind in "iu",
    )


def _states(a, b, first):
    states = np.zeros(b.shape, np.result_type(a, b))
    state = first
    for t in range(len(b)):
        states[t] = state = a[t] * state + b[t]
    return states


def recurrence(draw: Draw, name: str) -> Call:
    """Draw any axis, either direction, and a first state."""
    labels = draw.labels((1, 2, 2, 3)) if draw.only is None else "ab"
    dtype = draw.type(F32, BF16, F16, F64, *COMPLEX)
    sizes = draw.moved_sizes(labels, 1 << 16)
    axis, reverse = _direction(draw, len(labels))
    length = sizes[labels[axis]]
    operands = draw.operands(f"{labels},{labels}->", sizes, [dtype, dtype])
    if draw.only is None and draw.chance(0.5):
        state = labels[:axis] + labels[axis + 1 :]
        operands += draw.operands(f"{state}->", sizes, [dtype])

    def states(a, b, first=0, *, reverse=reverse):
        first = np.broadcast_to(first, b.shape[:axis] + b.shape[axis + 1 :])
        with np.errstate(all="ignore"):
            return _along(lambda a, b: _states(a, b, first), axis, reverse, a, b)

    roundoff = 8 * (length + 2) * unit(dtype)

    def errors(result, *xs):
        sizes = [np.abs(wide(x)) for x in xs]
        # Products of coefficients may underflow.
        slack = roundoff * states(*sizes) + length * 2.0**-126 * (1 + np.max(sizes[1], initial=0))
        # Behind a product of coefficients, or a state, that may overflow, anything is right.
        reached = states(sizes[0], *(np.maximum(x, 1) for x in sizes[1:]))
        reached = _along(np.maximum.accumulate, axis, reverse, reached)
        slack = np.where(8 * reached < float(jnp.finfo(dtype).max), slack, np.inf)
        return [compared(result, states(*map(wide, xs)), slack)]

    def before(x, first=0):
        def moved(x):
            start = np.broadcast_to(first, x.shape[1:])
            return np.concatenate([start[None], x[:-1]]) if len(x) else x

        return _along(moved, axis, reverse, x)

    def after(x):
        return _along(lambda x: np.concatenate([0 * x[:1], x[:-1]]), axis, not reverse, x)

    def cotangent_errors(cotangents, cotangent, a, b, *first):
        def gradients(a, b, *first, ct):
            g = states(after(a), ct, reverse=not reverse)
            da = g * before(states(a, b, *first), *first)
            at = np.take(np.arange(length), -1 if reverse else 0)
            return da, g, *((np.take(a * g, at, axis),) if first else ())

        exact = gradients(*map(wide, (a, b, *first)), ct=wide(cotangent))
        largest = gradients(*(np.abs(wide(x)) for x in (a, b, *first)), ct=np.abs(wide(cotangent)))
        # States and cotangents are rounded to their type before they are multiplied.
        relative = 2 * roundoff + 4 * UNIT_ROUNDOFF[dtype]
        tiny = length * 2.0**-126 * (1 + max(np.max(x, initial=0) for x in largest))
        return [
            compared(found, value, relative * size + tiny)
            for found, value, size in zip(cotangents, exact, largest, strict=True)
        ]

    return Call(
        name,
        f"{axis=}, {reverse=}",
        operands,
        lambda m, a, b, *first: m.linear_recurrence(
            a, b, axis=axis, reverse=reverse, initial=first[0] if first else None
        ),
        errors,
        cotangent_errors if is_float(dtype) and length else None,
        is_plain=False,
    )


def of_one_array(draw: Draw, name: str) -> Call:
    """Draw ``x + y + x y``, by which products of ``1 + x`` grow."""
    labels = draw.labels((1, 2, 2, 3)) if draw.only is None else "ab"
    dtype = draw.type(F32, F64)
    axis, reverse = _direction(draw, len(labels))
    (operand,) = draw.operands(f"{labels}->", draw.moved_sizes(labels, 1 << 16), [dtype])
    length = operand.shape[axis]

    # The same function in each call.
    def combine(x, y):
        return x + y + x * y

    def errors(result, x):
        def products(x):
            with np.errstate(all="ignore"):
                return _along(lambda x: np.multiply.accumulate(x, 0), axis, reverse, 1 + x)

        # Terms of 1 + |x| multiply in the same way.
        slack = 8 * (length + 2) * unit(dtype) * products(np.abs(wide(x)))
        return [compared(result, products(wide(x)) - 1, slack)]

    return Call(
        name,
        f"{axis=}, {reverse=}",
        (operand,),
        lambda m, x: m.associative_scan(combine, x, reverse, axis),
        errors,
        is_plain=False,
    )


def composition(draw: Draw, name: str) -> Call:
    """Draw affine maps, which are composed, and numbers, of which the largest is found."""
    labels = draw.labels((1, 2, 2, 3)) if draw.only is None else "ab"
    dtype = draw.type(F32, F64)
    axis, reverse = _direction(draw, len(labels))
    sizes = draw.moved_sizes(labels, 1 << 16)
    operands = draw.operands(f"{labels},{labels},{labels}->", sizes, [dtype] * 3)
    length = operands[0].shape[axis]

    def combine(x, y):
        (a, b, c), (d, e, f) = x, y
        return a * d, d * b + e, jnp.maximum(c, f)

    def scanned(a, b, c):
        with np.errstate(all="ignore"):
            products, maxima = (
                _along(lambda x, f=f: f.accumulate(x, 0), axis, reverse, x)
                for f, x in ((np.multiply, a), (np.maximum, c))
            )
            states = _along(lambda a, b: _states(a, b, 0), axis, reverse, a, b)
        return products, states, maxima

    def errors(results, *xs):
        exact, largest = scanned(*map(wide, xs)), scanned(*(np.abs(wide(x)) for x in xs))
        # Products of coefficients may underflow.
        above = scanned(*(np.maximum(np.abs(wide(x)), 1) for x in xs))
        roundoff, tiny = 8 * (length + 2) * unit(dtype), 4 * (length + 2) * 2.0**-126
        return [
            compared(found, value, 0 if i == 2 else roundoff * size + tiny * more)
            for i, (found, value, size, more) in enumerate(
                zip(results, exact, largest, above, strict=True)
            )
        ]

    return Call(
        name.partition(",")[0],
        f"{axis=}, {reverse=}",
        operands,
        lambda m, *xs: m.associative_scan(combine, xs, reverse, axis),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [
    *describe(cumulative, "cumsum", linear=True),
    *describe(cumulative, "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *describe(recurrence, "linear_recurrence"),
    *describe(of_one_array, "associative_scan"),
    # The derivatives of scans of several arrays are JAX's, which fail in some modes and meshes.
    *describe(composition, "associative_scan, maps", derivatives=0),
]
