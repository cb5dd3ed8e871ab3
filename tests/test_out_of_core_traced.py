"""Products of arrays in host memory inside ``jit``: values, derivatives, what is on the device."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from numerics import BF16, UNIT_ROUNDOFF, exact, on_gpu

from jax_tilekern import out_of_core
from jax_tilekern.out_of_core.plan import WholeProduct
from jax_tilekern.out_of_core.traced import choose_blocks, memory_bytes

HOST, DEVICE = "pinned_host", "device"


def placed(x, memory):
    return jax.device_put(x, SingleDeviceSharding(jax.devices()[0], memory_kind=memory))


def product(limit, **settings):
    return jax.jit(lambda a, b: out_of_core.matmul(a, b, memory_limit=limit, **settings))


@pytest.mark.parametrize(
    ("memories", "x64"), [((HOST, HOST), True), ((HOST, DEVICE), False), ((DEVICE, HOST), True)]
)
@pytest.mark.parametrize(
    ("m", "n", "k", "limit"),
    [
        # Blocks that do not divide the result, and a single one.
        (1000, 700, 130, 1_500_000),
        # Several strips of rows that divide it.
        (1024, 512, 130, 1_500_000),
        (100, 90, 80, 1 << 20),
    ],
)
def test_values(rng, memories, x64, m, n, k, limit):
    a, b = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    with jax.enable_x64(x64):
        result = product(limit)(placed(a, memories[0]), placed(b, memories[1]))
        assert result.sharding.memory_kind == HOST
        np.testing.assert_array_equal(result, a @ b)


def test_float64_and_an_operand_that_is_closed_over(rng, x64):
    a, b = (rng.standard_normal(shape) for shape in ((300, 200), (200, 400)))
    there = placed(b, HOST)
    result = jax.jit(lambda a: out_of_core.matmul(a, there, memory_limit=2 << 20))(placed(a, HOST))
    assert result.dtype == np.float64
    np.testing.assert_allclose(result, a @ b, rtol=1e-10, atol=1e-10)


def test_rounds_once(rng):
    a, b = (rng.standard_normal(s, np.float32).astype(BF16) for s in ((300, 500), (500, 260)))
    result = product(1 << 20)(placed(a, HOST), placed(b, HOST))
    assert result.dtype == BF16
    wide = exact(a) @ exact(b)
    bound = UNIT_ROUNDOFF[np.dtype(BF16)] * np.abs(wide) + 500 * 2.0**-24 * (
        np.abs(exact(a)) @ np.abs(exact(b))
    )
    assert np.all(np.abs(exact(result) - wide) <= 1.01 * bound)


def test_empty():
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        result = product(1 << 20)(placed(np.ones((m, k)), HOST), placed(np.ones((k, n)), HOST))
        np.testing.assert_array_equal(result, np.zeros((m, n)))


@pytest.mark.parametrize(("memories", "x64"), [((HOST, HOST), True), ((HOST, DEVICE), False)])
def test_derivatives(rng, memories, x64):
    """First and second order; cotangents are where their primals are."""
    with jax.enable_x64(x64):
        check_derivatives(rng, memories)


def check_derivatives(rng, memories):
    a, b = (rng.integers(-3, 4, s).astype(np.float32) for s in ((260, 200), (200, 300)))
    w = rng.integers(-3, 4, (260, 300)).astype(np.float32)
    operands = [placed(x, memory) for x, memory in zip((a, b), memories, strict=True)]

    def loss(matmul):
        def value(a, b):
            return (w * jax.device_put(matmul(a, b), jax.memory.Space.Device) ** 2).sum()

        return value

    ours = loss(lambda a, b: out_of_core.matmul(a, b, memory_limit=2 << 20))
    plain = loss(lambda a, b: jnp.matmul(a, b, precision="highest"))
    gradients = jax.jit(jax.grad(ours, (0, 1)))(*operands)
    assert [x.sharding.memory_kind for x in gradients] == list(memories)
    for x, y in zip(gradients, jax.grad(plain, (0, 1))(a, b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-2)

    def second(f):
        def of_gradient(a, b):
            found = jax.grad(f)(a, b)
            return (jax.device_put(found, jax.memory.Space.Device) * a0).sum()

        a0 = jnp.asarray(a)
        return jax.jit(jax.grad(of_gradient, 1))

    np.testing.assert_allclose(second(ours)(*operands), second(plain)(a, b), rtol=1e-5, atol=1)


def test_only_blocks_are_on_the_device(rng):
    a, b = placed(np.ones((1000, 130), np.float32), HOST), placed(np.ones((130, 700)), HOST)
    text = product(1_500_000).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
    moved = re.findall(r'placement = "device"}} : \(tensor<(\d+)x(\d+)xf32>\)', text)
    assert moved
    blocks = choose_blocks(WholeProduct(1000, 700, 130, *[np.dtype(np.float32)] * 4), 1_500_000)
    assert {tuple(map(int, shape)) for shape in moved} == {
        (blocks.rows, 130),
        (130, blocks.columns),
    }


@pytest.mark.parametrize("limit", [1_500_000, 2 << 20, 8 << 20])
def test_each_block_of_rows_is_copied_once(limit):
    sizes = WholeProduct(1000, 700, 130, *[np.dtype(np.float32)] * 4)
    rows, _ = choose_blocks(sizes, limit)

    def copies(jaxpr):
        count = 0
        for equation in jaxpr.eqns:
            inner = [x.jaxpr for x in equation.params.values() if hasattr(x, "jaxpr")]
            count += equation.params.get("length", 1) * sum(map(copies, inner))
            if equation.primitive.name == "device_put":
                count += equation.outvars[0].aval.shape == (rows, 130)
        return count

    a, b = placed(np.ones((1000, 130), np.float32), HOST), placed(np.ones((130, 700)), HOST)
    assert copies(jax.make_jaxpr(product(limit))(a, b).jaxpr) == math.ceil(1000 / rows)


@pytest.mark.skipif(not on_gpu(), reason="on a CPU, both kinds of memory are the host's")
def test_a_result_beyond_the_limit_is_not_on_the_device():
    """The result takes 4 GiB. The limit leaves space for the 32 MiB of a cuBLAS workspace."""
    limit = 400 << 20
    a = placed(jnp.zeros((32768, 256), jnp.bfloat16), HOST)
    b = placed(jnp.zeros((256, 32768), jnp.bfloat16), HOST)
    compiled = product(limit, preferred_element_type=jnp.float32).lower(a, b).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= limit


sizes = st.integers(1, 3000)


@given(sizes, sizes, sizes, st.integers(23, 28))
def test_blocks_keep_to_their_limit(m, n, k, limit):
    all_sizes = WholeProduct(m, n, k, *map(np.dtype, (BF16, np.float32, BF16, np.float32)))
    blocks = choose_blocks(all_sizes, 1 << limit)
    assert memory_bytes(all_sizes, *blocks) <= 1 << limit
    assert 1 <= blocks.rows <= m
    assert 1 <= blocks.columns <= n


def test_errors(tmp_path):
    file = np.memmap(tmp_path / "a", np.float32, "w+", shape=(300, 300))
    a = placed(np.ones((300, 300), np.float32), HOST)
    with pytest.raises(ValueError, match="inside jit a call needs a memory_limit"):
        product(None)(a, a)
    with pytest.raises(ValueError, match="out and progress are for calls outside of jit"):
        product(1 << 20, progress=True)(a, a)
    with pytest.raises(ValueError, match="inside jit, blocks of 128x128, 300 deep, need 1118208"):
        product(1000)(a, a)
    with pytest.raises(TypeError, match=r"b is ndarray, .*: pass a JAX array"):
        jax.jit(lambda a: out_of_core.matmul(a, np.ones((300, 3)), memory_limit=1 << 20))(a)
    with pytest.raises(TypeError, match=r"a is memmap, .*: pass a JAX array"):
        jax.jit(lambda b: out_of_core.matmul(file, b, memory_limit=1 << 20))(a)
    with pytest.raises(ValueError, match="contracted dimensions differ"):
        product(1 << 20)(a, placed(np.ones((200, 300), np.float32), HOST))
