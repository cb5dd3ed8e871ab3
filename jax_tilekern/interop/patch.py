"""``patch`` makes JAX's own products, attention, updates of rows, sorts and scans trace to ours.

Every product of ``jax.numpy``, of ``jax.lax`` and of ``@`` is bound through one of two primitives,
``dot_general`` and ``ragged_dot_general``, and reductions to segments and derivatives of gathers
are scatters. So primitives are intercepted, and no public name in JAX is changed. Attention,
quantiles and binary searches have no primitive: a private function that all of them call is
replaced. The modules of the operations say
what they replace, by :func:`replace` and :func:`replace_function`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import (
    intercept,
    intercept_function,
    intercepting,
    release,
    release_function,
)
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.scope import scoped


@scoped
def patch() -> Iterator[None]:
    """Make JAX's own products, attention, updates of rows, sorts and scans trace to this library.

    A context manager and a decorator, which needs no parentheses. Inside it ``jnp.matmul``,
    ``dot``, ``vdot``, ``tensordot``, ``inner``, ``einsum``, ``matvec``, ``vecmat``, ``lax.dot``,
    ``dot_general``, ``batch_matmul``, ``ragged_dot``, ``ragged_dot_general`` and ``@`` are computed
    as :func:`jax_tilekern.dot_general` and :func:`jax_tilekern.ragged_dot_general` compute them,
    wherever they are called: in a layer of a library, in a derivative, in ``scan`` or in a function
    that is already jitted, which is traced again.

    So are the scatters that update whole rows of a table: those of ``jax.ops.segment_sum``,
    ``segment_max``, ``segment_min`` and ``segment_prod``, of ``x.at[rows].add``, ``multiply``,
    ``max`` and ``min``, and of the derivatives of ``x[rows]`` and ``jnp.take``. On a GPU they are
    reductions to segments where these are predicted to be faster, as those of 16-bit types and of
    wide rows are; elsewhere JAX's own scatter runs.

    What selects by order is this library's, too: ``lax.sort``, by which ``jax.numpy`` sorts,
    ``lax.top_k``, ``jnp.median``, ``quantile``, ``percentile``, ``searchsorted`` and ``digitize``,
    and on a GPU ``lax.approx_max_k`` and ``approx_min_k``, which are exact then. So are
    ``lax.cumsum`` and ``jnp.cumsum``, and on a GPU ``cumprod``, ``cummax``, ``cummin`` and
    ``cumlogsumexp``. Sums, products and logarithms of 16-bit floats stay JAX's.

    ``jax.nn.dot_product_attention``, which ``flax.nnx`` calls, is :func:`jax_tilekern.attention`
    unless it asks for cuDNN, or a GPU has no kernel of it. A query that sees no key gives zeros.

    It holds for the current thread, may be nested, and ends with the block, also by an exception.
    JAX reuses a trace from inside only inside, and one from outside only outside. Products in
    Pallas kernels stay JAX's. Keep transformations that have rules for JAX's own primitives alone,
    such as ``jax.experimental.jet`` and ``sparsify``, outside.

    Raises
    ------
    RuntimeError
        If the installed version of JAX does not trace these functions as the supported versions
        do. Pass :func:`jax_tilekern.dot_general` to the layers instead.

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


_REPLACEMENTS: dict[compat.Primitive, Callable[..., Any]] = {}


def replace(primitive: compat.Primitive, replacement: Callable[..., Any]) -> None:
    """Let ``primitive`` trace to ``replacement``, which takes its parameters, inside ``patch``."""
    _REPLACEMENTS[primitive] = replacement


_FUNCTIONS: dict[tuple[Any, str], Callable[..., Any]] = {}


def replace_function(function: tuple[Any, str], replacement: Callable[..., Any]) -> None:
    """Let a function in a module trace to ``replacement``, which may return ``NotImplemented``."""
    _FUNCTIONS[function] = replacement


_installing = threading.Lock()
_installed = False


def _install() -> None:
    """Intercept the primitives, once, and check that JAX's functions bind them."""
    global _installed
    with _installing:
        if _installed:
            return
        for primitive, replacement in _REPLACEMENTS.items():
            intercept(primitive, replacement)
        for function, replacement in _FUNCTIONS.items():
            intercept_function(*function, replacement)
        try:
            # A new thread has none of the user's contexts, such as a mesh.
            with ThreadPoolExecutor(1) as thread:
                traced = thread.submit(_traced).result()
            if any(traced.count(name) != count for name, count in _EXPECTED.items()):
                raise RuntimeError(f"functions were traced to {sorted(traced)}")
        except Exception as error:
            for primitive in _REPLACEMENTS:
                release(primitive)
            for function in _FUNCTIONS:
                release_function(*function)
            raise RuntimeError(
                f"jax_tilekern.patch() does not fit jax {jax.__version__}, which traces its "
                "functions in another way than jax 0.10 to 0.12 do: pass jax_tilekern.dot_general "
                "to the layers instead"
            ) from error
        _installed = True


_EXPECTED = {
    "tilekern_contract": 2,
    "tilekern_scatter_rows": 1,
    "tilekern_top_k": 1,
    "tilekern_sort_operands": 1,
    "tilekern_cumulative": 1,
    "tilekern_order_statistics": 1,
    "tilekern_searchsorted": 1,
    "tilekern_attention": 1,
}


def _traced() -> list[str]:
    """Return the names of the primitives that calls of each kind are traced to."""

    # The function is new in every call, because JAX caches traces by function.
    def calls() -> tuple[Any, ...]:
        x, ids = jax.numpy.ones((2, 2)), jax.numpy.array([2])
        # A call that cuDNN has.
        heads = jax.numpy.ones((1, 1, 1, 8), jax.numpy.bfloat16)
        return (
            lax.dot(x, x),
            lax.ragged_dot(x, x[None], ids),
            x.at[ids].add(1.0),
            lax.top_k(x, 1),
            lax.sort(x),
            lax.cumsum(x),
            jnp.median(x),
            jnp.searchsorted(x[0], x),
            jax.nn.dot_product_attention(heads, heads, heads),
        )

    with intercepting():
        jaxpr = jax.make_jaxpr(calls)().jaxpr
    return list(_names(jaxpr))


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in compat.jaxprs_of(eqn):
            yield from _names(inner)
