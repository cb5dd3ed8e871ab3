"""Epilogues that return reductions of the product's rows."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import BF16, UNIT_ROUNDOFF, assert_close, exact, random
from nvrtc_mark import needs_nvrtc
from sharded import AUTO, EXPLICIT, bytes_sent, collectives, mesh_of, needs_devices

import jax_tilekern as jtk

HIGHEST = jax.lax.Precision.HIGHEST
KINDS = {
    "sum": (jtk.row_sum, lambda x: x.sum(-1)),
    "max": (jtk.row_max, lambda x: x.max(-1)),
    "logsumexp": (
        jtk.row_logsumexp,
        lambda x: np.log(np.exp(x - x.max(-1)[..., None]).sum(-1)) + x.max(-1),
    ),
}


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


# Sharded.

ROWS, INNER, COLUMNS = 64, 128, 256
SCHEMES = {
    "rows": (P("d"), P(), P()),
    "columns": (P(), P(None, "m"), P("m")),
    "columns over both axes": (P(), P(None, ("d", "m")), P()),
    "rows and columns": (P("d"), P(None, "m"), P("m")),
    "contracted": (P(None, "m"), P("m"), P()),
    "contracted and columns": (P(None, "d"), P("d", "m"), P("m")),
    "contracted and rows": (P("d", "m"), P("m"), P()),
}


def every_kind(x, w, bias, elements=True):
    def epilogue(y, bias):
        rows = jtk.row_logsumexp(y + bias), jtk.row_sum(y * bias), jtk.row_max(y - bias)
        return (y + bias, *rows) if elements else rows

    return jtk.matmul(x, w, epilogue=epilogue, operands=(bias,), precision=HIGHEST)


def every_kind_by_jax(x, w, bias, elements=True):
    y = jnp.matmul(x, w, precision=HIGHEST)
    rows = jax.nn.logsumexp(y + bias, axis=-1), (y * bias).sum(-1), (y - bias).max(-1)
    return (y + bias, *rows) if elements else rows


def drawn(rng, *batch):
    shapes = ((*batch, ROWS, INNER), (INNER, COLUMNS), (COLUMNS,))
    return [0.1 * random(rng, shape, np.float32) for shape in shapes]


def put(mesh, arrays, specs):
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


def assert_within_bounds(found, x, w, bias, elements=True):
    """Compare with float64, within the bound of a sum over the contraction and over a row."""
    x, w, bias = map(exact, (x, w, bias))
    y, terms = x @ w, np.abs(x) @ np.abs(w) + np.abs(bias)
    unit = 2 * (INNER + COLUMNS) * UNIT_ROUNDOFF[np.dtype(np.float32)]
    of_element, of_sum = unit * (1 + terms.max()), unit * (terms * np.abs(bias)).sum(-1).max()
    expected = [
        (y + bias, of_element),
        (KINDS["logsumexp"][1](y + bias), of_element),
        ((y * bias).sum(-1), of_sum),
        ((y - bias).max(-1), of_element),
    ]
    for mine, (true, bound) in zip(found, expected[not elements :], strict=True):
        assert np.abs(np.asarray(mine, np.float64) - true).max() <= bound


@needs_devices
@pytest.mark.parametrize("elements", [True, False], ids=["elements", "reductions alone"])
@pytest.mark.parametrize("specs", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.one_in(4)
def test_sharded(rng, specs, elements):
    """Devices reduce the columns that they have, and send no more than JAX's program does."""
    args = drawn(rng)
    placed = put(mesh_of((AUTO, AUTO)), args, specs)

    def compiled(call):
        return jax.jit(lambda *xs: call(*xs, elements)).lower(*placed).compile()

    ours, jaxs = compiled(every_kind), compiled(every_kind_by_jax)
    assert_within_bounds(ours(*placed), *args, elements)
    assert bytes_sent(ours) <= 1.05 * bytes_sent(jaxs), collectives(ours)
    assert {x.kind for x in collectives(ours)} <= {"all-reduce"}


@needs_devices
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, np.float64])
def test_sharded_nan_and_infinities(x64, dtype):
    """What one device has reaches the results of all."""
    columns = 16
    values = np.zeros((13, columns))
    for row, column in enumerate(range(0, columns, 4)):  # The first column of each device.
        values[row, column] = np.nan
    values[4, 5], values[5, 5] = np.inf, -np.inf
    values[6] = -np.inf
    values[7, 4:] = -np.inf
    values[8, [0, 12]] = np.inf, -np.inf
    values[9] = -6e4
    values[10, [3, 13]] = np.inf, np.nan
    values[11] = np.array([-np.inf, np.nan]).repeat(columns // 2)
    values[12] = -np.float64(np.nan)
    mesh = mesh_of((AUTO, AUTO))
    sharded = NamedSharding(mesh, P(None, "m"))
    a, b = jnp.zeros((13, 2), dtype), jax.device_put(jnp.zeros((2, columns), dtype), sharded)

    def epilogue(y, x):
        value = y.astype(x.dtype) + x
        return jtk.row_sum(value), jtk.row_max(value), jtk.row_logsumexp(value)

    program = jax.jit(lambda *xs: jtk.matmul(*xs[:2], epilogue=epilogue, operands=xs[2:]))
    args = a, b, jax.device_put(jnp.asarray(values, dtype), sharded)
    compiled = program.lower(*args).compile()
    assert {x.kind for x in collectives(compiled)} == {"all-reduce"}
    values = exact(args[2])
    with np.errstate(all="ignore"):
        expected = values.sum(-1), values.max(-1), jax.nn.logsumexp(values, -1)
    rounding = {2: 1e-2, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    for x, y in zip(compiled(*args), expected, strict=True):
        assert x.dtype == dtype
        with np.errstate(all="ignore"):
            y = np.asarray(np.asarray(y).astype(dtype), np.float64)
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=rounding)


@needs_devices
@pytest.mark.parametrize("contracted", [False, True])
def test_sharded_reductions_of_16_bits_are_rounded_once(rng, contracted):
    """Sums of small integers are exact in float32, and those of a device's part not in bfloat16."""
    x, w = (jnp.asarray(rng.integers(0, 3, shape), BF16) for shape in ((ROWS, 8), (8, COLUMNS)))
    specs = (P(None, "d"), P("d", "m")) if contracted else (P(), P(None, "m"))
    placed = put(mesh_of((AUTO, AUTO)), (x, w), specs)
    epilogue = lambda y: jtk.row_sum(y.astype(BF16))  # noqa: E731
    found = jax.jit(lambda x, w: jtk.matmul(x, w, epilogue=epilogue))(*placed)
    np.testing.assert_array_equal(found, (exact(x) @ exact(w)).sum(-1).astype(BF16))


@needs_devices
@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.bool_])
def test_sharded_reductions_of_integers(rng, kind):
    x, w = (rng.integers(-9, 9, shape).astype(np.int8) for shape in ((ROWS, 8), (8, COLUMNS)))
    placed = put(mesh_of((AUTO, AUTO)), (x, w), (P(), P(None, "m")))

    def epilogue(y):
        value = y > 0 if kind == np.bool_ else y.astype(kind)
        return jtk.row_sum(value), jtk.row_max(value)

    def call(x, w):
        return jtk.matmul(x, w, epilogue=epilogue, preferred_element_type=np.int32)

    for mine, whole in zip(jax.jit(call)(*placed), call(x, w), strict=True):
        np.testing.assert_array_equal(mine, whole)


@needs_devices
def test_sharding_in_types(rng):
    """On explicit axes a reduction of sharded columns is whole on every device."""
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    args, specs = drawn(rng), SCHEMES["rows and columns"]

    def gradients(call):
        def loss(*xs):
            return sum(jnp.sum(jnp.sin(x)) for x in call(*xs))

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    with jax.set_mesh(mesh):
        placed = put(mesh, args, specs)
        assert [jax.typeof(x).sharding.spec for x in jax.eval_shape(every_kind, *placed)] == [
            P("d", "m"),
            P("d"),
            P("d"),
            P("d"),
        ]
        for transformed in (jax.jit, gradients):
            ours, jaxs = (
                transformed(f).lower(*placed).compile() for f in (every_kind, every_kind_by_jax)
            )
            found, expected = ours(*placed), jaxs(*placed)
            assert bytes_sent(ours) <= 1.05 * bytes_sent(jaxs), collectives(ours)
            assert {x.kind for x in collectives(ours)} == {"all-reduce"}
            if transformed is jax.jit:
                assert_within_bounds(found, *args)
            for x, y in zip(found, expected, strict=True):
                assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
                assert_close(x, np.asarray(y, np.float64), 1e-3)


@needs_devices
def test_shard_map_reduces_the_part_of_a_device(rng):
    """No collective is added where the program writes them."""
    x, w, bias = drawn(rng)
    mapped = jax.shard_map(
        lambda *xs: [r[:, None] for r in every_kind(*xs, elements=False)],
        mesh=mesh_of((AUTO, AUTO)),
        in_specs=SCHEMES["rows and columns"],
        out_specs=P("d", "m"),
    )
    compiled = jax.jit(mapped).lower(x, w, bias).compile()
    assert not collectives(compiled)
    by_part = compiled(x, w, bias)
    for part in range(4):
        columns = slice(part * COLUMNS // 4, (part + 1) * COLUMNS // 4)
        found = [r[:, part] for r in by_part]
        assert_within_bounds(found, x, w[:, columns], bias[columns], elements=False)


@needs_devices
def test_columns_that_do_not_divide(rng):
    """Padding would be reduced, so the columns are whole."""
    mesh = mesh_of((AUTO, AUTO))
    args = [0.1 * random(rng, shape, np.float32) for shape in ((16, 8), (8, 31), (31,))]
    columns = NamedSharding(mesh, P(None, "m"))

    @jax.jit
    def call(x, w, bias):
        elements, *rows = every_kind(x, lax.with_sharding_constraint(w, columns), bias)
        return lax.with_sharding_constraint(elements, columns), *rows

    assert_within_bounds(call(*args), *args)


def test_errors(rng):
    a, b = jnp.ones((4, 3)), jnp.ones((3, 5))
    with pytest.raises(TypeError, match=r"reduces rows of \(.*\); it must be one scalar"):
        jtk.matmul(a, b, epilogue=lambda y: jtk.row_sum((y, y)))
    with pytest.raises(TypeError, match="result of rows, which ragged_dot does not have"):
        jtk.ragged_dot(a, b[None], jnp.array([4]), epilogue=lambda y: jtk.row_sum(y))


# Without a GPU: the kernels.


def lowered(function, *args, gpu="sm_90"):
    with jtk.gpu_target(gpu), jtk.strict(allow_fallbacks=True):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


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


@needs_nvrtc
@pytest.mark.parametrize(
    "epilogue",
    [
        lambda y: y - jtk.row_max(y),
        lambda y: y / jtk.row_sum(y),
        lambda y: jtk.row_sum(y) + 1,
        lambda y: -jtk.row_sum(y),
        lambda y: jnp.exp(jtk.row_sum(y)),
        lambda y: jnp.where(jtk.row_sum(y) > 0, y, 0),
        lambda y: y if jtk.row_sum(y) else -y,
        lambda y: float(jtk.row_sum(y)),
        lambda y: jtk.row_quantize(y)[0] * 2,
    ],
)
def test_a_reduction_is_no_number(epilogue):
    x = jnp.ones((8, 8))
    message = r"row_\w+\(\.\.\.\) is a result of the epilogue .* compute with it after the product"
    with pytest.raises(TypeError, match=message):
        jtk.matmul(x, x, epilogue=epilogue)


def test_a_reduction_has_no_methods_of_an_array():
    with pytest.raises(AttributeError, match=r"astype: row_sum\(\.\.\.\) is a result"):
        jtk.matmul(
            jnp.ones((8, 8)), jnp.ones((8, 8)), epilogue=lambda y: jtk.row_sum(y).astype(int)
        )
    assert copy.copy(jtk.row_sum(1.0)) == jtk.row_sum(1.0)


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
