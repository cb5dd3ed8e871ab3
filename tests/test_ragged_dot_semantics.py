"""``ragged_dot`` is ``lax.ragged_dot`` where that is defined, errors included, and more beside."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from numerics import BF16
from ragged import (
    CONTRACTED,
    KINDS,
    contractions,
    group_sizes,
    masked_einsum,
    on_the_cpu,
    random_bounds,
    spans,
)

import jax_tilekern as jtk
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.groups import group_bounds


def same(ours, theirs, *args):
    """The same type, and the same values: of operands whose products are exact."""
    got, expected = ours(*args), on_the_cpu(theirs, *args)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.weak_type == expected.weak_type
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def integers(rng, shape, dtype=np.float32):
    """Small integers, of which every product is exact in any arithmetic."""
    return jnp.asarray(rng.integers(-3, 4, shape).astype(dtype))


@pytest.fixture
def layer(rng):
    """Rows, a matrix for each group, and sizes."""
    sizes = jnp.asarray(group_sizes(rng, "random", 4, 50))
    return integers(rng, (50, 12)), integers(rng, (4, 12, 9)), sizes


@pytest.mark.parametrize("types", [(np.float32, np.float32), (BF16, BF16), (np.int8, np.int8)])
@pytest.mark.parametrize("preferred", [None, np.float32])
def test_as_lax(rng, types, preferred):
    x, w = integers(rng, (50, 12), types[0]), integers(rng, (4, 12, 9), types[1])
    for kind in KINDS:
        if kind in ("over-long", "negative"):
            continue  # JAX does not define them
        sizes = jnp.asarray(group_sizes(rng, kind, 4, 50))
        same(
            functools.partial(jtk.ragged_dot, preferred_element_type=preferred),
            functools.partial(lax.ragged_dot, preferred_element_type=preferred),
            x, w, sizes,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_sizes_of_any_integer_type(layer, dtype):
    x, w, sizes = layer
    with jax.enable_x64(dtype in (np.int64, np.uint64)):
        same(jtk.ragged_dot, lax.ragged_dot, x, w, sizes.astype(dtype))


def test_numpy_arrays_and_weak_types(layer):
    same(jtk.ragged_dot, lax.ragged_dot, *map(np.asarray, layer))
    weak = jnp.full((4, 3), 2.0), jnp.full((2, 3, 5), 3.0)
    same(jtk.ragged_dot, lax.ragged_dot, *weak, jnp.array([1, 2]))


def numbers(contracting, batch, ragged, groups):
    return lax.RaggedDotDimensionNumbers((contracting, batch), ragged, groups)


# Shapes of lhs and rhs, dimension numbers, and those of lhs's dimensions that sizes may have.
GENERAL = [
    ((11, 4), (3, 4, 5), numbers(((1,), (1,)), ((), ()), (0,), (0,)), ()),
    ((4, 11), (4, 5, 3), numbers(((0,), (0,)), ((), ()), (1,), (2,)), ()),
    ((2, 11, 4), (3, 2, 4, 5), numbers(((2,), (2,)), ((0,), (1,)), (1,), (0,)), (0,)),
    ((11, 2, 4), (3, 5, 2, 4), numbers(((2,), (3,)), ((1,), (2,)), (0,), (0,)), (1,)),
    ((2, 6, 11, 4), (3, 2, 4, 5), numbers(((3,), (2,)), ((0,), (1,)), (2,), (0,)), (0, 1)),
    ((6, 11, 4), (3, 4, 5), numbers(((2,), (1,)), ((), ()), (1,), (0,)), (0,)),
    ((11, 6, 4), (3, 4, 5), numbers(((2,), (1,)), ((), ()), (0,), (0,)), ()),
    ((11, 4, 2), (3, 2, 5, 4), numbers(((1, 2), (3, 1)), ((), ()), (0,), (0,)), ()),
    ((11, 4), (11, 5), numbers(((0,), (0,)), ((), ()), (0,), ()), ()),
    ((4, 11), (5, 11), numbers(((1,), (1,)), ((), ()), (1,), ()), ()),
    ((2, 11, 4), (2, 11, 5), numbers(((1,), (1,)), ((0,), (0,)), (1,), ()), (0,)),
    ((2, 11, 4), (2, 11, 5), numbers(((0, 1), (0, 1)), ((), ()), (1,), ()), (0,)),
    ((6, 2, 11, 4), (2, 11, 6), numbers(((1, 2), (0, 1)), ((0,), (2,)), (2,), ()), (0, 1)),
    ((2, 11, 4), (2, 4, 5), numbers(((2,), (1,)), ((0,), (0,)), (0,), ()), ()),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(GENERAL)))
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.one_in(4)
def test_general_as_lax(rng, case, batched):
    lhs_shape, rhs_shape, dims, prefix = GENERAL[case]
    if batched and not prefix:
        pytest.skip("one set of sizes")
    x, w = integers(rng, lhs_shape), integers(rng, rhs_shape)
    shape = tuple(lhs_shape[i] for i in prefix) if batched else ()
    rows = lhs_shape[dims.lhs_ragged_dimensions[0]]
    sizes = jnp.stack(
        [group_sizes(rng, "random", 3, rows) for _ in range(int(np.prod(shape)))]
    ).reshape(*shape, 3)
    same(
        functools.partial(jtk.ragged_dot_general, ragged_dot_dimension_numbers=dims),
        functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dims),
        x, w, sizes,
    )  # fmt: skip
    if dims.lhs_ragged_dimensions[0] not in dims.dot_dimension_numbers[1][0]:
        explained = jtk.explain(
            lambda *args: jtk.ragged_dot_general(*args, ragged_dot_dimension_numbers=dims),
            x, w, sizes,
        )  # fmt: skip
        assert explained[-1].kernel is not None, explained


def test_a_single_ragged_row_is_an_outer_product(rng):
    x, w = integers(rng, (1, 5)), integers(rng, (1, 4))
    product = functools.partial(jtk.ragged_dot_general, ragged_dot_dimension_numbers=CONTRACTED)
    by_lax = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=CONTRACTED)
    for sizes in ([0, 1, 0], [0, 0, 0]):
        same(product, by_lax, x, w, jnp.array(sizes))
    choice = jtk.explain(product, x, w, jnp.array([0, 1, 0]))[-1]
    assert choice.reason.startswith("nothing is contracted")


@given(contractions(), st.integers(0, 2**32 - 1))
@settings(max_examples=12)
def test_every_ragged_contraction(case, seed):
    """Labels anywhere, and both gradients, agree with the definition."""
    c, sizes = case
    rng = np.random.default_rng(seed)
    lhs, rhs = (integers(rng, [sizes[x] for x in labels]) for labels in (c.lhs, c.rhs))
    bounds = random_bounds(rng, c, sizes)
    expected = masked_einsum(c, np.asarray(lhs), np.asarray(rhs), bounds)
    y = integers(rng, expected.shape)

    @jax.jit
    def run(lhs, rhs, bounds, y):
        out, pullback = jax.vjp(
            lambda lhs, rhs: contract(
                lhs, rhs, bounds, contraction=c, precision=None, out_dtype=np.dtype(np.float32)
            ),
            lhs, rhs,
        )  # fmt: skip
        return out, *pullback(y)

    def gradient(of):
        """By the definition, as an einsum is linear in each operand."""
        shape = np.shape((lhs, rhs)[of])
        basis = np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)
        other = np.asarray((rhs, lhs)[of])
        return np.array([
            np.vdot(masked_einsum(c, *((e, other) if of == 0 else (other, e)), bounds), y)
            for e in basis
        ]).reshape(shape)  # fmt: skip

    out, *gradients = run(lhs, rhs, jnp.asarray(bounds), y)
    np.testing.assert_array_equal(out, expected)
    for of, got in enumerate(gradients):
        if got.size <= 200:
            np.testing.assert_array_equal(got, gradient(of))


# Group offsets: the groups that rhs has are some of those that group_sizes has.


def by_groups(x, w, sizes, offset):
    """The product of those groups that ``w`` has."""
    out = np.zeros((len(x), w.shape[2]), np.float32)
    for g, (begin, end) in enumerate(spans(sizes, len(x))):
        if 0 <= g - offset < len(w):
            out[begin:end] = np.asarray(x[begin:end]) @ np.asarray(w[g - offset])
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_shards_add_up_to_the_whole(rng, kind):
    x, w = integers(rng, (350, 12)), integers(rng, (8, 12, 70))
    sizes = jnp.asarray(group_sizes(rng, kind, 8, 350))
    shards = [
        jtk.ragged_dot(x, w[i : i + 2], sizes, group_offset=jnp.array([i])) for i in (0, 2, 4, 6)
    ]
    for i, shard in enumerate(shards):
        np.testing.assert_array_equal(shard, by_groups(x, w[2 * i : 2 * i + 2], sizes, 2 * i))
    np.testing.assert_array_equal(sum(shards), jtk.ragged_dot(x, w, sizes))


@pytest.mark.parametrize("offset", [-(2**31), -9, -1, 0, 3, 5, 6, 99, 2**31 - 1])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.one_in(4)
def test_any_offset_is_defined(rng, offset, shape):
    x, w = integers(rng, (40, 6)), integers(rng, (3, 6, 5))
    sizes = jnp.asarray(group_sizes(rng, "full", 6, 40))
    run = jax.jit(lambda offset: jtk.ragged_dot(x, w, sizes, group_offset=offset))
    got = run(jnp.full(shape, offset, np.int32))
    np.testing.assert_array_equal(got, by_groups(x, w, sizes, offset))
    if 0 <= offset < 256:
        np.testing.assert_array_equal(run(jnp.full(shape, offset, np.uint8)), got)


@pytest.mark.parametrize("offset", [-1, 0, 2, 4])
def test_offset_with_a_contracted_dimension(rng, offset):
    """As many groups as there are sizes, zeros for those that do not exist."""
    x, y = integers(rng, (40, 6)), integers(rng, (40, 5))
    sizes = jnp.asarray(group_sizes(rng, "full", 4, 40))
    whole = np.asarray(jtk.ragged_dot_general(x, y, sizes, CONTRACTED))
    got = jtk.ragged_dot_general(x, y, sizes, CONTRACTED, group_offset=jnp.array([offset]))
    assert got.shape == whole.shape
    for g in range(4):
        expected = whole[g + offset] if 0 <= g + offset < 4 else np.zeros_like(whole[0])
        np.testing.assert_array_equal(got[g], expected)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_bounds(rng, dtype):
    with jax.enable_x64(dtype is np.int64):
        info = np.iinfo(dtype)
        for sizes in ([3, 0, 2], [info.max] * 3, [info.min, 5, info.max], [info.max, info.min, 1]):
            got = jax.jit(group_bounds, static_argnums=1)(jnp.array(sizes, dtype), 100)
            assert got.dtype == np.int32
            assert got.tolist() == [0, *(end for _, end in spans(sizes, 100))]
    many = np.full(70_000, 2**31 - 1, np.int32)
    assert jax.jit(group_bounds, static_argnums=1)(many[:3000], 2**31 - 1)[-1] == 2**31 - 1


# Errors.

X, W, SIZES = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([1, 2, 3])
BAD = [
    (X, W, jnp.array([1, 2])),
    (X, W, jnp.array([1.0, 2.0, 3.0])),
    (X, W, jnp.array(1)),
    (X, W, jnp.ones((2, 3), int)),
    (X, W, [1, 2, 3]),
    (X, W[0], SIZES),
    (X, jnp.ones((3, 7, 5)), SIZES),
    (X[0], W, SIZES),
]


@pytest.mark.parametrize("args", BAD)
def test_raises_as_lax(args):
    with pytest.raises((TypeError, ValueError, IndexError)) as theirs:
        lax.ragged_dot(*args)
    with pytest.raises(type(theirs.value)) as ours:
        jtk.ragged_dot(*args)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dims", [
    numbers(((1,), (1,)), ((), ()), (0, 1), (0,)), numbers(((1,), (1,)), ((), ()), (5,), (0,)),
    numbers(((1,), (1,)), ((), ()), (0,), ()), numbers(((1,), (1,)), ((), ()), (0,), (1,)),
    numbers(((1,), (1,)), ((), ()), (1,), (0,)), numbers(((1,), (1,)), ((), ()), (0,), (-1,)),
])  # fmt: skip
def test_general_raises_as_lax(dims):
    with pytest.raises(TypeError) as theirs:
        lax.ragged_dot_general(X, W, SIZES, dims)
    with pytest.raises(TypeError) as ours:
        jtk.ragged_dot_general(X, W, SIZES, dims)
    assert str(ours.value) == str(theirs.value)


def test_bad_offsets_are_refused():
    for offset in (jnp.array([0.0]), jnp.array([0, 1]), jnp.zeros((1, 1), int)):
        with pytest.raises(TypeError, match="group_offset of shape"):
            jtk.ragged_dot(X, W, SIZES, group_offset=offset)
    with pytest.raises(TypeError, match=r"3 groups in rhs of shape \(3, 4, 5\)"):
        jtk.ragged_dot(X, W, SIZES[:2], group_offset=jnp.array([0]))
    dims = numbers(((1,), (1,)), ((), ()), (0,), (7,))
    with pytest.raises(TypeError, match="rhs group dimension numbers"):
        jtk.ragged_dot_general(X, W, SIZES, dims, group_offset=jnp.array([0]))
    batch = numbers(((2,), (1,)), ((0,), (0,)), (0,), ())
    args = jnp.ones((2, 11, 4)), jnp.ones((2, 4, 5)), SIZES, batch
    with pytest.raises(NotImplementedError, match="group_offset"):
        jtk.ragged_dot_general(*args, group_offset=jnp.array([0]))


def test_too_many_rows_are_refused():
    rows = jax.ShapeDtypeStruct((2**31, 4), np.float32)
    with pytest.raises(NotImplementedError, match="2147483648"):
        jax.eval_shape(jtk.ragged_dot, rows, W, SIZES)


WRONG = [
    ([4, 3, 0], None, r"group_sizes \[4, 3, 0\] exceed the 6 rows"),
    ([4, -3, 0], None, r"group_sizes \[4, -3, 0\] have negative"),
    ([2**31 - 1] * 3, None, "exceed the 6 rows"),
    ([1, 2, 1, 1], 2, "group_offset 2: there are no 3 groups"),
    ([1, 2, 1, 1], -1, "group_offset -1: there are no 3 groups"),
]


@pytest.mark.parametrize(("sizes", "offset", "message"), WRONG)
@pytest.mark.one_in(3)
def test_debug_raises(sizes, offset, message):
    sizes = jnp.array(sizes)
    square = jnp.ones((3, 4, 4))

    def run(x, sizes):
        where = None if offset is None else jnp.array([offset])
        return jtk.ragged_dot(x, square, sizes, group_offset=where, debug=True)

    def scanned(x, sizes):
        return lax.scan(lambda x, sizes: (run(x, sizes), None), x, sizes[None])[0]

    calls = [
        run, jax.jit(run), jax.jit(scanned),
        jax.jit(jax.grad(lambda x, sizes: run(x, sizes).sum())),
        jax.grad(jax.checkpoint(lambda x, sizes: run(x, sizes).sum())),
        lambda x, sizes: jax.vmap(run, (None, 0))(x, jnp.stack([sizes * 0, sizes])),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(call(X, sizes))
        # The effect's own error, which nobody has waited for.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.effects_barrier()


@pytest.mark.parametrize(("sizes", "offset", "message"), [
    *WRONG, ([2**32 + 1, 2, 3], None, r"group_sizes \[4294967297, 2, 3\] exceed the 6 rows"),
])  # fmt: skip
def test_debug_raises_at_once_for_numpys_sizes(sizes, offset, message):
    def run(x):
        return jtk.ragged_dot(x, W, np.array(sizes), group_offset=offset, debug=True)

    for call in (run, jax.jit(run)):
        with pytest.raises(ValueError, match=message):
            call(X)


def test_debug_passes_what_is_right(layer):
    x, w, sizes = layer
    got = jax.jit(functools.partial(jtk.ragged_dot, debug=True))(x, w, sizes)
    np.testing.assert_array_equal(got, jtk.ragged_dot(x, w, sizes))
    jtk.ragged_dot(x, w[1:3], sizes, group_offset=jnp.array([1]), debug=True)
    jtk.ragged_dot_general(x, x, sizes, CONTRACTED, group_offset=jnp.array([2]), debug=True)


# Types that JAX multiplies without a promotion, and none of which holds the other's values.


@pytest.mark.usefixtures("x64")
def test_no_bit_of_64_is_lost():
    x, w = jnp.array([[2**60 + 1, 3]], jnp.int64), jnp.array([[1], [2]], jnp.uint64)
    dims = (((1,), (0,)), ((), ()))
    assert on_the_cpu(lambda x, w: jtk.dot_general(x, w, dims), x, w)[0, 0] == 2**60 + 7
    assert on_the_cpu(jtk.ragged_dot, x, w[None], jnp.array([1]))[0, 0] == 2**60 + 7


def test_types_of_64_bits_are_truncated(layer):
    """As by ``lax.dot_general``; ``lax.ragged_dot`` fails."""
    with pytest.warns(UserWarning, match="truncated to dtype float32"):
        got = jtk.ragged_dot(*layer, preferred_element_type=np.float64)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, jtk.ragged_dot(*layer))


def test_ranks_need_no_promotion(rng):
    """Under the option by which JAX refuses to broadcast ranks, also where rows are gathered."""
    x, y = integers(rng, (2, 11, 4)), integers(rng, (2, 11, 5))
    dims = numbers(((0, 1), (0, 1)), ((), ()), (1,), ())
    sizes = jnp.asarray(np.stack([group_sizes(rng, "random", 3, 11) for _ in range(2)]))
    ours = functools.partial(jtk.ragged_dot_general, ragged_dot_dimension_numbers=dims)
    expected = ours(x, y, sizes)
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(jax.jit(ours)(x, y, sizes), expected)
