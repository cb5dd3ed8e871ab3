"""``ragged_dot`` with an epilogue in a ``jit`` over several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from ragged_layer import GROUPS, SIZES, N, drawn, function, fused, loss, unfused
from sharded import AUTO, EXPLICIT, bytes_sent, collectives, devices, mesh_of, needs_devices, put

import jax_tilekern as jtk

pytestmark = needs_devices


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(devices()[0]):
        yield


@pytest.fixture
def arrays(rng, on_the_cpu):
    return drawn(rng)


# Shardings of x, w, residual, bias and scale, and whether the sum over devices comes first.
PARTITIONS = {
    "rows": ((P("d"), P(), P("d"), P(), P()), False),
    "rows and columns": ((P("d"), P(None, None, "m"), P("d", "m"), P(None, "m"), P()), False),
    "groups": ((P(), P("m"), P(), P("m"), P("m")), True),
    "groups, results by rows": ((P(), P("m"), P("m"), P(), P()), True),
    "contracted": ((P("d", "m"), P(None, "m"), P("d"), P(), P()), True),
    "rows and groups": ((P("d"), P("m"), P("d"), P("m"), P("m")), True),
}


@pytest.mark.parametrize(("specs", "partial"), PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.one_in(6)
def test_partitioned(arrays, specs, partial):
    mesh = mesh_of((AUTO, AUTO))
    placed = [put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
    # The results lie where the residual does.
    program = functools.partial(jax.jit, out_shardings=placed[2].sharding)
    compiled = program(fused).lower(*placed).compile()
    assert_close(compiled(*placed), unfused(*arrays))
    # The same by XLA after our product, with bias and scale at hand.
    separate = program(unfused_product).lower(*placed[:3]).compile()
    small = 4 * GROUPS * (N + 1)
    assert bytes_sent(compiled) <= bytes_sent(separate) + small, collectives(compiled)
    if jax.default_backend() != "cpu":
        return  # explain compiles for its own platform
    (call, *_) = jtk.explain(program(fused), *placed, platform="cpu")
    assert ("the epilogue after the sum" in call.partition) == partial, call.partition


def unfused_product(x, w, residual):
    return jax.nn.gelu(jtk.ragged_dot(x, w, SIZES)) + residual


@pytest.mark.parametrize("specs", [(P("d"), P(None, "m")), (P("d", "m"), P()), (P(), P("m"))])
@pytest.mark.one_in(3)
def test_partitioned_batches_of_sizes_that_do_not_divide(rng, specs):
    """Batches whose bounds differ, and groups and rows that pad the last part."""
    shapes = (4, 42, 8), (4, 6, 8, 12), (4, 6, 12)
    x, w, bias = (jnp.asarray(rng.normal(size=shape), np.float32) for shape in shapes)
    sizes = jnp.asarray([[7, 0, 20, 9, 1, 2], [0, 0, 0, 0, 0, 42], [1] * 6, [42, 0, 0, 0, 0, 0]])
    mesh = mesh_of((AUTO, AUTO))

    def by(product):
        return jax.vmap(lambda x, w, bias, sizes: product(x, w, 1.0, bias, 2.0, sizes))

    def at_once(x, w, residual, bias, scale, sizes):
        return jtk.ragged_dot(
            x, w, sizes, epilogue=function, operands=(residual,), group_operands=(bias, scale)
        )

    def one_by_one(x, w, residual, bias, scale, sizes):
        return unfused(x, w, residual, bias, jnp.full((6, 1), scale), sizes)

    @jax.jit
    def program(x, w, *rest):
        # Unlike an operand's, the sharding of what is computed may leave a remainder.
        x, w = (
            jax.lax.with_sharding_constraint(y * 1, NamedSharding(mesh, spec))
            for y, spec in zip((x, w), specs, strict=True)
        )
        return by(at_once)(x, w, *rest)

    assert_close(program(x, w, bias, sizes), by(one_by_one)(x, w, bias, sizes))


def test_explicit_axes(arrays):
    mesh, numbers = mesh_of((EXPLICIT, EXPLICIT)), tuple(range(5))
    specs = P("d"), P(None, None, "m"), P("d", "m"), P(None, "m"), P()
    expected = jax.grad(loss(unfused), numbers)(*arrays)
    with jax.set_mesh(mesh):
        placed = [put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
        call = functools.partial(fused, out_sharding=P("d", "m"))
        found = jax.jit(call)(*placed)
        assert jax.typeof(found).sharding.spec == P("d", "m")
        gradients = jax.jit(jax.grad(loss(call), numbers))(*placed)
        for gradient, x in zip(gradients, placed, strict=True):
            assert jax.typeof(gradient).sharding.spec == jax.typeof(x).sharding.spec
    assert_close(np.asarray(found), unfused(*arrays))
    assert_close(tuple(map(np.asarray, gradients)), expected)


def test_shard_map_over_groups(arrays):
    """Devices have groups of their own: the sum of their results is the whole."""
    _x, _w, _residual, _bias, _scale = arrays
    mesh = mesh_of((AUTO, AUTO))

    def local(x, w, residual, bias, scale):
        offset = jax.lax.axis_index("m").reshape(1)
        return jax.lax.psum(fused(x, w, residual, bias, scale, group_offset=offset), "m")

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("m"), P(), P("m"), P("m")), out_specs=P()
    )
    assert_close(jax.jit(mapped)(*arrays), unfused(*arrays))
    numbers = tuple(range(5))
    found = jax.jit(jax.grad(loss(mapped), numbers))(*arrays)
    assert_close(found, jax.grad(loss(unfused), numbers)(*arrays))
