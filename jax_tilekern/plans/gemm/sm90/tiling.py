"""Candidates on the kernels of ``gemm/sm90``.

Dense products, emulated float32 and grouped GEMMs share what is here. A candidate is a tile, in
either orientation of the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.arithmetic import ElementTypes
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.epilogue_kernel import kernel_with_epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import TypedProduct
from jax_tilekern.plans.gemm.sm90.config import (
    MAX_TMA_BATCH_DIMS,
    MAX_WORK_TILES,
    TMA_STRIDE_BYTES,
    View,
    WgmmaInstance,
    WgmmaTile,
    takes,
)
from jax_tilekern.plans.gemm.sm90.staged_operands import staging_of
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, NoKernel, Parameter

_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class TiledWgmmaCandidate(CostedCandidate):
    """A tile for a product, not compiled yet.

    Attributes
    ----------
    tile
        The output's tile.
    instance
        The kernel.
    cycles
        The estimated cost.
    """

    tile: WgmmaTile
    instance: WgmmaInstance
    cycles: float

    @property
    def kind(self) -> str:
        """The kind of its consumers, and the orientation."""
        consumers = "cooperative" if self.tile.cooperative else "ping-pong"
        return consumers + (" swapped" if self.swapped else "")

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.instance.accumulators

    @property
    def swapped(self) -> bool:
        """Whether the kernel computes the output's transpose, with the operands swapped."""
        return self.instance.out_m_major

    @property
    def tile_key(self) -> str:
        """The tile and the orientation, as a key has them."""
        return self.tile.key + (" swapped" if self.swapped else "")

    @property
    def tile_reason(self) -> str:
        """The tile, its pipeline and the orientation, for ``explain``."""
        text = f"{self.tile}, {self.instance.stages} stages"
        text += ", dynamic tile scheduler" if self.instance.dynamic else ""
        return text + (", operands swapped" if self.swapped else "")

    def fused(
        self,
        epilogue: Epilogue | None,
        geometry: MatmulGeometry,
        out_buffer: int,
        partials: Sequence[Buffer] = (),
    ) -> tuple[Kernel, tuple[Parameter, ...]]:
        """Return the kernel with an epilogue, and the parameters that follow its own.

        The epilogue and the geometry are those of the product before any swap; ``partials`` are
        workspaces of its reductions.
        """
        plain, rows, columns = self.instance.kernel, geometry.m, geometry.n
        if epilogue is None:
            return plain, ()
        if self.swapped:
            epilogue, rows, columns = epilogue.swapped(), columns, rows
        staging = staging_of(self.instance, epilogue, geometry, out_buffer)
        kernel = kernel_with_epilogue(
            plain,
            epilogue,
            columns=columns,
            within_rows=rows % (self.tile.block_m * self.tile.cluster) == 0,
            within_columns=columns % self.tile.out_n == 0,
            tile_columns=self.tile.out_n,
            staging=staging,
        )
        return kernel, epilogue.parameters(out_buffer, partials, staging)

    def out_alignment(self, itemsize: int) -> int:
        """Return the bytes that the output's address is a multiple of."""
        return TMA_STRIDE_BYTES if self.instance.tma_store else itemsize


def oriented_tiles(
    view: View, tiles: Sequence[WgmmaTile], gpu: Gpu, *, swaps: Sequence[bool] = (False, True)
) -> Iterator[tuple[WgmmaTile, View]]:
    """Yield the tiles that a product can have, each with the product as the kernel computes it.

    Parameters
    ----------
    view
        The product as its operands lie.
    tiles
        Tiles to choose from.
    gpu
        What it is for.
    swaps
        Whether the operands are swapped; both orientations unless given.
    """
    for swapped in swaps:
        oriented = view.swapped() if swapped else view
        for tile in tiles:
            if takes(tile, oriented, gpu):
                yield tile, oriented


def is_launchable(instance: WgmmaInstance, work_tiles: int) -> bool:
    """Whether the kernel compiles without spills, and can count its work tiles."""
    return instance.fits_registers and work_tiles <= MAX_WORK_TILES


def refusal(product: TypedProduct[Any], types: ElementTypes, gpu: Gpu) -> NoKernel | None:
    """Return why the kernels do not take a product on a GPU, or ``None``."""
    if gpu.compute_capability != _CAPABILITY:
        return NoKernel(f"{product.arithmetic} takes sm_90a, and this is {gpu.arch}")
    batch = product.strided.batch
    if len(batch) > MAX_TMA_BATCH_DIMS:
        return NoKernel(f"{len(batch)} batch dimensions (wgmma takes at most {MAX_TMA_BATCH_DIMS})")
    return product.refusal(types)
