"""The passes of Winograd's form of Strassen's algorithm over float32 operands and products.

Each operand is cut into 2 x 2 blocks, and seven sums of blocks of one are multiplied by those of
the other. A pass reads the blocks where they lie and writes hi and lo float16 parts of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.gemm.passes.split_float32 import SplitPass, threads_of
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import StridedOperand, StridedRows, check_rows

PRODUCTS = 7
_FILE = "gemm/passes/winograd.cuh"
_THREADS = 256
# Elements of a thread, and CTAs per SM that hide the latency of memory.
_COMBINED = 4
_WAVES = 8


@dataclass(frozen=True)
class BlockTerms:
    """The terms of the seven sums.

    Attributes
    ----------
    blocks
        For each block, in the order in which they are added, whether it is in the second half of M
        or N, and whether it is in that of ``k``.
    signs
        For each sum, how each block takes part: 1, -1 or 0.
    """

    blocks: tuple[tuple[int, int], ...]
    signs: tuple[tuple[int, ...], ...]

    def values(self, mn_offset: int, k_offset: int) -> tuple[int, ...]:
        """Return the fields of ``BlockSums``, given the distances of the second halves."""
        masks = [
            sum(
                (sign == wanted) << (4 * product + block)
                for product, signs in enumerate(self.signs)
                for block, sign in enumerate(signs)
            )
            for wanted in (1, -1)
        ]
        return (
            *(mn * mn_offset + k * k_offset for mn, k in self.blocks),
            len(self.signs),
            *masks,
        )


# Blocks 21, 22, 11 and 12 of lhs.
LHS_TERMS = BlockTerms(
    ((1, 0), (1, 1), (0, 0), (0, 1)),
    (
        (0, 0, 1, 0), (0, 0, 0, 1), (-1, -1, 1, 1), (0, 1, 0, 0), (1, 1, 0, 0), (1, 1, -1, 0),
        (-1, 0, 1, 0),
    ),
)  # fmt: skip
# Blocks 12, 11, 22 and 21 of rhs.
RHS_TERMS = BlockTerms(
    ((1, 0), (0, 0), (1, 1), (0, 1)),
    (
        (0, 1, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (-1, 1, 1, -1), (1, -1, 0, 0), (-1, 1, 1, 0),
        (-1, 0, 1, 0),
    ),
)  # fmt: skip

COMBINE_KERNEL = Kernel(_FILE, "tilekern::combine_products")
SUM_KERNEL = Kernel(_FILE, "tilekern::sum_blocks_if")
_LAYOUT = "4q3I"


@dataclass(frozen=True)
class BlockSumSplitPass(SplitPass):
    """Splits the seven sums of an operand's blocks.

    ``operand`` is what the pass writes: a batch of seven matrices.

    Attributes
    ----------
    source
        A block of the operand, as its rows lie in memory.
    terms
        The sums.
    """

    source: StridedOperand
    terms: BlockTerms

    @classmethod
    def of(cls, whole: StridedOperand, terms: BlockTerms, gpu: Gpu) -> BlockSumSplitPass:
        """Return the pass over a matrix, whose sizes are even."""
        mn, k = whole.mn // 2, whole.k // 2
        source = StridedOperand((), mn, k, (), whole.mn_stride, whole.k_stride)
        sums = StridedOperand((PRODUCTS,), mn, k, (mn * k,), k, 1)
        return cls(sums, gpu, source, terms)

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        return self._kernel("split_block_sums", self.source, sums=True)

    def launch(self, compiled: Compiled, source: Buffer, parts: Buffer, facts: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers."""
        block = self.source
        rows = StridedRows.of([(block.mn, block.mn_stride * 4)] if block.k_major else [])
        check_rows(self.rows)
        shape = Scalars.pack(
            f"{StridedRows.LAYOUT}q4I",
            *rows.values,
            0 if block.k_major else block.k_stride * 4,
            block.mn,
            block.k,
            self.k_padded,
            self.rows,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(PRODUCTS * -(-block.mn // self._cta_rows(block)), 1, 1),
            block=(threads_of(block), 1, 1),
            parameters=(source, parts, facts, shape, self._sums),
        )

    def sums_launch(self, compiled: Compiled, flag: Buffer, source: Buffer, sums: Buffer) -> Launch:
        """Return the launch of ``SUM_KERNEL``, which writes ``float32[7][mn][k_padded]``.

        It does nothing unless the flag is set. The parts of the sums have the same size.
        """
        block = self.source
        layout = Scalars.pack(
            "2q3I", block.mn_stride * 4, block.k_stride * 4, block.mn, block.k, self.k_padded
        )
        return Launch(
            entry=compiled.entry(SUM_KERNEL.name),
            grid=(_WAVES * self.gpu.sm_count, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(flag, source, sums, layout, self._sums),
        )

    @property
    def _sums(self) -> Scalars:
        block = self.source
        offsets = block.mn * block.mn_stride * 4, block.k * block.k_stride * 4
        return Scalars.pack(_LAYOUT, *self.terms.values(*offsets))


def combine_launch(
    compiled: Compiled, rows: int, columns: int, products: Buffer, out: Buffer, gpu: Gpu
) -> Launch:
    """Return the launch of ``COMBINE_KERNEL``, which writes the result from the seven products.

    Parameters
    ----------
    compiled
        What ``COMBINE_KERNEL`` was compiled to.
    rows, columns
        Of a product; columns are a multiple of 4.
    products, out
        The products, and the result, which is row-major.
    gpu
        The GPU to plan for.
    """
    threads = rows * columns // _COMBINED
    return Launch(
        entry=compiled.entry(COMBINE_KERNEL.name),
        grid=(min(-(-threads // _THREADS), _WAVES * gpu.sm_count), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(products, out, Scalars.pack("I", rows), Scalars.pack("I", columns)),
    )
