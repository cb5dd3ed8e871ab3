"""Convolutions."""

from __future__ import annotations

import functools

import numpy as np

from benchmarks.catalog.bounds import F32, FLOATS, compared, unit, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw, text_of


def _logistic(z):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def _terms(x, weights, bias, state):
    """Return the arguments of the activation, and the sum of magnitudes of their terms."""
    inputs = np.concatenate((state, x), -2)
    length = x.shape[-2]
    taps = [inputs[..., i : i + length, :] for i in range(len(weights))]
    z = bias + sum(w * tap for w, tap in zip(weights, taps, strict=True))
    size = np.abs(bias) + sum(np.abs(w * tap) for w, tap in zip(weights, taps, strict=True))
    return z, size, taps


def causal_conv1d(draw: Draw, name: str) -> Call:
    """Draw sequences, with a state or without."""
    width = draw.one(2, 3, 4, 4, 5, 8) if draw.only is None else 4
    sizes = draw.moved_sizes("blc", 1 << 20)
    batch, length, channels = (sizes[label] for label in "blc")
    dtype = draw.type(*FLOATS)
    options = {"activation": draw.one(None, "silu") if draw.only is None else "silu"}
    has_state = draw.only is not None or draw.chance(0.5)
    shapes = [(batch, length, channels), (width, channels), (channels,)]
    shapes += [(batch, width - 1, channels)] if has_state else []
    operands = tuple(draw.operand(shape, dtype) for shape in shapes)

    def exact(x, weights, bias, state=None):
        none = np.zeros((batch, width - 1, channels))
        return _terms(*map(wide, (x, weights, bias, none if state is None else state)))

    def errors(result, *operands):
        z, size, _ = exact(*operands)
        # The slope of silu is below 1.1, and its terms are rounded a few times.
        value = z * _logistic(z) if options["activation"] else z
        roundoff = unit(dtype, dtype) * np.abs(value)
        found = [compared(result, value, 2.2 * (width + 4) * unit(F32, F32) * size + roundoff)]
        return found if dtype.itemsize < 8 else [compared(result, value, 1e-15 * 64 * size)]

    def cotangent_errors(cotangents, cotangent, *operands):
        z, size, taps = exact(*operands)
        share = _logistic(z)
        slope = share * (1 + z * (1 - share)) if options["activation"] else 1.0
        d_z, weights = wide(cotangent) * slope, wide(operands[1])
        # An error of z changes the slope by less than half of it.
        rounding = unit(F32, F32) if dtype.itemsize < 8 else 1e-15
        error = np.abs(wide(cotangent)) * (width + 8) * 2 * rounding * (1 + size)
        d_inputs = np.zeros((batch, width - 1 + length, channels))
        bound = np.zeros_like(d_inputs)
        for i, w in enumerate(weights):
            d_inputs[:, i : i + length] += w * d_z
            bound[:, i : i + length] += np.abs(w) * (error + 2 * width * rounding * np.abs(d_z))
        bound += unit(dtype, dtype) * np.abs(d_inputs)
        terms = batch * length + 2
        sums = np.stack([(d_z * tap).sum((0, 1)) for tap in taps])
        of_sums = np.stack(
            [((terms * rounding * np.abs(d_z) + error) * np.abs(tap)).sum((0, 1)) for tap in taps]
        )
        of_bias = (terms * rounding * np.abs(d_z) + error).sum((0, 1))
        total = d_z.sum((0, 1))
        own = unit(dtype, dtype)
        found = [
            (d_inputs[:, width - 1 :], bound[:, width - 1 :]),
            (sums, of_sums + own * np.abs(sums)),
            (total, of_bias + own * np.abs(total)),
            (d_inputs[:, : width - 1], bound[:, : width - 1]),
        ]
        return [compared(x, *y) for x, y in zip(cotangents, found, strict=False)]

    def function(m, x, weights, bias, state=None):
        call = functools.partial(m.causal_conv1d, x, weights, bias, **options)
        return call() if state is None else call(state=state)[0]

    return Call(
        name, f"{text_of(options)}", operands, function, errors, cotangent_errors, is_plain=False
    )


DESCRIPTIONS = [*describe(causal_conv1d, "causal_conv1d")]
