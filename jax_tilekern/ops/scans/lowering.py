"""The lowering of scans: the problem of three dimensions, and a kernel or why there is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.scans.combinations import computed_dtype
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.scans.problem import Combination, Scan, ScanInput
from jax_tilekern.plans.scans.select import plan_scan
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel, Rewrite


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
    return planned_kernel([x.value for x in operands], plan_scan, scan)


def on_cpus(reference: Callable[..., Any], *_: Any, **params: Any) -> Rewrite:
    """Let each device call XLA's operation for its sequences."""
    return Rewrite("XLA's own", functools.partial(reference, **params))


def rule_of_sequences(
    shape: Sequence[int], axis: int, *, operands: int, results: int
) -> ShardingRule:
    """Return the rule of arrays of one shape, of which every device has whole sequences."""
    dims = tuple(None if i == axis else i for i in range(len(shape)))
    sizes = {i: shape[i] for i in dims if i is not None}
    names = {i: f"axis {i}" for i in sizes}
    return ShardingRule(
        (dims,) * operands, (dims,) * results, sizes, flops=math.prod(shape), names=names
    )


def batch_place(dims: Sequence[int | None]) -> int:
    """Return where ``vmap`` puts its dimension: where the first operand that has it has it."""
    return next((dim for dim in dims if dim is not None), 0)


def batch_size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    sizes: list[int] = [x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None]
    return sizes[0]


def with_batch(x: Any, dim: int | None, place: int, size: int) -> Any:
    """Return an operand with the batch at a place."""
    if dim is not None:
        return jnp.moveaxis(x, dim, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    return jnp.broadcast_to(lax.expand_dims(x, (place,)), shape)
