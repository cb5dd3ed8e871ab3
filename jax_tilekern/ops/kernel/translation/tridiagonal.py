"""Systems of tridiagonal matrices in a lane (``lane_tridiagonal.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_tilekern.epilogue.understood import one_of
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Buffer, Index, Value, in_memory
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule


# Pivots that are perturbed belong to singular systems.
@rule("tridiagonal_solve", perturb_singular=one_of(False))
def _tridiagonal_solve(
    writer: LaneWriter, _: Any, operands: list[Value], __: Places
) -> list[Value]:
    right = operands[-1]
    if right.size == 0:
        return [right]
    *batch, size, columns = right.shape
    buffers = [
        writer.to_update(x, None, [*operands[:i], *operands[i + 1 :]])
        for i, x in enumerate(operands)
    ]

    def line(buffer: Buffer, indices: Sequence[Index]) -> str:
        first = buffer.load((*indices, 0, 0)[: len(buffer.shape)])
        return f"lax::Line<{right.cxx}>{{&{first}, {buffer.strides[len(batch)]}ll}}"

    with writer.elements(batch, buffers[-1]) as indices:
        lines = ", ".join(line(x, indices) for x in buffers)
        step = buffers[-1].strides[-1]
        writer.line(f"lax::solve_tridiagonal<{size}, {columns}>({lines}, {step}ll);")
    return [in_memory(buffers[-1])]
