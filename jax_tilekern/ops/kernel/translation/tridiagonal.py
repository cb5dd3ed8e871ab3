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
    lower, diagonal, upper, right = operands
    if right.size == 0:
        return [right]
    *batch, size, columns = right.shape
    read = diagonal if diagonal.whole else writer.copied(diagonal)
    changed = [
        writer.to_update(x, None, others)
        for x, others in (
            (lower, [diagonal, upper, right]),
            (upper, [lower, diagonal, right]),
            (right, [lower, diagonal, upper]),
        )
    ]

    def line(buffer: Buffer | None, indices: Sequence[Index], const: str = "") -> str:
        assert buffer is not None
        first = buffer.load((*indices, 0, 0)[: len(buffer.shape)])
        return f"lax::Line<{const}{right.cxx}>{{&{first}, {buffer.strides[len(batch)]}ll}}"

    with writer.elements(batch, changed[-1]) as indices:
        lines = [line(x, indices) for x in changed]
        lines.insert(1, line(read.whole, indices, "const "))
        step = changed[-1].strides[-1]
        writer.line(f"lax::solve_tridiagonal<{size}, {columns}>({', '.join(lines)}, {step}ll);")
    return [in_memory(changed[-1])]
