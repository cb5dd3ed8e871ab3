"""Products of groups of rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.catalog.bounds import (
    BF16,
    F32,
    as_promoted,
    compared,
    einsum,
    is_float,
    operand_rounding,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw, text_of


def ragged_dot(draw: Draw, name: str) -> Call:
    """Draw groups, of which the rows may be fewer than there are."""
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
    def errors(result, a, b, _):
        a, b = (wide(as_promoted(x, types)) for x in (a, b))
        return [compared(result, *sums("gmk,gkn->mn", in_groups(a), b, False))]

    def cotangent_errors(cotangents, cotangent, a, b, _):
        ct = in_groups(wide(cotangent))
        return [
            compared(cotangents[0], *sums("gmn,gkn->mk", ct, wide(b), True)),
            compared(cotangents[1], *sums("gmk,gmn->gkn", in_groups(wide(a)), ct, True)),
        ]

    return Call(
        name,
        f"group_sizes={counts.tolist()}, {text_of(options)}",
        (*operands, draw.given(counts)),
        lambda m, a, b, sizes: m.ragged_dot(a, b, sizes, **options),
        errors,
        cotangent_errors if all(map(is_float, types)) else None,
        is_plain=False,
        # XLA's compiler for GPUs ends the process where it meets complex groups (jax 0.11.2).
        has_peer=all(x.kind != "c" for x in types),
    )


def with_epilogue(draw: Draw, name: str) -> Call:
    """Draw groups of rows, of which an epilogue adds two operands and computes the tanh."""
    dtype = draw.type(F32, BF16)
    sizes = draw.sizes("mkn")
    m, k, n = (max(1, sizes[label]) for label in "mkn")
    groups = draw.one(1, 3)
    rows = int(draw.rng.integers(0, m + 1)) if draw.chance(0.5) else m
    counts = draw.rng.multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)
    row_shape = draw.one((n,), (m, 1), (m, n), ())
    shapes = (m, k), (groups, k, n), row_shape, (groups, draw.one(1, n))
    operands = tuple(draw.operand(shape, dtype) for shape in shapes)
    # Rows of no group are zeros.
    of_row = np.repeat(np.arange(groups), counts)

    def errors(result, x, w, b, c, _):
        value, magnitude, terms = einsum("mk,mkn->mn", wide(x)[:rows], wide(w)[of_row])
        b, c = np.broadcast_to(wide(b), (m, n))[:rows], wide(c)[of_row]
        share = (terms + 4) * 2.0**-24 + operand_rounding([dtype] * 2, None)
        slack = share * (magnitude + np.abs(b) + np.abs(c)) + 2.0**-20
        rest = (0, m - rows), (0, 0)
        expected = np.pad(np.tanh(value + b + c), rest)
        return [compared(result, expected, np.pad(slack, rest))]

    def biased(y, b, c):
        return jnp.tanh(y + b + c)

    return Call(
        name,
        f"group_sizes={counts.tolist()}",
        (*operands, draw.given(counts)),
        lambda m, x, w, b, c, sizes: m.ragged_dot(
            x, w, sizes, epilogue=biased, operands=(b,), group_operands=(c,)
        ),
        errors,
        is_plain=False,
    )


def ragged_dot_general(draw: Draw, name: str) -> Call:
    """Draw rows of groups that are contracted: a matrix for each group."""
    sizes, groups = draw.sizes("mkn"), draw.one(1, 2, 3)
    m = sizes["m"]
    dtype = draw.type(F32, BF16)
    operands = draw.operands("mk,mn->gkn", sizes, [dtype] * 2)
    counts = draw.rng.multinomial(m, np.full(groups, 1 / groups)).astype(np.int32)
    masks = np.repeat(np.arange(groups), counts) == np.arange(groups)[:, None]
    dimensions = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def errors(result, a, b, _):
        value, magnitude, terms = einsum("gmk,mn->gkn", masks[..., None] * wide(a), wide(b))
        share = (terms + 1) * 2.0**-24 + operand_rounding([dtype] * 2, None)
        return [compared(result, value, share * magnitude)]

    return Call(
        name,
        f"group_sizes={counts.tolist()}",
        (*operands, draw.given(counts)),
        lambda m, a, b, sizes: m.ragged_dot_general(a, b, sizes, dimensions),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [
    *describe(ragged_dot, "ragged_dot", linear=True),
    *describe(with_epilogue, "ragged_dot, epilogue"),
    *describe(ragged_dot_general, "ragged_dot_general", linear=True),
]
