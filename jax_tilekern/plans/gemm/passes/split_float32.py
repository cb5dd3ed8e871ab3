"""The passes that split float32 into float16 pieces, and decide whether these are good enough."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import (
    MOST_ROWS,
    ROW_BYTES,
    StridedOperand,
    StridedRows,
    check_rows,
    source_rows,
)

# Of an element.
PIECES = 2
_PIECE_BYTES = 2
# A warp walks shorter lines, and a block longer ones.
_LONG_LINE = 2048


@dataclass(frozen=True)
class SplitPass:
    """Splits float32 into float16 whose sum it is, ``[batch][lines][PIECES][k_padded]``.

    Rows are whole multiples of 128 bytes, and zeros follow on ``k``. Pieces are those of the line
    divided by a power of two. A second workspace, ``int32[3][batch][lines]``, holds each line's
    exponent of that power, how many of its elements the pieces miss, and how many are near its
    largest; see ``split_float32.cuh``. Batch dimensions that are broadcast are left out.

    Attributes
    ----------
    operand
        What to split, at any address of whole elements and with any strides.
    gpu
        What to plan for.
    """

    operand: StridedOperand
    gpu: Gpu

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = cxx_config(
            "SplitConfig",
            k_major=self.operand.k_major,
            threads=self._threads,
            line_lanes=self._line_lanes,
            min_blocks=3 if self.operand.k_major else 1,
        )
        return Kernel("gemm/passes/split_float32.cuh", f"tilekern::split_float32<{config}>")

    @property
    def k_padded(self) -> int:
        """Elements of a row of pieces, and the stride between the pieces of a line."""
        unit = ROW_BYTES // _PIECE_BYTES
        return -(-self.operand.k // unit) * unit

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the pieces: of the batch dimensions, lines, pieces of a line, and ``k``."""
        line = PIECES * self.k_padded
        batch = self.operand.dense_batch_strides(self.operand.lines * line)
        return (*batch, line, self.k_padded, 1)

    @property
    def pieces_bytes(self) -> int:
        """Size of the pieces."""
        return self.lines * PIECES * self.k_padded * _PIECE_BYTES

    @property
    def fact_strides(self) -> tuple[int, ...]:
        """Strides of each of the three arrays of facts: of the batch dimensions, and lines."""
        return (*self.operand.dense_batch_strides(self.operand.lines), 1)

    @property
    def facts_bytes(self) -> int:
        """Size of the facts: exponents, lost and dense elements, each an int32 for every line."""
        return 3 * 4 * self.lines

    @property
    def lines(self) -> int:
        """Lines of all matrices."""
        return self.operand.copied_lines

    @property
    def fits(self) -> bool:
        """Whether a launch can have its lines, of which a block takes at least one."""
        return self.lines <= MOST_ROWS

    @property
    def _threads(self) -> int:
        return 256 if self.operand.k_major else 512

    @property
    def _line_lanes(self) -> int:
        operand = self.operand
        if operand.k_major:
            return 1 if operand.k > _LONG_LINE else 8
        # 16 lines a block, or 8, which are the least that whole sectors hold, to have more blocks.
        return 4 if self.lines >= 16 * self.gpu.sm_count else 2

    def launch(self, compiled: Compiled, source: Buffer, pieces: Buffer, facts: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If it does not fit.
        """
        operand = self.operand
        rows = source_rows(operand, 4)
        block_lines = self._line_lanes * (1 if operand.k_major else 4)
        if operand.k_major:
            blocks = -(-rows.count // block_lines)
        else:
            blocks = rows.count * -(-operand.lines // block_lines)
        check_rows(self.lines)
        shape = Scalars.pack(
            f"{StridedRows.LAYOUT}q4I",
            *rows.values,
            0 if operand.k_major else operand.k_stride * 4,
            operand.lines,
            operand.k,
            self.k_padded,
            self.lines,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(blocks, 1, 1),
            block=(self._threads, 1, 1),
            parameters=(source, pieces, facts, shape),
        )


DECIDE_KERNEL = Kernel("gemm/passes/split_float32.cuh", "tilekern::decide_float32")


def decide_launch(
    compiled: Compiled,
    lhs: SplitPass,
    rhs: SplitPass,
    lhs_facts: Buffer,
    rhs_facts: Buffer,
    flag: Buffer,
) -> Launch:
    """Return the launch of ``DECIDE_KERNEL``, which writes one int32.

    It is 0 if the sum of the products of pieces, all but that of the two low ones, is as accurate
    as float32's own arithmetic, and 1 if it may not be.

    Parameters
    ----------
    compiled
        What ``DECIDE_KERNEL`` was compiled to.
    lhs, rhs
        How the operands were split.
    lhs_facts, rhs_facts
        What that found out.
    flag
        Where to write.
    """
    shape = Scalars.pack("3I", lhs.lines, rhs.lines, lhs.operand.k)
    return Launch(
        entry=compiled.entry(DECIDE_KERNEL.name),
        grid=(1, 1, 1),
        block=(1024, 1, 1),
        parameters=(lhs_facts, rhs_facts, flag, shape),
    )
