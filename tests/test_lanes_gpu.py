"""Functions as kernels of lanes on a GPU, against ``jax.vmap``."""

import functools

import jax
import pytest
from numerics import on_gpu
from test_emulated_lanes import GRADIENTS, TABLE, assert_close, gradient_by, mapped_by, raw
from test_lane_groups import cases

import jax_tilekern as jtk
from jax_tilekern.ops.kernel.translation import text

if not on_gpu():
    pytest.skip("launches kernels, and JAX has no GPU here", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("highest_precision")


def by_threads(threads, monkeypatch):
    """Return ``kernel`` by so many threads, which share out short arrays too."""
    monkeypatch.setattr(text, "_UNROLLED_IN_GROUPS", (3, 0))
    return functools.partial(jtk.kernel, threads=threads)


def values_of(theirs, args, name):
    # On GPUs, XLA's products of int8 are wrong at some sizes, and NaN spreads less in its spectra.
    where = jax.devices("cpu")[0] if name in ("mixed_products", "spectra") else None
    with jax.default_device(where):
        return raw(jax.jit(theirs)(*args))


@pytest.mark.parametrize("threads", [1, 32, 128])
@pytest.mark.parametrize("name", TABLE)
def test_is_vmap(name, threads, monkeypatch):
    ours, args = mapped_by(TABLE[name], by_threads(threads, monkeypatch))
    theirs, _ = mapped_by(TABLE[name], jax.vmap)
    with jtk.strict():
        found = jax.jit(ours)(*args)
    assert_close(raw(found), values_of(theirs, args, name))


@pytest.mark.parametrize("threads", [1, 32, 128])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_is_that_of_vmap(name, threads, monkeypatch):
    ours, args = gradient_by(GRADIENTS[name], by_threads(threads, monkeypatch))
    theirs, _ = gradient_by(GRADIENTS[name], jax.vmap)
    with jtk.strict():
        found = jax.tree.leaves(jax.jit(ours)(*args))
    assert_close(found, jax.tree.leaves(jax.jit(theirs)(*args)))


@pytest.mark.parametrize("threads", [32, 64, 256])
@pytest.mark.parametrize("name", cases(jax.vmap))
def test_long_arrays_are_shared_out(name, threads):
    ours, args = cases(functools.partial(jtk.kernel, threads=threads))[name]
    theirs, _ = cases(jax.vmap)[name]
    with jtk.strict():
        found = jax.jit(ours)(*args)
    assert_close(raw(found), values_of(theirs, args, name))
