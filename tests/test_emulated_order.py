"""The order of rows by few keys on an emulated GPU."""

import emulated_plans
import jax
import numpy as np
import pytest
from emulated_gpu import emulated_gpu

from jax_tilekern.ops.segments.order import order_and_places, order_by_key

pytestmark = pytest.mark.skipif(emulated_plans.COMPILER is None, reason="there is no g++")


@pytest.mark.parametrize(
    ("rows", "bins", "kernels"),
    [
        (1, 3, 1), (31, 3, 1), (1000, 66, 1), (1024, 130, 1), (1025, 130, 2), (5000, 66, 2),
        (5000, 2, 2), (5000, 512, 2), (40_000, 512, 4), (3000, 513, 7),
    ],
)  # fmt: skip
@pytest.mark.one_in(6)
def test_orders_places_and_bounds(rng, rows, bins, kernels):
    keys = rng.integers(-2, bins, rows).astype(np.int32)
    keys[rng.random(rows) < 0.3] = 0
    clipped = np.clip(keys, -1, bins - 2)
    order = np.argsort(clipped, kind="stable")
    places = np.argsort(order)
    bounds = np.searchsorted(clipped[order], np.arange(-1, bins))
    bounds[-1] = rows
    wanted = order, places, bounds[:-1], order, bounds
    for how in ({}, {"backwards": True}):
        with emulated_gpu(**how) as ran:
            found = jax.jit(lambda k: order_and_places(k, bins=bins))(keys)
            plain = jax.jit(lambda k: order_by_key(k, bins=bins))(keys)
        for a, b in zip((*found, *plain), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert [len(plan.launches) for plan in ran] == [kernels] * 2
