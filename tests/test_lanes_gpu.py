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
    assert_close(raw(found), raw(jax.jit(theirs)(*args)))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_vmap(name):
    ours, args = gradient_by(GRADIENTS[name], jtk.kernel)
    theirs, _ = gradient_by(GRADIENTS[name], jax.vmap)
    with jtk.strict():
        found = jax.tree.leaves(jax.jit(ours)(*args))
    assert_close(found, jax.tree.leaves(jax.jit(theirs)(*args)))
