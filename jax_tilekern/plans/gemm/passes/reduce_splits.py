"""The pass that reduces the partial results of split-K."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import RowTiling, StridedRows, merged_dims


@dataclass(frozen=True)
class SumPass:
    """Adds partial results ``[splits][batch][m][n]`` in order, and rounds to the output's type.

    Attributes
    ----------
    geometry
        Sizes, and the output's strides.
    splits
        Number of partial results of each element.
    sum_dtype
        Their type: float32, float64 or int32.
    out_dtype
        The same, or bfloat16 or float16 of float32.
    epilogue
        What is done to the sums; ``None`` for nothing.
    """

    geometry: MatmulGeometry
    splits: int
    sum_dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    epilogue: Epilogue | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        types = ", ".join(CXX_TYPES[dtype] for dtype in (self.sum_dtype, self.out_dtype))
        config = cxx_config("SumConfig", vector=self._vector)
        plain = Kernel("gemm/passes/reduce_splits.cuh", f"tilekern::sum_splits<{types}, {config}>")
        if self.epilogue is None:
            return plain
        return kernel_with_epilogue(
            plain, self.epilogue, columns=self.geometry.n, within_rows=True, within_columns=True,
            tile_columns=self.geometry.n,
        )  # fmt: skip

    @property
    def split_stride(self) -> int:
        """Elements between the partial results of one element."""
        return math.prod(self.geometry.batch) * self.geometry.m * self.geometry.n

    @property
    def workspace_bytes(self) -> int:
        """Size of the partial results."""
        return self.splits * self.split_stride * self.sum_dtype.itemsize

    @property
    def out_alignment(self) -> int:
        """Bytes that the output's address is to be a multiple of."""
        return self._vector * self.out_dtype.itemsize

    @property
    def _rows(self) -> tuple[list[tuple[int, int]], int]:
        """Sizes and strides of the dimensions that number the output's rows, and a row's length."""
        geometry = self.geometry
        sizes = (*geometry.batch, geometry.m)
        *outer, (columns, stride) = merged_dims(
            [*zip(sizes, geometry.out_strides[:-1], strict=True), (geometry.n, 1)]
        ) or [(1, 1)]
        # A dimension of size 1 is dropped, even n.
        return (outer, columns) if stride == 1 else ([*outer, (columns, stride)], 1)

    @property
    def _vector(self) -> int:
        rows, columns = self._rows
        vector = VECTOR_BYTES // self.sum_dtype.itemsize
        whole = all(step % vector == 0 for step in (columns, *(stride for _, stride in rows)))
        return vector if whole and self.split_stride % vector == 0 else 1

    def launch(self, compiled: Compiled, partials: Buffer, out: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If the output takes more rows or CTAs than a launch can have.
        """
        dims, columns = self._rows
        more = () if self.epilogue is None else self.epilogue.parameters(out.index)
        rows, threads = StridedRows.of(dims), 256
        tiling = RowTiling.of(rows.count, columns // self._vector, 1, threads)
        shape = Scalars.pack(
            f"{StridedRows.LAYOUT}2q2I3i",
            *rows.values,
            columns,
            self.split_stride,
            *tiling.values,
            self.splits,
            self.geometry.m,
            self.geometry.n,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(tiling.blocks, 1, 1),
            block=(threads, 1, 1),
            parameters=(partials, out, shape, *more),
        )
