"""``matmul``, ``dot_general`` and ``strassen_matmul``: errors, types, shapes and precisions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import (
    BF16,
    F8E4,
    F8E5,
    MAJORS,
    TF32_ROUNDOFF,
    UNIT_ROUNDOFF,
    assert_equal,
    assert_product,
    error_bound,
    exact,
    frobenius,
    on_gpu,
    operands,
    poison,
    product,
    random,
    rounding,
    roundoff,
    supported,
    whole,
)

import jax_tilekern as jtk
from jax_tilekern import strassen_matmul

TOLERANCE = {"rtol": 2e-2 if on_gpu() else 1e-5, "atol": 2e-2 if on_gpu() else 1e-5}


def same(ours, theirs, *args):
    got, expected = ours(*args), theirs(*args)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.weak_type == expected.weak_type
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), **TOLERANCE
    )


def test_matmul_takes_what_jnp_takes():
    weak = jnp.full((3, 4), 2.0), jnp.full((4, 5), 3.0)
    same(jtk.matmul, jnp.matmul, *weak)
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.bfloat16))
    same(jtk.matmul, jnp.matmul, np.ones((3, 4), np.float32), np.ones(4, np.float32))
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.int32))


BAD = [
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((5, 6)), (((1,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((-1,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((2,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((1, 1), (0, 0)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((2, 6)), (((), ()), ((0,), (0,)))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((1,), ()), ((), ()))), TypeError),
]


@pytest.mark.parametrize(("lhs", "rhs"), [((4, 8), (8, 3)), ((8,), (8, 3)), ((4, 8), (8,))])
def test_dimension_numbers_of_dot(rng, lhs, rhs):
    x, y = (jnp.asarray(rng.normal(size=shape), np.float32) for shape in (lhs, rhs))
    wanted = lax.dot_general(x, y, None, precision="highest")
    np.testing.assert_allclose(jtk.dot_general(x, y, None, precision="highest"), wanted, atol=1e-5)
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    np.testing.assert_array_equal(
        jtk.fp8_dot_general(x, y, None), jtk.fp8_dot_general(x, y, numbers)
    )
    with pytest.raises(ValueError, match="dimension_numbers must be specified"):
        jtk.dot_general(jnp.ones((2, 4, 8)), jnp.ones((2, 8, 3)), None)


@pytest.mark.parametrize(("call", "expected"), BAD)
def test_dot_general_raises_as_lax(call, expected):
    with pytest.raises(expected) as theirs:
        call(lax.dot_general)
    with pytest.raises(type(theirs.value)) as ours:
        call(jtk.dot_general)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(type(theirs.value)):
        jax.jit(lambda: call(jtk.dot_general))()


@pytest.mark.parametrize("shapes", [((3, 4), (5, 6)), ((2, 3, 4), (3, 4, 5)), ((), (4, 5)),
                                    ((3, 4), ())])  # fmt: skip
def test_matmul_raises_as_jnp(shapes):
    a, b = (jnp.ones(shape) for shape in shapes)
    with pytest.raises((TypeError, ValueError)) as theirs:
        jnp.matmul(a, b)
    with pytest.raises(type(theirs.value)) as ours:
        jtk.matmul(a, b)
    assert str(ours.value) == str(theirs.value)


def test_traced_dimension_numbers_are_refused():
    x = jnp.ones((3, 3))
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(lambda d: jtk.dot_general(x, x, (((d,), (0,)), ((), ()))))(1)


# -- Gradients, export and threads


@pytest.fixture
def matrices(rng):
    return whole(rng, 6, 8), whole(rng, 8, 4)


def mm(a, b):
    return jtk.matmul(a, b, precision="highest")


def reference(a, b):
    return jnp.matmul(a, b, precision="highest")


def test_gradient_with_preferred_type(rng):
    a, b = (whole(rng, *shape, dtype=jnp.bfloat16) for shape in ((6, 8), (8, 4)))
    got = jax.grad(lambda a: jtk.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    expected = jax.grad(lambda a: jnp.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    assert got.dtype == jnp.bfloat16
    assert_equal(got, expected)


def test_export_with_symbolic_shapes_falls_back(matrices):
    a, b = matrices
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype)
    exported = jax.export.export(jax.jit(mm))(shape, b)
    assert_equal(exported.call(a, b), reference(a, b))


@pytest.mark.defaults  # A policy holds for a thread.
def test_concurrent_calls(rng):
    """One compiled executable, many threads."""
    from concurrent.futures import ThreadPoolExecutor

    a = [random(rng, (150, 70), np.float32) for _ in range(8)]
    b = random(rng, (70, 130), np.float32)
    run = jax.jit(mm)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: np.asarray(run(x, b)), a * 10))
    for x, got in zip(a * 10, results, strict=True):
        np.testing.assert_array_equal(got, run(x, b))
    assert on_gpu() or len(results) == 80


TYPES = [
    (np.float32, np.float32, None),
    (np.float64, np.float64, None),
    (BF16, BF16, None),
    (BF16, BF16, np.float32),
    (np.float16, np.float16, None),
    (np.float16, np.float16, np.float32),
    (np.int8, np.int8, np.int32),
    (F8E4, F8E4, np.float32),
    (F8E5, F8E4, BF16),
    (F8E4, F8E5, np.float16),
]
# (m, n, k): ones, odd and prime sizes, multiples of vectors and of tiles, and one beyond each.
SHAPES = [
    (1, 1, 1), (1, 7, 3), (5, 1, 9), (1, 1, 257), (3, 5, 1), (16, 16, 16), (17, 31, 61),
    (64, 64, 64), (33, 130, 70), (129, 127, 128), (128, 256, 96), (200, 136, 264), (1, 300, 520),
    (300, 1, 520), (8, 520, 48), (6, 70, 97), (257, 65, 513),
]  # fmt: skip


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("subscripts", MAJORS)
@pytest.mark.parametrize(("lhs", "rhs", "out"), TYPES)
@pytest.mark.one_in(32)
def test_types_majors_shapes(rng, lhs, rhs, out, subscripts):
    run = jax.jit(partial(product, subscripts, out=out))
    for m, n, k in SHAPES:
        a, b = operands(rng, subscripts, {"m": m, "n": n, "k": k}, lhs, rhs)
        poison((m, n), out or lhs)
        assert_product(run(a, b), a, b, f"{subscripts}->mn", roundoff(lhs))
    choice = jtk.explain(run, a, b)[-1]
    assert (choice.kernel is not None) == supported(lhs), choice


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("by", ["auto", "kernels", "xla"])
@pytest.mark.parametrize("out", [np.int8, np.int16, np.int32])
@pytest.mark.one_in(3)
def test_int8_over_a_short_k(rng, by, out):
    """XLA's own are wrong on GPUs at a k like 5 or 97, and without autotuning at 8, 256 and 320."""
    pairs = []
    for k in (1, 2, 3, 5, 7, 8, 16, 17, 50, 97, 127, 255, 256, 257, 320, 3520):
        a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((4, k), (k, 6)))
        # The largest sum is beyond an int16.
        a[0] = b[:, 0] = -128
        pairs.append((a, b))
    multiply = partial(jtk.matmul, preferred_element_type=out)

    @jax.jit
    def products(pairs):
        return [multiply(a, b) for a, b in pairs]

    with jtk.policy(by):
        found = products(pairs)
    for product_of_pair, (a, b) in zip(found, pairs, strict=True):
        expected = (exact(a) @ exact(b)).astype(np.int32).astype(out)
        np.testing.assert_array_equal(product_of_pair, expected)


@pytest.mark.parametrize("out", [np.float32, BF16])
def test_integer_products_with_a_float_result(rng, out):
    a, b = random(rng, (33, 40), np.int8), random(rng, (40, 65), np.int8)
    assert_product(product("mk,kn", a, b, out), a, b, "mk,kn->mn")


@pytest.mark.parametrize("types", [(BF16, F8E4), (np.float32, BF16), (F8E4, F8E4)])
def test_results_rounded_from_the_accumulator(rng, types):
    """A result type that no kernel writes, or operands of two types."""
    a, b = operands(rng, "mk,kn", {"m": 33, "n": 65, "k": 40}, *types)
    out = product("mk,kn", a, b, F8E5 if types == (F8E4, F8E4) else BF16)
    assert_product(out, a, b, "mk,kn->mn", roundoff(np.float32))


def test_precision_names_keep_their_promise(rng):
    """Float32 at HIGHEST has float32's error; the default is TF32 on a GPU and float32 else."""
    a, b = random(rng, (256, 512), np.float32), random(rng, (512, 384), np.float32)
    reference = exact(a) @ exact(b)

    def error(precision):
        out = jtk.matmul(a, b, precision=precision)
        return frobenius(exact(out) - reference)

    full = error_bound(a, b, "mk,kn->mn", np.float32)
    tf32 = error_bound(a, b, "mk,kn->mn", np.float32, TF32_ROUNDOFF)
    names = ["highest", lax.Precision.HIGHEST, "float32", lax.DotAlgorithmPreset.F32_F32_F32]
    for precision in names:
        assert error(precision) <= full, precision
    for precision in [None, "default", "high", "tensorfloat32", (lax.Precision.DEFAULT,) * 2]:
        assert error(precision) <= tf32, precision
        if on_gpu():
            assert error(precision) > full, precision
    if on_gpu():
        for preset in ("BF16_BF16_F32", "F16_F16_F32", "TF32_TF32_F32", "BF16_BF16_F32_X9"):
            operand = {"B": 2.0**-8, "F": 2.0**-11, "T": TF32_ROUNDOFF}[preset[0]]
            operand = 0.0 if preset.endswith("X9") else operand
            bound = error_bound(a, b, "mk,kn->mn", np.float32, operand)
            assert error(lax.DotAlgorithmPreset[preset]) <= bound, preset


@pytest.mark.parametrize(("given", "out"), [(BF16, np.float16), (np.float16, BF16)])
def test_outer_products_are_rounded_once(rng, given, out):
    """They are XLA's, which would round them to the operands' type first."""
    x, y = random(rng, (50, 1), given), random(rng, (1, 60), given)
    found = exact(jtk.matmul(x, y, preferred_element_type=out))
    expected = exact(x) * exact(y)
    assert (np.abs(found - expected) <= 1.001 * rounding(expected, out)).all()


@pytest.mark.defaults
def test_bfloat16_sums_over_several_dimensions_are_not_rounded(rng):
    """XLA's own product on a CPU rounds them where an operand is a transpose."""
    x = jnp.asarray(rng.standard_normal((1, 58, 7)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((7, 5)), jnp.bfloat16)
    c = jnp.asarray(rng.standard_normal((58, 1, 5)), jnp.bfloat16)

    def rows(x, w):
        return jtk.inner(x.transpose(1, 0, 2), w.T)

    gradient = jax.vjp(jax.jit(rows), x, w)[1](c)[1]
    exact = np.einsum("mpn,pmk->kn", np.asarray(c, np.float64), np.asarray(x, np.float64))
    bound = np.einsum("mpn,pmk->kn", *(abs(np.asarray(a, np.float64)) for a in (c, x)))
    error = np.abs(np.asarray(gradient, np.float64) - exact)
    assert (error <= 2**-8 * np.abs(exact) + 64 * 2**-24 * bound).all()


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.int8, np.int32, np.uint8])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 48, 80), (33, 17, 65), (1, 5, 3)])
@pytest.mark.one_in(56)
def test_values(rng, x64, m, n, k, dtype, levels):
    """Higham, Accuracy and Stability of Numerical Algorithms, theorem 23.3: 18 ** levels."""
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    product = strassen_matmul(a, b, levels=levels, precision="highest")
    if np.dtype(dtype).kind in "iu":
        return assert_equal(product, jnp.matmul(a, b))
    # Sums of blocks add the roundoff of a narrow type.
    depth, unit = -(-k // 2**levels), UNIT_ROUNDOFF[np.dtype(dtype)]
    bound = 18**levels * (depth**2 * min(unit, 2.0**-24) + 6 * depth * unit) + k * unit
    norms = np.abs(exact(a)).max() * np.abs(exact(b)).max()
    assert product.dtype == dtype
    assert np.abs(exact(product) - exact(a) @ exact(b)).max() <= bound * norms
