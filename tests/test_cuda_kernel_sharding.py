"""``cuda_kernel`` with a sharding rule: what it says of a call, and what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from nvrtc_mark import needs_nvrtc
from sharded import EXPLICIT, devices, integers, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.interop import compat
from jax_tilekern.partitioning.call import _operations, _partition, _text
from jax_tilekern.partitioning.mesh import hlo_sharding

SOURCE = """
__global__ void scaled(const float* x, const float* scale, float* out, int k) {
  for (int i = 0; i < k; ++i) out[blockIdx.x * k + i] = x[blockIdx.x * k + i] * scale[i];
}
"""


def scaled(rule, **settings):
    given = {
        "out": lambda x, scale: x,
        "grid": lambda x, scale: x.shape[0],
        "block": 1,
        "scalars": lambda x, scale: (np.int32(x.shape[1]),),
        "reference": lambda x, scale: x * scale,
    }
    return jtk.cuda_kernel(SOURCE, sharding_rule=rule, **{**given, **settings})


@pytest.mark.parametrize(
    "rule", ["rows k, k", "rows k, k -> rows k -> k", "rows rows, k -> rows k", "a-b k, k -> a k"]
)
def test_rules_of_another_form_are_refused(rule):
    with pytest.raises(ValueError, match=re.escape(repr(rule))):
        scaled(rule)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("rows k -> rows k", "1 inputs"),
        ("rows k, rows k -> rows k", "2 dimensions for input 1"),
        ("rows k, rows -> rows k", "rows has the sizes 4 and 8"),
        ("rows k, k -> rows k, k", "2 outputs"),
        ("rows _, _ -> rows k", "no input has k"),
    ],
)
def test_rules_that_do_not_fit_are_refused_when_traced(rule, why):
    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    with pytest.raises(ValueError, match=why) as refusal:
        jax.jit(scaled(rule)).trace(x, scale)
    assert repr(rule) in str(refusal.value)
    assert "float32[4,8], float32[8] -> float32[4,8]" in str(refusal.value)


def test_a_rule_may_be_a_function_and_must_be_text():
    x, scale = jnp.ones((4, 8)), jnp.ones(8)
    by_shape = scaled(lambda x, scale: "rows k, k -> rows k")
    np.testing.assert_array_equal(by_shape(x, scale), x)
    with pytest.raises(TypeError, match="not a string"):
        scaled(lambda x, scale: 3)(x, scale)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_explicit_shardings_follow_from_the_rule(rng):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    x, scale = integers(rng, 8, 16), integers(rng, 16)
    kernel = scaled("rows k, k -> rows k")
    with jax.set_mesh(mesh):
        args = put(mesh, x, P("d", "m")), put(mesh, scale, P("m"))
        got = jax.jit(kernel)(*args)
        assert jax.typeof(got).sharding.spec == P("d", "m")
        np.testing.assert_array_equal(got, x * scale)
        with pytest.raises(compat.ShardingTypeError, match="do not go together"):
            kernel(args[0], put(mesh, scale, P("d")))
        with pytest.raises(compat.ShardingTypeError, match="rows _, _"):
            scaled("rows _, _ -> rows _")(*args)


def question(shapes, splits, mesh, out_shape, out_split):
    """What XLA asks about a call: shapes and shardings of the arrays."""
    from jax._src.lib import xla_client

    def shape(sizes):
        return xla_client.Shape.array_shape(np.dtype(np.float32), sizes)

    return (
        [shape(sizes) for sizes in shapes],
        [hlo_sharding(split, mesh) for split in splits],
        shape(out_shape),
        hlo_sharding(out_split, mesh),
    )


@needs_nvrtc
def test_each_device_calls_the_kernel_on_its_part():
    launched = []

    def grid(x, scale):
        launched.append((x.shape, scale.shape))
        return x.shape[0]

    kernel = scaled("rows k, k -> rows k", grid=grid)
    settings = kernel._settings
    params = {"settings": settings, "parameters": _parameters(settings), "batches": ()}
    with jtk.gpu_target("sm_90"):
        text = _text(_operations["tilekern_cuda_kernel"], "cuda", params)
        asked = question([(8, 16), (16,)], [[(0,), (1,)], [(1,)]], (2, 4), (8, 16), [(0,), (1,)])
        module, operands, result = _partition(*asked, text)
    assert launched[-1] == ((4, 4), (4,))
    assert b"jax_tilekern_cuda_launch" in module
    assert [list(s.tile_assignment_dimensions()) for s in operands] == [[2, 4], [4, 2]]
    assert list(result.tile_assignment_dimensions()) == [2, 4]


def _parameters(settings):
    from jax_tilekern.ops.cuda_kernel.settings import Parameters

    return Parameters(settings.label, {})
