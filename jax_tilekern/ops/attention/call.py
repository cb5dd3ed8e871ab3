"""A call of a primitive of attention: its operands by their use, and the problem that kernels have.

Operands are arrays, types or values of MLIR; what follows from their types alone is found once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import compat
from jax_tilekern.ops.attention import residual
from jax_tilekern.ops.attention.score_numbers import ScoreNumbers, Sizes, score_numbers
from jax_tilekern.ops.attention.score_text import score_text
from jax_tilekern.ops.attention.scores import Scores, visible_jaxpr
from jax_tilekern.ops.attention.tile_map import tile_kinds
from jax_tilekern.plans.attention.problem import (
    Attention,
    Bias,
    Tiles,
    bias_refusal,
    gradient_refusal,
    has_wgmma,
    refusal,
)
from jax_tilekern.plans.gemm.arithmetic import precision_name
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu, NoGpu, current_gpu

# Positions of query, key and value, and of a bias, among the operands of ``attention``.
OF_PRODUCTS, BIAS = (0, 1, 2), 3


def operands_before_arrays(kind: str, scores: Scores) -> int:
    """Return how many operands come before the arrays of scores and masks, but for tangents."""
    results = 1 + residual.count(scores)
    return {"forward": 3, "tangent": 3 + results}.get(kind, 5 + results)


@dataclass(frozen=True)
class Call:
    """A call of a primitive.

    Attributes
    ----------
    kind
        ``"forward"``, ``"tangent"`` or ``"backward"``, of which ``"bias gradient"`` is a part.
    operands
        Those of the primitive (``primitives.py``).
    scores
        What is computed of the products.
    wanted
        Positions, among the operands of ``attention``, of those that have tangents or whose
        gradients are wanted.
    """

    kind: str
    operands: tuple[Any, ...]
    scores: Scores
    wanted: tuple[int, ...] = ()

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What scores and masks read."""
        dots = len(self.wanted) if self.kind == "tangent" else 0
        return self.operands[self._first + dots :]

    def moving(self, wanted: tuple[int, ...]) -> Call:
        """Return the call with the tangents of some operands alone."""
        first = self.operands[: self._first]
        dots = dict(zip(self.wanted, self.tangents, strict=True))
        operands = (*first, *(dots[i] for i in wanted), *self.arrays)
        return dataclasses.replace(self, operands=operands, wanted=wanted)

    @property
    def _first(self) -> int:
        return operands_before_arrays(self.kind, self.scores)

    @property
    def tangents(self) -> tuple[Any, ...]:
        """Those of the operands that are wanted, of a tangent."""
        return self.operands[self._first : self._first + len(self.wanted)]

    @property
    def logarithm(self) -> tuple[Any, ...]:
        """What a derivative has of the sums of exponentials (``residual.py``)."""
        return self.operands[4 : 4 + residual.count(self.scores)]

    @property
    def cotangents(self) -> tuple[Any, Any]:
        """Those of the output and of the logarithm, of a gradient."""
        d_out, d_lse = self.operands[self._first - 2 : self._first]
        return d_out, d_lse

    @property
    def lengths(self) -> Sizes:
        """The dimensions of the scores."""
        query, key = self.operands[:2]
        return Sizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1])

    @property
    def sizes(self) -> Attention:
        """The problem without its functions, on the current GPU."""
        query, key, value = self.operands[:3]
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
            scale=float(self.scores.scale),
            precision=precision_name(self.scores.precision),
            by_wgmma=has_wgmma(np.dtype(query.dtype), current_gpu()),
        )


def problem_of(call: Call) -> Attention:
    """Return a call as its plans have it.

    Raises
    ------
    Untranslatable
        If no kernel covers it.
    NoGpu
        If there is no GPU.
    """
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.operands)
    found: Attention = _problem(dataclasses.replace(call, operands=types), current_gpu())
    return found


# Layers of a model, and the steps of a lowering, have equal calls.
@compat.cached(max_size=1024)
def _problem(call: Call, gpu: Gpu) -> Attention:
    scores, problem = call.scores, call.sizes
    why = refusal(problem, gpu)
    if call.kind == "backward":
        why = why or gradient_refusal(problem)
    if why:
        raise Untranslatable(why)
    numbers = numbers_of(call, call.wanted) if call.kind == "backward" else None
    arrays = call.arrays
    if call.kind != "tangent" and numbers is None and _can_be_staged(call):
        problem = dataclasses.replace(problem, bias=tuple(arrays[0].shape))
        named = tuple(x for x in scores.named if x[0] != "bias")
        functions = score_text(dataclasses.replace(scores, named=named), arrays[1:], problem)
    else:
        functions = score_text(scores, arrays, problem, numbers)
    problem = dataclasses.replace(problem, functions=functions)
    if scores.has_mask:
        kinds = jax.eval_shape(
            lambda *arrays: tile_kinds_of(scores, problem, Tiles(64, 64), arrays), *call.arrays
        )
        problem = dataclasses.replace(problem, listed=kinds.shape[:2])
    return problem


def _can_be_staged(call: Call) -> bool:
    """Whether a call has a bias of which TMA copies tiles of queries and keys."""
    query, key = call.operands[:2]
    if not call.sizes.by_wgmma or dict(call.scores.named).get("bias", 0) is not None:
        return False
    bias = call.arrays[0]
    if bias.dtype != query.dtype or bias.shape[2:] != (query.shape[1], key.shape[1]):
        return False
    if call.kind == "backward" and call.sizes.is_widest:
        return False
    return bool(key.shape[1] * bias.dtype.itemsize % VECTOR_BYTES == 0)


def tile_kinds_of(
    scores: Scores, problem: Attention, tiles: Tiles, arrays: tuple[Any, ...]
) -> Array:
    """Return which tiles the mask of a call empties, and which it leaves whole."""
    visible, read = visible_jaxpr(scores, arrays), arrays[scores.score_arrays :]
    sizes = problem.batch, problem.heads, problem.queries, problem.keys
    kinds: Array = tile_kinds(visible, read, sizes, tiles.queries, tiles.keys)
    return kinds


def share_of(call: Call) -> float:
    """Return the share of the tiles that the mask leaves; 1 where arrays decide."""
    scores = call.scores
    if not scores.has_mask or len(call.arrays) != scores.score_arrays:
        return 1.0
    share: float = _share(scores, call.sizes)
    return share


@compat.cached(max_size=1024)
def _share(scores: Scores, sizes: Attention) -> float:
    """Return the share of the tiles that a mask without arrays leaves."""
    kinds = tile_kinds_of(scores, sizes, sizes.tiles("forward"), (None,) * scores.score_arrays)
    return float(np.mean(kinds != 0)) if kinds.size else 1.0


class BiasProblem(NamedTuple):
    """The gradient of a bias, as its kernel has it."""

    problem: Attention
    bias: Bias


def bias_problem_of(call: Call) -> BiasProblem | None:
    """Return the problem of the gradient of a call's bias; ``None`` if no kernel covers it."""
    query, key = call.operands[:2]
    named = dict(call.scores.named)
    if named.get("bias", 0) is not None or 0 in (*query.shape, *key.shape):
        return None
    bias = call.arrays[0]
    try:
        problem = problem_of(dataclasses.replace(call, kind="bias gradient", wanted=()))
    except (NoGpu, Untranslatable):
        return None
    found = BiasProblem(problem, Bias(tuple(bias.shape), np.dtype(bias.dtype)))
    return None if bias_refusal(*found) else found


class Gradients(NamedTuple):
    """What computes the gradients by arrays that are wanted of a call.

    Attributes
    ----------
    by_numbers, numbers
        Positions of the arrays whose gradients follow from those by the numbers that a score reads
        of them, which the kernel of the gradients of products adds up.
    by_bias_kernel
        Whether a kernel computes the gradient of the bias.
    by_blocks
        Positions of the others.
    """

    by_numbers: tuple[int, ...]
    numbers: ScoreNumbers | None
    by_bias_kernel: bool
    by_blocks: tuple[int, ...]


def gradients_of(call: Call) -> Gradients:
    """Return what computes the gradients of a call of ``backward``."""
    by_numbers, numbers = _by_numbers(call)
    by_bias_kernel = BIAS in call.wanted and bias_problem_of(call) is not None
    found = {*OF_PRODUCTS, *by_numbers, *([BIAS] if by_bias_kernel else ())}
    by_blocks = tuple(i for i in call.wanted if i not in found)
    return Gradients(by_numbers, numbers, by_bias_kernel, by_blocks)


def _by_numbers(call: Call) -> tuple[tuple[int, ...], ScoreNumbers | None]:
    read = call.scores.by_use(call.arrays).of_score
    single = {i: numbers_of(call, (i,)) for i in call.wanted if i not in OF_PRODUCTS}
    found = {
        i: x for i, x in single.items() if x is not None and x.has_gradients(read, call.lengths)
    }
    for wanted in (tuple(found), tuple(i for i, x in found.items() if not x.axes.difference)):
        numbers = numbers_of(call, wanted)
        if numbers is not None and numbers.has_gradients(read, call.lengths):
            try:
                problem_of(dataclasses.replace(call, wanted=(*OF_PRODUCTS, *wanted)))
                return wanted, numbers
            except Untranslatable:
                pass
    return (), None


def numbers_of(call: Call, wanted: tuple[int, ...]) -> ScoreNumbers | None:
    """Return the numbers that a score reads of those of the arrays that are ``wanted``."""
    scores = call.scores
    first = 3 + scores.kinds.count("bias")
    moving = [i - first for i in wanted if i not in OF_PRODUCTS]
    # Kernels by mma.sync add up no gradients by numbers.
    if not call.sizes.by_wgmma:
        return None
    if not all(0 <= i < scores.score_arrays + 3 - first for i in moving) or not moving:
        return None
    found = score_numbers(scores, moving)
    # Sums by differences are in shared memory.
    return None if found and found.axes.difference and call.sizes.is_widest else found
