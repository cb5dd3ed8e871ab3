"""The lowering of scans: the problem of three dimensions, and a kernel or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.ops.planned_kernel import planned_kernel, transposed_sizes
from jax_tilekern.ops.scans.combinations import computed_dtype
from jax_tilekern.plans.scans.problem import Combination, Scan, ScanInput
from jax_tilekern.plans.scans.select import plan_scan
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel


def scan_input(dtype: np.dtype[Any], *, is_before: bool = False) -> ScanInput:
    """Describe an operand; raise ``Untranslatable`` if CUDA does not compute in its type."""
    computed = computed_type(computed_dtype(dtype))
    return ScanInput(np.dtype(dtype), computed, is_before)


def planned_scan(
    name: str,
    operands: Sequence[Operand],
    *,
    axis: int,
    reverse: bool,
    inputs: Callable[[], Sequence[ScanInput]],
    combination: Callable[[], Combination],
    outputs: Sequence[int],
    initial: Sequence[str | None] = (),
    in_levels: bool = False,
) -> PlannedKernel | Fallback:
    """Plan scans of operands of one shape along an axis; others follow them in ``operands``."""
    shape = operands[0].aval.shape
    try:
        scan = Scan(
            name=name,
            outer=math.prod(shape[:axis]),
            length=shape[axis],
            columns=math.prod(shape[axis + 1 :]),
            reverse=reverse,
            inputs=tuple(inputs()),
            outputs=tuple(outputs),
            combination=combination(),
            initial=tuple(initial),
            in_levels=in_levels,
        )
    except Untranslatable as error:
        return Fallback(str(error))
    return planned_kernel([x.value for x in operands], plan_scan, scan, transposed_sizes(operands))
