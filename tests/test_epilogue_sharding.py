"""Epilogues over several devices: partitioned calls, shard_map and explicit meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from sharded import (
    AUTO,
    EXPLICIT,
    MESH_TYPES,
    SCHEMES,
    TRANSFORMS,
    D,
    F,
    T,
    check,
    collectives,
    explicit_part,
    integers,
    transformed,
)
from sharded import mesh_of as eight_devices

import jax_tilekern as jtk

SHAPES = {"x": (64, 48), "w": (48, 32), "bias": (32,), "residual": (64, 32)}


def epilogue(y, bias, residual):
    return jax.nn.gelu(y + bias) + residual


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


# The schemes by which models are trained, against the same program of JAX's.


def fused_layers(module, types, hidden, result):
    """Two layers with a bias and a residual; small integers keep every sum exact."""

    def activation(y, bias):
        return jnp.maximum(y + bias, 0)

    def layer(x, w, epilogue, operands, spec):
        out = explicit_part(spec, types, x.ndim) if EXPLICIT in types else None
        if module is jnp:
            return epilogue(jnp.matmul(x, w, out_sharding=out), *operands)
        return jtk.matmul(x, w, epilogue=epilogue, operands=operands, out_sharding=out)

    def f(x, w1, w2, bias):
        h = layer(x, w1, activation, (bias,), hidden)
        return layer(h, w2, jnp.add, (x,), result)

    return f


@pytest.mark.parametrize("types", MESH_TYPES.values(), ids=MESH_TYPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(16)
def test_schemes_communicate_no_more_than_jax(rng, scheme, transform, types):
    x_spec, w1_spec, w2_spec, hidden, result = SCHEMES[scheme]
    mesh = eight_devices(types)
    x, w1, w2, bias = (integers(rng, *shape) for shape in ((T, D), (D, F), (F, D), (F,)))
    if transform == "vmap of gradient":
        x, x_spec = integers(rng, 3, T, D), P(None, *x_spec)
    specs = x_spec, w1_spec, w2_spec, P(*w1_spec[1:])

    def program(module):
        layers = fused_layers(module, types, hidden, result)
        return transformed(transform, layers)

    with jax.set_mesh(mesh):
        args = put(mesh, (x, w1, w2, bias), specs)
        check(mesh, program, args, kernels=False)


def test_sum_is_scattered_before_the_epilogue(rng):
    mesh = eight_devices((AUTO, AUTO))
    x, w, residual = integers(rng, 16, 32), integers(rng, 32, 64), integers(rng, 16, 64)
    args = put(mesh, (x, w, residual), (P(None, "m"), P("m"), P("m")))

    def program(module):
        if module is jnp:
            return lambda x, w, residual: jnp.maximum(x @ w, residual)
        return lambda x, w, r: jtk.matmul(x, w, epilogue=jnp.maximum, operands=(r,))

    compiled = check(mesh, program, args, P("m"))
    assert [c.kind for c in collectives(compiled)] == ["reduce-scatter"]


@pytest.mark.parametrize("shape", [(9, 13, 11), (16, 3, 16), (2, 30, 7)])
@pytest.mark.parametrize(
    "specs", [(P("m"), P()), (P(None, "m"), P("m")), (P("d", "m"), P("m"))], ids=str
)
@pytest.mark.one_in(3)
def test_sizes_that_do_not_divide(rng, shape, specs):
    m, k, n = shape
    mesh = eight_devices((AUTO, AUTO))
    args = integers(rng, m, k), integers(rng, k, n), integers(rng, n)

    def value(call):
        def f(x, w, bias):
            # The padding is garbage, and this makes ones of zeros.
            x, w = (
                jax.lax.with_sharding_constraint(1 / (x + 2), NamedSharding(mesh, spec))
                for x, spec in zip((x, w), specs, strict=True)
            )
            return call(x, w, bias).sum()

        return jax.value_and_grad(f, (0, 1, 2))

    found = jax.jit(value(lambda x, w, b: jtk.linear(x, w, b, jnp.tanh)))(*args)
    expected = jax.jit(value(lambda x, w, b: jnp.tanh(x @ w + b)))(*args)
    assert_close(found, expected)
