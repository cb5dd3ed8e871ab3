"""Functions as kernels of lanes on a GPU, against ``jax.vmap``."""

import jax
import pytest
from numerics import on_gpu
from test_emulated_lanes import GRADIENTS, TABLE, assert_close, gradient_by, mapped_by, raw

import jax_tilekern as jtk

if not on_gpu():
    pytest.skip("launches kernels, and JAX has no GPU here", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.mark.parametrize("name", TABLE)
def test_is_vmap(name):
    ours, args = mapped_by(TABLE[name], jtk.kernel)
    theirs, _ = mapped_by(TABLE[name], jax.vmap)
    with jtk.strict():
        found = jax.jit(ours)(*args)
    # XLA's products of int8 are wrong on GPUs at some sizes.
    where = jax.devices("cpu")[0] if name == "mixed_products" else None
    with jax.default_device(where):
        wanted = raw(jax.jit(theirs)(*args))
    assert_close(raw(found), wanted)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_vmap(name):
    ours, args = gradient_by(GRADIENTS[name], jtk.kernel)
    theirs, _ = gradient_by(GRADIENTS[name], jax.vmap)
    with jtk.strict():
        found = jax.tree.leaves(jax.jit(ours)(*args))
    assert_close(found, jax.tree.leaves(jax.jit(theirs)(*args)))
