"""Attention by the kernels of ``attention/sm90``.

A call is rewritten to one of ``tilekern_attention_kernel``, whose last operands the kernel reads
besides: statistics of rows, and lists of the tiles that the mask leaves. XLA computes these from
the call's operands, once for all layers that have the same mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat, cudnn
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention import blocks
from jax_tilekern.ops.attention.score_numbers import ScoreNumbers, score_numbers
from jax_tilekern.ops.attention.score_text import score_text
from jax_tilekern.ops.attention.scores import Scores, visible_jaxpr
from jax_tilekern.ops.attention.tile_map import tile_kinds, tile_lists
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.plans.attention.sm90 import (
    STATISTICS_ROWS,
    Attention,
    Bias,
    Tiles,
    bias_refusal,
    derivative_refusal,
    plan_backward,
    plan_bias_gradient,
    plan_forward,
    plan_tangent,
    refusal,
)
from jax_tilekern.plans.attention.ways import CUDNN, KERNELS, Pass, Way, ways_of, workload_of
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu, NoGpu, current_gpu
from jax_tilekern.plans.policy import PolicyChoice, choose, current_policy, predicted_times
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
    no_refusal,
)

Results = Sequence[Array]
_LOG2_E = np.float32(np.log2(np.e))
# The operands of each primitive before the arrays of scores and masks, but for tangents.
_FIRST = {"forward": 3, "tangent": 5, "backward": 7, "bias gradient": 7}
_OF_PRODUCTS, _OF_BIAS = (0, 1, 2), (3,)


def planner_of(name: str) -> Planner:
    """Return how GPUs compute the primitive of attention of this name."""

    def plan(operands: Sequence[Operand], _: Any, **params: Any) -> Outcome:
        try:
            return _chosen(name, operands, **params)
        except NoGpu as error:
            return Fallback(str(error))

    return Planner(no_refusal, plan)


def _chosen(name: str, operands: Sequence[Operand], **params: Any) -> Outcome:
    """Return the kernels or cuDNN, by what the policy predicts of both and of XLA's blocks."""
    avals = [x.aval for x in operands]
    has_lse = name == "backward" and not compat.is_zeros(operands[6].value)
    ways, reason = ways_by_key(name, avals, has_lse=has_lse, **params)
    if current_policy() == "kernels":
        ways.pop(CUDNN, None)
    if not ways:
        return Fallback(reason)
    if name == "tangent":
        return ways[KERNELS]
    choice, each = choice_of(name, avals, ways, **params)
    if choice.candidate is None:
        return Fallback(f"blocks of scores by XLA: {choice.reason}{each}", choice.predicted_us)
    way = ways[choice.candidate.key]
    reason = f"{way.reason}; {choice.reason}{each}"
    return dataclasses.replace(way, reason=reason, predicted_us=choice.predicted_us)


def has_kernels(query: Any, key: Any, value: Any) -> bool:
    """Whether kernels compute the value and the gradient of a call without functions."""
    problem = _sizes((query, key, value), Scores(1.0))
    return not (refusal(problem, current_gpu()) or derivative_refusal(problem))


def choice_of(
    name: str, avals: Sequence[Any], keys: Collection[str], **params: Any
) -> tuple[PolicyChoice[Way], str]:
    """Return which of some ways computes a call, or XLA, and their predicted times in words."""
    gpu, found = current_gpu(), _pass(name, avals, **params)
    workload, ways = workload_of(found, gpu), ways_of(found, gpu, keys)
    choice = choose(workload, ways, gpu)
    times = predicted_times(workload, ways, gpu)
    if times is None or len(ways) == 1:
        return choice, ""
    each = (f"{way.key} {us:.3g} us" for way, us in zip(ways, times.ours, strict=True))
    return choice, f"; {', '.join(each)}"


def ways_by_key(
    name: str, avals: Sequence[Any], scores: Scores, wanted: Sequence[int] = (), *, has_lse: bool
) -> tuple[dict[str, Rewrite], str]:
    """Return what computes a call beside XLA, and why the kernels do not.

    ``has_lse`` says whether a gradient has a cotangent of the logarithms.
    """
    ways: dict[str, Rewrite] = {}
    by_cudnn = None if has_lse else _by_cudnn(name, avals, scores, wanted)
    if by_cudnn is not None:
        ways[CUDNN] = by_cudnn
    params: dict[str, Any] = {"scores": scores} | ({"wanted": wanted} if name != "forward" else {})
    try:
        problem = _problem(name, avals, scores, wanted)
    except Untranslatable as error:
        return ways, str(error)
    if name != "forward" and (why := derivative_refusal(problem)):
        return ways, why
    reason = "tiles of scores"
    share = _share(name, avals, scores, wanted, problem)
    if share < 1:
        reason += f", of which the mask empties {1 - share:.0%}"
    ways[KERNELS] = Rewrite(reason, functools.partial(_rewritten, name, **params))
    return ways, ""


def _share(
    name: str, avals: Sequence[Any], scores: Scores, wanted: Sequence[int], problem: Attention
) -> float:
    """Return the share of the tiles that a mask leaves; 1 where arrays decide."""
    arrays = _arrays(name, avals, wanted)
    if not scores.has_mask or len(arrays) != scores.score_arrays:
        return 1.0
    share: float = _share_by_mask(scores, problem)
    return share


@compat.cached(max_size=1024)
def _share_by_mask(scores: Scores, problem: Attention) -> float:
    """Return the share of the tiles that a mask without arrays leaves."""
    kinds = _kinds(scores, problem, problem.forward_tiles(), *[None] * scores.score_arrays)
    return float(np.mean(kinds != 0)) if kinds.size else 1.0


def _pass(name: str, avals: Sequence[Any], scores: Scores, wanted: Sequence[int] = ()) -> Pass:
    """Return a call as the policy sees it."""
    problem = _sizes(avals, scores)
    arrays = _arrays(name, avals, wanted)
    of_bias = 3 in wanted and name == "backward" and _bias_problem(avals, scores) is not None
    of_numbers = len(_of_numbers(avals, scores, wanted)) if name == "backward" else 0
    # Estimates have logarithms of sizes.
    positive: dict[str, Any] = {
        field: max(1, size) for field, size in vars(problem).items() if type(size) is int
    }
    return Pass(
        dataclasses.replace(problem, **positive),
        is_gradient=name == "backward",
        share=max(_share(name, avals, scores, wanted, problem), _LEAST_SHARE),
        has_mask=scores.has_mask,
        has_window=scores.window is not None,
        has_score=scores.has_score,
        arrays=len(arrays),
        of_bias=of_bias,
        of_arrays=sum(i >= 3 for i in wanted) - of_bias - of_numbers,
    )


# The share that stands for none.
_LEAST_SHARE = 1e-3


def _by_cudnn(
    name: str, avals: Sequence[Any], scores: Scores, wanted: Sequence[int] = ()
) -> Rewrite | None:
    """Return a call of cuDNN, if it has the call."""
    query, key, value = avals[:3]
    biases = avals[_FIRST[name] :]
    options = _cudnn_options(scores)
    if (
        name == "tangent"
        or options is None
        or len(biases) != options.has_bias
        or (options.is_causal and query.shape[1] != key.shape[1])
        or not cudnn.covers(current_gpu().compute_capability, query, key, value, *biases)
    ):
        return None
    if name == "forward":
        return Rewrite("cuDNN's", functools.partial(cudnn.attention, options=options))
    has_kernel = 3 in wanted and _bias_problem(avals, scores) is not None

    def gradient(*given: Array) -> Results:
        read = [*given[:6], *given[7:]]
        of_bias = 3 in wanted and not has_kernel
        found = [*cudnn.attention_gradient(read, options, of_bias=of_bias)]
        if has_kernel:
            found.append(_bias_gradient(given, scores))
        return [found[i] for i in wanted]

    return Rewrite("cuDNN's" + has_kernel * ", and a kernel for the bias", gradient)


def _cudnn_options(scores: Scores) -> cudnn.Options | None:
    """Return a call without functions, and with no array but a bias, as cuDNN has it."""
    if not scores.is_plain or scores.named not in ((), (("bias", None),)):
        return None
    if not scores.scale > 0:
        return None
    window = 0
    if scores.window is not None:
        before, after = scores.window
        if not scores.is_causal and after > 0:
            return None
        window = before + 1
    is_causal = scores.is_causal or window > 0
    return cudnn.Options(float(scores.scale), is_causal, window, has_bias=bool(scores.named))


def _problem(
    name: str, avals: Sequence[Any], scores: Scores, wanted: Sequence[int] = ()
) -> Attention:
    """Return a call as its plans have it; raise if no kernel covers it."""
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)
    problem: Attention = _problem_once(name, types, scores, tuple(wanted), current_gpu())
    return problem


# Layers of a model, and the steps of a lowering, have equal calls.
@compat.cached(max_size=1024)
def _problem_once(
    name: str,
    types: tuple[jax.ShapeDtypeStruct, ...],
    scores: Scores,
    wanted: tuple[int, ...],
    gpu: Gpu,
) -> Attention:
    arrays = _arrays(name, types, wanted)
    problem = _sizes(types, scores)
    if why := refusal(problem, gpu):
        raise Untranslatable(why)
    numbers = _numbers(types, scores, wanted) if name == "backward" else None
    problem = dataclasses.replace(problem, functions=score_text(scores, arrays, numbers))
    if scores.has_mask:
        kinds = jax.eval_shape(functools.partial(_kinds, scores, problem, Tiles(64, 64)), *arrays)
        problem = dataclasses.replace(problem, listed=kinds.shape[:2])
    return problem


def _sizes(types: Sequence[Any], scores: Scores) -> Attention:
    """Return the sizes of a call, without its functions."""
    query, key, value = types[:3]
    batch, queries, heads, features = query.shape
    return Attention(
        batch=batch,
        queries=queries,
        keys=key.shape[1],
        heads=heads,
        key_heads=key.shape[2],
        features=features,
        value_features=value.shape[3],
        dtype=np.dtype(query.dtype),
        scale=float(scores.scale),
    )


def _arrays(name: str, operands: Sequence[Any], wanted: Sequence[int]) -> Sequence[Any]:
    return operands[_FIRST[name] + (len(wanted) if name == "tangent" else 0) :]


def _kinds(scores: Scores, problem: Attention, tiles: Tiles, *arrays: Any) -> Array:
    visible, read = visible_jaxpr(scores, arrays), arrays[scores.score_arrays :]
    sizes = problem.batch, problem.heads, problem.queries, problem.keys
    kinds: Array = tile_kinds(visible, read, sizes, tiles.queries, tiles.keys)
    return kinds


def _rewritten(name: str, *operands: Array, scores: Scores, wanted: Sequence[int] = ()) -> Results:
    """Compute a call by kernels, and derivatives by arrays that none covers by blocks."""
    of_arrays = tuple(i for i in wanted if i >= 3)
    own = tuple(i for i in wanted if i < 3)
    if name == "forward":
        return _with_tiles(name, operands, scores, ())
    if name == "backward":
        found: dict[int, Array] = {}
        of_numbers = _of_numbers(operands, scores, of_arrays)
        if own or of_numbers:
            results = _with_tiles(name, operands, scores, (*_OF_PRODUCTS, *of_numbers))
            found |= zip(_OF_PRODUCTS, results, strict=False)
        if of_numbers and (numbers := _numbers(operands, scores, of_numbers)):
            arrays = _arrays(name, operands, wanted)
            results = numbers.gradients(results[3].sum(2), scores, arrays)
            found |= zip(of_numbers, results, strict=True)
        if 3 in wanted and _bias_problem(operands, scores) is not None:
            found[3] = _bias_gradient(operands, scores)
        if others := tuple(i for i in of_arrays if i not in found):
            results = blocks.backward(*operands, scores=scores, wanted=others)
            found |= zip(others, results, strict=True)
        return [found[i] for i in wanted]
    first, arrays = operands[:5], _arrays(name, operands, wanted)
    dots = dict(zip(wanted, operands[5:], strict=False))

    def tangent(function: Callable[..., Results], moving: tuple[int, ...]) -> Results:
        return function((*first, *(dots[i] for i in moving), *arrays), moving)

    # A tangent is linear in those of the operands.
    terms: list[Results] = []
    if own:
        terms.append(tangent(lambda x, moving: _with_tiles(name, x, scores, moving), own))
    if of_arrays:
        by_blocks = functools.partial(blocks.tangent, scores=scores)
        terms.append(tangent(lambda x, moving: by_blocks(*x, wanted=moving), of_arrays))
    return [sum(x[1:], x[0]) for x in zip(*terms, strict=True)]


def _of_numbers(operands: Sequence[Any], scores: Scores, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the arrays that a score reads as numbers of a batch and head, as a kernel has them."""
    found = tuple(i for i in wanted if i >= 3 and _numbers(operands, scores, (i,)))
    if not found or not _numbers(operands, scores, found):
        return ()
    try:
        _problem("backward", operands, scores, (*_OF_PRODUCTS, *found))
    except Untranslatable:
        return ()
    return found


def _numbers(operands: Sequence[Any], scores: Scores, wanted: Sequence[int]) -> ScoreNumbers | None:
    """Return the numbers that a score reads of those of the arrays that are ``wanted``."""
    first = 3 + scores.kinds.count("bias")
    moving = [i - first for i in wanted if i >= 3]
    if not all(0 <= i < scores.score_arrays + 3 - first for i in moving) or not moving:
        return None
    query, arrays = operands[0], _arrays("backward", operands, wanted)
    return score_numbers(scores, arrays, moving, (query.shape[0], query.shape[2]))


def _with_tiles(
    name: str, operands: Sequence[Array], scores: Scores, wanted: tuple[int, ...]
) -> Results:
    """Bind the kernel's primitive, with statistics and lists of tiles."""
    arrays = _arrays(name, operands, wanted)
    problem = _problem(name, operands, scores, wanted)
    own = [] if name == "forward" else [_statistics(*operands[3:7], name=name)]
    if problem.listed is not None:
        by_keys, by_queries = problem.backward_tiles()
        tiles = {
            "forward": problem.forward_tiles(),
            "tangent": problem.tangent_tiles(),
            "backward": by_queries,
        }[name]
        if name == "backward":
            own += tile_lists(_kinds(scores, problem, by_keys, *arrays).swapaxes(-1, -2))
        own += tile_lists(_kinds(scores, problem, tiles, *arrays))
    bound: Results = _bind(*operands, *own, kernel=name, scores=scores, wanted=wanted, own=len(own))
    return bound


def _bias_problem(operands: Sequence[Any], scores: Scores) -> tuple[Attention, Bias] | None:
    """Return the problem of the gradient of a bias; ``None`` if no kernel covers it."""
    query, key = operands[:2]
    if dict(scores.named).get("bias", 0) is not None or 0 in (*query.shape, *key.shape):
        return None
    first = _FIRST["bias gradient"]
    bias = operands[first]
    staged = (
        bias.dtype == query.dtype
        and bias.shape[2:] == (query.shape[1], key.shape[1])
        and key.shape[1] % (VECTOR_BYTES // bias.dtype.itemsize) == 0
    )
    arrays = operands[first + staged :]
    if staged:
        named = tuple(x for x in scores.named if x[0] != "bias")
        scores = dataclasses.replace(scores, named=named)
    try:
        problem = _problem("bias gradient", [*operands[:first], *arrays], scores)
    except (NoGpu, Untranslatable):
        return None
    found = Bias(tuple(bias.shape), np.dtype(bias.dtype), staged)
    return None if bias_refusal(problem, found) else (problem, found)


def _known_bias_problem(operands: Sequence[Any], scores: Scores) -> tuple[Attention, Bias]:
    found = _bias_problem(operands, scores)
    assert found is not None
    return found


def _bias_gradient(operands: Sequence[Array], scores: Scores) -> Array:
    """Bind the kernel's primitive, and add the parts of queries that the bias lacks."""
    problem, bias = _known_bias_problem(operands, scores)
    own = [_statistics(*operands[3:7], name="backward")]
    if scores.has_mask:
        arrays = operands[_FIRST["bias gradient"] :]
        own.append(_kinds(scores, problem, problem.bias_tiles(), *arrays))
    bound: Results = _bind(
        *operands, *own, kernel="bias gradient", scores=scores, wanted=_OF_BIAS, own=len(own)
    )
    if bias.has_queries(problem):
        return bound[0]
    return bound[0].sum(2, keepdims=True).astype(bias.dtype)


def _statistics(out: Array, lse: Array, *cotangents: Array, name: str) -> Array:
    """Return what the kernels read of each row, as ``backward.cuh`` says."""
    rows = [jnp.where(jnp.isneginf(lse), np.float32(np.inf), lse) * _LOG2_E]
    if name == "backward":
        d_out, d_lse = cotangents
        # A row without keys has no derivative, whatever the cotangent of its infinite logarithm is.
        d_lse = jnp.where(jnp.isneginf(lse), 0, d_lse)
        products = out.astype(np.float32) * d_out.astype(np.float32)
        rows += [products.sum(-1).transpose(0, 2, 1) - d_lse, d_lse]
    missing = -lse.shape[-1] % STATISTICS_ROWS
    padding = [(0, 0), (0, 0), (0, missing)]
    fills = [np.float32(np.inf), *[np.float32(0)] * (len(rows) - 1)]
    return jnp.stack(
        [jnp.pad(x, padding, constant_values=fill) for x, fill in zip(rows, fills, strict=True)]
    )


def _reference(
    *operands: Array, kernel: str, scores: Scores, wanted: tuple[int, ...], own: int
) -> Results:
    given = operands[: len(operands) - own]
    if kernel == "forward":
        return blocks.forward(*given, scores=scores)
    if kernel == "tangent":
        return blocks.tangent(*given, scores=scores, wanted=wanted)
    like = _like_results(*operands, kernel=kernel, scores=scores, wanted=wanted, own=own)[-1]
    if kernel == "backward" and (numbers := _numbers(given, scores, wanted)):
        sizes = given[0].shape[0], given[0].shape[2]
        scores, arrays, position = numbers.as_array(scores, given[_FIRST[kernel] :], sizes)
        given, wanted = (*given[: _FIRST[kernel]], *arrays), (*_OF_PRODUCTS, 3 + position)
    *results, last = blocks.backward(*given, scores=scores, wanted=wanted)
    # A result that has parts has all of the gradient in the first.
    if last.ndim < like.ndim:
        last = last[:, :, None]
    padding = [(0, y - x) for x, y in zip(last.shape, like.shape, strict=True)]
    return [*results, jnp.pad(last, padding).astype(like.dtype)]


def _like_results(
    *operands: Array, kernel: str, scores: Scores, wanted: tuple[int, ...], own: int
) -> Results:
    query, key, value = operands[:3]
    given = operands[: len(operands) - own]
    if kernel == "backward":
        found = [jnp.zeros_like(x) for x in (query, key, value)]
        if wanted != _OF_PRODUCTS:
            problem = _problem(kernel, given, scores, wanted)
            found.append(jnp.zeros(problem.numbers_shape(), np.float32))
        return found
    if kernel == "bias gradient":
        problem, bias = _known_bias_problem(given, scores)
        return [jnp.zeros(bias.result_shape(problem), bias.result_dtype(problem))]
    rows = query.shape[:3]
    out = jnp.zeros((*rows, value.shape[3]), query.dtype)
    return [out, jnp.zeros((rows[0], rows[2], rows[1]), np.float32)]


def _planned(
    operands: Sequence[Operand], _: Any, *, kernel: str, scores: Scores, wanted: tuple[int, ...],
    own: int,
) -> PlannedKernel | Fallback:  # fmt: skip
    count = len(operands) - own
    values = [x.value for x in operands]
    given, extra = values[:count], values[count:]
    avals = [x.aval for x in operands[:count]]
    arrays = _arrays(kernel, given, wanted)
    if kernel == "bias gradient":
        problem, bias = _known_bias_problem(avals, scores)
        read = [*given[:3], given[5], extra[0], arrays[0], *extra[1:], *arrays[bias.staged :]]
        return planned_kernel(read, plan_bias_gradient, problem, bias)
    problem = _problem(kernel, avals, scores, wanted)
    if kernel == "forward":
        return planned_kernel([*given[:3], *extra, *arrays], plan_forward, problem)
    statistics, *lists = extra
    if kernel == "backward":
        read = [*given[:3], given[5], statistics, *lists, *arrays]
        return planned_kernel(read, plan_backward, problem)
    dots = given[5 : 5 + len(wanted)]
    read = [*given[:4], statistics, *dots, *lists, *arrays]
    moving = tuple(i in wanted for i in range(3))
    return planned_kernel(read, plan_tangent, problem, moving)


def _batch(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a call of attention is mapped before it becomes one of a kernel")


_bind = define(
    Operation(
        "tilekern_attention_kernel",
        _reference,
        batch=_batch,
        sharding_rule=None,
        # CPUs have no call of it, but for GPUs that tests emulate.
        planners=dict.fromkeys(("cpu", "cuda"), Planner(no_refusal, _planned)),
        describe=lambda *, kernel, **_: f"attention {kernel}",
        several_results=True,
        like_results=_like_results,
    )
)
