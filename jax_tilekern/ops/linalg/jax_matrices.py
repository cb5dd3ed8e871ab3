"""JAX's functions of matrices, with this library's products and decompositions as their parts.

JAX's primitives that decompose matrices are intercepted where such a function is called, as
:func:`jax_tilekern.patch` intercepts those of products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array

from jax_tilekern.interop import outcomes
from jax_tilekern.interop.global_modes import intercept, intercepting
from jax_tilekern.interop.originals import lax
from jax_tilekern.interop.patch import patch
from jax_tilekern.ops.linalg import decompositions, matrices
from jax_tilekern.ops.linalg.matrix_kernels import TOO_LARGE, refusal
from jax_tilekern.plans.linalg.small_matrices import MAX_SIZE
from jax_tilekern.plans.policy import why_excluded
from jax_tilekern.scope import Function

Refusal = Callable[[Array], str | None]


def composed(function: Function) -> Function:
    """Return a function of JAX's with products and decompositions of this library inside."""

    @functools.wraps(function)
    def composed_function(*args: Any, **kwargs: Any) -> Any:
        _install()
        with patch(), intercepting("matrices"):
            return function(*args, **kwargs)

    return composed_function  # type: ignore[return-value]


def is_left_to_jax(call: str, a: Array, why: str | None) -> bool:
    """Whether there is a reason to leave a call to JAX, which ``explain`` then shows."""
    if why is None:
        return False
    reason = why_excluded() or why
    outcomes.record_traced_choice(call, jax.typeof(a), reason)
    outcomes.note_loss(call, reason)
    outcomes.note_fallback(call, reason)
    return True


def refusal_of_square(a: Array) -> str | None:
    """Return why functions of square matrices leave matrices to JAX."""
    if a.shape[-1] != a.shape[-2]:
        return "kernels are for square matrices"
    return refusal(a.shape[-1], a.dtype)


def refusal_of_decomposition(a: Array) -> str | None:
    """Return why ``svd``, ``eigh`` and ``qr`` leave matrices to JAX."""
    sizes = a.shape[-2:]
    why = next(filter(None, (refusal(size, a.dtype) for size in sizes)), None)
    return why or (TOO_LARGE if max(sizes) > MAX_SIZE else None)


def _eigh(a: Array, *, lower: bool) -> Sequence[Array]:
    w, v = decompositions.eigh(a, vectors=True, lower=lower, symmetrize=False)
    return v, w


# For each primitive of JAX: the function of this library, its keywords by the primitive's
# parameters, and why matrices are left to JAX.
_REPLACED: dict[str, tuple[Callable[..., Any], dict[str, str], Refusal]] = {
    "svd": (
        decompositions.svd,
        {"compute_uv": "vectors", "full_matrices": "full"},
        refusal_of_decomposition,
    ),
    "eigh": (_eigh, {"lower": "lower"}, refusal_of_decomposition),
    "qr": (
        functools.partial(decompositions.qr, vectors=True),
        {"full_matrices": "full"},
        refusal_of_decomposition,
    ),
    "lu": (matrices.lu, {}, refusal_of_square),
    "cholesky": (functools.partial(matrices.cholesky, symmetrize=False), {}, refusal_of_square),
    "triangular_solve": (
        matrices.triangular_solve,
        {name: name for name in ("left_side", "lower", "unit_diagonal")}
        | {"transpose_a": "transpose"},
        refusal_of_square,
    ),
}
# Parameters that ask for results which no kernel computes.
_UNUSUAL = ("subset_by_index", "pivoting")


def _replacement(name: str, primitive: Any) -> Callable[..., Any]:
    function, keywords, refusal_of = _REPLACED[name]
    theirs = primitive.bind
    if name == "svd":
        theirs = decompositions.on_finite_matrices(theirs)

    def replaced(a: Array, *operands: Array, **params: Any) -> Any:
        unusual = next((each for each in _UNUSUAL if params.get(each)), None)
        why = refusal_of(a) if unusual is None else f"{name} with {unusual} is JAX's own"
        if is_left_to_jax(name, a, why):
            return theirs(a, *operands, **params)
        return function(a, *operands, **{own: params[each] for each, own in keywords.items()})

    return replaced


@functools.cache
def _install() -> None:
    for name in _REPLACED:
        primitive = getattr(lax.linalg, f"{name}_p")
        intercept(primitive, _replacement(name, primitive), "matrices")
