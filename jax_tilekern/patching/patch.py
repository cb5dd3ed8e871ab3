"""``patch`` makes JAX's own products trace to this library's.

Every product of ``jax.numpy``, of ``jax.lax`` and of ``@`` is bound through one of two primitives,
``dot_general`` and ``ragged_dot_general``, so those two are intercepted and no name in JAX is
changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.interception import intercept, intercepting, release
from jax_tilekern.ops.matmul import dot_general
from jax_tilekern.ops.ragged_dot import ragged_dot_general
from jax_tilekern.scope import scoped


@scoped
def patch() -> Iterator[None]:
    """Make JAX's own matrix products trace to this library's kernels.

    A context manager and a decorator, which needs no parentheses. Inside it ``jnp.matmul``,
    ``dot``, ``vdot``, ``tensordot``, ``inner``, ``einsum``, ``matvec``, ``vecmat``, ``lax.dot``,
    ``dot_general``, ``batch_matmul``, ``ragged_dot``, ``ragged_dot_general`` and ``@`` are computed
    as :func:`jax_tilekern.dot_general` and :func:`jax_tilekern.ragged_dot_general` compute them,
    wherever they are called: in a layer of a library, in a derivative, in ``scan`` or in a function
    that is already jitted, which is traced again.

    It holds for the current thread, may be nested, and ends with the block, also by an exception.
    JAX reuses a trace from inside only inside, and one from outside only outside. Products in
    Pallas kernels stay JAX's. Keep transformations that have rules for JAX's own primitives alone,
    such as ``jax.experimental.jet`` and ``sparsify``, outside.

    Raises
    ------
    RuntimeError
        If the installed version of JAX does not trace its products as the supported versions do.
        Pass :func:`jax_tilekern.dot_general` to the layers instead.

    See Also
    --------
    explain : which kernel computes each product, and why.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((64, 64))
    >>> with jtk.patch():
    ...     y = jax.jit(lambda x: x @ x)(x)
    >>> @jax.jit
    ... @jtk.patch
    ... def loss(x):
    ...     return jnp.einsum("ij,kj->ik", x, x).sum()
    >>> print(jtk.explain(loss, x)[0].call)
    mk,nk->mn
    """
    _install()
    with intercepting():
        yield


_REPLACEMENTS: dict[compat.Primitive, Callable[..., Array]] = {
    compat.dot_general_p: dot_general,
    compat.ragged_dot_general_p: ragged_dot_general,
}
_installing = threading.Lock()
_installed = False


def _install() -> None:
    """Intercept the two primitives, once, and check that JAX binds its products through them."""
    global _installed
    with _installing:
        if _installed:
            return
        for primitive, replacement in _REPLACEMENTS.items():
            intercept(primitive, replacement)
        try:
            # A new thread has none of the user's contexts, such as a mesh.
            with ThreadPoolExecutor(1) as thread:
                traced = thread.submit(_traced_products).result()
            if traced.count("tilekern_contract") != 2:
                raise RuntimeError(f"products were traced to {sorted(traced)}")
        except Exception as error:
            for primitive in _REPLACEMENTS:
                release(primitive)
            raise RuntimeError(
                f"jax_tilekern.patch() does not fit jax {jax.__version__}, which traces its "
                "products in another way than jax 0.10 to 0.12 do: pass jax_tilekern.dot_general "
                "to the layers instead"
            ) from error
        _installed = True


def _traced_products() -> list[str]:
    """Return the names of the primitives that one product of each of two kinds is traced to."""

    # The function is new in every call, because JAX caches traces by function.
    def products() -> tuple[Array, Array]:
        x = jax.numpy.ones((2, 2))
        return lax.dot(x, x), lax.ragged_dot(x, x[None], jax.numpy.array([2]))

    with intercepting():
        return [eqn.primitive.name for eqn in jax.make_jaxpr(products)().eqns]
