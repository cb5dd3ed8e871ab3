"""Every group against a float64 product of its own rows, whatever the sizes of the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import (
    BF16,
    F8E4,
    F8E5,
    TF32_ROUNDOFF,
    assert_close,
    on_gpu,
    poison,
    random,
    roundoff,
    supported,
)
from ragged import (
    CONTRACTED,
    KINDS,
    assert_rows,
    assert_sums,
    group_sizes,
    on_the_cpu,
    spans,
)

import jax_tilekern as jtk

TYPES = [
    (np.float32, np.float32, None),
    (np.float64, np.float64, None),
    (BF16, BF16, None),
    (BF16, BF16, np.float32),
    (np.float16, np.float16, None),
    (np.int8, np.int8, np.int32),
    (F8E4, F8E4, np.float32),
    (F8E5, F8E4, BF16),
]
# (rows, groups, k, n): groups of parts of tiles and of several, odd sizes, ones, few rows.
SHAPES = [(420, 5, 136, 72), (300, 9, 65, 129), (333, 3, 40, 296), (7, 12, 9, 5), (1, 1, 1, 1),
          (300, 4, 1, 48), (300, 4, 48, 1)]  # fmt: skip


def forward(out, x, w, sizes):
    return jtk.ragged_dot(x, w, sizes, preferred_element_type=out)


def forward_swapped(out, x, w, sizes):
    """Weights that lie in the other major order."""
    return jtk.ragged_dot(x, w.swapaxes(1, 2), sizes, preferred_element_type=out)


def weights(out, x, y, sizes):
    return jtk.ragged_dot_general(x, y, sizes, CONTRACTED, preferred_element_type=out)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("lhs", "rhs", "out"), TYPES)
@pytest.mark.parametrize("function", [forward, forward_swapped, weights])
@pytest.mark.one_in(10)
def test_types_shapes_sizes(rng, lhs, rhs, out, function):
    run = jax.jit(function, static_argnums=0)
    for rows, groups, k, n in SHAPES[: 2 if function is forward_swapped else None]:
        x = random(rng, (rows, k), lhs)
        shape = {forward: (groups, k, n), forward_swapped: (groups, n, k), weights: (rows, n)}
        w = random(rng, shape[function], rhs)
        for kind in KINDS if rows == SHAPES[0][0] else rng.choice(KINDS, 2, replace=False):
            sizes = group_sizes(rng, kind, groups, rows)
            poison((groups, k, n) if function is weights else (rows, n), out or lhs)
            got = run(out, x, w, sizes)
            if function is weights:
                assert_sums(got, x, w, sizes, roundoff(lhs))
            else:
                wide = w.swapaxes(1, 2) if function is forward_swapped else w
                assert_rows(got, x, wide, sizes, roundoff(lhs))
    choice = jtk.explain(lambda *args: function(out, *args), x, w, sizes)[-1]
    assert (choice.kernel is not None) == supported(lhs), choice


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


@pytest.mark.parametrize("dtype", [np.complex64, np.int32, np.uint8])
def test_other_types_fall_back(rng, dtype):
    x, w = random(rng, (30, 8), dtype), random(rng, (4, 8, 5), dtype)
    sizes = group_sizes(rng, "random", 4, 30)
    # On a GPU XLA takes the parts of complex numbers for TF32 otherwise.
    got = jtk.ragged_dot(x, w, sizes, "highest")
    expected = on_the_cpu(lax.ragged_dot, x, w, sizes)
    assert got.dtype == expected.dtype
    assert_close(got, expected)
    (choice,) = jtk.explain(jtk.ragged_dot, x, w, sizes)
    assert choice.kernel is None
    assert "no kernel for" in choice.reason


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


def test_nothing_leaks_from_weights(rng):
    sizes = np.array([90, 70, 0, 133, 40], np.int32)
    x, w = random(rng, (430, 72), np.float32), random(rng, (5, 72, 136), np.float32)
    clean = np.asarray(jtk.ragged_dot(x, w, sizes))
    for g, (begin, end) in enumerate(spans(sizes, 430)):
        out = np.asarray(jtk.ragged_dot(x, w.at[g].set(np.nan), sizes))
        assert np.isnan(out[begin:end]).all()
        np.testing.assert_array_equal(np.delete(out, slice(begin, end), 0),
                                      np.delete(clean, slice(begin, end), 0))  # fmt: skip


def test_many_groups(rng):
    """More groups than rows, and hundreds of small ones."""
    for rows, groups in ((100, 513), (1000, 300)):
        x, w = random(rng, (rows, 24), np.float32), random(rng, (groups, 24, 40), np.float32)
        for kind in ("full", "skewed", "over-long"):
            sizes = group_sizes(rng, kind, groups, rows)
            assert_rows(jtk.ragged_dot(x, w, sizes), x, w, sizes, roundoff(np.float32))


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (6, 0, 4, 5), (6, 3, 0, 5), (6, 3, 4, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_empty_dimensions(shape, dtype):
    rows, groups, k, n = shape
    x, w, y = (jnp.ones(s, dtype) for s in ((rows, k), (groups, k, n), (rows, n)))
    sizes = jnp.full((groups,), 2)
    for out in (jax.jit(jtk.ragged_dot)(x, w, sizes),):
        assert (out.shape, out.dtype) == ((rows, n), dtype)
        assert not out.astype(np.float32).any()
    out = jtk.ragged_dot_general(x, y, sizes, CONTRACTED)
    assert (out.shape, out.dtype) == ((groups, k, n), dtype)
    np.testing.assert_array_equal(out, np.full(out.shape, 2 if rows else 0))
