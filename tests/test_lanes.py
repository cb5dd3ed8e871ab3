"""Functions as kernels of lanes: the CUDA text, compiled as C++, against ``jax.vmap``."""

import jax
import jax.numpy as jnp
import lane_functions
import numpy as np
import pytest
from emulated import COMPILER
from lanes import Emulated

import jax_tilekern as jtk

TABLE, WIDE, GRADIENTS = (
    lane_functions.table(), lane_functions.wide_table(), lane_functions.gradients(),
)  # fmt: skip
TOLERANCE = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 2e-5, "float64": 1e-12}
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


def _mapped(case, map_):
    function, in_axes, args = case
    if in_axes is None:
        return map_(lambda _: function(*args)), (np.zeros(3, np.float32),)
    return map_(function, in_axes=in_axes), args


def _gradient(case, map_):
    function, args = case
    numbers = tuple(range(len(args)))
    return jax.value_and_grad(lambda *args: function(map_, *args), argnums=numbers), args


def _raw(tree):
    keys = jax.dtypes.prng_key
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, keys) else x
        for x in jax.tree.leaves(tree)
    ]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Every function, compiled in one program."""
    traced = {}
    for name, case in TABLE.items():
        function, args = _mapped(case, jtk.kernel)
        traced[name] = jax.make_jaxpr(lambda *args, f=function: _raw(f(*args)))(*args)
    for name, case in GRADIENTS.items():
        function, args = _gradient(case, jtk.kernel)
        traced[f"gradient of {name}"] = jax.make_jaxpr(function)(*args)
    with jax.enable_x64(True):
        for name, case in WIDE.items():
            function, args = _mapped(case, jtk.kernel)
            traced[name] = jax.make_jaxpr(lambda *args, f=function: _raw(f(*args)))(*args)
    return Emulated(tmp_path_factory.mktemp("lanes"), traced)


def _assert_close(found, wanted):
    assert len(found) == len(wanted)
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        tolerance = TOLERANCE.get(x.dtype.name)
        if tolerance is None:
            np.testing.assert_array_equal(x, y, err_msg=f"result {i}")
        else:
            x, y = x.astype(np.float64), y.astype(np.float64)
            np.testing.assert_allclose(x, y, tolerance, tolerance, err_msg=f"result {i}")


@pytest.mark.parametrize("name", TABLE)
def test_is_vmap(emulated, name):
    function, args = _mapped(TABLE[name], jax.vmap)
    _assert_close(emulated(name, *args), _raw(jax.jit(function)(*args)))


@pytest.mark.parametrize("name", WIDE)
def test_is_vmap_of_64_bits(emulated, name, x64):
    function, args = _mapped(WIDE[name], jax.vmap)
    _assert_close(emulated(name, *args), _raw(jax.jit(function)(*args)))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_vmap(emulated, name):
    function, args = _gradient(GRADIENTS[name], jax.vmap)
    found = emulated(f"gradient of {name}", *args)
    _assert_close(found, jax.tree.leaves(jax.jit(function)(*args)))
