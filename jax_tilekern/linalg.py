"""Linear algebra with JAX's signatures and semantics: batches of small matrices, and large ones.

Kernels compute batches of float32 and float64 matrices up to 64x64. On a Hopper GPU, products do
most of the arithmetic of large ones. Everything else is JAX's own function, and
:func:`jax_tilekern.explain` states the reason.

The module has every name of :mod:`jax.numpy.linalg`, and of :mod:`jax.scipy.linalg` those that the
former lacks. A name that is not in ``__all__`` is a product of the library, or JAX's function with
the library's products and decompositions as its parts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from jax_tilekern.interop.originals import jnp, jsp_linalg
from jax_tilekern.ops.linalg.functions import (
    SlogdetResult,
    cholesky,
    det,
    eigh,
    eigvalsh,
    expm,
    inv,
    lu,
    lu_factor,
    pinv,
    qr,
    slogdet,
    solve,
    solve_triangular,
    svd,
    svdvals,
    triangular_solve,
)
from jax_tilekern.ops.linalg.jax_matrices import composed
from jax_tilekern.ops.muon.newton_schulz import newton_schulz
from jax_tilekern.ops.products.matmul import matmul as matmul
from jax_tilekern.ops.products.tensor_products import multi_dot as multi_dot
from jax_tilekern.ops.products.tensor_products import tensordot as tensordot
from jax_tilekern.ops.products.tensor_products import vecdot as vecdot

if TYPE_CHECKING:  # What __getattr__ returns.
    from jax.numpy.linalg import (  # isort: skip
        cond as cond, cross as cross, diagonal as diagonal, eig as eig, eigvals as eigvals,
        lstsq as lstsq, matrix_norm as matrix_norm, matrix_power as matrix_power,
        matrix_rank as matrix_rank, matrix_transpose as matrix_transpose, norm as norm,
        outer as outer, tensorinv as tensorinv, tensorsolve as tensorsolve,
        trace as trace, vector_norm as vector_norm,
    )  # fmt: skip
    from jax.scipy.linalg import (  # isort: skip
        block_diag as block_diag, cho_factor as cho_factor, cho_solve as cho_solve,
        circulant as circulant, companion as companion, convolution_matrix as convolution_matrix,
        dft as dft, eigh_tridiagonal as eigh_tridiagonal,
        expm_frechet as expm_frechet, fiedler as fiedler, fiedler_companion as fiedler_companion,
        funm as funm, hadamard as hadamard, hankel as hankel, helmert as helmert,
        hessenberg as hessenberg, hilbert as hilbert, invhilbert as invhilbert,
        invpascal as invpascal, leslie as leslie, lu_solve as lu_solve, pascal as pascal,
        polar as polar, qr_multiply as qr_multiply, rsf2csf as rsf2csf, schur as schur,
        solve_sylvester as solve_sylvester, sqrtm as sqrtm, toeplitz as toeplitz,
    )  # fmt: skip

__all__ = [
    "SlogdetResult", "cholesky", "det", "eigh", "eigvalsh", "expm", "inv", "lu", "lu_factor",
    "newton_schulz", "pinv", "qr", "slogdet", "solve", "solve_triangular", "svd", "svdvals",
    "triangular_solve",
]  # fmt: skip

_MODULES = (jnp.linalg, jsp_linalg)

if not TYPE_CHECKING:  # A checker reports unknown names.

    @functools.cache
    def __getattr__(name: str) -> Any:
        """Return JAX's function of the library's parts."""
        for module in _MODULES:
            if not name.startswith("_") and hasattr(module, name):
                return composed(getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    names = (name for module in _MODULES for name in dir(module) if not name.startswith("_"))
    return sorted({*__all__, *names})
