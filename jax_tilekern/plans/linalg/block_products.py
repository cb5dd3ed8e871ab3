"""Products that update a matrix in blocks of columns, as launches of a larger plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_tilekern.plans.candidate import fused_plan
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, NoKernel, Scalars

# Columns of a block.
BLOCK = 256
# The arithmetic of the products, by the types of the matrices.
BLOCK_ARITHMETICS = {np.dtype(np.float32): "f32_normwise", np.dtype(np.float64): "f64"}


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix in a buffer."""

    buffer: Buffer
    stride: int
    itemsize: int

    def at(self, row: int, column: int) -> Buffer:
        offset = (row * self.stride + column) * self.itemsize
        return dataclasses.replace(self.buffer, offset_bytes=self.buffer.offset_bytes + offset)


class NoProduct(Exception):
    """No kernel computes a product of the plan."""


@dataclass
class Products:
    """Products that are added to a matrix, or subtracted, and share workspaces."""

    dtype: np.dtype[Any]
    gpu: Gpu
    first_workspace: int
    workspace_bytes: list[int] = field(default_factory=list)

    def reserving(self, sms: int) -> Products:
        """Return products that leave SMs to launches beside them, if their CTAs are persistent."""
        return dataclasses.replace(self, gpu=dataclasses.replace(self.gpu, reserved_sms=sms))

    def launches(
        self,
        sizes: tuple[int, int, int],
        lhs: Buffer,
        rhs: Buffer,
        out: Buffer,
        strides: tuple[int, int, int],
        result: str,
    ) -> Iterable[Launch]:
        """Return the launches that store ``result`` of a product ``x0`` and the old ``x1``."""
        dtype = self.dtype
        lhs_strides, rhs_strides, out_strides = ((stride, 1) for stride in strides)
        added = Epilogue(
            statements=(),
            results=(result,),
            operands=(EpilogueArray(dtype, CXX_TYPES[dtype], out_strides),),
            outputs=(),
            batch=(),
            instructions=1,
        )
        geometry = MatmulGeometry((), *sizes, lhs_strides, rhs_strides, out_strides)
        product = Product(geometry, dtype, dtype, dtype, BLOCK_ARITHMETICS[dtype], added)
        found = candidates(product, self.gpu)
        plan = found if isinstance(found, NoKernel) else fused_plan(found, self.gpu)
        if isinstance(plan, NoKernel):
            raise NoProduct(plan.reason)
        for i, size in enumerate(plan.workspace_bytes):
            if i == len(self.workspace_bytes):
                self.workspace_bytes.append(0)
            self.workspace_bytes[i] = max(self.workspace_bytes[i], size)
        own = [Buffer(self.first_workspace + i) for i in range(len(plan.workspace_bytes))]
        buffers = [lhs, rhs, out, out, *own]
        return [launch.placed(buffers) for launch in plan.launches]


def ints(*values: int) -> tuple[Scalars, ...]:
    """Return parameters that are 32-bit integers."""
    return tuple(Scalars.pack("i", value) for value in values)
