"""Products with weights of 4 or 8 bits, and which of them a kernel covers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.launch import Scalars

ROW_BYTES = 128  # of weights in a k-tile, and of x in a chunk
CHUNK = 64  # elements of a row of x in a chunk
GROUPS = (32, 64, 128)
TENSOR_MAP_DTYPES: dict[np.dtype[Any], Any] = {BF16: "bfloat16", F16: "float16"}
_ITEM_BYTES = 2
_MOST_SPANS_BYTES = 16384
_MOST_ELEMENTS = 2**31 - 1024  # sizes and coordinates are 32-bit integers


@dataclass(frozen=True)
class WeightOnlyProduct:
    """A product of ``x`` and weights of integers: ``[batch, m, k]`` and ``[batch, n, k]``.

    Attributes
    ----------
    m, n, k
        Sizes.
    bits
        Of a weight, 4 or 8. Two weights of 4 bits are a byte, the first one in its low half.
    group
        Adjacent elements along ``k`` that have a scale; the last group may have fewer.
    dtype, out_dtype
        Types of ``x`` and of the result, which is the same or float32.
    scale_dtype, zero_dtype
        Types of scales and zero points ``[batch, n / row_block, groups]``: 16-bit floats or
        float32. There are no zero points without ``zero_dtype``.
    row_block
        Rows of weights that share scales and zero points.
    batch
        Number of products.
    x_batched, weights_batched
        Whether operands have the batch dimension.
    epilogue
        What is done to the sums; ``None`` for nothing. It has results of elements alone.
    ragged
        Whether ``x`` is ``[m, k]``, and consecutive rows of it have a matrix of the batch each.
    pair
        Whether ragged rows are multiplied by two arrays of weights. Results lie side by side.
    float8
        Type of weights that are 8-bit floats, which have no zero points; ``None`` for integers.
    """

    m: int
    n: int
    k: int
    bits: int
    group: int
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    scale_dtype: np.dtype[Any] = F32
    zero_dtype: np.dtype[Any] | None = None
    row_block: int = 1
    batch: int = 1
    x_batched: bool = True
    weights_batched: bool = True
    epilogue: Epilogue | None = None
    ragged: bool = False
    pair: bool = False
    float8: np.dtype[Any] | None = None

    @property
    def columns(self) -> int:
        """Those of the output."""
        return self.n * (1 + self.pair)

    @property
    def multiply_adds(self) -> int:
        """Those of the product."""
        return self.m * self.columns * self.k * (1 if self.ragged else self.batch)

    @property
    def rows_of_matrix(self) -> int:
        """Rows of ``x`` that a matrix has, of ragged ones twice the average."""
        return min(self.m, 2 * math.ceil(self.m / self.batch)) if self.ragged else self.m

    @property
    def geometry_of_groups(self) -> GroupedGeometry:
        """The product of ragged rows."""
        return GroupedGeometry(
            batch=(self.batch,), m=self.m, n=self.n, k=self.k,
            lhs_strides=(0, self.k, 1), rhs_strides=(self.n * self.k, 1, self.k),
            out_strides=(0, self.n, 1), ragged="m", bounds_strides=(),
        )  # fmt: skip

    @property
    def spans_bytes(self) -> int:
        """Shared memory of the tiles that ragged rows have."""
        return 2 * 4 * (self.geometry_of_groups.spans + 1) if self.ragged else 0

    @property
    def weights_type(self) -> str:
        """Their type in C++."""
        return CXX_TYPES[self.float8] if self.float8 else f"tilekern::WeightInteger<{self.bits}>"

    @property
    def weights_name(self) -> str:
        return self.float8.name if self.float8 else f"int{self.bits}"

    @property
    def block_k(self) -> int:
        """Elements along ``k`` of a k-tile."""
        return 8 * ROW_BYTES // self.bits

    @property
    def groups(self) -> int:
        return math.ceil(self.k / self.group)

    @property
    def k_tiles(self) -> int:
        return math.ceil(self.k / self.block_k)

    @property
    def chunks(self) -> int:
        """Chunks of a row of ``x``, of which the last one is filled up with zeros."""
        return math.ceil(self.k / CHUNK)

    def shape_scalars(self, split_k_tiles: int) -> Scalars:
        """Return the ``WeightOnlyShape`` of kernels, whose parts of k have so many k-tiles."""
        return Scalars.pack(
            "12i",
            self.m,
            self.n,
            self.group,
            self.groups,
            self.row_block,
            math.ceil(self.n / self.row_block),
            self.k_tiles,
            split_k_tiles,
            self.batch,
            self.x_batched,
            self.weights_batched,
            self.columns,
        )


def refusal(problem: WeightOnlyProduct, gpu: Gpu) -> str:
    """Return why no kernel covers a product, or nothing."""
    if gpu.compute_capability[0] != 9:
        return f"kernels of 4- and 8-bit weights are for Hopper, and {gpu.name} has {gpu.arch}"
    if problem.dtype not in TENSOR_MAP_DTYPES:
        return f"kernels of 4- and 8-bit weights take bfloat16 and float16, not {problem.dtype}"
    if problem.k * problem.bits % (8 * VECTOR_BYTES) or problem.k * _ITEM_BYTES % VECTOR_BYTES:
        return f"rows of {problem.k} elements are no multiple of {VECTOR_BYTES} bytes"
    if problem.float8 and problem.zero_dtype:
        return f"kernels have no zero points of {problem.float8}"
    whole = problem.group >= problem.k or problem.group % problem.block_k == 0
    if problem.group not in GROUPS and not whole:
        return f"kernels of 4- and 8-bit weights have groups of 32, 64 and 128, not {problem.group}"
    if problem.out_dtype not in (problem.dtype, F32):
        return f"kernels of 4- and 8-bit weights have no {problem.out_dtype} of {problem.dtype}"
    if max(problem.m, problem.n, problem.k) > _MOST_ELEMENTS:
        return f"a size of {max(problem.m, problem.n, problem.k)} exceeds {_MOST_ELEMENTS}"
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return "there is nothing to multiply"
    if problem.spans_bytes > _MOST_SPANS_BYTES:
        return f"tiles of {problem.batch} groups have no room in shared memory"
    return ""
