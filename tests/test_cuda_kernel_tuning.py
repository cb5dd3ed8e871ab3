"""The parameters of a ``cuda_kernel`` that are chosen by measuring it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from nvrtc_mark import needs_gpu, require_nvrtc
from sharded import AUTO, devices, mesh_of, put

import jax_tilekern as jtk
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.tuned import TunedChoices, recorded_products
from jax_tilekern.tuning import product_timing, random_operands
from jax_tilekern.tuning import tuner as tuning

require_nvrtc()

H100 = known_gpu("sm_90")
SOURCE = r"""
template <int kItems>
__global__ void times(const float* x, float* out, float a, int size) {
  for (int item = 0; item < kItems; ++item) {
    const int i = (blockIdx.x * kItems + item) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = a * x[i];
  }
}
"""
X = jax.ShapeDtypeStruct((1000,), np.float32)


def times(source=SOURCE, **settings):
    seen = []

    def reference(x, **parameters):
        seen.append(parameters)
        return parameters["a"] * x

    kernel = jtk.cuda_kernel(
        source,
        **{
            "name": lambda x, a, block, items: f"times<{items}>",
            "out": lambda x, **_: x,
            "grid": lambda x, a, block, items: -(-x.size // (block * items)),
            "block": lambda x, a, block, items: block,
            "scalars": lambda x, a, **_: (np.float32(a), np.int32(x.size)),
            "reference": reference,
            "tune": {"block": (64, 128), "items": [1, 2]},
            **settings,
        },
    )
    return kernel, seen


@pytest.fixture
def store(tmp_path):
    with tuning.using(TunedChoices(tmp_path / "tuned.json")) as choices, jtk.gpu_target("sm_90"):
        yield choices


def explained(function, *args):
    (choice,) = jtk.explain(function, *args, platform="cuda")
    return choice.kernel, choice.reason


def choose(store, function, *args, winner="block=128, items=2"):
    """Store a choice for every call of a kernel in a function."""
    for call in tuning.problems_of(function, *args):
        store.put(call, H100, winner)


def test_a_choice_is_followed(store):
    kernel, seen = times()

    def call(x):
        return kernel(x, a=2)

    assert explained(call, X)[0] == "times<1>"
    assert jtk.explain(kernel, X, a=2, platform="cuda")[0].kernel == "times<1>"
    assert "block=64, items=1, not tuned" in explained(call, X)[1]
    assert len(tuning.problems_of(kernel, X, a=2)) == 1
    choose(store, call, X)
    assert explained(call, X)[0] == "times<2>"
    assert explained(call, X)[1].endswith("; block=128, items=2, tuned")
    report = kernel.report(X, a=2)
    assert (report.block[0], report.grid[0]) == (128, 4)
    # Values of the call, other shapes and other parameters.
    assert "block=64, not tuned" in explained(lambda x: kernel(x, a=2, items=2), X)[1]
    assert explained(lambda x: kernel(x, a=2, items=2, block=32), X)[0] == "times<2>"
    for other in (lambda x: kernel(x, a=3), lambda x: jax.vmap(call)(x[None])):
        assert "block=64, items=1, not tuned" in explained(other, X)[1]
    assert "not tuned" in explained(call, jnp.ones(999))[1]
    assert "not tuned" in explained(lambda x: times(SOURCE + "\n")[0](x, a=2), X)[1]
    np.testing.assert_array_equal(call(jnp.ones(3)), 2.0)
    # A GPU runs the kernel, and no reference.
    assert not seen if jax.default_backend() == "gpu" else seen[-1] == {"a": 2}


def test_rules_do_not_get_what_is_tuned():
    kernel, _ = times()
    got = []

    def transpose(cotangent, x, **parameters):
        got.append(parameters)
        return parameters["a"] * cotangent

    kernel.deflinear(0, transpose)
    gradient = jax.grad(lambda x: kernel(x, a=2, block=128).sum())(jnp.ones(3))
    np.testing.assert_array_equal(gradient, 2.0)
    assert got == [{"a": 2}]


def test_a_choice_that_is_no_candidate_any_more(store):
    kernel, _ = times()
    choose(store, lambda x: kernel(x, a=2), X, winner="block=7, items=7")
    with pytest.warns(RuntimeWarning, match="block=7, items=7 is no candidate; tune it"):
        assert explained(lambda x: kernel(x, a=2), X)[0] == "times<1>"


def test_out_does_not_depend_on_it(store):
    kernel, _ = times(out=lambda x, a, block, items: jax.ShapeDtypeStruct((block,), x.dtype))
    choose(store, lambda x: kernel(x, a=2), X)
    with pytest.raises(ValueError, match="kernel times: out depends on a parameter that is tuned"):
        explained(lambda x: kernel(x, a=2), X)


def test_calls_are_measured(store, monkeypatch):
    """On a CPU the reference computes every choice; the launch of one is refused."""
    monkeypatch.setattr(random_operands, "_MOST_COPIES", 2)
    monkeypatch.setattr(product_timing, "timed", lambda sides, _: dict.fromkeys(sides, 1.0))
    kernel, _ = times(tune={"block": (64, 2048), "items": (1, 2)})

    def step(x):
        return kernel(x @ x, a=2) + jax.vmap(lambda row: kernel(row, a=3))(x)

    problems = tuning.problems_of(step, jnp.ones((8, 8)))
    calls = [x for x in problems if not isinstance(x, tuning.Product)]
    assert len(calls) == 2
    for call in calls:
        row = tuning.tuned(call, H100)
        assert set(row.microseconds) == {"xla", "block=64, items=1", "block=64, items=2"}
        assert row.winner == store.find(call, H100) == "block=64, items=1"
        assert re.search("2048", row.failures["block=2048, items=1"])
        assert row.name.startswith("cuda_kernel times(float32[8")
    assert tuning.tuned(calls[0], H100, operands=[np.eye(8)]).winner is not None


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
def test_what_a_device_computes_is_tuned(store):
    """A sharded call is not tuned as a whole."""
    kernel, _ = times(sharding_rule="n -> n")
    x = put(mesh_of((AUTO, AUTO)), np.ones(80, np.float32), P(("d", "m")))
    sharded = jax.jit(lambda x: kernel(x, a=2))
    with recorded_products() as recorded:
        sharded.trace(x).lower(lowering_platforms=("cuda",))
    assert recorded == []
    np.testing.assert_array_equal(sharded(x), 2.0)


@pytest.mark.parametrize(
    ("tune", "error", "message"),
    [
        ([("block", 1)], TypeError, "tune is .*, not a dict such as"),
        ({"block": 64}, TypeError, "'block': 64, not a name and a list of values"),
        ({"block": ()}, ValueError, "tune has no value for block"),
        ({"block": ([],)}, TypeError, "parameter block of kernel .* not hashable"),
    ],
)
def test_what_is_refused(tune, error, message):
    with pytest.raises(error, match=message):
        times(tune=tune)


@needs_gpu
def test_tuning_on_a_gpu(tmp_path):
    kernel, _ = times()
    x = jnp.arange(100_000.0)
    with tuning.using(TunedChoices(tmp_path / "tuned.json")):
        (row,) = jtk.tune(kernel, x, a=2, seconds=0.1)
        assert set(row.microseconds) >= {"xla", "block=64, items=1", "block=128, items=2"}
        assert not row.failures
        np.testing.assert_array_equal(jax.jit(lambda x: kernel(x, a=2))(x), 2 * x)
