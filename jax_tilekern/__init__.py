"""Tile kernels for JAX that compose with ``jit``, ``vmap``, ``grad`` and sharding."""

import pkgutil

# In a checkout, ``python -m jax_tilekern`` finds this folder before the installed package: the
# compiled module then comes from there.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_tilekern.explain import Explanation, explain
from jax_tilekern.ffi import FFI_TARGETS
from jax_tilekern.ops.matmul import dot_general, matmul
from jax_tilekern.plans.gpu import Gpu, gpu_target
from jax_tilekern.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "FFI_TARGETS",
    "Explanation",
    "Gpu",
    "dot_general",
    "explain",
    "gpu_target",
    "matmul",
    "tune",
]
