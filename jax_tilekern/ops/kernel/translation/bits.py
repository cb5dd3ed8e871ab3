"""Bits of a lane: casts that keep them, and the cipher of JAX's random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import Untranslatable, all_of
from jax_tilekern.ops.kernel.translation.arrays import Places, result_type
from jax_tilekern.ops.kernel.translation.values import Value, everywhere, in_memory
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, broadcast, rule
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16


@rule("bitcast_convert_type", **all_of("new_dtype"))
def _bitcast(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    (x,) = operands
    dtype, shape = result_type(eqn)
    if dtype.itemsize != x.dtype.itemsize:
        raise Untranslatable(
            f"no CUDA for bitcast_convert_type of {x.dtype} to {dtype}, of another size"
        )
    computed_type(dtype)

    def cast(element: str) -> str:
        if x.dtype in (F16, BF16):
            element = f"from_float<{CXX_TYPES[x.dtype]}>({element})"
        bits = f"lax::bitcast<{CXX_TYPES[dtype]}>({element})"
        return f"to_float({bits})" if dtype in (F16, BF16) else bits

    if x.size == 1:
        return [writer.scalar(dtype, cast(x.first), shape)]
    flat = x.flat
    return [
        Value(
            dtype,
            shape,
            lambda i: cast(x.at(i)),
            None if flat is None else lambda i: cast(flat(i)),
            x.buffers,
        )
    ]


@rule("threefry2x32")
def _threefry(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    dtype, shape = result_type(eqn)
    read = [broadcast(x, shape, eqn) for x in operands]

    def mixed(read: list[str]) -> str:
        name = writer.name("t")
        writer.line(f"lax::Pair {name} = lax::threefry2x32({', '.join(read)});")
        return name

    if math.prod(shape) == 1:
        pair = mixed([x.first for x in operands])
        return [everywhere(dtype, shape, f"{pair}.{member}") for member in "xy"]
    buffers = [writer.array(dtype, shape, place) for place in places]
    with writer.elements(shape, buffers[0]) as i:
        pair = mixed([x.at(i) for x in read])
        for buffer, member in zip(buffers, "xy", strict=True):
            writer.line(buffer.store(i, f"{pair}.{member}"))
    return [in_memory(x) for x in buffers]


@rule("iota_2x32_shape", **all_of("shape"))
def _iota(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    """Count elements by numbers of 64 bits, of which the results are the halves."""
    dtype, shape = np.dtype(np.uint32), result_type(eqn)[1]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

    def low(indices: Any) -> str:
        terms = [f"{i} * {stride}" for i, stride in zip(indices, strides, strict=True)]
        return f"static_cast<uint32>({' + '.join(terms) or 0})"

    return [everywhere(dtype, shape, "0u"), Value(dtype, shape, low)]


@rule("reduce_precision", **all_of("exponent_bits mantissa_bits"))
def _reduce_precision(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,) = operands
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    own = {"float32": (8, 23), "float64": (11, 52), "bfloat16": (8, 7), "float16": (5, 10)}
    if own.get(x.dtype.name) != bits:
        raise Untranslatable(f"no CUDA for reduce_precision to {bits} bits")
    return [x]
