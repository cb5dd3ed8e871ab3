"""Every group against a float64 product of its own rows, whatever the sizes of the groups."""

import jax
import numpy as np
import pytest
from jax import lax
from numerics import (
    BF16,
    F8E4,
    F8E5,
    TF32_ROUNDOFF,
    on_gpu,
    random,
    roundoff,
)
from ragged import (
    CONTRACTED,
    assert_rows,
    assert_sums,
    group_sizes,
)

import jax_tilekern as jtk


def weights(out, x, y, sizes):
    return jtk.ragged_dot_general(x, y, sizes, CONTRACTED, preferred_element_type=out)


@pytest.mark.parametrize("precision", [None, "highest", "high", lax.DotAlgorithmPreset.F32_F32_F32,
                                       lax.DotAlgorithmPreset.BF16_BF16_F32_X3])  # fmt: skip
def test_precision_names_keep_their_promise(rng, precision):
    if not on_gpu() and precision is lax.DotAlgorithmPreset.BF16_BF16_F32_X3:
        pytest.skip("XLA has no such product on a CPU")
    x, w = random(rng, (520, 256), np.float32), random(rng, (6, 256, 130), np.float32)
    y = random(rng, (520, 130), np.float32)
    sizes = group_sizes(rng, "random", 6, 520)
    rounded = TF32_ROUNDOFF if on_gpu() and precision in (None, "high") else 0.0
    assert_rows(jtk.ragged_dot(x, w, sizes, precision), x, w, sizes, rounded)
    assert_sums(jtk.ragged_dot_general(x, y, sizes, CONTRACTED, precision), x, y, sizes, rounded)
    with jax.default_matmul_precision("highest"):
        assert_rows(jtk.ragged_dot(x, w, sizes), x, w, sizes)


@pytest.mark.parametrize(("types", "out"), [
    ((BF16, np.float32), None), ((np.float32, np.float32), BF16), ((np.int8, np.int8), np.float32),
    ((np.int8, np.int8), np.int8), ((F8E4, F8E5), F8E4),
])  # fmt: skip
def test_types_that_no_kernel_writes(rng, types, out):
    x, w = random(rng, (130, 40), types[0]), random(rng, (4, 40, 33), types[1])
    sizes = group_sizes(rng, "random", 4, 130)
    got = jtk.ragged_dot(x, w, sizes, preferred_element_type=out)
    assert_rows(got, x, w, sizes, roundoff(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["of a group", "of no group"])
@pytest.mark.one_in(2)
def test_nothing_leaks_from_rows(rng, dtype, value, where):
    """NaN and infinity in one group's rows, or in no group's, are in no other group's results."""
    rows, groups = 430, 5
    sizes = np.array([90, 70, 0, 133, 40], np.int32)
    bad = slice(90, 160) if where == "of a group" else slice(333, rows)
    x, w = random(rng, (rows, 72), dtype), random(rng, (groups, 72, 136), dtype)
    y = random(rng, (rows, 136), dtype)
    poisoned = [x.at[bad].set(value), y.at[bad].set(value)]
    run = jax.jit(lambda x, w, y: jax.vjp(lambda x, w: jtk.ragged_dot(x, w, sizes), x, w)[1](y))
    out = np.asarray(jtk.ragged_dot(poisoned[0], w, sizes))
    rows_gradient = np.asarray(run(x, w, poisoned[1])[0])
    keep = np.ones(rows, bool)
    keep[bad] = False
    for got, clean in ((out, jtk.ragged_dot(x, w, sizes)), (rows_gradient, run(x, w, y)[0])):
        np.testing.assert_array_equal(got[keep], np.asarray(clean)[keep])
        if where == "of a group":
            assert not np.isfinite(got[bad].astype(np.float32)).any()
        else:
            assert not got[bad].astype(np.float32).any()
    groups_kept = [0, 2, 3, 4] if where == "of a group" else list(range(5))
    clean = np.asarray(run(x, w, y)[1])
    for args in ((poisoned[0], w, y), (x, w, poisoned[1]), (poisoned[0], w, poisoned[1])):
        weights = np.asarray(run(*args)[1])
        np.testing.assert_array_equal(weights[groups_kept], clean[groups_kept])
        if where == "of a group":
            assert not np.isfinite(weights[1].astype(np.float32)).any()
