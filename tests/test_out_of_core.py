"""``out_of_core.matmul``: plans, bits, what is read, errors; inside ``jit`` derivatives too."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from numerics import BF16, UNIT_ROUNDOFF, assert_close, exact, on_gpu, whole

from jax_tilekern import out_of_core, policy
from jax_tilekern.out_of_core.blocks import WholeProduct, choose_plan

TYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float16, np.float32)]
LIMIT = 600_000
sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.integers(20, 28), st.integers(1, 4), st.booleans())
def test_plans_keep_to_their_limit_and_cover_the_product(m, n, k, limit, devices, inside_jit):
    problem = WholeProduct(m, n, k, *TYPES)
    try:
        plan = choose_plan(problem, 1 << limit, devices, inside_jit=inside_jit)
    except ValueError as error:
        least = int(re.search(r"too small: .* need (\d+) bytes", str(error))[1])
        assert 1 << limit < least == choose_plan(problem, least, inside_jit=inside_jit).memory_bytes
        return
    assert plan.memory_bytes <= 1 << limit
    steps = [list(plan.steps(i)) for i in range(plan.devices)]
    assert all(steps)
    if m * n < 1 << 16:
        covered = np.zeros((m, n), int)
        for step in (step for each in steps for step in each if step.is_last):
            covered[step.place] += 1
        assert (covered == 1).all()
    parts = [item for each in steps for step in each for item in step.reads.items()]
    itemsize = {"a": 2, "b": 4}
    extents = [(itemsize[x], *(y.stop - y.start for y in part)) for x, part in parts]
    assert plan.read_bytes == sum(map(math.prod, extents))


def test_a_product_that_fits_is_one_block_and_every_device_has_work():
    plan = choose_plan(WholeProduct(1000, 900, 800, *TYPES), 1 << 30)
    assert (plan.rows, plan.columns, plan.depth) == (1000, 900, 800)
    assert plan.read_bytes == 800 * (2 * 1000 + 4 * 900)
    assert choose_plan(WholeProduct(5000, 5000, 5000, *TYPES), 1 << 30, 8).devices == 8


class Sliced:
    """An array that has slices and nothing else, as those of zarr and h5py."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read = 0

    def __getitem__(self, index):
        part = np.array(self.array[index])
        self.read += part.nbytes
        return part

    def __setitem__(self, index, value):
        self.array[index] = value


@pytest.mark.parametrize("ahead_bytes", [5000, 1 << 30])
def test_operands_of_any_kind_are_read_as_planned(rng, tmp_path, monkeypatch, ahead_bytes):
    monkeypatch.setattr("jax_tilekern.out_of_core.blocks._AHEAD_BYTES", ahead_bytes)
    a, b = (rng.integers(-99, 99, s).astype(np.int8) for s in ((256, 384), (384, 512)))
    expected = a.astype(np.int32) @ b.astype(np.int32)
    files = [np.memmap(tmp_path / str(i), x.dtype, "w+", shape=x.shape)
             for i, x in enumerate((a, b, expected))]  # fmt: skip
    files[0][:], files[1][:] = a, b
    left, right = Sliced(a), Sliced(b)
    for x, y, out in (
        (left, right, Sliced(np.zeros_like(expected))),
        (jnp.asarray(a), np.asfortranarray(b), np.zeros_like(expected)),
        (a[::-1].copy()[::-1], b.T.copy().T, None),
        files,
    ):
        seen = []
        found = out_of_core.matmul(
            x, y, out=out, memory_limit=LIMIT, preferred_element_type=np.int32, progress=seen.append
        )
        assert out is None or found is out
        np.testing.assert_array_equal(getattr(found, "array", found), expected)
        assert (seen[0].done, seen[-1].done) == (0, seen[-1].total)
        assert seen[-1].read_bytes == seen[-1].plan.read_bytes
    assert left.read + right.read == seen[-1].read_bytes


def test_the_estimate_and_the_printed_progress(rng, capsys, monkeypatch):
    monkeypatch.setattr("jax_tilekern.out_of_core.product._MEASURED_BYTES", 1 << 20)
    a = rng.standard_normal((256, 256), np.float32)
    plan = out_of_core.plan(a, a, memory_limit=LIMIT)
    assert plan.seconds > 0
    out_of_core.matmul(a, a, memory_limit=LIMIT, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert str(plan).startswith(lines[0])
    assert re.match(r"(\d+) of \1 blocks", lines[-1])


# Inside jit.

HOST, DEVICE = (
    SingleDeviceSharding(jax.devices()[0], memory_kind=kind) for kind in ("pinned_host", "device")
)


def product(limit, **settings):
    return jax.jit(lambda a, b: out_of_core.matmul(a, b, memory_limit=limit, **settings))


@pytest.mark.parametrize("places", [(HOST, HOST), (HOST, DEVICE), (DEVICE, HOST)], ids=str)
# Blocks that do not divide the result, several strips of rows that divide it, and one block.
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 700, 130), (1024, 512, 130), (100, 90, 80)])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.one_in(2)
def test_inside_jit(rng, places, m, n, k, x64):
    a, b = whole(rng, m, k), whole(rng, k, n)
    with jax.enable_x64(x64):
        result = product(1_500_000)(*map(jax.device_put, (a, b), places))
    assert result.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(result, np.asarray(a) @ np.asarray(b))


@pytest.mark.parametrize("places", [(HOST, HOST), (HOST, DEVICE)], ids=str)
def test_derivatives(rng, places):
    """First and second order; cotangents are where their primals are."""
    a, b = whole(rng, 260, 200), whole(rng, 200, 300)

    def gradients(matmul, a, b):
        def loss(a, b):
            return (jax.device_put(matmul(a, b), jax.memory.Space.Device) ** 2).sum() / 1e6

        def of_gradient(a, b):
            return (jax.device_put(jax.grad(loss)(a, b), jax.memory.Space.Device) ** 2).sum()

        return jax.grad(loss, (0, 1))(a, b), jax.grad(of_gradient, 1)(a, b)

    found = jax.jit(gradients, static_argnums=0)(
        product(2 << 20, precision="highest"), *map(jax.device_put, (a, b), places)
    )
    assert [x.sharding for x in found[0]] == list(places)
    plain = lambda a, b: jnp.matmul(a, b, precision="highest")  # noqa: E731
    assert_close(found, gradients(plain, a, b))


@pytest.mark.parametrize("limit", [1_500_000, 2 << 20, 8 << 20])
def test_only_blocks_are_on_the_device_and_those_of_rows_once(limit):
    a, b = (jax.device_put(np.ones(s, np.float32), HOST) for s in ((1000, 130), (130, 700)))
    problem = WholeProduct(1000, 700, 130, *[np.dtype(np.float32)] * 4)
    plan = choose_plan(problem, limit, inside_jit=True)
    with policy("xla"):
        text = product(limit).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    moved = re.findall(r'placement = "device"}} : \(tensor<(\d+)x(\d+)xf32>\)', text)
    assert {tuple(map(int, x)) for x in moved} == {(plan.rows, 130), (130, plan.columns)}

    def copies(jaxpr):
        count = 0
        for equation in jaxpr.eqns:
            inner = [x.jaxpr for x in equation.params.values() if hasattr(x, "jaxpr")]
            count += equation.params.get("length", 1) * sum(map(copies, inner))
            if equation.primitive.name == "device_put":
                count += equation.outvars[0].aval.shape == (plan.rows, 130)
        return count

    assert copies(jax.make_jaxpr(product(limit))(a, b).jaxpr) == math.ceil(1000 / plan.rows)


@pytest.mark.skipif(not on_gpu(), reason="on a CPU, both kinds of memory are the host's")
def test_a_result_beyond_the_limit_is_not_on_the_device():
    """The result takes 4 GiB. The limit leaves space for the 32 MiB of a cuBLAS workspace."""
    a, b = (jax.ShapeDtypeStruct(s, BF16, sharding=HOST) for s in ((32768, 256), (256, 32768)))
    compiled = product(400 << 20, preferred_element_type=jnp.float32).lower(a, b).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 400 << 20


# Both.


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float64])
@pytest.mark.parametrize("inside_jit", [False, True])
@pytest.mark.one_in(6)
def test_rounds_once_in_one_order(rng, x64, inside_jit, dtype):
    limit = (3 << 20) * np.dtype(dtype).itemsize if inside_jit else 3 << 20
    shapes = (300, 5000), (5000, 200)
    a, b = operands = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    if inside_jit:
        operands = [jax.device_put(x, HOST) for x in operands]
    matmul = product(limit, precision="highest")
    matmul = matmul if inside_jit else matmul.__wrapped__
    result, again = (np.asarray(matmul(*operands)) for _ in range(2))
    np.testing.assert_array_equal(result, again)
    assert result.dtype == dtype
    terms, unit = 5000 * abs(exact(a)) @ abs(exact(b)), UNIT_ROUNDOFF[result.dtype]
    bound = unit * abs(exact(a) @ exact(b)) + min(unit, 2.0**-24) * terms
    assert np.all(abs(exact(result) - exact(a) @ exact(b)) <= 1.01 * bound)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (2, 3, 4)])
def test_empty_and_float64_without_64_bit_types(m, n, k):
    a, b = np.ones((m, k)), np.ones((k, n))
    for found in (out_of_core.matmul(a, b), product(1 << 20)(a, b)):
        np.testing.assert_array_equal(found, np.full((m, n), k, np.float32), strict=True)


def test_errors(monkeypatch, tmp_path):
    a, b = np.ones((300, 50), np.float32), np.ones((50, 400), np.float32)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(300, 400))
    there = jax.device_put(a, HOST)
    limit = {"memory_limit": 1 << 20}

    def fails(error, message, function, *args, **options):
        with pytest.raises(error, match=message):
            function(*args, **options)

    fails(ValueError, r"a has shape \(50,\), which is not", out_of_core.matmul, a[0], b)
    fails(ValueError, r"a has shape \(300, 50\), b \(300, 50\)", out_of_core.matmul, a, a)
    fails(TypeError, "b is list, which has no shape", out_of_core.matmul, a, [[1.0]])
    fails(ValueError, r"out is .* \(50, 400\), but", out_of_core.matmul, a, b, out=b)
    fails(TypeError, "out is int32", out_of_core.matmul, a, b, out=out.view(np.int32))
    fails(ValueError, "is too small", out_of_core.matmul, a, b, memory_limit=100)
    fails(ValueError, "inside jit a call needs a memory_limit", product(None), there, b)
    fails(ValueError, "out and progress are for", product(1 << 20, progress=True), there, b)
    fails(ValueError, "128x128, 50 deep, need ", product(1000), there, b)
    for x in (b, out):
        call = jax.jit(lambda a, x=x: out_of_core.matmul(a, x[:50], **limit))
        fails(TypeError, rf"b is {type(x).__name__}, .*: pass a JAX array", call, there)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    fails(OSError, "No space left", out_of_core.matmul, a, b, out=out)

    class Broken(Sliced):
        __getitem__ = full

    fails(OSError, "No space left", out_of_core.matmul, Broken(a), b, **limit)
