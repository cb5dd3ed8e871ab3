"""Epilogues over several devices: partitioned calls, shard_map and explicit meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk

SHAPES = {"x": (64, 48), "w": (48, 32), "bias": (32,), "residual": (64, 32)}
OPERANDS = (0, 1, 2, 3)


def epilogue(y, bias, residual):
    return jax.nn.gelu(y + bias) + residual


def fused(x, w, *operands, **kwargs):
    return jtk.matmul(x, w, epilogue=epilogue, operands=operands, **kwargs)


def unfused(x, w, *operands):
    return epilogue(jnp.matmul(x, w), *operands)


@pytest.fixture
def devices():
    found = jax.devices("cpu")[:4]
    assert len(found) == 4, "conftest.py asks for host devices"
    return found


@pytest.fixture(autouse=True)
def on_the_cpu(devices):
    with jax.default_device(devices[0]):
        yield


@pytest.fixture
def arrays(rng, on_the_cpu):
    return [jnp.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES.values()]


def mesh_of(devices, kind):
    return jax.make_mesh((2, 2), ("i", "j"), axis_types=(kind,) * 2, devices=devices)


def put(mesh, arrays, specs):
    return [
        jax.device_put(x, NamedSharding(mesh, P(*spec)))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def loss(call):
    return lambda *xs: jnp.sum(call(*xs) ** 2)


def assert_close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3), found, expected
    )


ROWS_AND_COLUMNS = (("i", None), (None, "j"), ("j",), ("i", "j"))
CONTRACTED = ((None, "i"), ("i", None), (None,), (None, None))


@pytest.mark.parametrize("specs", [ROWS_AND_COLUMNS, CONTRACTED])
def test_partitioned_calls(devices, arrays, specs):
    sharded = put(mesh_of(devices, AxisType.Auto), arrays, specs)
    assert_close(jax.jit(fused)(*sharded), unfused(*arrays))
    gradients = jax.jit(jax.grad(loss(fused), OPERANDS))(*sharded)
    assert_close(gradients, jax.grad(loss(unfused), OPERANDS)(*arrays))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="explain compiles for its own platform")
def test_contracted_dimensions_are_whole_on_every_device(devices, arrays):
    sharded = put(mesh_of(devices, AxisType.Auto), arrays, CONTRACTED)
    call, _ = jtk.explain(fused, *sharded, platform="cpu")
    assert call.operands[:2] == ("f32[64,48]", "f32[48,32]")
    sharded = put(mesh_of(devices, AxisType.Auto), arrays, ROWS_AND_COLUMNS)
    call, _ = jtk.explain(fused, *sharded, platform="cpu")
    assert call.operands == ("f32[32,48]", "f32[48,16]", "f32[16]", "f32[32,16]")


def test_shard_map(devices, arrays):
    mapped = jax.shard_map(
        fused,
        mesh=mesh_of(devices, AxisType.Auto),
        in_specs=tuple(P(*spec) for spec in ROWS_AND_COLUMNS),
        out_specs=P("i", "j"),
    )
    assert_close(mapped(*arrays), unfused(*arrays))
    found = jax.grad(loss(mapped), OPERANDS)(*arrays)
    assert_close(found, jax.grad(loss(unfused), OPERANDS)(*arrays))


def test_explicit_meshes(devices, arrays):
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        sharded = put(mesh, arrays, ROWS_AND_COLUMNS)
        found = jax.jit(fused)(*sharded)
        assert jax.typeof(found).sharding.spec == P("i", "j")
        gradients = jax.jit(jax.grad(loss(fused), OPERANDS))(*sharded)
        for gradient, x in zip(gradients, sharded, strict=True):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(x).sharding.spec
        sharded = put(mesh, arrays, CONTRACTED)
        whole = jax.jit(lambda *xs: fused(*xs, out_sharding=P(None, None)))(*sharded)
    assert_close(np.asarray(found), unfused(*arrays))
    assert_close(np.asarray(whole), unfused(*arrays))
    expected = jax.grad(loss(unfused), OPERANDS)(*arrays)
    assert_close(tuple(map(np.asarray, gradients)), expected)
