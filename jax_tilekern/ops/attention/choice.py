"""What computes a call of attention on a GPU: kernels, cuDNN, or XLA's blocks of scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import Array

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat, cudnn
from jax_tilekern.ops.attention.call import BIAS, Call, gradients_of, problem_of, share_of
from jax_tilekern.ops.attention.kernel_lowering import by_kernels
from jax_tilekern.ops.attention.residual import logsumexp, without_base
from jax_tilekern.ops.attention.scores import Scores
from jax_tilekern.plans.attention.problem import Pass, refusal, tangent_refusal
from jax_tilekern.plans.attention.ways import CUDNN, KERNELS, is_timed, ways_of, workload_of
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.policy import choose, current_policy, predicted_times
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Outcome,
    Planner,
    Rewrite,
    no_refusal,
)

# The share of tiles that stands for none.
_LEAST_SHARE = 1e-3
_NOT_TIMED = (
    'these kernels are not timed, so XLA computes it (jax_tilekern.policy("kernels") takes them)'
)


def planner_of(kind: str) -> Planner:
    """Return how GPUs compute the primitive of attention of this kind."""

    def plan(operands: Sequence[Operand], _: Any, **params: Any) -> Outcome:
        has_lse = False
        if kind == "backward":
            _, d_lse = Call(kind, tuple(x.value for x in operands), **params).cotangents
            has_lse = not compat.is_zeros(d_lse)
        try:
            return _chosen(Call(kind, tuple(x.aval for x in operands), **params), has_lse)
        except NoGpu as error:
            return Fallback(str(error))

    return Planner(no_refusal, plan)


def has_kernels(query: Any, key: Any, value: Any) -> bool:
    """Whether kernels compute the value and the gradient of a call without functions."""
    sizes = Call("forward", (query, key, value), Scores(1.0)).sizes
    return sizes.by_wgmma and not refusal(sizes, current_gpu())


def _chosen(call: Call, has_lse: bool) -> Outcome:
    """Return the kernels or cuDNN, by what the policy predicts of both and of XLA's blocks."""
    rewrites, reason = ways_by_key(call, has_lse=has_lse)
    if current_policy() == "kernels":
        rewrites.pop(CUDNN, None)
    if not rewrites:
        return Fallback(reason)
    if call.kind == "tangent":
        return rewrites[KERNELS]
    gpu, numbers = current_gpu(), _as_numbers(call)
    workload, ways = workload_of(numbers, gpu), ways_of(numbers, gpu, rewrites)
    choice, times = choose(workload, ways, gpu), predicted_times(workload, ways, gpu)
    reason = choice.reason
    if times is not None and len(ways) > 1:
        each = (f"{way.key} {us:.3g} us" for way, us in zip(ways, times.ours, strict=True))
        reason += f"; {', '.join(each)}"
    if choice.candidate is None:
        return Fallback(f"blocks of scores by XLA: {reason}", choice.predicted_us)
    found = rewrites[choice.candidate.key]
    reason = f"{found.reason}; {reason}"
    return dataclasses.replace(found, reason=reason, predicted_us=choice.predicted_us)


def ways_by_key(call: Call, *, has_lse: bool) -> tuple[dict[str, Rewrite], str]:
    """Return what computes a call beside XLA, and why the kernels do not.

    ``has_lse`` says whether a gradient has a cotangent of the logarithms.
    """
    by_cudnn = None if has_lse else _by_cudnn(call)
    ways = {} if by_cudnn is None else {CUDNN: by_cudnn}
    if not is_timed(call.sizes, current_gpu()) and current_policy() != "kernels":
        return ways, _NOT_TIMED
    try:
        problem = problem_of(call)
    except Untranslatable as error:
        return ways, str(error)
    if call.kind == "tangent" and (why := tangent_refusal(problem)):
        return ways, why
    share = share_of(call)
    emptied = f", of which the mask empties {1 - share:.0%}" if share < 1 else ""

    def kernels(*operands: Array) -> Sequence[Array]:
        return by_kernels(dataclasses.replace(call, operands=operands))

    if call.scores.has_score:
        # cuDNN keeps the logarithm of a row as one number; see ``residual.py``.
        ways.pop(CUDNN, None)
    ways[KERNELS] = Rewrite(f"tiles of scores{emptied}", kernels)
    return ways, ""


def _as_numbers(call: Call) -> Pass:
    """Return a call as the policy sees it."""
    scores, is_gradient = call.scores, call.kind == "backward"
    gradients = gradients_of(call) if is_gradient else None
    # Estimates have logarithms of sizes.
    positive: dict[str, Any] = {
        field: max(1, size) for field, size in vars(call.sizes).items() if type(size) is int
    }
    return Pass(
        dataclasses.replace(call.sizes, **positive),
        is_gradient=is_gradient,
        share=max(share_of(call), _LEAST_SHARE),
        has_mask=scores.has_mask,
        has_window=scores.window is not None,
        has_score=scores.has_score,
        has_function=scores.score_mod is not None,
        arrays=len(call.arrays),
        of_bias=gradients is not None and gradients.by_bias_kernel,
        of_arrays=len(gradients.by_blocks) if gradients else 0,
    )


def _by_cudnn(call: Call) -> Rewrite | None:
    """Return the call by cuDNN, if that has it."""
    query, key, value = call.operands[:3]
    options = _cudnn_options(call.scores)
    if (
        call.kind == "tangent"
        or options is None
        or len(call.arrays) != options.has_bias
        or (options.is_causal and query.shape[1] != key.shape[1])
        or not cudnn.covers(current_gpu().compute_capability, query, key, value, *call.arrays)
    ):
        return None

    def forward(*operands: Array) -> Sequence[Array]:
        out, lse = cudnn.attention(*operands, options=options)
        return [out, *without_base(call.scores, lse)]

    def gradient(*operands: Array) -> Sequence[Array]:
        own = dataclasses.replace(call, operands=operands)
        lse = logsumexp(*own.logarithm)
        read = [*operands[:4], lse, own.cotangents[0], *own.arrays]
        found = cudnn.attention_gradient(read, options, of_bias=BIAS in call.wanted)
        return [found[i] for i in call.wanted]

    return Rewrite("cuDNN's", forward if call.kind == "forward" else gradient)


def _cudnn_options(scores: Scores) -> cudnn.Options | None:
    """Return a call without functions, and with no array but a bias, as cuDNN has it."""
    has_others = scores.named not in ((), (("bias", None),))
    if has_others or not scores.is_plain or not scores.scale > 0:
        return None
    window = 0
    if scores.window is not None:
        before, after = scores.window
        if not scores.is_causal and after > 0:
            return None
        window = before + 1
    is_causal = scores.is_causal or window > 0
    return cudnn.Options(float(scores.scale), is_causal, window, has_bias=bool(scores.named))
