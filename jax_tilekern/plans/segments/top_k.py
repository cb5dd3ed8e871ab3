"""The plan of the largest elements of rows (``segments/top_k.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

_THREADS = 128
_MOST_ITEMS = 32
MAX_ROW_LENGTH = _THREADS * _MOST_ITEMS
# Each element found takes a search; XLA sorts.
MAX_K = 64
_DTYPES = tuple(
    np.dtype(t)
    for t in (
        np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int16, np.int8,
        np.uint32, np.uint16, np.uint8,
    )
)  # fmt: skip


@dataclass(frozen=True)
class TopK:
    """The ``k`` largest elements of each row."""

    rows: int
    columns: int
    k: int
    dtype: np.dtype[Any]


def plan_top_k(problem: TopK, gpu: Gpu) -> LaunchPlan | NoKernel:
    rows, columns, k, dtype = problem.rows, problem.columns, problem.k, problem.dtype
    if dtype not in _DTYPES:
        return NoKernel(f"no kernel orders {dtype}")
    if columns > MAX_ROW_LENGTH or k > MAX_K:
        return NoKernel(f"{k} elements of rows of {columns} (at most {MAX_K} of {MAX_ROW_LENGTH})")
    if rows > 2**31 - 1:
        return NoKernel(f"{rows} rows")
    # A warp to a row where its lanes hold the row in few registers.
    warps = 1 if columns <= WARP * 16 else _THREADS // WARP
    items = power_of_two(math.ceil(columns / (WARP * warps)))
    kernel = Kernel("segments/top_k.cuh", f"tilekern::top_k<{CXX_TYPES[dtype]}, {items}, {warps}>")
    compiled = compile_kernels(kernel, arch=gpu.arch)
    sizes = (Scalars.pack("I", size) for size in (rows, columns, k))
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(math.ceil(rows * WARP * warps / _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(Buffer(0), Buffer(1), Buffer(2), *sizes),
    )
    return LaunchPlan(
        name=f"top_k {dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=(dtype.itemsize, dtype.itemsize, 4),
        reason=f"{k} of {columns}, {warps} warps to a row",
    )
