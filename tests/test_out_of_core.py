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

from jax_tilekern import out_of_core
from jax_tilekern.out_of_core.blocks import WholeProduct, choose_plan

TYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float16, np.float32)]
LIMIT = 600_000
sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.integers(20, 28), st.booleans())
def test_plans_keep_to_their_limit_and_cover_the_product(m, n, k, limit, inside_jit):
    problem = WholeProduct(m, n, k, *TYPES)
    try:
        plan = choose_plan(problem, 1 << limit, inside_jit=inside_jit)
    except ValueError as error:
        least = int(re.search(r"too small: .* need (\d+) bytes", str(error))[1])
        assert 1 << limit < least == choose_plan(problem, least, inside_jit=inside_jit).memory_bytes
        return
    assert plan.memory_bytes <= 1 << limit
    if m * n < 1 << 16:
        covered = np.zeros((m, n), int)
        for place, _, is_last in plan.steps():
            covered[place] += is_last
        assert (covered == 1).all()
    read = sum(
        getattr(problem, name).itemsize * math.prod(x.stop - x.start for x in part)
        for _, reads, _ in plan.steps()
        for name, part in reads.items()
    )
    assert inside_jit or plan.read_bytes == read


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
        found = out_of_core.matmul(
            x, y, out=out, memory_limit=LIMIT, preferred_element_type=np.int32
        )
        assert out is None or found is out
        np.testing.assert_array_equal(getattr(found, "array", found), expected)
    plan = out_of_core.plan(a, b, memory_limit=LIMIT, preferred_element_type=np.int32)
    assert left.read + right.read == plan.read_bytes


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

        def gradient_norm(a, b):
            return (jax.device_put(jax.grad(loss)(a, b), jax.memory.Space.Device) ** 2).sum()

        return jax.grad(loss, (0, 1))(a, b), jax.grad(gradient_norm, 1)(a, b)

    found = jax.jit(gradients, static_argnums=0)(
        product(2 << 20, precision="highest"), *map(jax.device_put, (a, b), places)
    )
    assert [x.sharding for x in found[0]] == list(places)
    plain = lambda a, b: jnp.matmul(a, b, precision="highest")  # noqa: E731
    assert_close(found, gradients(plain, a, b))


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


class Broken(Sliced):
    def __getitem__(self, index):
        raise OSError("cannot be read")


def test_errors():
    a, b = np.ones((300, 50), np.float32), np.ones((50, 400), np.float32)
    integers, there = np.ones((300, 400), np.int32), jax.device_put(a, HOST)
    matmul, constant = out_of_core.matmul, jax.jit(lambda x: product(9).__wrapped__(x, b))
    for error, message, function, *operands in (
        (ValueError, r"a has shape \(50,\), which is not", matmul, a[0], b),
        (ValueError, r"a has shape \(300, 50\), b \(300, 50\)", matmul, a, a),
        (TypeError, "b is list, which has no shape", matmul, a, [[1.0]]),
        (ValueError, r"out is .* \(50, 400\), but", product(None, out=b).__wrapped__, a, b),
        (TypeError, "out is int32", product(None, out=integers).__wrapped__, a, b),
        (ValueError, "128x128, 50 deep, need ", product(1000).__wrapped__, a, b),
        (OSError, "cannot be read", product(1 << 20).__wrapped__, Broken(a), b),
        (ValueError, "128x128, 50 deep, need ", product(1000), there, b),
        (ValueError, "inside jit a call needs a memory_limit", product(None), there, b),
        (ValueError, "out is for calls outside", product(1 << 20, out=b), there, b),
        (TypeError, "b is ndarray, .*: pass a JAX", constant, there),
    ):
        with pytest.raises(error, match=message):
            function(*operands)
