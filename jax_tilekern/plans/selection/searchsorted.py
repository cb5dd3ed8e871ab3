"""The plan of binary searches (``selection/searchsorted.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.selection.tile import ORDERED_DTYPES

_THREADS, _SEARCHES = 256, 4
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Searches:
    """Searches of queries in one sorted array."""

    count: int  # elements of the array
    queries: int
    dtype: np.dtype[Any]
    right: bool  # whether a query belongs after the elements that equal it


def plan_searchsorted(problem: Searches, gpu: Gpu) -> LaunchPlan | NoKernel:
    count, queries, dtype = problem.count, problem.queries, problem.dtype
    if dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {dtype}")
    ctas = math.ceil(queries / (_THREADS * _SEARCHES))
    if max(count, ctas) > MAX_INT32:
        return NoKernel(f"{queries} searches in {count} elements (at most {MAX_INT32})")
    types = f"{CXX_TYPES[dtype]}, {str(problem.right).lower()}"
    kernel = Kernel("selection/searchsorted.cuh", f"tilekern::searchsorted<{types}>")
    sizes = Scalars.pack("I", count), Scalars.pack("I", count.bit_length())
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(ctas, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(Buffer(0), Buffer(1), Buffer(2), *sizes, Scalars.pack("q", queries)),
    )
    return LaunchPlan(
        name=f"searchsorted {dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=(dtype.itemsize, dtype.itemsize, _INDEX_BYTES),
        reason=f"{queries} searches in {count}, {_SEARCHES} to a thread",
    )
