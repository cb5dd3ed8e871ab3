"""Attention by the kernels of ``ffi/cuda/attention``.

A call is rewritten to one of ``tilekern_attention_kernel``, whose last operands the kernel reads
besides: statistics of rows, and lists of the tiles that the mask leaves. XLA computes these from
the call's operands, once for all layers that have the same mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention import blocks
from jax_tilekern.ops.attention.call import (
    BIAS,
    OF_PRODUCTS,
    BiasProblem,
    Call,
    bias_problem_of,
    gradients_of,
    numbers_of,
    problem_of,
    tile_kinds_of,
)
from jax_tilekern.ops.attention.differences import as_parts, sum_of_parts
from jax_tilekern.ops.attention.residual import logsumexp, without_base
from jax_tilekern.ops.attention.score_numbers import ScoreNumbers, number_of_difference
from jax_tilekern.ops.attention.scores import Scores
from jax_tilekern.ops.attention.tile_map import tile_lists
from jax_tilekern.ops.planned_kernel import define_kernel, planned_kernel
from jax_tilekern.plans.attention import mma, sm90
from jax_tilekern.plans.attention.problem import STATISTICS_ROWS, Attention
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel

Results = Sequence[Array]
_LOG2_E = np.float32(np.log2(np.e))
# The kernels that read lists of tiles, by the primitive.
_LISTS = {
    "forward": ("forward",),
    "tangent": ("tangent",),
    "backward": ("backward_keys", "backward_queries"),
}


def by_kernels(call: Call) -> Results:
    """Compute a call by kernels, and derivatives by arrays that none covers by blocks."""
    if call.kind == "forward":
        out, *logarithm = _bound(_with_numbers_read(call))
        return [out, *(logarithm if len(logarithm) > 1 else without_base(call.scores, *logarithm))]
    return _gradients(call) if call.kind == "backward" else _tangents(call)


def _gradients(call: Call) -> Results:
    of_arrays = gradients_of(call)
    found: dict[int, Array] = {}
    if of_arrays.by_numbers or set(call.wanted) & {*OF_PRODUCTS}:
        wanted = (*OF_PRODUCTS, *of_arrays.by_numbers)
        numbers, sizes = of_arrays.numbers, call.lengths
        results = _bound(_with_numbers_read(dataclasses.replace(call, wanted=wanted), numbers))
        found |= zip(OF_PRODUCTS, results, strict=False)
        if numbers is not None:
            of_numbers = (
                sum_of_parts(results[3], sizes.queries, sizes.keys)
                if numbers.axes.difference
                else results[3].sum(2)
            )
            results = numbers.gradients(of_numbers, call.scores, call.arrays, sizes)
            found |= zip(of_arrays.by_numbers, results, strict=True)
    if of_arrays.by_bias_kernel:
        found[BIAS] = bias_gradient(call)
    if others := of_arrays.by_blocks:
        results = blocks.backward(*call.operands, scores=call.scores, wanted=others)
        found |= zip(others, results, strict=True)
    return [found[i] for i in call.wanted]


def _tangents(call: Call) -> Results:
    """Return the sum of the tangents by products and by arrays, since a tangent is linear."""
    terms: list[Results] = []
    if own := tuple(i for i in call.wanted if i in OF_PRODUCTS):
        terms.append(_bound(_with_numbers_read(call.moving(own))))
    if of_arrays := tuple(i for i in call.wanted if i not in OF_PRODUCTS):
        operands = call.moving(of_arrays).operands
        terms.append(blocks.tangent(*operands, scores=call.scores, wanted=of_arrays))
    return [sum(x[1:], x[0]) for x in zip(*terms, strict=True)]


def _with_numbers_read(call: Call, moving: ScoreNumbers | None = None) -> Call:
    """Return the call with a score that reads what it takes long to compute of each difference.

    The gradients by that array stand for those by the ``moving`` numbers.
    """
    numbers = number_of_difference(call.scores)
    if numbers is None or (moving is not None and moving.numbers != numbers.numbers):
        return call
    scores, arrays, position = numbers.as_array(call.scores, call.arrays, call.lengths)
    operands = (*call.operands[: len(call.operands) - len(call.arrays)], *arrays)
    wanted = call.wanted if moving is None else (*OF_PRODUCTS, len(OF_PRODUCTS) + position)
    return dataclasses.replace(call, operands=operands, scores=scores, wanted=wanted)


def _bound(call: Call) -> Results:
    """Bind the kernel's primitive, with statistics and lists of tiles."""
    problem = problem_of(call)
    own = [] if call.kind == "forward" else [_statistics(call, problem)]
    for kernel in _LISTS[call.kind] if problem.listed is not None else ():
        kinds = tile_kinds_of(call.scores, problem, problem.tiles(kernel), call.arrays)
        own += tile_lists(kinds.swapaxes(-1, -2) if kernel == "backward_keys" else kinds)
    return _bind_call(call, own)


def bias_gradient(call: Call) -> Array:
    """Bind the kernel's primitive, and add the parts of queries that the bias lacks."""
    call = _with_numbers_read(call)
    problem, bias = _bias_problem(call)
    own = [_statistics(call, problem)]
    if call.scores.has_mask:
        tiles = problem.tiles("bias_gradient")
        own.append(tile_kinds_of(call.scores, problem, tiles, call.arrays))
    (found,) = _bind_call(dataclasses.replace(call, kind="bias gradient", wanted=(BIAS,)), own)
    if bias.has_queries(problem):
        return found
    return found.sum(2, keepdims=True).astype(bias.dtype)


def _bind_call(call: Call, own: Sequence[Array]) -> Results:
    bound: Results = _bind(
        *call.operands, *own, kernel=call.kind, scores=call.scores, wanted=call.wanted, own=len(own)
    )
    return bound


def _bias_problem(call: Call) -> BiasProblem:
    found = bias_problem_of(call)
    assert found is not None
    return found


def _statistics(call: Call, problem: Attention) -> Array:
    """Return what the kernels read of each row, as ``backward.cuh`` says."""
    log, *bases = call.logarithm
    is_empty = jnp.isneginf(log)

    def padded(x: Array, fill: float) -> Array:
        padding = [(0, 0), (0, 0), (0, -x.shape[-1] % STATISTICS_ROWS)]
        return jnp.pad(x, padding, constant_values=np.float32(fill))

    if not problem.has_bases:
        log, bases = logsumexp(log, *bases), []
    log2 = padded(jnp.where(is_empty, np.float32(np.inf), log) * _LOG2_E, np.inf)
    # A kernel reads both numbers of a row at once.
    rows = [jnp.stack([*(padded(x, 0) for x in bases), log2], -1)]
    if call.kind == "backward":
        out, (d_out, d_lse) = call.operands[3], call.cotangents
        # A row without keys has no derivative, whatever the cotangent of its infinite logarithm is.
        d_lse = jnp.where(is_empty, 0, d_lse)
        products = out.astype(np.float32) * d_out.astype(np.float32)
        deltas = products.sum(-1).transpose(0, 2, 1) - d_lse
        rows += [padded(deltas, 0), padded(d_lse, 0)]
    # XLA fuses the transpose where all have one shape.
    return jnp.concatenate([x.reshape(-1, *log2.shape) for x in rows]).reshape(-1)


# The primitive.


def _reference(
    *operands: Array, kernel: str, scores: Scores, wanted: tuple[int, ...], own: int
) -> Results:
    call = Call(kernel, operands[: len(operands) - own], scores, wanted)
    if kernel == "forward":
        out, *logarithm = blocks.forward(*call.operands, scores=scores)
        has_bases = problem_of(call).has_bases
        return [out, *(logarithm if has_bases else [logsumexp(*logarithm)])]
    if kernel == "tangent":
        return blocks.tangent(*call.operands, scores=scores, wanted=wanted)
    like = _like_results(*operands, kernel=kernel, scores=scores, wanted=wanted, own=own)[-1]
    given = call.operands
    numbers = numbers_of(call, wanted) if kernel == "backward" else None
    if numbers is not None:
        scores, arrays, position = numbers.as_array(scores, call.arrays, call.lengths)
        given = (*given[: len(given) - len(call.arrays)], *arrays)
        wanted = (*OF_PRODUCTS, 3 + position)
    *results, last = blocks.backward(*given, scores=scores, wanted=wanted)
    if numbers is not None and numbers.axes.difference:
        last = as_parts(last, like.shape, call.lengths.queries, call.lengths.keys)
    # Any other result that has parts has all of the gradient in the first.
    if last.ndim < like.ndim:
        last = last[:, :, None]
    padding = [(0, y - x) for x, y in zip(last.shape, like.shape, strict=True)]
    return [*results, jnp.pad(last, padding).astype(like.dtype)]


def _like_results(
    *operands: Array, kernel: str, scores: Scores, wanted: tuple[int, ...], own: int
) -> Results:
    call = Call(kernel, operands[: len(operands) - own], scores, wanted)
    query, key, value = operands[:3]
    if kernel == "backward":
        found = [jnp.zeros_like(x) for x in (query, key, value)]
        if wanted != OF_PRODUCTS:
            found.append(jnp.zeros(problem_of(call).numbers_shape(), np.float32))
        return found
    if kernel == "bias gradient":
        problem, bias = _bias_problem(call)
        return [jnp.zeros(bias.result_shape(problem), bias.result_dtype(problem))]
    rows = query.shape[:3]
    out = jnp.zeros((*rows, value.shape[3]), query.dtype)
    has_bases = kernel == "forward" and problem_of(call).has_bases
    return [out, *[jnp.zeros((rows[0], rows[2], rows[1]), np.float32)] * (1 + has_bases)]


def _planned(
    operands: Sequence[Operand], _: Any, *, kernel: str, scores: Scores, wanted: tuple[int, ...],
    own: int,
) -> PlannedKernel | Fallback:  # fmt: skip
    count = len(operands) - own
    types, values = zip(*((x.aval, x.value) for x in operands), strict=True)
    call = Call(kernel, types[:count], scores, wanted)
    products, extra = values[:3], values[count:]
    of_values = dataclasses.replace(call, operands=values[:count])
    arrays = of_values.arrays
    if kernel == "bias gradient":
        problem, bias = _bias_problem(call)
        (statistics, *kinds), (d_out, _) = extra, of_values.cotangents
        read = _behind_bias(problem, [*products, d_out, statistics], kinds, arrays)
        return planned_kernel(read, sm90.plan_bias_gradient, problem, bias)
    problem = problem_of(call)
    family = sm90 if problem.by_wgmma else mma
    if kernel == "forward":
        read = _behind_bias(problem, products, extra, arrays)
        return planned_kernel(read, family.plan_forward, problem)
    statistics, *lists = extra
    if kernel == "backward":
        d_out, _ = of_values.cotangents
        read = _behind_bias(problem, [*products, d_out, statistics], lists, arrays)
        return planned_kernel(read, family.plan_backward, problem)
    read = [*products, values[3], statistics, *of_values.tangents, *lists, *arrays]
    moving = tuple(i in wanted for i in OF_PRODUCTS)
    return planned_kernel(read, sm90.plan_tangent, problem, moving)


def _behind_bias(
    problem: Attention, first: Sequence[Any], lists: Sequence[Any], arrays: Sequence[Any]
) -> list[Any]:
    """Return the operands of a plan, of which the bias is the first array if it is staged."""
    staged = problem.bias is not None
    return [*first, *arrays[:staged], *lists, *arrays[staged:]]


_bind = define_kernel(
    "tilekern_attention_kernel",
    _reference,
    _planned,
    describe=lambda *, kernel, **_: f"attention {kernel}",
    like_results=_like_results,
)
