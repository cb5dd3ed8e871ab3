"""Launches of Hopper's kernels: made without a compiler, and read as the kernels read them."""

import re
import struct
import sys
from dataclasses import dataclass
from unittest import mock

from products import H100

# The layouts of WgmmaShape in gemm/sm90/config.cuh, and GroupShape in grouped_gemm/groups.cuh.
SHAPE_LAYOUT = "@4q19i0q"
GROUPS_LAYOUT = "@3q6i0q"
_SHAPE_BYTES, _GROUPS_BYTES = struct.calcsize(SHAPE_LAYOUT), struct.calcsize(GROUPS_LAYOUT)

_PARAMETER_BYTES = {
    "wgmma_matmul": (128, 128, 128, 8, _SHAPE_BYTES),
    "wgmma_matmul_dynamic": (128, 128, 128, 8, 8, _SHAPE_BYTES),
    "ragged_wgmma_matmul": (128, 128, 128, 8, 128, 8, 8, _SHAPE_BYTES, _GROUPS_BYTES),
    "clear_claimed_tiles": (8,),
    "pack_operand": (8, 8, 104),
    "sum_splits": (8, 8, 104),
}


@dataclass(frozen=True)
class FakeEntry:
    """Stands in for a compiled kernel, so that plans can be made without a compiler."""

    name: str
    parameter_bytes: tuple[int, ...]
    symbol: str = "symbol"
    max_threads: int = 1024
    shared_memory_bytes: int = 0
    cubin: bytes = b"\x7fELF"


class FakeCompiled:
    def entry(self, name):
        return FakeEntry(name, _PARAMETER_BYTES[kernel_of(name)])


def kernel_of(name):
    """The kernel's name, or its template's."""
    return re.match(r"tilekern::(\w+)", name)[1]


def plan_of(candidate, gpu=H100):
    """The candidate's plan, all but compiled."""
    module = sys.modules[type(candidate).__module__]
    with mock.patch.object(module, "compile_kernels", return_value=FakeCompiled()):
        return candidate.plan(gpu)


def span_bytes(sizes, strides, itemsize):
    """From the first element's address to the end of the last."""
    steps = zip(sizes, strides, strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * itemsize


def buffers_bytes(product, geometry):
    """What lhs, rhs and the output have at least."""
    g = geometry
    return (
        span_bytes((*g.batch, g.m, g.k), g.lhs_strides, product.lhs_dtype.itemsize),
        span_bytes((*g.batch, g.k, g.n), g.rhs_strides, product.rhs_dtype.itemsize),
        span_bytes((*g.batch, g.m, g.n), g.out_strides, product.out_dtype.itemsize),
    )
