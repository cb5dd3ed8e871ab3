"""The example runs, its results are right, and a GPU would run each function as one kernel."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk

PATH = Path(__file__).parent.parent / "examples" / "lanes.py"


@pytest.fixture(scope="module")
def lanes():
    spec = importlib.util.spec_from_file_location("lanes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_runs(lanes, capsys):
    mean, variance = jax.jit(lanes.sample)()
    assert abs(mean) < 0.05
    assert abs(variance - 1) < 0.1
    infected = lanes.epidemic()
    assert max(infected) > 10 * infected[0]
    assert infected[-1] < max(infected) / 2
    lines = lanes.picture()
    assert (len(lines), len(lines[0])) == (lanes.HEIGHT, lanes.WIDTH)
    assert set(lines[0]) == {" "}
    assert "#" in "".join(lines)


@needs_nvrtc
def test_each_is_a_kernel(lanes):
    keys, scalar = jax.random.split(jax.random.key(0), 100), jnp.float32(1)
    numbers = jnp.ones(100, jnp.int32)
    for function, in_axes, args in (
        (lanes.chain, (0, None), (keys, scalar)),
        (lanes.person, (0, None, 0, 0, None), (keys, jnp.int32(3), numbers, numbers, scalar)),
        (lanes.brightness, 0, (jnp.ones(100), jnp.ones(100))),
    ):
        with jtk.gpu_target("sm_90"):
            (choice,) = jtk.explain(jtk.kernel(function, in_axes=in_axes), *args, platform="cuda")
        assert choice.kernel is not None, choice.reason
