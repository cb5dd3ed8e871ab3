"""Epilogues that return reductions of the product's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import BF16, UNIT_ROUNDOFF, check_derivatives, exact, random
from sharded import AUTO, bytes_sent, collectives, devices, mesh_of

import jax_tilekern as jtk
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc

HIGHEST = jax.lax.Precision.HIGHEST
KINDS = {
    "sum": (jtk.row_sum, lambda x: x.sum(-1)),
    "max": (jtk.row_max, lambda x: x.max(-1)),
    "logsumexp": (
        jtk.row_logsumexp,
        lambda x: np.log(np.exp(x - x.max(-1)[..., None]).sum(-1)) + x.max(-1),
    ),
}
SHAPES = [
    ((40, 32), (32, 50)),
    ((300, 70), (70, 513)),
    ((3, 33, 17), (3, 17, 65)),
    ((5, 64, 32), (32, 640)),
]


def close(found, expected, tolerance):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.one_in(4)
def test_values_beside_the_product_and_alone(rng, x64, kind, dtype, shapes):
    reduce, expected = KINDS[kind]
    a, b = (random(rng, shape, dtype) for shape in shapes)
    bias = jnp.asarray(rng.standard_normal(shapes[1][-1]), np.float32)

    def call(epilogue):
        return jax.jit(
            lambda *xs: jtk.matmul(*xs[:2], epilogue=epilogue, operands=xs[2:], precision=HIGHEST)
        )(a, b, bias)

    alone = call(lambda y, bias: reduce(y + bias))
    nested = call(lambda y, bias: {"a reduction": reduce(y + bias), "element": y})
    values = exact(a) @ exact(b) + np.asarray(bias, np.float64)
    # The bound of the product's error, for as many terms as a sum of rows has.
    unit = UNIT_ROUNDOFF[np.dtype(np.float64 if dtype == np.float64 else np.float32)]
    terms = np.abs(exact(a)) @ np.abs(exact(b)) + np.abs(np.asarray(bias, np.float64))
    bound = 2 * (shapes[0][-1] + shapes[1][-1]) * unit * terms.sum(-1).max()
    for found in (alone, nested["a reduction"]):
        assert np.abs(np.asarray(found, np.float64) - expected(values)).max() <= bound
    np.testing.assert_array_equal(nested["element"], jtk.matmul(a, b, precision=HIGHEST))


def test_results_keep_the_users_order_and_types(rng):
    a, b = random(rng, (6, 8), BF16), random(rng, (8, 10), BF16)

    def epilogue(y):
        narrow = y.astype(jnp.bfloat16)
        return jtk.row_sum(narrow), y, jtk.row_max(y), narrow * 2

    total, product, top, doubled = jtk.matmul(a, b, epilogue=epilogue)
    assert (total.shape, total.dtype) == ((6,), jnp.bfloat16)
    assert (top.shape, top.dtype) == ((6,), jnp.float32)
    assert (product.dtype, doubled.dtype) == (jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(doubled, product * 2)
    # In float32, and rounded once.
    np.testing.assert_array_equal(total, product.astype(np.float32).sum(-1).astype(jnp.bfloat16))


@pytest.mark.parametrize("columns", [7, 300])
def test_nan_and_infinities(columns):
    values = np.zeros((7, columns), np.float32)
    values[1, 3] = np.nan
    values[2, 4] = np.inf
    values[3] = -np.inf
    values[4, 2:] = -np.inf
    values[5, [0, 5]] = np.inf, -np.inf
    values[6] = -3e38
    # Each column of the product is a column of the operand of the epilogue.
    a, b = jnp.zeros((7, 2)), jnp.zeros((2, columns))

    def epilogue(y, x):
        return jtk.row_sum(y + x), jtk.row_max(y + x), jtk.row_logsumexp(y + x)

    found = jtk.matmul(a, b, epilogue=epilogue, operands=(values,))
    with np.errstate(all="ignore"):
        expected = values.sum(-1), values.max(-1), jax.nn.logsumexp(values, -1)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def function(y, bias):
    value = jnp.tanh(y + bias)
    return value, jtk.row_logsumexp(value * 2), jtk.row_sum(y * y)


def calls(*args):
    return jtk.matmul(*args[:2], epilogue=function, operands=args[2:])


def unfused(a, b, bias):
    y = a @ b
    value = jnp.tanh(y + bias)
    return value, jax.nn.logsumexp(value * 2, -1), (y * y).sum(-1)


def test_derivatives(rng, x64):
    args = [random(rng, shape, np.float64) for shape in ((3, 4), (4, 5), (5,))]
    check_derivatives(jax.jit(calls), args)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, 2, 0)])
@pytest.mark.one_in(2)
def test_vmap(rng, x64, axes):
    shapes = ((3, 4), (4, 5), (5,))
    args = [
        random(rng, shape if axis is None else (*shape[:axis], 6, *shape[axis:]), np.float64)
        for shape, axis in zip(shapes, axes, strict=True)
    ]
    for x, y in zip(jax.vmap(calls, axes)(*args), jax.vmap(unfused, axes)(*args), strict=True):
        close(x, y, 1e-12)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize(
    ("specs", "moved"),
    [
        ((P("d"), P(), P()), 0),
        ((P("d", "m"), P("m"), P()), None),
        ((P("d"), P(None, "m"), P("m")), None),
    ],
)
def test_sharded(rng, specs, moved):
    mesh = mesh_of((AUTO, AUTO))
    args = [random(rng, shape, np.float32) for shape in ((16, 8), (8, 24), (24,))]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)
    ]
    program = jax.jit(calls).lower(*placed).compile()
    for x, y in zip(program(*placed), unfused(*args), strict=True):
        close(x, y, 1e-4)
    if moved is not None:
        assert bytes_sent(program) == moved
    # Partial products are added once, and nothing as large as lhs is gathered.
    assert sum(x.kind == "all-reduce" for x in collectives(program)) <= 1


def test_errors(rng):
    a, b = jnp.ones((4, 3)), jnp.ones((3, 5))
    with pytest.raises(TypeError, match=r"reduces rows of \(.*\); it must be one scalar"):
        jtk.matmul(a, b, epilogue=lambda y: jtk.row_sum((y, y)))
    with pytest.raises(TypeError, match="reduction of rows, which ragged_dot does not have"):
        jtk.ragged_dot(a, b[None], jnp.array([4]), epilogue=lambda y: jtk.row_sum(y))


# Without a GPU: the kernels.


def lowered(function, *args, gpu="sm_90"):
    with jtk.gpu_target(gpu), jtk.strict(allow_fallbacks=True):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def has_nvrtc():
    try:
        nvrtc()
    except NvrtcNotFound:
        return False
    return True


STATISTICS = lambda y, column, label: (  # noqa: E731
    jtk.row_logsumexp(y), jtk.row_sum(jnp.where(column == label, y, 0)), jtk.row_max(y)
)  # fmt: skip


def statistics(x, w, column, label):
    return jtk.matmul(x, w, epilogue=STATISTICS, operands=(column, label))


def shapes(m, n, k, dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((k, n), dtype),
        jax.ShapeDtypeStruct((n,), jnp.int32),
        jax.ShapeDtypeStruct((m, 1), jnp.int32),
    )


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("sizes", [(32768, 3328, 256), (512, 1000, 72), (100, 77, 33)])
@pytest.mark.one_in(3)
def test_a_call_is_one_kernel_without_the_elements(sizes, dtype):
    text = lowered(statistics, *shapes(*sizes, dtype))
    assert text.count("custom_call") == 1
    assert "stablehlo.reduce" not in text
    m, n, _ = sizes
    assert f"tensor<{m}x{n}x" not in text


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC")
def test_what_no_kernel_reduces_is_reduced_in_xla():
    m, n, k = 512, 256, 64
    text = lowered(statistics, *shapes(m, n, k), gpu="sm_80")
    assert "stablehlo.reduce" in text
    with jtk.gpu_target("sm_80"):
        (choice, *_) = jtk.explain(statistics, *shapes(m, n, k), platform="cuda")
    assert "only kernels of sm_90a reduce rows" in choice.reason
    # The columns of a transposed product are rows of the kernel.
    x, w, *_ = shapes(m, n, k)
    columns = lambda x, w: jtk.dot_general(  # noqa: E731
        x.T, w, (((0,), (0,)), ((), ())), epilogue=jtk.row_sum
    )
    assert "stablehlo.reduce" not in lowered(columns, x, w)
