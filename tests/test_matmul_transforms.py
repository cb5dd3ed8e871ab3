"""The primitive is closed under JAX's transformations, alone and in combination."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import check_derivatives, on_gpu, random

import jax_tilekern as jtk

# Float32 at its full precision, so that results can be compared closely on any backend.
DIMENSION_NUMBERS = [
    (((1,), (0,)), ((), ())),
    (((0,), (0,)), ((), ())),
    (((1,), (1,)), ((0,), (0,))),
    (((0, 2), (1, 2)), ((1,), (0,))),
    (((), ()), ((0,), (2,))),
    (((0, 1), (1, 0)), ((), ())),
]
AXES = [(0, None), (None, 0), (0, 0), (1, 2), (2, 0), (3, None), (None, 3), (3, 3)]


def ours(a, b, dimension_numbers):
    return jtk.dot_general(a, b, dimension_numbers, precision="highest")


def theirs(a, b, dimension_numbers):
    return lax.dot_general(a, b, dimension_numbers, precision="highest")


def close(got, expected):
    """Equal up to float32 rounding of the largest element, which chains of sums cancel from."""

    def compare(got, expected):
        scale = max(1.0, float(jnp.max(jnp.abs(expected), initial=0)))
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5 * scale)
        assert jnp.shape(got) == jnp.shape(expected)

    jax.tree.map(compare, got, expected)


@pytest.fixture
def cubes(rng):
    """Two operands whose three dimensions may be contracted with one another freely."""
    return random(rng, (5, 5, 5), np.float32), random(rng, (5, 5, 5), np.float32)


def loss(dot_general, dimension_numbers):
    return lambda a, b: jnp.sin(dot_general(a, b, dimension_numbers)).sum()


@pytest.mark.parametrize("dimension_numbers", DIMENSION_NUMBERS)
class TestEveryContraction:
    def test_derivatives(self, cubes, dimension_numbers):
        check_derivatives(lambda a, b: ours(a, b, dimension_numbers), cubes)

    def test_jvp_and_vjp(self, rng, cubes, dimension_numbers):
        tangents = tuple(random(rng, x.shape, np.float32) for x in cubes)
        for f in (ours, theirs):
            out = jax.jvp(lambda a, b, f=f: f(a, b, dimension_numbers), cubes, tangents)
            _, pullback = jax.vjp(lambda a, b, f=f: f(a, b, dimension_numbers), *cubes)
            gradients = pullback(jnp.cos(out[0]))
            if f is ours:
                expected = out, gradients
            else:
                close(expected, (out, gradients))

    def test_one_operand_at_a_time(self, cubes, dimension_numbers):
        for i in (0, 1):
            close(
                jax.grad(loss(ours, dimension_numbers), i)(*cubes),
                jax.grad(loss(theirs, dimension_numbers), i)(*cubes),
            )

    @pytest.mark.parametrize("axes", AXES)
    def test_vmap(self, rng, cubes, dimension_numbers, axes):
        """Over each operand and axis, with more than one element mapped, and its gradient."""
        a, b = (
            x if axis is None else random(rng, (*x.shape[:axis], 3, *x.shape[axis:]), np.float32)
            for x, axis in zip(cubes, axes, strict=True)
        )
        for out_axis in (0, -1):
            mapped = [
                jax.jit(jax.vmap(lambda a, b, f=f: f(a, b, dimension_numbers), axes, out_axis))
                for f in (ours, theirs)
            ]
            close(mapped[0](a, b), mapped[1](a, b))
        gradients = [
            jax.jit(jax.vmap(jax.grad(loss(f, dimension_numbers), (0, 1)), axes))
            for f in (ours, theirs)
        ]
        close(gradients[0](a, b), gradients[1](a, b))

    def test_nested_vmap(self, rng, cubes, dimension_numbers):
        a = random(rng, (2, *cubes[0].shape, 3), np.float32)
        b = random(rng, (3, *cubes[1].shape), np.float32)
        for f in (ours, theirs):
            inner = jax.vmap(lambda a, b, f=f: f(a, b, dimension_numbers), (3, 0))
            out = jax.vmap(inner, (0, None))(a, b)
            if f is ours:
                expected = out
            else:
                close(expected, out)

    def test_second_order(self, cubes, dimension_numbers):
        def curvature(f):
            first = jax.grad(loss(f, dimension_numbers), (0, 1))
            return jax.grad(lambda a, b: sum(jnp.sum(g**2) for g in first(a, b)), (0, 1))

        close(curvature(ours)(*cubes), curvature(theirs)(*cubes))


@pytest.fixture
def matrices(rng):
    return random(rng, (6, 8), np.float32), random(rng, (8, 4), np.float32)


def mm(a, b):
    return jtk.matmul(a, b, precision="highest")


def reference(a, b):
    return jnp.matmul(a, b, precision="highest")


def scalar(f):
    return lambda a, b: jnp.tanh(f(a, b)).sum()


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_jacobians(matrices, transform):
    for function in (lambda f: f, scalar):
        if transform is jax.hessian and function is not scalar:
            continue
        for argnums in (0, 1):
            close(
                transform(function(mm), argnums)(*matrices),
                transform(function(reference), argnums)(*matrices),
            )


def test_linearize(rng, matrices):
    tangents = tuple(random(rng, x.shape, np.float32) for x in matrices)
    out, linear = jax.linearize(mm, *matrices)
    close((out, linear(*tangents)), jax.jvp(reference, matrices, tangents))
    transposed = jax.linear_transpose(lambda a: mm(a, matrices[1]), matrices[0])
    close(transposed(out)[0], reference(out, matrices[1].T))


def test_scan_and_its_gradient(rng):
    w = random(rng, (8, 8), np.float32) / 3

    def run(f, w, x):
        return lax.scan(lambda x, _: (jnp.tanh(f(x, w)), None), x, length=5)[0].sum()

    x = random(rng, (4, 8), np.float32)
    close(
        jax.jit(jax.grad(functools.partial(run, mm)))(w, x),
        jax.grad(functools.partial(run, reference))(w, x),
    )


def test_while_and_cond(matrices):
    a, b = matrices

    def run(f):
        square = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(f(x, f(b, a))), b.T @ b)
        return lax.cond(square.sum() > 0, lambda x: f(x, x), lambda x: f(x, -x), square)

    b = jnp.ones((4, 4))
    a = jnp.full((4, 4), 0.1)
    close(jax.jit(lambda: run(mm))(), jax.jit(lambda: run(reference))())


def test_remat(matrices):
    for policy in (None, jax.checkpoint_policies.dots_saveable):
        close(
            jax.grad(jax.checkpoint(scalar(mm), policy=policy), (0, 1))(*matrices),
            jax.grad(scalar(reference), (0, 1))(*matrices),
        )


def test_custom_vjp_around_it(matrices):
    @jax.custom_vjp
    def layer(a, b):
        return mm(a, b)

    layer.defvjp(lambda a, b: (mm(a, b), (a, b)), lambda r, g: (mm(g, r[1].T), mm(r[0].T, g)))
    close(
        jax.jit(jax.grad(scalar(layer), (0, 1)))(*matrices),
        jax.grad(scalar(reference), (0, 1))(*matrices),
    )
    batch = jnp.stack([matrices[0]] * 3)
    close(
        jax.vmap(jax.grad(scalar(layer), (0, 1)), (0, None))(batch, matrices[1]),
        jax.vmap(jax.grad(scalar(reference), (0, 1)), (0, None))(batch, matrices[1]),
    )


def test_per_example_gradients(rng, matrices):
    x = random(rng, (7, 8), np.float32)
    w = matrices[1]

    def example(f):
        return jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sin(f(x, w)).sum()), (None, 0)))

    close(example(mm)(w, x), example(reference)(w, x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_operands_types(rng, dtype):
    a, b = random(rng, (6, 8), dtype), random(rng, (8, 4), np.float32)

    def gradient(f):
        return jax.grad(lambda a, b: f(a, b).astype(np.float32).sum(), (0, 1))(a, b)

    got, expected = gradient(jtk.matmul), gradient(jnp.matmul)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g.astype(np.float32), e.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_gradient_with_preferred_type(rng):
    a, b = (random(rng, s, jnp.bfloat16) for s in ((6, 8), (8, 4)))
    got = jax.grad(lambda a: jtk.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    expected = jax.grad(lambda a: jnp.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    assert got.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2e-2)


def test_complex_gradients_through_the_fallback(rng):
    a, b = random(rng, (5, 6), np.complex64), random(rng, (6, 4), np.complex64)

    def gradient(f):
        return jax.grad(lambda a: jnp.abs(f(a, b)).sum())(a)

    close(gradient(mm), gradient(reference))


def test_export_round_trip(matrices):
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jtk.FFI_TARGETS]
    exported = jax.export.export(jax.jit(jax.grad(scalar(mm), (0, 1))), disabled_checks=checks)
    loaded = jax.export.deserialize(exported(*matrices).serialize())
    close(loaded.call(*matrices), jax.grad(scalar(reference), (0, 1))(*matrices))


def test_export_with_symbolic_shapes_falls_back(matrices):
    a, b = matrices
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype)
    exported = jax.export.export(jax.jit(mm))(shape, b)
    close(exported.call(a, b), reference(a, b))


def test_donated_operand(rng):
    a, b = random(rng, (64, 64), np.float32), random(rng, (64, 64), np.float32)
    expected = reference(a, b) + 1
    got = jax.jit(lambda a, b: mm(a, b) + 1, donate_argnums=0)(a, b)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-4)


def test_debug_checks(matrices):
    with jax.debug_nans(True):
        mm(*matrices).block_until_ready()
    with jax.disable_jit():
        close(mm(*matrices), reference(*matrices))


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
