"""Primitives on square matrices: inverses, factorisations and systems.

Operands have one type and the same leading dimensions. Derivatives are products and calls of these
primitives again, so that all orders of them are kernels. ``matrix_kernels.py`` has the kernels, and
``blocked.py`` computes large matrices in blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.compat import ad, zero_tangent
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.linalg import blocked
from jax_tilekern.ops.linalg.matrix_kernels import (
    TOO_LARGE,
    cholesky_of_large,
    in_blocks,
    inverse_of_large,
    matrix_on_cpu,
    matrix_on_cuda,
    refused,
    solution_of_large,
    system_on_cpu,
    system_on_cuda,
)
from jax_tilekern.ops.products.matmul import matmul
from jax_tilekern.partitioning import explicit
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.linalg import small_matrices as plans
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
)

# Derivatives are as accurate as the functions.
product = functools.partial(matmul, precision=lax.Precision.HIGHEST)


def inverse(a: Array) -> Array:
    result: Array = _inverse(*split_alike(a))[0]
    return result


def solve(a: Array, b: Array, *, transpose: bool = False) -> Array:
    """Solve ``a @ x = b``, or with ``a`` transposed."""
    result: Array = _solve(*split_alike(a, b), transpose=transpose)[0]
    return result


def triangular_solve(
    a: Array,
    b: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose: bool = False,
    unit_diagonal: bool = False,
) -> Array:
    """Solve ``a @ x = b``, or ``x @ a = b``, with one triangle of ``a``."""
    result: Array = _triangular_solve(
        *split_alike(a, b),
        left_side=left_side,
        lower=lower,
        transpose=transpose,
        unit_diagonal=unit_diagonal,
    )[0]
    return result


def cholesky(a: Array, *, symmetrize: bool) -> Array:
    """Factor into ``x @ x.mT``, from the lower triangle alone unless ``symmetrize``."""
    result: Array = _cholesky(*split_alike(a), symmetrize=symmetrize)[0]
    return result


def lu(a: Array) -> tuple[Array, Array, Array]:
    """Factor with partial pivoting; as :func:`jax.lax.linalg.lu`."""
    factors, pivots, permutation = _lu(*split_alike(a))
    return factors, pivots, permutation


def split_alike(*operands: Array) -> list[Array]:
    """Split the leading dimensions of all operands alike on a mesh with explicit axes."""
    leading = tuple(range(operands[0].ndim - 2))
    return explicit.split_alike([(*leading, None, None)] * len(operands), operands)


# Batching. Mapped matrices extend the batch; mapped right-hand sides of an unmapped matrix are more
# columns, unless an explicit axis splits them.


def _in_front(x: Array, dim: int | None, size: int) -> Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _batch_matrix(
    bind: Callable[..., Sequence[Array]],
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int],
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int]]:
    ((a,), (dim,)) = operands, dims
    results = bind(jnp.moveaxis(a, dim, 0), **params)
    return results, [0] * len(results)


def _batch_system(
    bind: Callable[..., Sequence[Array]],
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int]]:
    (a, b), (a_dim, b_dim) = operands, dims
    left_side = params.get("left_side", True)
    if a_dim is None and not compat.is_split_explicitly(axis_data):
        assert b_dim is not None
        # The columns of a left side are the last dimension, those of a right side the one before.
        at = a.ndim if left_side else a.ndim - 2
        b = jnp.moveaxis(b, b_dim, at)
        merged = at - 1 if left_side else at
        sizes = b.shape
        flat = b.reshape(*sizes[:merged], sizes[merged] * sizes[merged + 1], *sizes[merged + 2 :])
        results = bind(a, flat, **params)
        return [x.reshape(sizes) for x in results], [at] * len(results)
    size = axis_data.size
    in_front = _in_front(a, a_dim, size), _in_front(b, b_dim, size)
    results = bind(*split_alike(*in_front), **params)
    return results, [0] * len(results)


# Derivatives.


def _transposed_if(x: Array, condition: bool) -> Array:
    return x.mT if condition else x


def _inverse_jvp(primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    x = inverse(*primals)
    return [x], [-product(x, product(tangents[0], x))]


def _solve_change(a_dot: Array, x: Array, *, transpose: bool) -> Array:
    return product(_transposed_if(a_dot, transpose), x)


def _triangular_change(
    a_dot: Array,
    x: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose: bool,
    unit_diagonal: bool,
) -> Array:
    off_diagonal = int(unit_diagonal)
    triangle = jnp.tril(a_dot, -off_diagonal) if lower else jnp.triu(a_dot, off_diagonal)
    triangle = _transposed_if(triangle, transpose)
    return product(triangle, x) if left_side else product(x, triangle)


def _cholesky_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, symmetrize: bool
) -> tuple[list[Any], list[Any]]:
    """Differentiate as Murray, arXiv:1602.07527, eq. 10."""
    ((a,), (a_dot,)) = primals, tangents
    x = cholesky(a, symmetrize=symmetrize)
    lower = jnp.tril(a_dot) + jnp.tril(a_dot, -1).mT
    change = (a_dot + a_dot.mT) / 2 if symmetrize else lower
    solved = functools.partial(triangular_solve, x, lower=True)
    inner = solved(solved(change, left_side=False, transpose=True), left_side=True)
    halved = jnp.tril(inner) / (1 + jnp.eye(a.shape[-1], dtype=a.dtype))
    return [x], [product(x, halved)]


def _lu_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Any], list[Any]]:
    """Differentiate as de Hoog, Anderssen and Lukas, Math. Comp. 80 (2011).

    From ``P dA = dL U + L dU`` it follows that ``inv(L) P dA inv(U)`` is the sum of ``inv(L) dL``,
    which is strictly lower, and of ``dU inv(U)``, which is upper.
    """
    ((a,), (a_dot,)) = primals, tangents
    factors, pivots, permutation = lu(a)
    permuted = jnp.take_along_axis(a_dot, permutation[..., None], axis=-2)
    inner = triangular_solve(factors, permuted, left_side=True, lower=True, unit_diagonal=True)
    inner = triangular_solve(factors, inner, left_side=False, lower=False)
    lower = jnp.tril(factors, -1) + jnp.eye(a.shape[-1], dtype=a.dtype)
    factors_dot = product(lower, jnp.tril(inner, -1)) + product(jnp.triu(inner), jnp.triu(factors))
    return (
        [factors, pivots, permutation],
        [factors_dot, zero_tangent(pivots), zero_tangent(permutation)],
    )


# Partitioning: the leading dimensions are split among devices.


def _sharding_rule(
    like_results: Callable[..., Sequence[Any]],
    a: Any,
    *avals: Any,
    results_follow: int | None = None,
    **params: Any,
) -> ShardingRule:
    leading = tuple(range(a.ndim - 2))
    operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in (a, *avals)]
    results = jax.eval_shape(functools.partial(like_results, **params), *operands)
    # Other dimensions are whole, each with a label of its own.
    own = itertools.count(len(leading))
    labelled, labelled_results = (
        tuple((*leading, *itertools.islice(own, array.ndim - len(leading))) for array in arrays)
        for arrays in (operands, results)
    )
    shapes = (array.shape for array in (*operands, *results))
    sizes = sizes_of(*zip((*labelled, *labelled_results), shapes, strict=True))
    return ShardingRule(
        labelled,
        labelled_results,
        sizes,
        flops=2.0 * math.prod(a.shape) * a.shape[-1],
        names={axis: f"axis {axis}" for axis in leading},
        unsplit=frozenset(sizes) - set(leading),
        results_follow=results_follow,
    )


# Large matrices in blocks: the smallest triangles are inverted by a kernel.


def inverted_triangles(lower: Array) -> Array:
    """Invert lower triangles of the smallest blocks."""
    identity = jnp.broadcast_to(jnp.eye(blocked.SMALLEST, dtype=lower.dtype), lower.shape)
    return triangular_solve(lower, identity, left_side=True, lower=True)


def _inverse_in_blocks(a: Array, **blocks: Any) -> Array:
    # Whether the factors are computed in blocks is a choice of its own.
    factors, _, permutation = lu(a)
    return blocked.inverse(factors, permutation, **blocks)


def _in_blocks(name: str, function: Callable[..., Any]) -> Callable[..., Rewrite | Fallback]:
    return functools.partial(
        in_blocks, name, functools.partial(function, invert=inverted_triangles)
    )


# The primitives. Each returns a sequence of results.

_Bind = Callable[..., list[Any]]


def define_matrix(
    name: str,
    *,
    like_results: Callable[..., Sequence[Any]],
    cpu: Callable[..., Outcome],
    cuda: Callable[..., Outcome],
    **rules: Any,
) -> _Bind:
    """Define an operation on each matrix of a batch, which ``cpu`` and ``cuda`` plan."""

    def batch(*args: Any, **params: Any) -> tuple[Sequence[Array], Sequence[int]]:
        return _batch_matrix(bind, *args, **params)

    bind: _Bind = define(
        Operation(
            f"tilekern_{name}",
            batch=batch,
            sharding_rule=functools.partial(_sharding_rule, like_results),
            planners={
                "cpu": Planner(refused, cpu),
                "cuda": Planner(refused, cuda),
            },
            like_results=like_results,
            several_results=True,
            **rules,
        )
    )
    return bind


def _define_system(
    name: str,
    *,
    cuda: Callable[..., plans.MatrixKernel],
    large: Callable[..., Outcome],
    reference: Callable[..., Array],
    change: Callable[..., Array],
    describe: Callable[..., str],
    results_follow: int | None = None,
) -> _Bind:
    """Define the solution of a system with each matrix of a batch.

    The function returned is ``system(a, *terms, copies=1, **params)``: the solution for the sum of
    ``terms``, as ``copies`` results. Its transpose is a call of the same: each term's cotangent is
    the solution of the transposed system for the sum of the copies' cotangents. The solution that
    is the gradient with respect to the right-hand sides is also a factor of the product that gives
    the matrices' gradient. Devices may split the two unlike each other, so they are two results.

    ``cuda`` has the kernel of small matrices, and ``large`` plans large ones on a GPU.
    ``change(a_dot, x, **params)`` is the change of ``a @ x`` by a tangent of the matrices.
    ``results_follow`` is that of the sharding rule.
    """

    def system(a: Array, *terms: Array, copies: int = 1, **params: bool) -> list[Array]:
        return bind(a, *terms, terms=len(terms), copies=copies, **params)

    def single_solve(
        a: Array, *right_sides: Array, terms: int, copies: int, **params: bool
    ) -> list[Array]:
        return system(a, functools.reduce(lax.add, right_sides), **params) * copies

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], *, terms: int, copies: int, **params: Any
    ) -> tuple[list[Any], list[Any]]:
        (a, *right_sides), (a_dot, *moves) = primals, tangents
        (x,) = system(a, functools.reduce(lax.add, right_sides), **params)
        moves = [functools.reduce(ad.add_tangents, moves)]
        if type(a_dot) is not ad.Zero:
            moves.append(-change(a_dot, x, **params))
        (x_dot,) = system(a, *(move for move in moves if type(move) is not ad.Zero), **params)
        return [x] * copies, [x_dot] * copies

    def transposed(
        cotangents: Sequence[Array], a: Array, *_: Any, terms: int, copies: int, **params: bool
    ) -> list[Array]:
        flipped = {**params, "transpose": not params["transpose"]}
        return system(a, functools.reduce(lax.add, cotangents), copies=terms, **flipped)

    def batch(
        axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
    ) -> tuple[Sequence[Array], Sequence[int]]:
        if params["terms"] == 1:
            return _batch_system(bind, axis_data, operands, dims, **params)
        mapped = jax.vmap(functools.partial(single_solve, **params), in_axes=tuple(dims))
        return mapped(*operands), [0] * params["copies"]

    def refusal(a: Any, *avals: Any, terms: int, **params: Any) -> Rewrite | Fallback | None:
        refused_call = refused(a)
        if refused_call is None and terms > 1:
            return Rewrite("one solve", functools.partial(single_solve, terms=terms, **params))
        return refused_call

    def planner(plan: Callable[..., Outcome]) -> Planner:
        def plan_copies(
            operands: Sequence[Operand],
            results: Sequence[Any],
            *,
            terms: int,
            copies: int,
            **params: Any,
        ) -> Outcome:
            if copies == 1:
                return plan(operands, results, **params)
            copied = functools.partial(single_solve, terms=terms, copies=copies, **params)
            return Rewrite("one solve", copied)

        return Planner(refusal, plan_copies)

    def like_results(a: Array, b: Array, *_: Array, copies: int, **__: Any) -> tuple[Array, ...]:
        return (b,) * copies

    def described(*, terms: int, copies: int, **params: bool) -> str:
        summed = ", of two tangents" * (terms > 1)
        return describe(**params) + summed + ", for two gradients" * (copies > 1)

    def sum_reference(
        a: Array, *right_sides: Array, terms: int, copies: int, **params: bool
    ) -> tuple[Array, ...]:
        return (reference(a, functools.reduce(lax.add, right_sides), **params),) * copies

    bind: _Bind = define(
        Operation(
            f"tilekern_{name}",
            reference=sum_reference,
            like_results=like_results,
            batch=batch,
            sharding_rule=functools.partial(
                _sharding_rule, like_results, results_follow=results_follow
            ),
            planners={
                "cpu": planner(system_on_cpu),
                "cuda": planner(functools.partial(system_on_cuda, cuda, large)),
            },
            jvp=jvp,
            transposes=lambda *, terms, **_: {tuple(range(1, 1 + terms)): transposed},
            describe=described,
            several_results=True,
        )
    )
    return system


_inverse = define_matrix(
    "inverse",
    like_results=lambda a: (a,),
    reference=lambda a: (jnp.linalg.inv(a),),
    jvp=_inverse_jvp,
    cpu=functools.partial(matrix_on_cpu, ffi.CPU_MATRIX_INVERSE),
    cuda=functools.partial(
        matrix_on_cuda,
        plans.inverse_kernel,
        functools.partial(inverse_of_large, _in_blocks("inverse", _inverse_in_blocks)),
    ),
    describe=lambda: "inv",
)


def _solve_reference(a: Array, b: Array, *, transpose: bool) -> Array:
    solve = functools.partial(jnp.linalg.solve, a)
    # Both systems have the factors of one matrix. XLA computes them once.
    result: Array = jax.linear_transpose(solve, b)(b)[0] if transpose else solve(b)
    return result


_solve = _define_system(
    "solve",
    reference=_solve_reference,
    change=_solve_change,
    cuda=plans.solve_kernel,
    large=functools.partial(solution_of_large, lambda a, b: (solve(a.mT, b),)),
    describe=lambda transpose: "solve" + transpose * " transposed",
    results_follow=0,  # The result of JAX's function is sharded like the matrices.
)


def _triangular_reference(a: Array, b: Array, *, transpose: bool, **params: bool) -> Array:
    result: Array = lax.linalg.triangular_solve(a, b, transpose_a=transpose, **params)
    return result


def _describe_triangular(
    *, left_side: bool, lower: bool, transpose: bool, unit_diagonal: bool
) -> str:
    words = ("lower" if lower else "upper", transpose * "transposed", unit_diagonal * "unit")
    side = "left" if left_side else "right"
    return f"triangular_solve {' '.join(filter(None, words))} on the {side}"


_triangular_solve = _define_system(
    "triangular_solve",
    reference=_triangular_reference,
    change=_triangular_change,
    cuda=plans.triangular_solve_kernel,
    large=_in_blocks("triangular_solve", blocked.triangular_solve),
    describe=_describe_triangular,
)

_cholesky = define_matrix(
    "cholesky",
    like_results=lambda a, **_: (a,),
    reference=lambda a, *, symmetrize: (lax.linalg.cholesky(a, symmetrize_input=symmetrize),),
    jvp=_cholesky_jvp,
    cpu=functools.partial(matrix_on_cpu, ffi.CPU_MATRIX_CHOLESKY),
    cuda=functools.partial(matrix_on_cuda, plans.cholesky_kernel, cholesky_of_large),
    describe=lambda symmetrize: "cholesky" + symmetrize * " symmetrized",
)


def _like_lu(a: Array) -> tuple[Array, Array, Array]:
    integers = a.sum(axis=-1).astype(np.int32)
    return a, integers, integers


_lu = define_matrix(
    "lu",
    like_results=_like_lu,
    reference=lax.linalg.lu,
    jvp=_lu_jvp,
    cpu=functools.partial(matrix_on_cpu, ffi.CPU_MATRIX_LU),
    cuda=functools.partial(matrix_on_cuda, plans.lu_kernel, lambda _: Fallback(TOO_LARGE)),
    describe=lambda: "lu",
)
