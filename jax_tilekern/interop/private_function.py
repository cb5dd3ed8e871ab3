"""Operations that a module has once, in a private function, however often they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_tilekern.interop.compat import func, ir


def call_private(
    ctx: Any,
    name: str,
    digest: str,
    operands: Sequence[Any],
    emit: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Call a private function of the module that is being lowered; the first call defines it.

    XLA inlines the calls before it optimises anything. What the function emits then has the
    ``op_name`` of the call, with ``name`` at its end.

    Parameters
    ----------
    ctx
        The lowering rule's context.
    name
        For people: what the operation is called in HLO and in profiles.
    digest
        Differs wherever what is emitted does, and does not depend on the process.
    operands
        MLIR values.
    emit
        Emits the operation on values of the same types, and returns its results.

    Returns
    -------
    The MLIR values of the results.
    """
    symbols = ctx.module_context.symbol_table
    symbol = f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}_{digest}"
    if symbol not in symbols:
        symbols.insert(_function(ctx, symbol, name, operands, emit))
    results: Sequence[Any] = func.CallOp(symbols[symbol], list(operands)).results
    return results


def _function(
    ctx: Any,
    symbol: str,
    name: str,
    operands: Sequence[Any],
    emit: Callable[[Sequence[Any]], Sequence[Any]],
) -> Any:
    types = [operand.type for operand in operands]
    function = func.FuncOp(symbol, ir.FunctionType.get(types, []), ip=ctx.module_context.ip)
    function.attributes["sym_visibility"] = ir.StringAttr.get("private")
    with ir.InsertionPoint(function.add_entry_block()), ir.Location.name(name):
        results = list(emit(function.arguments))
        func.ReturnOp(results)
    made = ir.FunctionType.get(types, [result.type for result in results])
    function.attributes["function_type"] = ir.TypeAttr.get(made)
    return function
