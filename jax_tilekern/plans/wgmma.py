"""Plans for matrix products on Hopper: the kernel of ``wgmma_matmul.cuh``.

A candidate is a tile, whether the operands change places, and in how many splits ``k`` is taken.
Operands that tensor maps cannot read are packed first, and splits are added up last
(``operand_passes.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jax_tilekern.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans import mma
from jax_tilekern.plans.geometry import MatmulGeometry
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Parameter, Scalars, TensorMap, TensorMapDtype
from jax_tilekern.plans.operand_passes import PackPass, StridedOperand, SumPass
from jax_tilekern.plans.product import CXX_TYPES, Candidate, MatmulPlan, Product, copy_cycles

_Dtype = np.dtype[Any]

_F32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
# A row of an operand's or of an output's tile in shared memory, and the slabs of an output that a
# consumer has there.
_ROW_BYTES = 128
_SLABS_BYTES = 2 * 8192
_BARRIER_BYTES = 8
MAX_BATCH_DIMS = 3
_BOX_STRIDE_BYTES = 16
# More would be idle, or cost tiles' worth of latency to fill.
_MOST_STAGES = 12
# Of which a block counts past the last by as many as there are blocks.
_MOST_ITEMS = 2**31 - 1024


@dataclass(frozen=True)
class WgmmaTile:
    """The tile of the output that is computed at a time.

    Attributes
    ----------
    block_m, block_n
        Its size.
    consumers
        Warpgroups that multiply.
    cooperative
        Whether they share a tile, rather than taking turns at tiles.
    cluster
        Blocks that share the copies of ``rhs``.
    """

    block_m: int
    block_n: int
    consumers: int = 2
    cooperative: bool = True
    cluster: int = 1

    def __str__(self) -> str:
        """Return the size and what is unusual."""
        text = f"{self.block_m}x{self.block_n}"
        text += "" if self.consumers == 2 else f" by {self.consumers}"
        text += "" if self.cooperative else " in turns"
        return text + ("" if self.cluster == 1 else f" clusters of {self.cluster}")


# Products of one warpgroup are 64 rows by up to 256 columns.
_TILES = (
    WgmmaTile(128, 256),
    WgmmaTile(256, 128),
    WgmmaTile(128, 256, cluster=2),
    WgmmaTile(256, 128, cluster=2),
    WgmmaTile(128, 128, cooperative=False),
    WgmmaTile(128, 128),
    WgmmaTile(128, 64),
    WgmmaTile(64, 128, consumers=1),
    WgmmaTile(64, 64, consumers=1),
    WgmmaTile(64, 64, cooperative=False),
    WgmmaTile(128, 32),
    WgmmaTile(128, 16),
    WgmmaTile(64, 32, consumers=1),
    WgmmaTile(64, 16, consumers=1),
)


@dataclass(frozen=True)
class WgmmaArithmetic:
    """How the kernel computes.

    Attributes
    ----------
    macs_per_cycle
        Multiply-adds of a multiprocessor in a cycle.
    promote
        Whether sums are added up outside the tensor cores; see ``WgmmaConfig``.
    """

    macs_per_cycle: int
    promote: bool = False


ARITHMETICS = {
    "bf16": WgmmaArithmetic(2048),
    "f16": WgmmaArithmetic(2048),
    "tf32": WgmmaArithmetic(1024),
    "int8": WgmmaArithmetic(4096),
    "fp8": WgmmaArithmetic(4096, promote=True),
    "fp8_fast": WgmmaArithmetic(4096),
}


@dataclass(frozen=True)
class WgmmaInstance:
    """One compiled kernel: its types and its ``WgmmaConfig``; see ``wgmma_shape.cuh``."""

    types: tuple[str, str, str]
    block_m: int
    block_n: int
    block_k: int
    stages: int
    consumers: int
    cooperative: bool
    cluster: int
    lhs_k_major: bool
    rhs_k_major: bool
    out_m_major: bool
    out_boxes: bool
    promote: bool
    pieces: int = 1
    order: int = 0

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        # int() turns the flags into 0 and 1, which C++ takes for bool.
        config = ", ".join(f".{name} = {int(value)}" for name, value in fields.items())
        types = "".join(f"{name}, " for name in self.types)
        name = f"wgmma_matmul<{types}" if self.pieces == 1 else "wgmma_matmul_of_pieces<"
        return Kernel("wgmma_matmul.cuh", f"tilekern::{name}tilekern::WgmmaConfig{{{config}}}>")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a tile of each operand."""
        return self.pieces * (self.block_m + self.block_n) * _ROW_BYTES

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        ring = self.stages * (self.stage_bytes + 2 * _BARRIER_BYTES)
        return ring + self.consumers * (_SLABS_BYTES + _BARRIER_BYTES)

    def with_most_stages(self, gpu: Gpu) -> WgmmaInstance:
        """Return the same with as many stages as fit and are of use."""
        empty = dataclasses.replace(self, stages=0)
        room = gpu.shared_memory_bytes - empty.shared_memory_bytes
        stages = min(room // (self.stage_bytes + 2 * _BARRIER_BYTES), _MOST_STAGES)
        return dataclasses.replace(self, stages=stages)


@dataclass(frozen=True)
class View:
    """A product as the kernel has it: operands in buffers, exchanged or not."""

    batch: tuple[int, ...]
    # Of the product; rows of pieces are longer.
    k: int
    lhs: StridedOperand
    rhs: StridedOperand
    lhs_dtype: _Dtype
    rhs_dtype: _Dtype
    lhs_buffer: int
    rhs_buffer: int
    # Of the output: its batch dimensions' sizes and strides, and strides of the kernel's m and n.
    out_dtype: _Dtype
    out_buffer: int
    out_batch: tuple[tuple[int, int], ...]
    out_m_stride: int
    out_n_stride: int
    # Whether the output's unit stride is along the kernel's m.
    out_m_major: bool = False
    # Between an operand's pieces, in elements of k.
    piece_step: int = 0

    def exchanged(self) -> View:
        """Return the transposed product."""
        return dataclasses.replace(
            self,
            lhs=self.rhs,
            rhs=self.lhs,
            lhs_dtype=self.rhs_dtype,
            rhs_dtype=self.lhs_dtype,
            lhs_buffer=self.rhs_buffer,
            rhs_buffer=self.lhs_buffer,
            out_m_stride=self.out_n_stride,
            out_n_stride=self.out_m_stride,
            out_m_major=True,
        )


@dataclass(frozen=True)
class WgmmaCandidate(Candidate):
    """A kernel for a product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    tile
        The output's tile.
    exchanged
        Whether the kernel computes the output's transpose from the operands' transposes.
    splits
        Parts of ``k`` whose sums are added up by another kernel.
    instance
        The kernel.
    cycles
        The estimated cost.
    """

    product: Product
    tile: WgmmaTile
    exchanged: bool
    splits: int
    instance: WgmmaInstance
    cycles: float

    @property
    def key(self) -> str:
        """The tile, the order of the operands, and splits."""
        text = f"wgmma {self.tile}" + (" exchanged" if self.exchanged else "")
        return text + (f" in {self.splits} splits" if self.splits > 1 else "")

    def plan(self, gpu: Gpu) -> MatmulPlan:
        """Compile it, with the passes that it needs."""
        product, instance = self.product, self.instance
        packs = _packs(product)
        sums = _sum_pass(product, self.splits)
        passes: list[PackPass | SumPass] = [*packs.values(), *([sums] if sums else [])]
        kernels = dict.fromkeys([instance.kernel, *(p.kernel for p in passes)])
        compiled = compile_kernels(*kernels, arch=gpu.arch)

        workspaces = {id(p): Buffer(3 + i) for i, p in enumerate(passes)}
        launches = [
            pack.launch(compiled, Buffer(buffer), workspaces[id(pack)])
            for buffer, pack in packs.items()
        ]
        view = view_of(product, packs, 3)
        if sums:
            view = _with_split_output(view, sums, workspaces[id(sums)].index, self.splits)
        view = view.exchanged() if self.exchanged else view
        launches.append(launch_tiles(compiled, self.tile, instance, view, self.splits, gpu))
        if sums:
            launches.append(sums.launch(compiled, workspaces[id(sums)], Buffer(2)))
        out_alignment = _BOX_STRIDE_BYTES if instance.out_boxes else product.out_dtype.itemsize
        return MatmulPlan(
            name=f"wgmma_matmul {product.arithmetic}",
            gpu=gpu,
            cubin=compiled.cubin,
            launches=tuple(launches),
            alignments=(
                *(
                    dtype.itemsize if buffer in packs else _BOX_STRIDE_BYTES
                    for buffer, dtype in enumerate((product.lhs_dtype, product.rhs_dtype))
                ),
                sums.out_alignment if sums else out_alignment,
            ),
            workspace_bytes=tuple(p.workspace_bytes for p in passes),
            reason=self._reason(packs),
        )

    def _reason(self, packs: dict[int, PackPass]) -> str:
        text = f"{self.tile}, {self.instance.stages} stages"
        text += ", as the transposed product" if self.exchanged else ""
        text += f", k in {self.splits} splits" if self.splits > 1 else ""
        names = [("lhs", "rhs")[buffer] for buffer in packs]
        return text + (f", {' and '.join(names)} packed first" if names else "")


def launch_tiles(
    compiled: Compiled,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: View,
    splits: int,
    gpu: Gpu,
    finish: tuple[tuple[Parameter, ...], tuple[Parameter, ...]] = ((), ()),
) -> Launch:
    """Return the launch of a kernel, given what ``instance.kernel`` was compiled to.

    ``finish`` has the parameters before and after the shape of a kernel that has some.
    """
    tiles_m, tiles_n = _tiles(tile, view.lhs.lines, view.rhs.lines)
    k_tiles = math.ceil(view.k / instance.block_k)
    split_k_tiles = math.ceil(k_tiles / splits)
    items = math.ceil(k_tiles / split_k_tiles) * math.prod(view.batch) * tiles_m * tiles_n
    clusters = min(items, gpu.multiprocessors // instance.cluster)

    missing = (0,) * (MAX_BATCH_DIMS - len(view.batch))
    out_missing = (0,) * (MAX_BATCH_DIMS - len(view.out_batch))
    shape = Scalars.pack(
        f"{MAX_BATCH_DIMS + 1}q{3 * MAX_BATCH_DIMS + 10}i",
        *out_missing,
        *(stride for _, stride in view.out_batch),
        view.out_n_stride if instance.out_m_major else view.out_m_stride,
        *(1 for _ in missing),
        *view.batch,
        *missing,
        *(int(stride != 0) for stride in view.lhs.batch_strides),
        *missing,
        *(int(stride != 0) for stride in view.rhs.batch_strides),
        math.prod(view.batch),
        view.lhs.lines,
        view.rhs.lines,
        k_tiles,
        split_k_tiles,
        view.piece_step,
        tiles_m,
        tiles_n,
        _band(tile, tiles_m, gpu),
        items,
    )
    lhs = _operand_map(
        view.lhs, view.lhs_dtype, view.lhs_buffer, instance.lhs_k_major, instance.block_m
    )
    rhs_lines = instance.block_n // instance.cluster
    rhs = _operand_map(view.rhs, view.rhs_dtype, view.rhs_buffer, instance.rhs_k_major, rhs_lines)
    return Launch(
        entry=compiled.entry(instance.kernel.name),
        grid=(clusters * instance.cluster, 1, 1),
        block=(instance.threads, 1, 1),
        # A kernel that stores the output itself takes any map in the place of the output's.
        parameters=(
            lhs,
            rhs,
            _out_map(view, instance) if instance.out_boxes else lhs,
            Buffer(view.out_buffer),
            *finish[0],
            shape,
            *finish[1],
        ),
        shared_memory_bytes=instance.shared_memory_bytes,
        cluster=(instance.cluster, 1, 1),
    )


def candidates(product: Product, gpu: Gpu) -> Iterator[WgmmaCandidate]:
    """Yield the ways to compute a product; none if the kernel is not for the product or the GPU."""
    how = ARITHMETICS.get(product.arithmetic)
    if how is None or gpu.compute_capability != (9, 0):
        return
    packs = _packs(product)
    view = view_of(product, packs, 3)
    if max(len(view.lhs.batch_strides), len(view.batch)) > MAX_BATCH_DIMS:
        return
    for exchanged in (False, True):
        oriented = view.exchanged() if exchanged else view
        for tile in _TILES:
            if not takes(tile, oriented, how, gpu):
                continue
            for splits in _split_counts(tile, oriented, gpu):
                instance = instance_for(tile, oriented, how, splits, gpu)
                tiles_m, tiles_n = _tiles(tile, oriented.lhs.lines, oriented.rhs.lines)
                items = splits * math.prod(view.batch) * tiles_m * tiles_n
                if items > _MOST_ITEMS:
                    continue
                busy = busy_cycles(tile, instance, oriented, how, splits, gpu)
                cycles = product.cycles(busy)
                cycles += sum(copy_cycles(pack.workspace_bytes) for pack in packs.values())
                if splits > 1:
                    cycles += copy_cycles(splits * _outputs(product) * 4)
                yield WgmmaCandidate(product, tile, exchanged, splits, instance, cycles)


def _packs(product: Product) -> dict[int, PackPass]:
    """Return the packs that operands need, by buffer.

    Of tiles in shared memory, wgmma takes lines side by side in 16-bit types alone. The kernel
    turns around one such operand, so that if both are, the smaller is packed.
    """
    operands = (StridedOperand.lhs(product.geometry), StridedOperand.rhs(product.geometry))
    dtypes = (product.lhs_dtype, product.rhs_dtype)
    packs = {
        buffer: PackPass(operand, dtype.itemsize)
        for buffer, (operand, dtype) in enumerate(zip(operands, dtypes, strict=True))
        if not _fits_boxes(operand, dtype)
    }
    turned = [i for i, operand in enumerate(operands) if not operand.k_major and i not in packs]
    if dtypes[0].itemsize != 2 and len(turned) == 2:
        smaller = min(turned, key=lambda i: operands[i].lines * operands[i].matrices)
        packs[smaller] = PackPass(operands[smaller], dtypes[smaller].itemsize)
    return packs


def _fits_boxes(operand: StridedOperand, dtype: _Dtype) -> bool:
    """Whether a tensor map can describe it."""
    outer = (
        (operand.lines, operand.line_stride) if operand.k_major else (operand.k, operand.k_stride)
    )
    dims = [outer, *zip(operand.batch, operand.batch_strides, strict=True)]
    return all(
        stride * dtype.itemsize % _BOX_STRIDE_BYTES == 0 for size, stride in dims if size > 1
    )


def view_of(product: Product, packs: dict[int, PackPass], first_workspace: int) -> View:
    """Return the product of the operands as they lie, or packed in workspaces."""
    geometry = product.geometry
    operands = [StridedOperand.lhs(geometry), StridedOperand.rhs(geometry)]
    buffers = [0, 1]
    for i, (buffer, pack) in enumerate(packs.items()):
        *batch, line, k = pack.strides
        operands[buffer] = dataclasses.replace(
            operands[buffer], batch_strides=tuple(batch), line_stride=line, k_stride=k
        )
        buffers[buffer] = first_workspace + i
    *out_batch, out_m, out_n = geometry.out_strides
    return View(
        batch=geometry.batch,
        k=geometry.k,
        lhs=operands[0],
        rhs=operands[1],
        lhs_dtype=product.lhs_dtype,
        rhs_dtype=product.rhs_dtype,
        lhs_buffer=buffers[0],
        rhs_buffer=buffers[1],
        out_dtype=product.out_dtype,
        out_buffer=2,
        out_batch=tuple(zip(geometry.batch, out_batch, strict=True)),
        out_m_stride=out_m,
        out_n_stride=out_n,
    )


def _sum_pass(product: Product, splits: int) -> SumPass | None:
    if splits == 1:
        return None
    sum_dtype = _INT32 if product.arithmetic == "int8" else _F32
    return SumPass(product.geometry, splits, sum_dtype, product.out_dtype)


def _outputs(product: Product) -> int:
    return math.prod(product.geometry.batch) * product.geometry.m * product.geometry.n


def _with_split_output(view: View, sums: SumPass, buffer: int, splits: int) -> View:
    m, n = view.lhs.lines, view.rhs.lines
    return dataclasses.replace(
        view,
        out_dtype=sums.sum_dtype,
        out_buffer=buffer,
        out_batch=((splits * math.prod(view.batch), m * n),),
        out_m_stride=n,
        out_n_stride=1,
    )


def takes(tile: WgmmaTile, view: View, how: WgmmaArithmetic, gpu: Gpu) -> bool:
    """Whether there is a kernel with this tile for a product."""
    wide = view.lhs_dtype.itemsize == 2
    out_row = _ROW_BYTES // view.out_dtype.itemsize
    sums = tile.block_m * tile.block_n // (tile.consumers if tile.cooperative else 1)
    return not (
        tile.cluster > gpu.multiprocessors
        or (not wide and not view.rhs.k_major)
        or (not view.rhs.k_major and tile.block_n // tile.cluster % 64)
        or (not view.lhs.k_major and not wide and tile.block_m % (128 // view.lhs_dtype.itemsize))
        or (not view.out_m_major and tile.block_n % out_row)
        # Registers: promotion takes two sets of sums.
        or (how.promote and sums > 64 * 128)
    )


def _split_counts(tile: WgmmaTile, view: View, gpu: Gpu) -> Iterator[int]:
    """Yield 1, and numbers of splits that occupy multiprocessors that would be idle."""
    yield 1
    items = math.prod(_tiles(tile, view.lhs.lines, view.rhs.lines)) * math.prod(view.batch)
    k_tiles = math.ceil(view.k * view.lhs_dtype.itemsize / _ROW_BYTES)
    most = min(gpu.multiprocessors // tile.cluster // items, k_tiles // 8)
    for splits in sorted({most, most // 2, 2} - {1}):
        # Every split has some of k.
        if 1 < splits <= most and (splits - 1) * math.ceil(k_tiles / splits) < k_tiles:
            yield splits


def instance_for(
    tile: WgmmaTile, view: View, how: WgmmaArithmetic, splits: int, gpu: Gpu, pieces: int = 1
) -> WgmmaInstance:
    """Return the kernel with this tile for a product."""
    out_dtype = view.out_dtype
    lines, stride = view.lhs.lines, view.out_m_stride
    if view.out_m_major:
        lines, stride = view.rhs.lines, view.out_n_stride
    out_batch = view.out_batch
    if splits > 1:
        # Of the partial sums, which are dense.
        out_dtype = _INT32 if out_dtype == _INT32 else _F32
        stride = view.lhs.lines if view.out_m_major else view.rhs.lines
        out_batch = ((splits * math.prod(view.batch), view.lhs.lines * view.rhs.lines),)
    out_boxes = all(
        step * out_dtype.itemsize % _BOX_STRIDE_BYTES == 0
        for size, step in ((lines, stride), *out_batch)
        if size > 1
    )
    return WgmmaInstance(
        types=(CXX_TYPES[view.lhs_dtype], CXX_TYPES[view.rhs_dtype], CXX_TYPES[out_dtype]),
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=_ROW_BYTES // view.lhs_dtype.itemsize,
        stages=0,
        consumers=tile.consumers,
        cooperative=tile.cooperative,
        cluster=tile.cluster,
        lhs_k_major=view.lhs.k_major,
        rhs_k_major=view.rhs.k_major,
        out_m_major=view.out_m_major,
        out_boxes=out_boxes,
        promote=how.promote,
        pieces=pieces,
        # Products that are smaller than the pieces' own rounding do not count.
        order=pieces - 1,
    ).with_most_stages(gpu)


def _tiles(tile: WgmmaTile, m: int, n: int) -> tuple[int, int]:
    """Tiles of the output along ``m``, in clusters, and along ``n``."""
    return math.ceil(m / (tile.block_m * tile.cluster)), math.ceil(n / tile.block_n)


# Bytes have no arithmetic, and float32 is rounded to TF32 on its way.
_MAP_DTYPES = {
    "int8": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float32": "tfloat32",
}


def _operand_map(
    operand: StridedOperand, dtype: _Dtype, buffer: int, k_major: bool, block_lines: int
) -> TensorMap:
    lines, k = (operand.lines, operand.line_stride), (operand.k, operand.k_stride)
    row = _ROW_BYTES // dtype.itemsize
    # A box is a row of k for each line, or a row of lines for each k.
    return _map(
        buffer,
        _MAP_DTYPES.get(dtype.name, dtype.name),
        dtype.itemsize,
        (k, lines) if k_major else (lines, k),
        [*zip(operand.batch, operand.batch_strides, strict=True)],
        (row, block_lines if k_major else row),
    )


def _out_map(view: View, instance: WgmmaInstance) -> TensorMap:
    m, n = (view.lhs.lines, view.out_m_stride), (view.rhs.lines, view.out_n_stride)
    row = _ROW_BYTES // view.out_dtype.itemsize
    # A slab of WgmmaEpilogue is 64 rows of n, or rows of m as many as the columns of a slab.
    return _map(
        view.out_buffer,
        view.out_dtype.name,
        view.out_dtype.itemsize,
        (m, n) if instance.out_m_major else (n, m),
        [*view.out_batch],
        (row, min(instance.block_n, row) if instance.out_m_major else 64),
    )


def _map(
    buffer: int,
    dtype: str,
    itemsize: int,
    matrix: tuple[tuple[int, int], tuple[int, int]],
    batch: list[tuple[int, int]],
    box: tuple[int, int],
) -> TensorMap:
    """Return the map of a matrix, given sizes and strides innermost first, and of its batch."""
    # An operand stays at 0 in dimensions that it is broadcast over.
    outer = [(size if stride else 1, stride) for size, stride in reversed(batch)]
    outer += [(1, 0)] * (MAX_BATCH_DIMS - len(batch))
    (inner, _), *rest = *matrix, *outer
    return TensorMap(
        buffer,
        cast("TensorMapDtype", dtype),
        (inner, *(size for size, _ in rest)),
        # Of a dimension of size 1 any stride will do.
        tuple(stride * itemsize if size > 1 else _BOX_STRIDE_BYTES for size, stride in rest),
        (*box, *(1,) * MAX_BATCH_DIMS),
        swizzle=128,
    )


def _band(tile: WgmmaTile, tiles_m: int, gpu: Gpu) -> int:
    """Rows of tiles in a band: what makes the least of the lines that running blocks share."""
    running, height = gpu.multiprocessors // tile.cluster, tile.block_m * tile.cluster

    def lines(band: int) -> int:
        return band * height + math.ceil(running / band) * tile.block_n

    return min((band for band in (1, 2, 4, 8, 16, 32) if band <= tiles_m), key=lines)


# Measured on an H100: what a multiprocessor gets from the second-level cache, in bytes a cycle.
_L2_BANDWIDTH = 62
_SHARED_BANDWIDTH = 128


def busy_cycles(
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: View,
    how: WgmmaArithmetic,
    splits: int,
    gpu: Gpu,
) -> float:
    """Estimate the cycles of the busiest multiprocessor, were memory no limit."""
    items = splits * math.prod(view.batch) * math.prod(_tiles(tile, view.lhs.lines, view.rhs.lines))
    rounds = math.ceil(items / (gpu.multiprocessors // tile.cluster))
    k_tiles = math.ceil(math.ceil(view.k / instance.block_k) / splits)
    operand_reads = tile.block_m // 64 * (64 + tile.block_n) * _ROW_BYTES
    products = instance.pieces * (instance.pieces + 1) // 2
    k_tile = max(
        products * tile.block_m * tile.block_n * instance.block_k / how.macs_per_cycle,
        products * operand_reads / _SHARED_BANDWIDTH,
        instance.pieces * (tile.block_m + tile.block_n) * _ROW_BYTES / _L2_BANDWIDTH,
    )
    # Measured: two 16-bit operands of which neither is k-major, what passes through registers, and
    # what is added up outside the tensor cores.
    if not instance.lhs_k_major and not instance.rhs_k_major and tile.block_n > 128:
        k_tile *= 1.03
    if not instance.lhs_k_major and view.lhs_dtype.itemsize != 2:
        k_tile *= 1.1 if tile.block_n > 128 else 1.3
    if how.promote:
        k_tile *= 1.2
    store = 400 + tile.block_m * tile.block_n * view.out_dtype.itemsize / 64
    if not instance.out_boxes:
        store *= 4
    # Consumers that take turns store while others multiply, unless they store element by element.
    if tile.cooperative or rounds == 1 or not instance.out_boxes:
        item = k_tiles * k_tile + store
    else:
        # Over many rounds they spread over more of the operands than the cache holds.
        item = (max(k_tiles * k_tile, store) + 100) * (1.05 if rounds > 2 else 1)
    # Clusters save reads of the second-level cache, which has not been seen to pay.
    return rounds * item * (1 if tile.cluster == 1 else 1.02)


# Sizes of which no dimension is short.
_MANY = 1 << 12


def instances(gpu: Gpu) -> Iterator[WgmmaInstance]:
    """Kernels that plans for ``gpu`` can ask for, so that a test can compile them.

    Features that are independent in the code are not crossed: of bfloat16, TF32, int8 and a pair of
    8-bit floats there is each tile in the order that most take, and the larger ones in all four
    major orders and with stores of single elements; of the other types one tile.
    """
    for arithmetic in ARITHMETICS:
        types = mma.ARITHMETICS[arithmetic]
        for lhs_dtype, rhs_dtype, out_dtype in itertools.product(
            types.operands, types.operands, types.results
        ):
            first = (lhs_dtype, rhs_dtype) == (types.operands[0], types.operands[0])
            one_tile = not first or out_dtype.name == "float16" or arithmetic == "f16"
            for lhs_k_major, rhs_k_major, odd in (
                *((lhs, rhs, 0) for lhs in (True, False) for rhs in (True, False)),
                (True, True, 1),
            ):
                geometry = _geometry(lhs_k_major, rhs_k_major, odd)
                product = Product(geometry, lhs_dtype, rhs_dtype, out_dtype, arithmetic)
                all_tiles = lhs_k_major and rhs_k_major and not odd
                for candidate in candidates(product, gpu):
                    tile = candidate.tile
                    if one_tile and tile != WgmmaTile(128, 128):
                        continue
                    if all_tiles or tile.block_m * tile.block_n >= 128 * 128:
                        yield candidate.instance


def _geometry(lhs_k_major: bool, rhs_k_major: bool, odd: int) -> MatmulGeometry:
    n = _MANY + odd
    return MatmulGeometry(
        (),
        _MANY,
        n,
        _MANY,
        (_MANY, 1) if lhs_k_major else (1, _MANY),
        (1, _MANY) if rhs_k_major else (n, 1),
        (n, 1),
    )
