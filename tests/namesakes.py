"""JAX's functions that have the same name and meaning as the library's."""

import contextlib

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import pytest
from jax import lax

import jax_tilekern as jtk

# Functions of JAX that have other parameters, results or types.
OTHERS = {
    (lax, "dot"), (lax, "transpose"), (lax, "scatter_add"), (lax, "sort"),
    (lax.linalg, "eigh"), (lax.linalg, "lu"), (jax.nn, "scaled_matmul"),
}  # fmt: skip
MODULES = {
    jtk: (jnp, lax, jax.nn, jax.ops),
    jtk.linalg: (jnp.linalg, jsp_linalg, lax.linalg),
}
NAMESAKES = [
    (theirs, name, getattr(ours, name))
    for ours, modules in MODULES.items()
    for theirs in modules
    for name in sorted({*ours.__all__, *(dir(ours) if ours is jtk.linalg else ())})
    if callable(getattr(theirs, name, None))
    and (theirs, name) not in OTHERS
    # A name that both modules of JAX have means what it means in the first.
    and not (theirs is jsp_linalg and hasattr(jnp.linalg, name))
]


@contextlib.contextmanager
def swapped():
    """JAX with the library's functions."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, ours in NAMESAKES:
            patch.setattr(module, name, ours)
        # A trace of before would hide a call of a function by itself.
        jax.clear_caches()
        yield
    jax.clear_caches()
