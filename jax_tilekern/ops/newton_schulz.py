"""``newton_schulz``: nearly orthogonal matrices by an iteration that consists of products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.matmul import matmul, symmetric_matmul
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.gemm.arithmetic import cuda_arithmetic, precision_name
from jax_tilekern.plans.gpu import MIN_COMPUTE_CAPABILITY, NoGpu, current_gpu
from jax_tilekern.primitives.operation import Operand, Operation, Planner, Rewrite, define

Method = Literal["auto", "standard", "gram"]
Preconditioning = Literal["frobenius", "spectral", "aol", "schatten"]

METHODS = ("auto", "standard", "gram")
PRECONDITIONINGS = ("frobenius", "spectral", "aol", "schatten")
# Keller Jordan's, which the optimizer Muon uses.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# The Gram form forms the Gram matrix anew after the second step, and then after every third one.
# Between, rounding errors of the Gram matrix grow by the square of the first coefficient a step.
_RESTARTS = slice(2, None, 3)


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
    wide = _wide_type(x.dtype)
    result: Array = _bind(
        x,
        jnp.broadcast_to(each_step, (steps, 3)).astype(wide),
        jnp.asarray(eps, wide),
        preconditioning=preconditioning,
        method=method,
        precision=compat.canonicalize_precision(precision),
    )
    return result


def orthogonalized_in_loop(
    x: Array, steps: Array, coefficients: Array, *, preconditioning: str, eps: ArrayLike
) -> Array:
    """Iterate in the standard form as often as a value of the program says."""
    wide = _wide_type(x.dtype)
    form = _Form(x.shape[-2] <= x.shape[-1], None)
    scaled = form.scaled(x, preconditioning, jnp.asarray(eps, wide)).astype(x.dtype)
    step = coefficients[None].astype(wide)
    result: Array = lax.fori_loop(0, steps, lambda _, x: form.standard(x, step), scaled)
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
        raise ValueError(f"steps is a number of steps, not {steps!r}")
    if isinstance(steps, bool):
        raise TypeError(f"steps is a number of steps, not {steps}")
    if jnp.iscomplexobj(coefficients):
        raise TypeError(f"coefficients are real numbers, not {coefficients.dtype}")
    if eps_shape:
        raise ValueError(f"eps is a number, not an array of shape {eps_shape}")
    if coefficients.shape not in ((3,), (steps, 3)):
        raise ValueError(
            f"coefficients have the shape (3,) or, for {steps} steps, ({steps}, 3), not "
            f"{coefficients.shape}"
        )
    for name, value, known in (
        ("preconditioning", preconditioning, PRECONDITIONINGS),
        ("method", method, METHODS),
    ):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def _wide_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the real type of norms and coefficients."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else np.zeros((), dtype).real.dtype


def _iterated(
    x: Array,
    coefficients: Array,
    eps: Array,
    *,
    preconditioning: str,
    method: str,
    precision: Any,
    in_float16: bool = False,
) -> Array:
    """Scale matrices and iterate, with float16 operands of products if this is asked for."""
    form = _Form(x.shape[-2] <= x.shape[-1], precision)
    scaled = form.scaled(x, preconditioning, eps)
    # Eigenvalues of Gram matrices need more than the 8 bits of bfloat16.
    if in_float16 or (method == "gram" and x.dtype.itemsize < 4):
        form = form.in_float16(coefficients)
    else:
        scaled = scaled.astype(x.dtype)
    iterate = form.standard if method == "standard" else form.by_gram_matrix
    return iterate(scaled, coefficients).astype(x.dtype)


def _largest_power_of_two(coefficients: Array) -> Array:
    """Return a power of two whose square times any element of an iteration is at most 2**15.

    The elements are those of ``x`` and of polynomials of its Gram matrix, and bounded by the
    largest singular values, which follow from the coefficients. The values are scalars, which XLA
    computes in one kernel.
    """
    # The squares of singular values lie between 0 and `end`.
    end = bound = jnp.ones((), coefficients.dtype)
    for a, b, c in lax.stop_gradient(coefficients):
        # Extrema of `b * g + c * g**2`, and of the singular values as functions of their squares g,
        # which are roots of `a + 3 * b * g + 5 * c * g**2`.
        root = -1.5 * b - jnp.copysign(0.5, b) * jnp.sqrt(9 * b * b - 20 * a * c)
        inside = [-b / (2 * c), root / (5 * c), a / root]
        squares = [end, *(jnp.clip(jnp.where(jnp.isnan(g), 0, g), 0, end) for g in inside)]
        of_gram = [b * g + c * g * g for g in squares]
        results = [g * (a + z) ** 2 for g, z in zip(squares, of_gram, strict=True)]
        end = functools.reduce(jnp.maximum, results)
        bound = functools.reduce(jnp.maximum, [bound, end, *map(jnp.abs, of_gram)])
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.ones_like(bound), (15 - exponent) // 2)


class _Form(NamedTuple):
    """The products of an iteration.

    Attributes
    ----------
    is_wide
        Whether the rows are the short side.
    precision
        Of the products.
    scale
        A power of two. Operands of products are ``scale * x``, Gram matrices and polynomials of
        them ``scale**2`` times what they stand for, and accumulated factors themselves.
    rounds
        Whether operands of products are float16, rather than of the type of ``x``.
    """

    is_wide: bool
    precision: lax.PrecisionLike
    scale: Any = 1.0
    rounds: bool = False

    def in_float16(self, coefficients: Array) -> _Form:
        """Return the form whose products have float16 operands.

        The scale keeps small elements from being subnormal.
        """
        scale = _largest_power_of_two(coefficients)
        return self._replace(precision=None, scale=scale, rounds=True)

    def operand(self, x: Array) -> Array:
        """Return matrices as an operand of products."""
        return (self.scale * x).astype(np.float16) if self.rounds else x

    def scaled(self, x: Array, preconditioning: str, eps: Array) -> Array:
        """Return matrices whose singular values are at most about 1, in a wide type."""
        wide_type = jnp.promote_types(x.dtype, eps.dtype)
        if preconditioning in ("frobenius", "spectral"):
            wide = x.astype(wide_type)
            if preconditioning == "frobenius":
                norm = _root(jnp.sum(_square(wide), axis=(-2, -1), keepdims=True))
            else:
                norm = jnp.linalg.norm(wide, ord=2, axis=(-2, -1), keepdims=True)
            return wide / (norm + eps)
        gram = self.gram(x, wide_type)
        if preconditioning == "aol":
            sums = jnp.abs(gram).sum(-1, keepdims=True)
        else:
            sums = _root(jnp.sum(_square(gram), axis=(-2, -1), keepdims=True))
        scale = lax.rsqrt(jnp.maximum(sums, eps))
        return x * (scale if self.is_wide else scale.mT)

    def gram(self, x: Array, out_type: np.dtype | None = None) -> Array:
        """Return the products of the short side's vectors with each other."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            # They are Hermitian.
            adjoint = x.conj().mT
            operands = (x, adjoint) if self.is_wide else (adjoint, x)
            return matmul(*operands, precision=self.precision, preferred_element_type=out_type)
        rows = x if self.is_wide else x.mT
        return symmetric_matmul(rows, precision=self.precision, preferred_element_type=out_type)

    def times(self, factor: Array, x: Array, **how: Any) -> Any:
        """Return the product of a factor of the short side with ``x``."""
        operands = (factor, x) if self.is_wide else (x, factor)
        return matmul(*operands, precision=self.precision, **how)

    def of_grams(
        self, first: Array, second: Array | None, epilogue: Callable[..., Array], *operands: Array
    ) -> Array:
        """Return an epilogue's result for the product of two polynomials of a Gram matrix.

        They commute, and real ones are symmetric. Without a second one it is the square of a
        product of :meth:`gram`, which has no rounding errors that are not symmetric: a kernel of
        float32 reads its transpose.
        """
        how: dict[str, Any] = {"precision": self.precision, "epilogue": epilogue}
        if jnp.issubdtype(first.dtype, jnp.complexfloating):
            return matmul(first, first if second is None else second, operands=operands, **how)
        return symmetric_matmul(first, second, operands=operands, **how)

    def standard(self, x: Array, coefficients: Array) -> Array:
        """Iterate on the matrices."""
        operand = self.operand(x)
        for step in coefficients[:-1]:
            x, operand = self._step(operand, x, self.scale**-3, step, is_followed=True)
        for step in coefficients[-1:]:
            x, _ = self._step(operand, x, self.scale**-3, step)
        return x

    def by_gram_matrix(self, x: Array, coefficients: Array) -> Array:
        """Iterate on the Gram matrices, and apply what they accumulate."""
        steps = len(coefficients)
        starts = [0, *range(steps)[_RESTARTS]]
        operand = self.operand(x)
        for start, stop in zip(starts, [*starts[1:], steps], strict=True):
            operand = self._segment(operand, coefficients[start:stop])
        return operand / self.scale if self.rounds else operand

    def _step(
        self, operand: Array, x: Array, scale: Any, step: Array, is_followed: bool = False
    ) -> tuple[Array, Array]:
        """Return a step's result for ``x`` in its type, and the operand that it is.

        Parameters
        ----------
        operand
            ``x`` as an operand of products.
        x
            The matrices.
        scale
            What the product of a polynomial and an operand is multiplied by.
        step
            The coefficients.
        is_followed
            Whether the operand is needed where it is not the result itself.
        """
        a, b, c = step
        gram = self.gram(operand)
        z = self.of_grams(gram, None, _combined, c * self.scale**-2, gram, b)
        how: dict[str, Any] = {"preferred_element_type": x.dtype}
        if is_followed and self.rounds:
            operands = (scale, x, a, self.scale)
            both = self.times(z, operand, epilogue=_combined_and_rounded, operands=operands, **how)
            return both[0], both[1]
        result = self.times(z, operand, epilogue=_combined, operands=(scale, x, a), **how)
        return result, result

    def _segment(self, x: Array, coefficients: Array) -> Array:
        inverse = self.scale**-2
        if len(coefficients) < 2:
            return self._step(x, x, inverse, coefficients[0])[0]
        gram = self.gram(x)
        # Each step multiplies x by a + z, and so the Gram matrix by it from both sides. A kernel
        # adds the identity where the row and the column are equal.
        row = jnp.arange(gram.shape[-1])
        (a, b, c), *others = coefficients
        z = self.of_grams(gram, None, _combined, c * inverse, gram, b)
        factor = None
        for next_a, b, c in others:
            right = self.of_grams(gram, z, _combined, inverse, gram, a)
            gram = self.of_grams(z, right, _combined, inverse, right, a)
            next_z = self.of_grams(gram, gram, _combined, c * inverse, gram, b)
            if factor is None:
                operands = (inverse, a, z, next_a, next_z, row[:, None], row)
                factor = self.of_grams(z, next_z, _product_of_sums, *operands)
            else:
                factor = self.of_grams(factor, next_z, _combined, inverse, factor, next_a)
            a, z = next_a, next_z
        assert factor is not None
        result: Array = self.times(factor, x)
        return result


def _combined(product: Array, c: Array, x: Array, b: Array) -> Array:
    return c * product + b * x


def _combined_and_rounded(
    product: Array, c: Array, x: Array, b: Array, scale: Array
) -> tuple[Array, Array]:
    result = _combined(product, c, x, b)
    return result, (scale * result).astype(np.float16)


def _product_of_sums(
    product: Array,
    scale: Array,
    a: Array,
    x: Array,
    b: Array,
    y: Array,
    row: Array,
    column: Array,
) -> Array:
    """Return an element of ``(a + scale * x) @ (b + scale * y)``, given that of ``x @ y``."""
    return scale * (scale * product + a * y + b * x) + jnp.where(row == column, a * b, 0)


def _square(x: Array) -> Array:
    return (x * x.conj()).real


def _root(x: Array) -> Array:
    """Return the square root, with the derivative 0 at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


# The primitive, whose batch devices share: products by themselves would be split along rows.


def _batched(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    (x, *others), (dim, *of_others) = operands, dims
    if dim is not None and all(other is None for other in of_others):
        return _bind(jnp.moveaxis(x, dim, 0), *others, **params), 0
    return jax.vmap(functools.partial(_iterated, **params), dims)(*operands), 0


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Array]:
    def moved(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
        return jax.jvp(functools.partial(_iterated, **params), primals, tangents)

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


def _describe(method: str, **_: Any) -> str:
    return f"newton_schulz, {method}"


def _plan_on_cpu(_: Any, __: Any, **params: Any) -> Rewrite:
    return Rewrite("its products have kernels", functools.partial(_iterated, **params))


def _plan_on_cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    if not _multiplies_in_tf32(operands[0].aval.dtype, params["precision"]):
        return _plan_on_cpu(operands, _, **params)
    return Rewrite(
        "its products have kernels of float16, which has the precision of TF32",
        functools.partial(_iterated, in_float16=True, **params),
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
        reference=_iterated,
        batch=_batched,
        sharding_rule=_sharding_rule,
        planners={
            "cpu": Planner(lambda *_, **params: None, _plan_on_cpu),
            "cuda": Planner(lambda *_, **params: None, _plan_on_cuda),
        },
        describe=_describe,
        jvp=_jvp,
        like_results=lambda x, *_, **params: x,
    )
)
