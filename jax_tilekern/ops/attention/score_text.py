"""The score function and the mask of a call as CUDA, for ``ffi/cuda/attention``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.epilogue.cuda_text import literal
from jax_tilekern.epilogue.primitives import TO_16_BITS
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.ops.attention.score_factors import FactoredScore, factored
from jax_tilekern.ops.attention.score_numbers import ScoreNumbers
from jax_tilekern.ops.attention.scores import Scores, score_jaxpr, visible_jaxpr
from jax_tilekern.ops.kernel.translation.values import (
    Buffer,
    everywhere,
    in_memory,
    is_wide,
    row_major,
)
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, TooLong
from jax_tilekern.plans.attention.problem import MOST_STAGED_BYTES, Attention, ScoreText
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32
from jax_tilekern.plans.gpu import VECTOR_BYTES

# Arrays of a function of up to so many elements are in registers.
_UNROLLED = 16
# Weights have the type of the values, or are TF32, so an absolute error of 2**-22 is no loss.
_SHORTER = TO_16_BITS | {"tanh": ("tanh_of_score", 5)}
# Queries and keys of bfloat16 are rounded by 2**-9, which is four times the relative error of this.
_SHORTER_IN_BFLOAT16 = TO_16_BITS | {"tanh": ("tanh_of_bfloat16_score", 1)}
# The exponentials of scores between this and its negative are weights without a maximum: 2**-87 to
# 2**87. Sums of 2**30 of them are finite, and products with values from 2**-39 on are normal.
_LARGEST_BOUND = 60.0
# Up to this the rounding of a row's logarithm, by 2**-17 at most, is no loss beside that of weights
# to 16 bits or TF32.
_LARGEST_OF_ONE_LOGARITHM = 128.0
_SCALARS = [("s", F32), *((name, np.dtype(np.int32)) for name in "bhqk")]


def score_text(
    scores: Scores,
    arrays: Sequence[Any],
    sizes: Attention,
    numbers: ScoreNumbers | None = None,
) -> ScoreText:
    """Translate the functions of a call of these sizes that reads arrays of these types.

    Derivatives are those by the score, and by ``numbers``.

    Raises
    ------
    Untranslatable
        If a function has no CUDA.
    """
    for x in arrays:
        if x.dtype not in CXX_TYPES:
            raise Untranslatable(f"CUDA has no arithmetic of {x.dtype}")
    names = [f"array{i}" for i in range(len(arrays))]
    memory = [
        Buffer(name, x.dtype, x.shape, row_major(x.shape), stored=True, wide=is_wide(x.shape),
               shared=True)
        for name, x in zip(names, arrays, strict=True)
    ]  # fmt: skip
    n, origins = scores.score_arrays, memory[len(scores.kinds) :]
    score = score_jaxpr(scores, F32, arrays)
    visible = visible_jaxpr(scores, arrays)
    of_score, of_slope = _Written([], ["s"]), _Written([], ["s", "1"])
    count = len(numbers.numbers) if numbers else 0
    by_difference = numbers is not None and numbers.axes.difference
    of_mask = _Written([], ["true"])
    # Gradients by arrays are sums of terms that cancel.
    has_arrays = "of_score" in scores.kinds
    shorter: Mapping[str, tuple[str, int]] = _SHORTER
    if sizes.is_split:
        shorter = {}
    elif sizes.dtype == BF16 and not has_arrays:
        shorter = _SHORTER_IN_BFLOAT16
    factors, is_bounded = FactoredScore(None), False
    if score is not None:
        # Derivatives by numbers are those of the whole score.
        factors = FactoredScore(score) if numbers else factored(score)
        is_bounded = (
            factors.is_up_to_one
            and factors.outer <= _LARGEST_OF_ONE_LOGARITHM
            and not sizes.is_split
        )
        if not is_bounded:
            # Scores themselves have a base, which is one of them.
            factors = factors.with_outer_inside()
        slope = numbers.derivatives_jaxpr(scores, arrays) if numbers else factors.with_slope()
        read = [*memory[:n], *origins]
        of_score = _written(factors.function, _SCALARS, read, shorter)
        of_slope = _written(slope, _SCALARS, read, shorter)
    if visible is not None:
        of_mask = _written(visible, _SCALARS[1:], memory[n:], shorter)
    pointers = [f"const {CXX_TYPES[x.dtype]}*" for x in arrays]
    text = _TEMPLATE.format(
        # Without a function, the kernel takes the largest product for that of the largest score.
        has_score=_flag(score is not None or not scores.scale > 0),
        has_mask=_flag(visible is not None),
        stage=_staged(memory[:n]),
        indices=_INDICES,
        reads=_flag(bool(pointers)),
        inner=literal(np.asarray(factors.inner), F32),
        outer=literal(np.asarray(factors.outer), F32),
        slope=literal(np.asarray(factors.inner * factors.outer), F32),
        is_up_to_one=_flag(sizes.dtype != F16 and is_bounded and factors.outer <= _LARGEST_BOUND),
        pointers="".join(f"  {kind} {name};\n" for kind, name in zip(pointers, names, strict=True)),
        score=of_score.body("return {};"),
        numbers=count,
        by_difference=_flag(by_difference),
        derivative=of_slope.body(
            "score = {}; slope = {};" + "".join(f" partials[{i}] = {{}};" for i in range(count))
        ),
        visible=of_mask.body("return {};"),
    )
    has = score is not None, visible is not None
    return ScoreText(text, tuple(pointers), *has, is_bounded, count, by_difference)


def _staged(arrays: Sequence[Buffer]) -> str:
    """Return statements that copy the arrays to shared memory, as far as they fit."""
    left, lines = MOST_STAGED_BYTES, []
    for i, x in enumerate(arrays):
        count, kind = math.prod(x.shape), CXX_TYPES[x.dtype]
        size = -(-count * x.dtype.itemsize // VECTOR_BYTES) * VECTOR_BYTES
        if not 0 < size <= left:
            continue
        left -= size
        lines += [
            f"__shared__ {kind} shared{i}[{count}];",
            f"for (int i = threadIdx.x; i < {count}; i += blockDim.x) shared{i}[i] = {x.name}[i];",
            f"{x.name} = shared{i};",
        ]
    return "\n".join(f"    {line}" for line in lines)


class _Written(NamedTuple):
    """A function in CUDA: statements, and the expressions of its results."""

    statements: list[str]
    results: list[str]

    def body(self, last: str) -> str:
        lines = [*self.statements, last.format(*self.results)]
        return "\n".join(f"    {line}" for line in lines)


def _written(
    closed: Any,
    scalars: Sequence[tuple[str, np.dtype[Any]]],
    arrays: Sequence[Buffer],
    shorter: Mapping[str, tuple[str, int]],
) -> _Written:
    """Translate a function of scalars and arrays."""
    writer = LaneWriter(_UNROLLED, 1, shorter)
    operands = [everywhere(dtype, (), name) for name, dtype in scalars]
    operands += [writer.evaluated(in_memory(x)) for x in arrays]
    try:
        found = writer.jaxpr(closed, operands)
    except TooLong as error:
        raise Untranslatable("the function has more statements than a kernel may have") from error
    if writer.workspace_bytes:
        raise Untranslatable("the function has arrays that do not fit in a thread's memory")
    # Elements of a tile with the same difference share what is computed from it.
    body = [line.replace("lax::sub(q, k)", "at.difference") for line in writer.body()]
    return _Written(body, [x.first for x in found])


def _flag(value: bool) -> str:
    return str(value).lower()


_INDICES = """\
    const int q = at.query, k = at.key;
    __builtin_assume(b >= 0 && h >= 0 && q >= 0 && k >= 0);"""
_TEMPLATE = """\
namespace tilekern {{

struct Functions {{
  static constexpr bool kScore = {has_score}, kMask = {has_mask}, kReads = {reads};
  static constexpr int kNumbers = {numbers};
  static constexpr bool kByDifference = {by_difference};
  static constexpr float kInner = {inner}, kOuter = {outer}, kSlope = {slope};
  static constexpr bool kIsUpToOne = {is_up_to_one};
{pointers}
  void stage() {{
{stage}
  }}
  float score(float s, int b, int h, ScoreIndices at) const {{
{indices}
{score}
  }}
  void derivative(float s, int b, int h, ScoreIndices at, float& score, float& slope,
                  float* partials) const {{
{indices}
{derivative}
  }}
  bool visible(int b, int h, ScoreIndices at) const {{
{indices}
{visible}
  }}
}};

}}  // namespace tilekern
"""
