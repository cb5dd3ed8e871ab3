"""A row of the table of kernels of ``gemm/sm90``: the differences from the plain kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.config import (
    WGMMA_ARITHMETICS,
    WgmmaInstance,
    WgmmaTile,
    dense_tiles,
)
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel, Parameter

# Parameters before and after the shape.
Parameters = tuple[tuple[Parameter, ...], tuple[Parameter, ...]]


@dataclass(frozen=True)
class Variant:
    """A kernel of dense products.

    Attributes
    ----------
    name
        Its name, in launch plans.
    key
        How the keys of its candidates begin.
    tiles
        Those that it may have.
    computes
        What it computes, for ``explain``, if it is not all of one product.
    kernel
        What it is called where it does not compute in an arithmetic.
    arithmetics
        Those that it computes in.
    swaps
        Whether the operands are swapped.
    store_row_bytes
        What a tile's rows of the output are a multiple of.
    has_passes
        Whether operands that TMA does not load are packed, and partial results of split-K added.
    rereads
        Whether its estimate counts what narrow tiles read again.
    ping_pong
        The measured time of ping-pong consumers over the estimate, relative to cooperative ones.
    refusal
        ``refusal(product)`` says why the kernel does not take a product.
    instance
        ``instance(product, view, instance, gpu)`` makes a plain kernel this one, or returns
        ``None`` if it does not have the tile.
    work_tiles
        ``work_tiles(tile, view)`` counts tiles of the output.
    parameters
        ``parameters(product, instance)`` returns those before and after the shape that a plain
        kernel does not have.
    """

    name: str
    key: str
    tiles: Sequence[WgmmaTile]
    computes: str = ""
    kernel: str = "kernel"
    arithmetics: Collection[str] = tuple(WGMMA_ARITHMETICS)
    swaps: Sequence[bool] = (False, True)
    store_row_bytes: int = TILE_ROW_BYTES
    has_passes: bool = True
    rereads: bool = True
    ping_pong: float = 1.0
    refusal: Callable[[Product], NoKernel | None] = lambda product: None
    instance: Callable[[Product, OrientedProduct, WgmmaInstance, Gpu], WgmmaInstance | None] = (
        lambda product, view, instance, gpu: instance
    )
    work_tiles: Callable[[WgmmaTile, OrientedProduct], int] = dense_tiles
    parameters: Callable[[Product, WgmmaInstance], Parameters] = lambda product, instance: ((), ())
