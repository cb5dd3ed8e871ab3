"""The CPU handler of ragged products, called as lowerings call it and as none would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import BF16, F8E4, F8E5, assert_product, exact, poison, random

from jax_tilekern import _core
from jax_tilekern.interop import ffi

pytestmark = pytest.mark.usefixtures("on_the_cpu")

TYPES = [
    (np.float32, np.float32, np.float32),
    (np.float64, np.float64, np.float64),
    (BF16, BF16, BF16),
    (BF16, BF16, np.float32),
    (np.float16, np.float16, np.float16),
    (F8E4, F8E5, np.float32),
    (F8E5, F8E5, BF16),
    (np.int8, np.int8, np.int32),
]
# Rows of each group: none, those of the vector kernels, of part of a tile, of tiles and of blocks.
ROWS = [0, 1, 4, 5, 8, 0, 9, 70, 33, 2]


def strides_of(x, order):
    """The strides, in elements, of a view of a row-major array with its dimensions in `order`."""
    strides = np.cumprod([1, *x.shape[:0:-1]])[::-1]
    return [0 if dim is None else int(strides[dim]) for dim in order]


def call(lhs, rhs, bounds, shape, dtype, **attributes):
    """Call the handler, in a place of memory that a result would be missed in."""
    result = jax.ShapeDtypeStruct(shape, dtype)
    arrays = {
        name: value if isinstance(value, int) else np.array(value, np.int64)
        for name, value in attributes.items()
    }
    poison(shape, dtype)
    return jax.ffi.ffi_call(ffi.CPU_RAGGED_MATMUL, result)(lhs, rhs, bounds, **arrays)


def rows_product(lhs, rhs, bounds, dtype, lhs_major="mk", rhs_major="kn"):
    """`out[rows of g] = lhs[rows of g] @ rhs[g]`; rhs has the groups before `rhs_major`."""
    m, k = (lhs.shape[lhs_major.index(label)] for label in "mk")
    groups, n = rhs.shape[0], rhs.shape[1 + rhs_major.index("n")]
    return call(
        lhs, rhs, bounds, (m, n), dtype,
        sizes=(groups, m, n, k),
        lhs_strides=strides_of(lhs, [None, lhs_major.index("m"), lhs_major.index("k")]),
        rhs_strides=strides_of(rhs, [0, 1 + rhs_major.index("k"), 1 + rhs_major.index("n")]),
        out_strides=(0, n, 1), bounds_strides=(0,), ragged_k=0,
    )  # fmt: skip


def groups_product(lhs, rhs, bounds, dtype, lhs_major="mk", rhs_major="kn"):
    """`out[g] = lhs[:, rows of g] @ rhs[rows of g]`, where rows are positions along k."""
    m, k = (lhs.shape[lhs_major.index(label)] for label in "mk")
    groups, n = len(bounds) - 1, rhs.shape[rhs_major.index("n")]
    return call(
        lhs, rhs, bounds, (groups, m, n), dtype,
        sizes=(groups, m, n, k),
        lhs_strides=strides_of(lhs, [None, lhs_major.index("m"), lhs_major.index("k")]),
        rhs_strides=strides_of(rhs, [None, rhs_major.index("k"), rhs_major.index("n")]),
        out_strides=(m * n, n, 1), bounds_strides=(0,), ragged_k=1,
    )  # fmt: skip


def bounds_of(rows, before=0):
    return np.cumsum([before, *rows]).astype(np.int32)


def spans(bounds):
    """Each group and the slice of its rows."""
    return enumerate(map(slice, bounds[:-1], bounds[1:]))


def assert_rows_product(out, lhs, rhs, bounds):
    """Each group's rows are its product, of an `mk` and a `gkn` array, and others are zeros."""
    out, lhs, rhs = map(np.asarray, (out, lhs, rhs))
    for group, rows in spans(bounds):
        assert_product(out[rows], lhs[rows], rhs[group], "mk,kn->mn")
    outside = np.concatenate([exact(out)[: bounds[0]], exact(out)[bounds[-1] :]])
    np.testing.assert_array_equal(outside, 0)


def assert_groups_product(out, lhs, rhs, bounds):
    """Each group has the product of its rows, of an `mk` and a `kn` array, zeros without rows."""
    out, lhs, rhs = map(np.asarray, (out, lhs, rhs))
    for group, rows in spans(bounds):
        assert_product(out[group], lhs[:, rows], rhs[rows], "mk,kn->mn")


@pytest.mark.parametrize(
    "types", TYPES, ids=lambda types: "-".join(np.dtype(t).name for t in types)
)
@pytest.mark.parametrize(("lhs_major", "rhs_major"), [("mk", "kn"), ("km", "nk")])
@pytest.mark.one_in(3)
def test_every_group_is_its_own_product(rng, types, lhs_major, rhs_major):
    lhs_type, rhs_type, out_type = types
    bounds = bounds_of(ROWS, before=3)
    rows, groups, k, n = bounds[-1] + 7, len(ROWS), 65, 47

    def reordered(x, major, plain):
        return x if major == plain else jnp.swapaxes(x, -1, -2).copy()

    lhs, rhs = random(rng, (rows, k), lhs_type), random(rng, (groups, k, n), rhs_type)
    for level in _core.cpu_instruction_sets():
        _core.set_cpu_instruction_set(level)
        out = rows_product(
            reordered(lhs, lhs_major, "mk"), reordered(rhs, rhs_major, "kn"), bounds, out_type,
            lhs_major, rhs_major,
        )  # fmt: skip
        assert_rows_product(out, lhs, rhs, bounds)

    lhs, rhs = random(rng, (k, rows), lhs_type), random(rng, (rows, n), rhs_type)
    for level in _core.cpu_instruction_sets():
        _core.set_cpu_instruction_set(level)
        out = groups_product(
            reordered(lhs, lhs_major, "mk"), reordered(rhs, rhs_major, "kn"), bounds, out_type,
            lhs_major, rhs_major,
        )  # fmt: skip
        assert_groups_product(out, lhs, rhs, bounds)


# Enough work for threads: balanced, skewed, one group alone, many of a few rows, hardly any rows.
LARGE = {
    "balanced": [120] * 8,
    "skewed": [2, 700, 0, 90, 31, 1, 130, 6],
    "one-hot": [0, 0, 960, 0],
    "many small": [4] * 128,
    "hardly any": [1, 0, 2],
}


@pytest.mark.parametrize("rows", LARGE.values(), ids=LARGE)
def test_threads_share_groups_of_any_sizes(rng, rows):
    bounds = bounds_of(rows, before=11)
    lhs = random(rng, (bounds[-1] + 1500, 130), np.float32)
    rhs = random(rng, (len(rows), 130, 150), np.float32)
    out = rows_product(lhs, rhs, bounds, np.float32)
    assert_rows_product(out, lhs, rhs, bounds)
    right = random(rng, (len(lhs), 150), np.float32)
    out = groups_product(lhs, right, bounds, np.float32, lhs_major="km")
    assert_groups_product(out, lhs.T, right, bounds)


def test_each_batch_has_its_own_bounds_or_shares_them(rng):
    batch, groups, m, n, k = (2, 1, 3), 3, 21, 17, 9
    ends = np.sort(rng.integers(0, m + 1, (2, 3, groups + 1)), axis=-1).astype(np.int32)
    lhs = random(rng, (m, 2, k), np.float32)  # no third batch dimension, and the first inside
    rhs = random(rng, (3, groups, k, n), np.float32)
    for shared in (False, True):
        bounds = ends[:, 0] if shared else ends
        out = call(
            lhs, rhs, bounds, (*batch, m, n), np.float32,
            sizes=(*batch, groups, m, n, k),
            lhs_strides=(k, 0, 0, 0, 2 * k, 1),
            rhs_strides=(0, 0, groups * k * n, k * n, n, 1),
            out_strides=(3 * m * n, 0, m * n, 0, n, 1),
            bounds_strides=(groups + 1, 0, 0) if shared else (3 * (groups + 1), 0, groups + 1),
            ragged_k=0,
        )  # fmt: skip
        for i, j in np.ndindex(2, 3):
            own = bounds[i] if shared else bounds[i, j]
            assert_rows_product(out[i, 0, j], lhs[:, i], rhs[j], own)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_groups_never_read_each_others_rows(rng, dtype):
    """NaN in the rows of one group, or of none, stays there."""
    bounds = bounds_of([5, 40, 3], before=2)
    lhs, right = (rng.standard_normal((60, n)) for n in (35, 50))
    for x in (lhs, right):
        x[: bounds[0]] = x[bounds[1] : bounds[2]] = x[bounds[-1] :] = np.nan
    lhs, right = jnp.asarray(lhs, dtype), jnp.asarray(right, dtype)
    out = exact(rows_product(lhs, random(rng, (3, 35, 50), dtype), bounds, dtype))
    hit = np.zeros(60, bool)
    hit[bounds[1] : bounds[2]] = True
    np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(hit[:, None], out.shape))
    out = exact(groups_product(lhs, right, bounds, dtype, lhs_major="km"))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


# A call of 3 groups of 7 rows, (7 x 5) x (5 x 6).
VALID = {
    "sizes": (3, 7, 6, 5),
    "lhs_strides": (0, 5, 1),
    "rhs_strides": (30, 6, 1),
    "out_strides": (0, 6, 1),
    "bounds_strides": (0,),
    "ragged_k": 0,
}


def small_call(bounds=(1, 2, 2, 6), types=(np.float32,) * 3, lhs=(7, 5), **changes):
    return call(
        jnp.zeros(lhs, types[0]), jnp.zeros((3, 5, 6), types[1]), np.asarray(bounds), (7, 6),
        types[2], **{**VALID, **changes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((-1, 2, 2, 6), r"in order and in \[0, 7\], but bound 0 of 4 is -1"),
        ((0, 2, 1, 6), r"in order and in \[0, 7\], but bound 2 of 4 is 1 after 2"),
        ((0, 2, 2, 8), r"in order and in \[0, 7\], but bound 3 of 4 is 8 after 2"),
        ((0, 2**31 - 1, 2, 6), r"but bound 1 of 4 is 2147483647 after 0"),
    ],
)
def test_bounds_that_leave_the_rows_are_refused(bounds, message):
    with pytest.raises(Exception, match=message):
        small_call(np.array(bounds, np.int32)).block_until_ready()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (7, 6, 5)}, r"\[0, 5, 1\] must have 2 entries"),
        ({"sizes": (0, 7, 6, 5)}, "at least one group"),
        ({"sizes": (3, 0, 6, 5)}, "m, n and k of at least 1"),
        ({"sizes": (4, 7, 6, 5)}, "rhs has 90 elements, its strides reach 120"),
        ({"sizes": (3, 8, 6, 5)}, "lhs has 35 elements, its strides reach 40"),
        ({"lhs": (6, 5)}, "lhs has 30 elements, its strides reach 35"),
        ({"lhs_strides": (1, 5, 1)}, "lhs has a stride of 1 for groups"),
        ({"out_strides": (6, 6, 1)}, "out has a stride of 6 for groups"),
        ({"out_strides": (0, 5, 1)}, "out_strides .* overlap"),
        ({"out_strides": (0, 1, 7)}, "must end in 1"),
        ({"rhs_strides": (2**62, 2**62, 1)}, "overflows 64 bits"),
        ({"rhs_strides": (30, -6, 1)}, "negative stride"),
        ({"bounds_strides": (4, 4)}, "an entry for each batch dimension"),
        ({"bounds_strides": (-4,)}, "negative stride"),
        ({"bounds": np.array([1, 2, 6], np.int32)}, "bounds has 3 elements, its strides reach 4"),
        ({"bounds": np.array([1, 2, 2, 6], np.float32)}, "S32|s32"),
        ({"ragged_k": 1}, "rhs has a stride of 30 for groups"),
        ({"ragged_k": 2}, "ragged_k is 2, not 0 or 1"),
        ({"types": (np.float32, BF16, np.float32)}, "no kernel for f32 x bf16 -> f32"),
        ({"types": (np.int8, np.int8, np.int8)}, "no kernel for s8 x s8 -> s8"),
    ],
)  # fmt: skip
def test_attributes_that_do_not_fit_the_buffers_are_refused(changes, message):
    changes = {"bounds": np.array([1, 2, 2, 6], np.int32), **changes}
    with pytest.raises(Exception, match=message):
        small_call(**changes).block_until_ready()


def test_the_call_that_others_are_changed_from_is_valid():
    np.testing.assert_array_equal(small_call(np.array([1, 2, 2, 6], np.int32)), 0)
