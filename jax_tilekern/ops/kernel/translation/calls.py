"""Calls of functions that have rules of their own for transformations."""

from __future__ import annotations

from typing import Any

from jax_tilekern.epilogue.understood import all_of
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Value
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule


@rule("custom_vmap_call", **all_of("call rule in_tree out_tree"))
def _custom_vmap(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    """Write what the function computes for one element."""
    return writer.jaxpr(compat.closed_jaxpr(eqn.params["call"]), operands, places)


@rule("tie")
def _tie(_: LaneWriter, __: Any, operands: list[Value], ___: Places) -> list[Value]:
    return operands[1:]
