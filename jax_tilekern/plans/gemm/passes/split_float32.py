"""The passes that split float32 into hi and lo float16 parts, and decide if these are accurate."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gemm.geometry import StridedOperand
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import (
    MAX_ROWS,
    ROW_BYTES,
    StridedRows,
    check_rows,
    source_rows,
)

# The parts of an element: hi and lo.
PARTS = 2
_PART_BYTES = 2
# A warp or a part of it walks shorter rows, and a CTA longer ones.
_LONG_ROW = 2048
# Half a warp: the other half works on the same rows.
_MOST_ROW_LANES = 16


def padded(k: int) -> int:
    """Return the elements of a row of one part, of ``k`` elements."""
    unit = ROW_BYTES // _PART_BYTES
    return -(-k // unit) * unit


@dataclass(frozen=True)
class SplitPass:
    """Splits float32 into hi and lo float16 parts, ``[batch][mn][PARTS][k_padded]``.

    Rows are multiples of 128 bytes, padded with zeros. A row is divided by a power of two before
    the split. A second workspace, ``int32[3][batch][mn]``, holds the exponent of that power, how
    many elements of the row the parts do not represent, and how many are near its largest; see
    ``split_float32.cuh``. Batch dimensions that are broadcast are left out.

    Attributes
    ----------
    operand
        The operand, at any address of whole elements and with any strides.
    gpu
        The GPU to plan for.
    """

    operand: StridedOperand
    gpu: Gpu

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        config = cxx_config(
            "SplitConfig",
            k_major=self.operand.k_major,
            threads=self._threads,
            line_lanes=self._row_lanes,
            min_blocks=3 if self.operand.k_major else 1,
        )
        return Kernel("gemm/passes/split_float32.cuh", f"tilekern::split_float32<{config}>")

    @property
    def k_padded(self) -> int:
        """Elements of a row of hi or lo parts, and the stride between the two rows."""
        return padded(self.operand.k)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the parts: of the batch dimensions, M or N, hi and lo, and ``k``."""
        line = PARTS * self.k_padded
        batch = self.operand.dense_batch_strides(self.operand.mn * line)
        return (*batch, line, self.k_padded, 1)

    @property
    def parts_bytes(self) -> int:
        """Size of the parts."""
        return self.rows * PARTS * self.k_padded * _PART_BYTES

    @property
    def fact_strides(self) -> tuple[int, ...]:
        """Strides of each of the three arrays of facts: of the batch dimensions, and of M or N."""
        return (*self.operand.dense_batch_strides(self.operand.mn), 1)

    @property
    def facts_bytes(self) -> int:
        """Size of the facts: exponents, lost and dense elements, each an int32 for every row."""
        return 3 * 4 * self.rows

    @property
    def rows(self) -> int:
        """Rows of k of all matrices."""
        return self.operand.copied_rows

    @property
    def fits(self) -> bool:
        """Whether a launch can have its rows, of which a CTA takes at least one."""
        return self.rows <= MAX_ROWS

    @property
    def _threads(self) -> int:
        if self.operand.k_major:
            return 256
        # The fewest threads that cover a short row of k.
        wanted = self._row_lanes * self.k_padded // 4
        return next((threads for threads in (128, 256) if threads >= wanted), 512)

    @property
    def _row_lanes(self) -> int:
        operand = self.operand
        if operand.k_major:
            if operand.k > _LONG_ROW:
                return 1
            # A thread has 16 elements of a row at a time.
            lanes_of_k = next((n for n in (4, 8, 16) if 16 * n >= operand.k), 32)
            return self._threads // lanes_of_k
        # 16 rows a CTA, or 8, which still fill whole sectors, where that takes more SMs. More rows
        # where one step of 512 threads would go beyond a short k.
        lanes = 4 if self.rows >= 16 * self.gpu.available_sms else 2
        while (
            lanes < _MOST_ROW_LANES
            and 512 // lanes * 4 > self.k_padded
            and self.rows >= 16 * lanes * self.gpu.available_sms
        ):
            lanes *= 2
        return lanes

    def launch(self, compiled: Compiled, source: Buffer, parts: Buffer, facts: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If it does not fit.
        """
        operand = self.operand
        rows = source_rows(operand, 4)
        cta_rows = self._row_lanes * (1 if operand.k_major else 4)
        if operand.k_major:
            blocks = -(-rows.count // cta_rows)
        else:
            blocks = rows.count * -(-operand.mn // cta_rows)
        check_rows(self.rows)
        shape = Scalars.pack(
            f"{StridedRows.LAYOUT}q4I",
            *rows.values,
            0 if operand.k_major else operand.k_stride * 4,
            operand.mn,
            operand.k,
            self.k_padded,
            self.rows,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(blocks, 1, 1),
            block=(self._threads, 1, 1),
            parameters=(source, parts, facts, shape),
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

    It is 0 if hi*hi + hi*lo + lo*hi is as accurate as float32 arithmetic, and 1 if it may not be.

    Parameters
    ----------
    compiled
        What ``DECIDE_KERNEL`` was compiled to.
    lhs, rhs
        How the operands were split.
    lhs_facts, rhs_facts
        What the splits found out.
    flag
        The flag.
    """
    shape = Scalars.pack("3I", lhs.rows, rhs.rows, lhs.operand.k)
    return Launch(
        entry=compiled.entry(DECIDE_KERNEL.name),
        grid=(1, 1, 1),
        block=(1024, 1, 1),
        parameters=(lhs_facts, rhs_facts, flag, shape),
    )
