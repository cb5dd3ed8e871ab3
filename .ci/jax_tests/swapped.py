"""A pytest plugin: where a test says ``jnp.linalg.inv``, it calls ``jax_tilekern.linalg.inv``.

The names of the library stand for those of JAX in the test's module alone. JAX and the library
itself call JAX's own functions.
"""

import types

import jax
import jax.numpy as jnp
import jax.scipy
from jax import lax

import jax_tilekern as jtk


class Swapped(types.ModuleType):
    """A module of JAX, some names of which are the library's."""

    def __init__(self, module, **names):
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name):
        """Return what JAX has."""
        return getattr(self._module, name)


def named(module, *names):
    """Return functions of the library by their names."""
    return {name: getattr(module, name) for name in names}


of_numpy = Swapped(
    jnp,
    linalg=jtk.linalg,
    **named(jtk, "dot", "einsum", "inner", "matmul", "matvec", "sum", "tensordot", "transpose"),
    **named(jtk, "bincount", "take", "vdot", "vecdot", "vecmat"),
)
of_lax_linalg = Swapped(lax.linalg, **named(jtk.linalg, "triangular_solve"))
of_lax = Swapped(
    lax,
    linalg=of_lax_linalg,
    **named(jtk, "dot_general", "ragged_dot", "ragged_dot_general", "top_k"),
)
of_ops = Swapped(jax.ops, **named(jtk, "segment_max", "segment_min", "segment_prod", "segment_sum"))
of_scipy_linalg = Swapped(
    jax.scipy.linalg, **named(jtk.linalg, "expm", "lu", "lu_factor", "solve_triangular")
)
of_scipy = Swapped(jax.scipy, linalg=of_scipy_linalg)
SWAPPED = {
    jax: Swapped(jax, numpy=of_numpy, lax=of_lax, ops=of_ops, scipy=of_scipy),
    jnp: of_numpy,
    jnp.linalg: jtk.linalg,
    jax.ops: of_ops,
    lax: of_lax,
    lax.linalg: of_lax_linalg,
    jax.scipy: of_scipy,
    jax.scipy.linalg: of_scipy_linalg,
}


def pytest_collection_modifyitems(items):
    """Put the library's names into the modules of the tests."""
    for module in {item.module for item in items}:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and value in SWAPPED:
                setattr(module, name, SWAPPED[value])
