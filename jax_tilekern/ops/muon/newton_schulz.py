"""``newton_schulz``: nearly orthogonal matrices by an iteration that consists of products."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.arguments import check_choice
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.muon.newton_schulz_iteration import iterated, wide_type_of
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.gemm.arithmetic import cuda_arithmetic, precision_name
from jax_tilekern.plans.gpu import MIN_COMPUTE_CAPABILITY, NoGpu, current_gpu
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
    no_refusal,
)

Method = Literal["auto", "standard", "gram"]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]

METHODS = ("auto", "standard", "gram")
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
# The coefficients of the optimizer Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@jitted("steps", "preconditioning", "method", "precision")
def newton_schulz(
    x: ArrayLike,
    *,
    steps: int = 5,
    coefficients: ArrayLike | Sequence[Any] = COEFFICIENTS,
    preconditioning: Preconditioning = "frobenius",
    eps: ArrayLike = 1e-8,
    method: Method = "auto",
    precision: lax.PrecisionLike = None,
) -> Array:
    """Orthogonalise matrices approximately by the quintic Newton-Schulz iteration.

    With ``x = u @ diag(s) @ vh``, the result is ``u @ diag(p(s / c)) @ vh``, where ``c`` is a norm
    of ``x`` and ``p`` applies ``s -> a * s + b * s**3 + c * s**5`` once for each step. It is an
    approximation of the polar factor ``u @ vh``, which :func:`jax.scipy.linalg.polar` computes to
    rounding errors, and the same for ``x`` and its transpose.

    The default coefficients rise steeply at zero and do not converge: five steps take singular
    values of at least 0.002 times the Frobenius norm to between 0.68 and 1.21. The coefficients
    ``(1.875, -1.25, 0.375)`` converge to 1; ten steps take those of at least 0.01 times the norm to
    between 0.9999 and 1. Smaller singular values stay smaller, and zero stays zero.

    Parameters
    ----------
    x
        Array of shape ``(..., m, n)`` of floats of 16 bits or more, or of complex numbers.
    steps
        Number of steps. With an array of coefficients for each step, it is their number.
    coefficients
        ``(a, b, c)``, or an array of shape ``(steps, 3)``.
    preconditioning
        How ``x`` is scaled first. ``"frobenius"`` divides by the Frobenius norm, ``"spectral"`` by
        the largest singular value, and ``"schatten"`` by the square root of the Frobenius norm of
        the Gram matrix. ``"aol"`` divides each row (column of a tall matrix) by the square root of
        the sum of the absolute values in its row of the Gram matrix, so the result is not
        that of ``x``.
    eps
        What is added to the norm, and the least of the sums under a square root.
    method
        ``"standard"`` iterates on ``x``. ``"gram"`` iterates on the Gram matrix of the short side,
        and multiplies ``x`` by the accumulated factors where the iteration is restarted, and at
        the end. It is equal in exact arithmetic, and takes fewer operations where one side is more
        than 1.5 times the other: about two thirds at 4 times, and less than half at 20 times.
        ``"auto"`` takes it where one side is more than twice the other.
    precision
        Of the products, as in :func:`jax_tilekern.matmul`.

    Returns
    -------
    Array
        Of the shape and the type of ``x``. Norms are computed in float32 at least. Where products
        of float32 are in TF32, as on GPUs by default, they are in float16 with a scale, which is as
        precise. For 16-bit types the Gram form computes in float16.

    Raises
    ------
    ValueError
        If ``x`` has fewer than two dimensions, or coefficients or ``eps`` have another shape, or a
        name is unknown.
    TypeError
        If ``x`` or the coefficients are of another type.

    Notes
    -----
    The iteration is that of Jordan et al., Muon (2024); the Gram form and its restarts are those
    of Zhang, Amsel, Chen and Dao, Gram Newton-Schulz (2026,
    https://dao-lab.ai/blog/2026/gram-newton-schulz).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jax.random.normal(jax.random.key(0), (3, 16, 64))
    >>> q = jtk.linalg.newton_schulz(x, steps=10, coefficients=(1.875, -1.25, 0.375))
    >>> bool(jnp.allclose(q @ q.mT, jnp.eye(16), atol=1e-4))
    True
    """
    x = jnp.asarray(x)
    each_step = jnp.asarray(coefficients)
    _check(x, steps, each_step, jnp.shape(eps), preconditioning, method)
    if 0 in x.shape:
        return x
    rows, columns = x.shape[-2:]
    if method == "auto":
        method = "gram" if max(rows, columns) > 2 * min(rows, columns) else "standard"
    wide = wide_type_of(x.dtype)
    result: Array = _bind(
        x,
        jnp.broadcast_to(each_step, (steps, 3)).astype(wide),
        jnp.asarray(eps, wide),
        preconditioning=preconditioning,
        method=method,
        precision=compat.canonicalize_precision(precision),
    )
    return result


def _check(
    x: Array,
    steps: int,
    coefficients: Array,
    eps_shape: tuple[int, ...],
    preconditioning: str,
    method: str,
) -> None:
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize < 2:
        raise TypeError(
            f"newton_schulz takes floats of 16 bits or more and complex numbers, not {x.dtype}"
        )
    if x.ndim < 2:
        raise ValueError(f"newton_schulz takes matrices (..., m, n), not shape {x.shape}")
    if not isinstance(steps, (int, np.integer)) or steps < 0:
        raise ValueError(f"newton_schulz: steps is a number of steps, not {steps!r}")
    if isinstance(steps, bool):
        raise TypeError(f"newton_schulz: steps is a number of steps, not {steps}")
    if jnp.iscomplexobj(coefficients):
        raise TypeError(f"newton_schulz: coefficients are real numbers, not {coefficients.dtype}")
    if eps_shape:
        raise ValueError(f"newton_schulz: eps is a number, not an array of shape {eps_shape}")
    if coefficients.shape not in ((3,), (steps, 3)):
        raise ValueError(
            f"newton_schulz: coefficients have the shape (3,) or, for {steps} steps, ({steps}, 3), "
            f"not {coefficients.shape}"
        )
    for name, value, known in (
        ("preconditioning", preconditioning, PRECONDITIONINGS),
        ("method", method, METHODS),
    ):
        check_choice("newton_schulz", name, value, known)


# The primitive, whose batch devices share. Its products alone would be split along rows.


def _batched(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    (x, *others), (dim, *other_dims) = operands, dims
    if dim is not None and all(other is None for other in other_dims):
        return _bind(jnp.moveaxis(x, dim, 0), *others, **params), 0
    return jax.vmap(functools.partial(iterated, **params), dims)(*operands), 0


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Array]:
    def moved(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
        return jax.jvp(functools.partial(iterated, **params), primals, tangents)

    sharding = compat.explicit_sharding(jax.typeof(primals[0]))
    out = None if sharding is None else (sharding, sharding)
    results: tuple[Array, Array] = compat.with_automatic_axes(moved, out)(
        tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
    )
    return results


def _sharding_rule(
    x: Any, coefficients: Any, eps: Any, *, preconditioning: str, method: str, **_: Any
) -> ShardingRule:
    dims = tuple(range(x.ndim))
    *batch, rows, columns = dims
    sizes = sizes_of((dims, x.shape))
    short = min(x.shape[-2:])
    flops = 4 * x.size * short * coefficients.shape[0]
    return ShardingRule(
        (dims, (None, None), ()),
        (dims,),
        sizes,
        flops,
        names={rows: "m", columns: "n"} | {axis: f"axis {axis}" for axis in batch},
        unsplit=frozenset((rows, columns)),
        shared=frozenset(batch),
    )


def _plan_on_cpu(_: Any, __: Any, **params: Any) -> Rewrite:
    return Rewrite("its products have kernels", functools.partial(iterated, **params))


def _plan_on_cuda(operands: Sequence[Operand], results: Any, **params: Any) -> Rewrite:
    if not _multiplies_in_tf32(operands[0].aval.dtype, params["precision"]):
        return _plan_on_cpu(operands, results, **params)
    return Rewrite(
        "its products have kernels of float16, which has the precision of TF32",
        functools.partial(iterated, in_float16=True, **params),
    )


def _multiplies_in_tf32(dtype: np.dtype[Any], precision: Any) -> bool:
    """Return whether products are in TF32, whose 11 bits float16 has in half of the bytes."""
    if cuda_arithmetic(dtype, dtype, dtype, precision_name(precision)) != "tf32":
        return False
    try:
        return current_gpu().compute_capability >= MIN_COMPUTE_CAPABILITY
    except NoGpu:
        return False


_bind = define(
    Operation(
        name="tilekern_newton_schulz",
        reference=iterated,
        batch=_batched,
        sharding_rule=_sharding_rule,
        planners={
            "cpu": Planner(no_refusal, _plan_on_cpu),
            "cuda": Planner(no_refusal, _plan_on_cuda),
        },
        describe=lambda method, **_: f"newton_schulz, {method}",
        jvp=_jvp,
        like_results=lambda x, *_, **params: x,
    )
)
