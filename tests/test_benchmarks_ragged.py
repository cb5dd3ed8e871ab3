"""What ``ragged_dot`` adds: grouped operands, a judge, several peers and their memory."""

import jax
import numpy as np
import pytest
from jax import lax

from benchmarks.calls import other_peers, ragged_by_blocks
from benchmarks.calls.case import jitted
from benchmarks.calls.operations import OURS
from benchmarks.calls.ragged_row import LAYER, LAYER_GRADIENTS, PRODUCTS, SPLITS
from benchmarks.suites import suite

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough


FORWARD, ROW_GRADIENT, WEIGHT_GRADIENT = PRODUCTS
CALLS = (*PRODUCTS, LAYER, LAYER_GRADIENTS)


def row(dimensions=FORWARD, group=(), **changes):
    lhs, rhs, out = dimensions
    sizes = {"g": 3, "m": 300, "k": 24, "n": 40}
    entry = {"name": "x", "type": "float32", "lhs": lhs, "rhs": rhs, "out": out} | sizes | changes
    return suite._row(entry, "ragged_dot", {"name": "g", "target": 1.0} | dict(group))


def expected(r, operands):
    """What a row of one product is, group by group in float64."""
    lhs, rhs, sizes = (np.asarray(x) for x in operands)
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if r.dimensions == WEIGHT_GRADIENT:
        return np.stack([lhs[part].T @ rhs[part] for part in parts])
    if r.dimensions == ROW_GRADIENT:
        rhs = rhs.mT
    return np.concatenate([lhs[part] @ rhs[g] for g, part in enumerate(parts)])


# Suites and rows.


@pytest.mark.parametrize("name", suite.suite_names("ragged_dot"))
def test_the_package_suites_are_well_formed(name):
    found = suite.load_suite(name)
    assert {r.dimensions for r in found.rows} == set(CALLS)
    assert {r.split for r in found.rows} == set(SPLITS)
    for r in found.rows:
        for side in (OURS, lax, ragged_by_blocks.BY_BLOCKS):
            results = jax.tree.leaves(jax.eval_shape(jitted(r, side), *r.structs))
            assert [x.shape for x in results] == [r.shape(x) for x in r.results], r.name
            assert {x.dtype for x in results} == {r.result_type}, r.name
        assert r.temporary == (None if r.is_layer else 1 << 20)


# What is called, and what says that it is right.


@pytest.mark.parametrize("dimensions", PRODUCTS)
@pytest.mark.one_in(3)
def test_all_sides_compute_the_product_of_each_group(dimensions):
    # TF32 on a GPU; a sum of n products of normal numbers has the size of the root of n.
    bound = (1e-2 if jax.default_backend() == "gpu" else 1e-5) * np.sqrt(300)
    for split in SPLITS:
        r = row(dimensions, split=split, g=5)
        operands = r.random_operands(0)
        exact = expected(r, operands)
        for side in (OURS, lax, ragged_by_blocks.BY_BLOCKS):
            found = jitted(r, side)(*operands)
            np.testing.assert_allclose(found, exact, rtol=0, atol=bound, err_msg=split)


# Other peers.


def test_ours_takes_hardly_any_temporary_memory():
    r = row(m=4000, g=8, k=64, n=64, split="multinomial")
    found = other_peers.temporary_bytes(other_peers.compiled(r, OURS))
    assert found < 1 << 20
