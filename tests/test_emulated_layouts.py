"""Kernels of Hopper's tensor cores, emulated, on random layouts: batches, padding, broadcasting.

Which tile of which output a CTA computes, what its tensor maps lead to and where it stores results
is seen in the values, and elements between those of a result keep what they were.
"""

import dataclasses
import math

import emulated_plans
import jax.numpy as jnp
import numpy as np
import pytest
from products import H100, product_of, ragged_product_of, taken

from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA

pytestmark = pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")

# Few CTAs have several tiles each.
GPU = dataclasses.replace(H100, sm_count=4)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 14))]
BOUNDS = ("random", "gaps", "empty", "one-hot")


def view(buffer, shape, strides):
    """The elements of an array with the strides, in float64."""
    indices = np.ix_(*map(np.arange, shape))
    return buffer[sum(i * stride for i, stride in zip(indices, strides, strict=True))].astype(
        np.float64
    )


def stored(rng, shape, strides, dtype):
    """Random numbers in an array with the strides, and what lies in memory."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numbers = rng.integers(-9, 10, count) if dtype.kind in "iu" else rng.normal(size=count)
    buffer = numbers.astype(dtype)
    return buffer, view(buffer, shape, strides)


def drawn(rng, family, make):
    """A product that the kernels take, and one of its candidates."""
    while True:
        arithmetic = str(rng.choice(sorted(WGMMA_ARITHMETICS)))
        types = WGMMA_ARITHMETICS[arithmetic].types
        operands, results = list(types.operands), list(types.results)
        lhs, rhs = (operands[rng.integers(len(operands))] for _ in range(2))
        product = make(arithmetic, types=(lhs, rhs, results[rng.integers(len(results))]))
        found = list(taken(family, product, GPU))
        if found:
            return product, found[rng.integers(len(found))]


def check(rng, product, candidate, operands, shape, strides, expected, magnitudes):
    with emulated_plans.record() as recorded:
        plan = candidate.plan(GPU)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    how = {"late": [("reads", "writes")[rng.integers(2)]], "backwards": bool(rng.integers(2))}
    (buffer,) = emulated_plans.run_plan(
        plan, recorded, operands, [((count,), product.out_dtype)], **how
    )
    found = view(buffer, shape, strides)
    # bfloat16 and TF32 round operands or results; integers are exact.
    is_float = jnp.issubdtype(product.out_dtype, jnp.floating)
    unit = 2**-10 + float(jnp.finfo(product.out_dtype).eps) if is_float else 0
    slack = unit * magnitudes + (2**-24 if is_float else 0)
    assert (np.abs(found - expected) <= slack).all(), (candidate.key, product)


def size(rng):
    return int(rng.choice([1, rng.integers(1, 40), 8 * rng.integers(1, 24)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_products(seed):
    rng = np.random.default_rng(seed)

    def make(arithmetic, types):
        return product_of(
            arithmetic, size(rng), size(rng), int(rng.choice([size(rng), 1000])),
            rng.integers(1, 4, rng.integers(3)).tolist(), types=types,
            lhs_k_major=bool(rng.integers(2)), rhs_k_major=bool(rng.integers(2)),
            padding=int(rng.choice([0, 0, 1, 8])), broadcast=set(rng.integers(0, 3, 1).tolist()),
        )  # fmt: skip

    product, candidate = drawn(rng, WGMMA, make)
    g = product.geometry
    lhs, a = stored(rng, (*g.batch, g.m, g.k), g.lhs_strides, product.lhs_dtype)
    rhs, b = stored(rng, (*g.batch, g.k, g.n), g.rhs_strides, product.rhs_dtype)
    shape = (*g.batch, g.m, g.n)
    check(rng, product, candidate, [lhs, rhs], shape, g.out_strides, a @ b, np.abs(a) @ np.abs(b))


def bounds_of(rng, groups, rows):
    """Where the groups of a batch begin and end."""
    kind = rng.choice(BOUNDS)
    if kind == "empty":
        return np.full(groups + 1, rng.integers(rows + 1))
    if kind == "one-hot":
        return np.where(np.arange(groups + 1) > rng.integers(groups), rows, 0)
    bounds = np.sort(rng.integers(0, rows + 1, groups + 1))
    return bounds if kind == "gaps" else np.array([0, *bounds[1:-1], rows])


@pytest.mark.parametrize("ragged", ["m", "k"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(2)
def test_groups(seed, ragged):
    rng = np.random.default_rng([seed, ragged == "m"])

    def make(arithmetic, types):
        return ragged_product_of(
            arithmetic, ragged, int(rng.integers(1, 6)), size(rng), size(rng), size(rng),
            batch=rng.integers(1, 3, rng.integers(2)).tolist(), types=types,
            lhs_k_major=ragged == "m", rhs_k_major=ragged == "m" and bool(rng.integers(2)),
            padding=int(rng.choice([0, 0, 8])),
        )  # fmt: skip

    product, candidate = drawn(rng, GROUPED_WGMMA, make)
    grouped = g = product.groups
    batch = (*g.outer_batch, g.groups)
    lhs, a = stored(rng, (*batch, g.m, g.k), g.lhs_strides, product.lhs_dtype)
    rhs, b = stored(rng, (*batch, g.k, g.n), g.rhs_strides, product.rhs_dtype)
    batches = math.prod(g.outer_batch)
    bounds = np.array([bounds_of(rng, g.groups, grouped.rows) for _ in range(batches)], np.int32)
    expected, magnitudes = np.zeros((2, batches, g.groups, g.m, g.n))
    a, b = (x.reshape(batches, *x.shape[-3:]) for x in (a, b))
    for i, group in np.ndindex(batches, g.groups):
        rows = slice(*bounds[i, group : group + 2])
        if ragged == "m":
            # Rows have one place, whatever their group.
            own = a[i, group, rows], b[i, group]
            expected[i, :, rows] = own[0] @ own[1]
            magnitudes[i, :, rows] = np.abs(own[0]) @ np.abs(own[1])
        else:
            own = a[i, group, :, rows], b[i, group, rows]
            expected[i, group], magnitudes[i, group] = (
                own[0] @ own[1],
                np.abs(own[0]) @ np.abs(own[1]),
            )
    shape = (*batch, g.m, g.n)
    check(
        rng, product, candidate, [lhs, rhs, bounds.ravel()], shape, g.out_strides,
        expected.reshape(shape), magnitudes.reshape(shape),
    )  # fmt: skip
