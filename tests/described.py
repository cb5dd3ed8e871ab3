"""Calls of the operations that ``benchmarks/catalog`` describes."""

from __future__ import annotations

import math
import zlib

import jax.numpy as jnp
import numpy as np

from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.bounds import F32, FP8
from benchmarks.catalog.draw import Draw


def call_of(name, only=F32, number=0, special=False, scale=1):
    """Return a small call of an operation, the same one for equal arguments, and NumPy's operands.

    The first one has several dimensions, groups and experts. With ``special``, NaN and infinities
    are among the operands.
    """
    draw = Draw(np.random.default_rng([zlib.crc32(name.encode()), number]), only, scale)
    calls = [DESCRIPTIONS[name].draw(draw) for _ in range(1 if number else 8)]
    call = max(calls, key=lambda call: sum(math.prod(x.shape) for x in call.operands))
    return call, [draw.value(x, special and x.dtype.kind in "fV") for x in call.operands]


def differentiable(arrays):
    """Return the positions of the arrays by which operations have derivatives."""
    types = [x.dtype for x in arrays]
    return [i for i, t in enumerate(types) if jnp.issubdtype(t, jnp.inexact) and t not in FP8]
