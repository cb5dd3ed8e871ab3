"""Types of results, products of mixed types, and float0."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import BF16, F8E4, F8E5, assert_close, exact, on_gpu
from sharded import bytes_sent

import jax_tilekern as jtk
from jax_tilekern.interop.result_types import evaluated_at_any_size, product_type

TYPES = ("float32", "bfloat16", "int8", "int32", "complex64", "bool")


def drawn_operands(rng, labels):
    sizes = {label: int(rng.choice([0, 1, 2, 6, 30, 31])) for label in "abmkn"}
    return [jnp.zeros([sizes[x] for x in own], rng.choice(TYPES)) for own in labels.split(",")]


@pytest.mark.parametrize(
    ("function", "labels", "options"),
    [
        (jnp.matmul, "abmk,akn", {"precision": "highest"}),
        (jnp.matmul, "k,kn", {"preferred_element_type": jnp.float32}),
        (jnp.dot, "amk,bkn", {}),
        (jnp.vdot, "mk,km", {}),
        (lax.dot_general, "amk,ank", {"dimension_numbers": (((2,), (2,)), ((0,), (0,)))}),
    ],
)
def test_types_and_errors_are_those_at_the_operands_own_sizes(rng, function, labels, options):
    def outcome(type_of, operands):
        try:
            return type_of(*operands)
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    def for_own_sizes(*operands):
        return jax.make_jaxpr(functools.partial(function, **options))(*operands).out_avals[0]

    def for_any_size(*operands):
        return product_type(function, *operands, **options)

    for _ in range(12):
        operands = drawn_operands(rng, labels)
        assert outcome(for_any_size, operands) == outcome(for_own_sizes, operands)


def test_sizes_whose_products_alone_are_equal_are_not_taken_for_each_other():
    found = product_type(jnp.vdot, jnp.ones((4, 9)), jnp.ones((6, 6)))
    assert found.shape == ()
    with pytest.raises(TypeError):
        product_type(jnp.vdot, jnp.ones((4, 9)), jnp.ones((6, 5)))


def test_a_function_is_traced_once_for_all_sizes():
    traced = []

    def evaluate(avals):
        traced.append(avals)
        return [avals[0].update(shape=avals[0].shape[::-1])]

    known = {}
    for shape in ((7, 9), (100, 3), (5, 5), (1, 4)):
        aval = jax.typeof(np.zeros(shape, np.float32))
        (found,) = evaluated_at_any_size(
            lambda avals: known.setdefault(avals, None) or known.update({avals: evaluate(avals)})
            or known[avals], [aval],
        )  # fmt: skip
        assert found.shape == shape[::-1]
    assert [x.shape for (x,) in traced] == [(2, 3), (2, 2), (1, 2)]


def test_the_number_of_groups_is_no_size_of_an_operand(rng, highest_precision):
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (3, 4, 5)))
    sizes = np.array([1, 2, 3], np.int32)
    gradient = jax.grad(lambda w: jtk.ragged_dot(x, w, sizes).sum())(w)
    wanted = jax.grad(lambda w: lax.ragged_dot(x, w, sizes).sum())(w)
    np.testing.assert_allclose(gradient, wanted, 1e-5)


FLOAT0 = jax.dtypes.float0
ROWS_OF_GROUPS = np.array([1, 2], np.int32)


def lax_or_ours(module):
    return lax if module is jnp else jtk


# A function of a module, jax.numpy or ours, and the shapes of its operands.
CALLS = {
    "transpose": (lambda m: m.transpose, [(2, 3)]),
    "transpose with axes": (lambda m: lambda x: m.transpose(x, (1, 0)), [(2, 3)]),
    "transpose without a permutation": (lambda m: lambda x: m.transpose(x, (1, 1)), [(2, 3)]),
    "sum": (lambda m: lambda x: m.sum(x, 0), [(2, 3)]),
    "add": (lambda m: m.add, [(2, 3), (2, 3)]),
    "matmul": (lambda m: m.matmul, [(2, 3), (3, 2)]),
    "matvec": (lambda m: m.matvec, [(2, 3), (3,)]),
    "vecmat": (lambda m: m.vecmat, [(2,), (2, 3)]),
    "dot": (lambda m: m.dot, [(3,), (3,)]),
    "vdot": (lambda m: m.vdot, [(3,), (3,)]),
    "einsum": (lambda m: lambda x, y: m.einsum("ij,jk->ki", x, y), [(2, 3), (3, 2)]),
    "tensordot": (lambda m: m.tensordot, [(2, 3), (2, 3)]),
    "inner": (lambda m: m.inner, [(2, 3), (2, 3)]),
    "vecdot": (lambda m: m.vecdot, [(2, 3), (2, 3)]),
    "ragged_dot": (
        lambda m: lambda x, w: lax_or_ours(m).ragged_dot(x, w, ROWS_OF_GROUPS),
        [(3, 4), (2, 4, 5)],
    ),
    "inv": (lambda m: m.linalg.inv, [(3, 3)]),
    "det": (lambda m: m.linalg.det, [(3, 3)]),
    "cholesky": (lambda m: m.linalg.cholesky, [(3, 3)]),
    "solve": (lambda m: m.linalg.solve, [(3, 3), (3, 3)]),
}


def outcome(function, *args):
    """The types of the results, or that of the exception."""
    try:
        return jax.tree.map(lambda x: (x.dtype, x.shape), function(*args))
    except Exception as error:
        return type(error)


def tangent(x):
    return np.zeros(x.shape, FLOAT0) if np.issubdtype(x.dtype, np.integer) else np.ones_like(x)


def jvp(f, *args):
    return jax.jvp(f, args, tuple(map(tangent, args)))


def vjp(f, *args):
    result, pullback = jax.vjp(f, *args)
    return pullback(tangent(result))


@pytest.mark.parametrize("name", CALLS)
def test_float0_operands(name):
    make, shapes = CALLS[name]
    args = [np.zeros(shape, FLOAT0) for shape in shapes]
    assert outcome(make(jtk), *args) == outcome(make(jnp), *args)


@pytest.mark.parametrize("derivative", [jvp, vjp])
@pytest.mark.parametrize("kinds", ["integers", "an integer and a float"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(9)
def test_derivatives_in_integers(name, kinds, derivative):
    make, shapes = CALLS[name]
    args = [
        np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        + np.eye(*shape[-2:], dtype=np.int32)
        for shape in shapes
    ]
    if kinds != "integers":
        args[-1] = args[-1].astype(np.float32)
    wanted = outcome(derivative, make(jnp), *args)
    assert outcome(derivative, make(jtk), *args) == wanted
    assert "permutation" in name or isinstance(wanted, tuple)


def test_a_transpose_of_float0_under_transformations():
    x = np.zeros((4, 2, 3), FLOAT0)
    for f in (jax.vmap(jtk.transpose), jax.jit(jax.vmap(jtk.transpose))):
        assert outcome(f, x) == (FLOAT0, (4, 3, 2))
    with jtk.gpu_target("sm_90"):
        (choice,) = jtk.explain(jtk.transpose, x, platform="cuda")
    assert choice.kernel is None
    assert "float0" in choice.reason


FLOATS = (np.float32, BF16, np.float16, F8E4, F8E5, jnp.float8_e3m4)
INTEGERS = (np.int32, np.uint32, np.int16, np.uint16, np.int8, np.uint8, jnp.int4, jnp.uint4, bool)
SUB_BYTE = (jnp.int2, jnp.uint2, jnp.int4, jnp.uint4)
# Every second one in the other order.
PAIRS = [
    pair[:: (-1) ** i] for i, pair in enumerate(itertools.combinations((*FLOATS, *INTEGERS), 2))
]
FEWER_PAIRS = [
    pair[:: (-1) ** i]
    for i, pair in enumerate(itertools.combinations((*FLOATS[1:4], *INTEGERS[::2]), 2))
]
# No type but float64 has all values of both of a pair.
INEXACT = [(np.float16, np.int32), (BF16, np.int32), (F8E4, np.int8), (np.int8, F8E5)]
DIMS = (((1,), (0,)), ((), ()))
# TF32 rounds operands.
IN_FLOAT32 = {"precision": "highest", "preferred_element_type": np.float32}
SIZES = jnp.array([3, 1])


def random(rng, shape, dtype):
    """Integers of any size up to 500,000, or normal values."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))
    info = jnp.iinfo(dtype)
    low, high = max(int(info.min), -500_000), min(int(info.max), 500_000)
    return jnp.asarray(rng.integers(low, high, shape, endpoint=True).astype(dtype))


def operands_of(rng, pairs):
    return [(random(rng, (5, 33), a), random(rng, (33, 4), b)) for a, b in pairs]


def in_float64(x, y, subscripts="mk,kn->mn"):
    """The product, and the sum of the products' magnitudes."""
    x, y = exact(x), exact(y)
    return np.einsum(subscripts, x, y), np.einsum(subscripts, abs(x), abs(y)) + 1e-30


def assert_float32(found, expected, magnitudes):
    assert found.dtype == np.float32
    assert (abs(exact(found) - expected) <= 40 * 2.0**-24 * magnitudes).all()


def test_every_pair_into_float32(rng):
    """JAX computes each in float32: no operand is rounded to the other one's type."""
    # XLA does not compile these as they are.
    pairs = [*PAIRS, *((x, x) for x in SUB_BYTE), *((x, bool) for x in SUB_BYTE)]
    operands = operands_of(rng, pairs)

    @jax.jit
    def products(operands):
        return [jtk.dot_general(x, y, DIMS, **IN_FLOAT32) for x, y in operands]

    for found, (x, y) in zip(products(operands), operands, strict=True):
        assert_float32(found, *in_float64(x, y))


@pytest.mark.skipif(on_gpu(), reason="XLA's integers become 8-bit floats by invalid code on GPUs")
@pytest.mark.parametrize("preferred", [None, np.int32, BF16])
@pytest.mark.one_in(2)
def test_every_pair_as_lax(rng, preferred):
    """Also where an integer result truncates operands, and where nothing holds both operands."""
    pairs = [
        pair for pair in FEWER_PAIRS
        # JAX requires a result that is as wide as integers.
        if not (preferred is BF16 and np.int32 in pair and not {*FLOATS} & {*pair})
    ]  # fmt: skip
    operands = operands_of(rng, pairs)

    def products(dot_general):
        multiply = functools.partial(dot_general, preferred_element_type=preferred)
        return jax.jit(lambda operands: [multiply(x, y, DIMS) for x, y in operands])(operands)

    for ours, theirs, (x, y) in zip(
        products(jtk.dot_general), products(lax.dot_general), operands, strict=True
    ):
        assert ours.dtype == theirs.dtype, (x.dtype, y.dtype)
        if jnp.issubdtype(ours.dtype, jnp.integer):
            np.testing.assert_array_equal(ours, theirs, f"{x.dtype} x {y.dtype}")
            continue
        finite = np.isfinite(exact(ours)) & np.isfinite(exact(theirs))
        _, magnitudes = in_float64(x, y)
        error = abs(np.subtract(exact(ours), exact(theirs), where=finite, out=np.zeros((5, 4))))
        assert (error <= 3 * float(jnp.finfo(ours.dtype).eps) * magnitudes).all()


def matrix_product(name):
    return lambda x, y: getattr(jtk, name)(x, y, **IN_FLOAT32), "mk,kn->mn"


def fused(x, y):
    return jtk.fuse(lambda x, y: 2 * lax.dot_general(x, y, DIMS, **IN_FLOAT32))(x, y) / 2


def ragged(x, y, **kwargs):
    return jtk.ragged_dot(x, jnp.stack([y, y]), SIZES, **IN_FLOAT32, **kwargs)


# Each function, and the product that it is.
PRODUCTS = {
    **{name: matrix_product(name) for name in ("matmul", "dot", "linear")},
    "einsum": (lambda x, y: jtk.einsum("mk,kn->nm", x, y, **IN_FLOAT32), "mk,kn->nm"),
    "tensordot": (lambda x, y: jtk.tensordot(x, y, 1, **IN_FLOAT32), "mk,kn->mn"),
    "inner": (lambda x, y: jtk.inner(x, y.T, **IN_FLOAT32), "mk,kn->mn"),
    "matvec": (lambda x, y: jtk.matvec(x, y[:, 0], **IN_FLOAT32)[:, None], "mk,kn->mn"),
    "vecmat": (lambda x, y: jtk.vecmat(x[0], y, **IN_FLOAT32)[None], "mk,kn->mn"),
    "vdot": (lambda x, y: jtk.vdot(x, y.T, **IN_FLOAT32), "mk,km->"),
    "vecdot": (lambda x, y: jtk.vecdot(x, y.T, **IN_FLOAT32), "mk,km->m"),
    "epilogue": (
        lambda x, y: jtk.matmul(x, y, epilogue=lambda acc: 2.0 * acc, **IN_FLOAT32) / 2,
        "mk,kn->mn",
    ),
    "gated_linear": (
        lambda x, y: jtk.gated_linear(x, y, y, lambda acc: 0 * acc + 1, **IN_FLOAT32),
        "mk,kn->mn",
    ),
    "fuse": (fused, "mk,kn->mn"),
    "patch": (jtk.patch()(functools.partial(jnp.matmul, **IN_FLOAT32)), "mk,kn->mn"),
    "ragged_dot": (ragged, "mk,kn->mn"),
    "ragged_dot with an epilogue": (
        functools.partial(ragged, epilogue=lambda acc: 1.0 * acc),
        "mk,kn->mn",
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.one_in(6)
def test_every_product_and_its_gradient(rng, name):
    function, subscripts = PRODUCTS[name]
    rows = {"matvec": (slice(4), slice(1)), "vecmat": (slice(1), slice(4))}.get(name)
    operands = [
        (x[:4] if rows is None else x[rows[0]], y if rows is None else y[:, rows[1]])
        for x, y in operands_of(rng, [*INEXACT, *(pair[::-1] for pair in INEXACT)])
    ]

    def value_and_gradient(x, y):
        number = int(jnp.issubdtype(y.dtype, jnp.floating))
        value, gradient = jax.vjp(
            lambda z: function(*((x, z) if number else (z, y))), (x, y)[number]
        )
        return value, *gradient(jnp.full_like(value, 2.0**-10))

    @jax.jit
    def values_and_gradients(operands):
        return [value_and_gradient(x, y) for x, y in operands]

    inputs, out = subscripts.split("->")
    for (value, gradient), (x, y) in zip(values_and_gradients(operands), operands, strict=True):
        expected, magnitudes = in_float64(x, y, subscripts)
        assert_float32(value, expected, magnitudes)
        number = int(jnp.issubdtype(y.dtype, jnp.floating))
        labels = inputs.split(",")
        other = exact((y, x)[number])
        whole = np.einsum(
            f"{labels[1 - number]},{out}->{labels[number]}",
            other,
            np.full(expected.shape, 2.0**-10),
        )
        rounded = jnp.asarray(whole.astype(np.float32)).astype(gradient.dtype)
        assert_close(gradient, rounded, 2 * float(jnp.finfo(gradient.dtype).eps))


@pytest.mark.parametrize("types", [
    (F8E4, BF16), (BF16, F8E5), (F8E4, F8E5), (jnp.int4, BF16), (np.float32, jnp.uint2),
])  # fmt: skip
def test_vectors_of_types_without_a_promotion(rng, types):
    """A preferred type makes a promotion unnecessary, and without one JAX raises an error."""
    x, y = random(rng, (5, 33), types[0]), random(rng, (33,), types[1])
    assert_float32(jtk.matvec(x, y, **IN_FLOAT32), *in_float64(x, y, "mk,k->m"))
    assert_float32(jtk.vecmat(y, x.T, **IN_FLOAT32), *in_float64(x, y, "mk,k->m"))
    for name, arguments in (("matvec", (x, y)), ("vecmat", (y, x.T))):
        for module in (jnp, jtk):
            with pytest.raises(jax.dtypes.TypePromotionError):
                getattr(module, name)(*arguments)


@pytest.mark.parametrize("dtype", [*SUB_BYTE, F8E4, jnp.float8_e3m4])
def test_epilogues_of_narrow_types(rng, dtype):
    """The accumulator has 32 bits, also for types that NumPy does not know."""
    x, y = (jnp.asarray(rng.integers(0, 2, shape).astype(dtype)) for shape in ((5, 33), (33, 4)))
    epilogue = lambda acc: (acc, jtk.row_sum(acc), jtk.row_max(acc.astype(dtype)))  # noqa: E731
    product, total, largest = jtk.matmul(x, y, epilogue=epilogue)
    assert product.dtype == largest.dtype == dtype
    assert total.dtype == (np.int32 if dtype in SUB_BYTE else np.float32)
    expected, _ = in_float64(x, y)
    np.testing.assert_array_equal(total, expected.sum(-1))
    rounded = jnp.asarray(expected.astype(total.dtype)).astype(dtype)
    np.testing.assert_array_equal(product, rounded)
    np.testing.assert_array_equal(exact(largest), exact(rounded).max(-1))


@pytest.mark.parametrize("types", [(np.float16, np.int32), (np.uint16, F8E4), (np.int8, np.int32)])
@pytest.mark.parametrize("preferred", [np.float16, np.int8])
def test_an_algorithm_casts_operands_to_its_own_type(rng, types, preferred):
    """A result of 8 bits is allowed with an algorithm, and no value is lost before it."""
    x, y = (random(rng, (4, 4), dtype) for dtype in types)
    ours, theirs = (
        exact(f(x, y, DIMS, lax.DotAlgorithmPreset.F32_F32_F32, preferred))
        for f in (jtk.dot_general, lax.dot_general)
    )
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-9, atol=2.0**-9)


def test_a_promotion_error_of_an_epilogue_stays_one():
    x = jnp.ones((4, 4), F8E4)
    with pytest.raises(jax.dtypes.TypePromotionError):
        jtk.linear(x, x, x[0])


WITH_WEIGHTS = {
    "matmul": (jtk.matmul, jnp.matmul),
    "linear": (lambda x, w: jtk.linear(x, w, w[0]), lambda x, w: x @ w + w[0]),
    "gated_linear": (
        lambda x, w: jtk.gated_linear(x, w, w),
        lambda x, w: jax.nn.silu(x @ w) * (x @ w),
    ),
    "strassen_matmul": (jtk.strassen_matmul, jnp.matmul),
    "vecmat": (lambda x, w: jtk.vecmat(x[0], w)[None], lambda x, w: jnp.vecmat(x[0], w)[None]),
}


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_gradients_of_narrow_weights_are_summed_over_devices_as_they_are(rng, name):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    x, w = rng.standard_normal((8, 16), np.float32), np.ones((16, 16), np.float16)

    def sent(product):
        f = jax.shard_map(product, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
        gradient = jax.grad(lambda w: (f(x, w) ** 2).sum())
        return bytes_sent(jax.jit(gradient).lower(w).compile())

    ours, by_jax = map(sent, WITH_WEIGHTS[name])
    assert 0 < ours <= by_jax
