"""The custom calls: registered with XLA here, and emitted from lowering rules.

The only module that touches :mod:`jax.ffi`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import export
from jax.interpreters import mlir

from jax_tilekern import _core

if TYPE_CHECKING:
    from jax_tilekern.plans.launch import LaunchPlan


import re

from jax_tilekern.interop.compat import func, ir

CPU_MATMUL = "jax_tilekern_cpu_matmul"
CPU_RAGGED_MATMUL = "jax_tilekern_cpu_ragged_matmul"
CPU_TRANSPOSE = "jax_tilekern_cpu_transpose"
CPU_SUM = "jax_tilekern_cpu_sum"
CPU_ADD = "jax_tilekern_cpu_add"
CPU_ORDER_BY_KEY = "jax_tilekern_cpu_order_by_key"
CPU_SEGMENT_REDUCE = "jax_tilekern_cpu_segment_reduce"
CPU_UPDATE_ROWS = "jax_tilekern_cpu_update_rows"
CPU_MATRIX_INVERSE = "jax_tilekern_cpu_matrix_inverse"
CPU_MATRIX_LU = "jax_tilekern_cpu_matrix_lu"
CPU_MATRIX_CHOLESKY = "jax_tilekern_cpu_matrix_cholesky"
CPU_MATRIX_SOLVE = "jax_tilekern_cpu_matrix_solve"
CPU_MATRIX_SVD = "jax_tilekern_cpu_matrix_svd"
CPU_MATRIX_EIGH = "jax_tilekern_cpu_matrix_eigh"
CPU_MATRIX_QR = "jax_tilekern_cpu_matrix_qr"
CUDA_LAUNCH = "jax_tilekern_cuda_launch"
CUDA_LAUNCH_CHECKED = "jax_tilekern_cuda_launch_checked"
CUDA_LAUNCH_OVERLAPPED = "jax_tilekern_cuda_launch_overlapped"
# The custom call that XLA's partitioner replaces; see jax_tilekern.partitioning.call.
PARTITIONED = "jax_tilekern_partitioned"
# Every target. Exported programs name them and their attributes.
FFI_TARGETS = (
    *(target for targets in _core.registrations().values() for target in targets),
    PARTITIONED,
)


def _register() -> None:
    # Types precede handlers, because XLA looks up a state's type when a handler is registered.
    for platform, types in _core.type_registrations().items():
        for name, type_registration in types.items():
            jax.ffi.register_ffi_type(name, type_registration, platform=platform)
    for platform, targets in _core.registrations().items():
        for name, handlers in targets.items():
            jax.ffi.register_ffi_target(name, handlers, platform=platform)


# At import, and for every platform: a program that was exported or cached calls the handlers
# without lowering anything here. It needs no GPU and starts no backend.
_register()


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Return the ``disabled_checks`` with which :func:`jax.export.export` accepts every kernel.

    JAX refuses to export custom calls whose stability it does not know. The process that loads the
    program must import ``jax_tilekern``.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((64, 64))
    >>> checks = jtk.export_checks()
    >>> exported = jax.export.export(jax.jit(jtk.matmul), disabled_checks=checks)(x, x)
    >>> loaded = jax.export.deserialize(exported.serialize())
    >>> loaded.call(x, x).shape
    (64, 64)
    """
    return [export.DisabledSafetyCheck.custom_call(target) for target in FFI_TARGETS]


def cuda_launch(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    plan: LaunchPlan,
    *,
    aliases: Mapping[int, int] | None = None,
    scratch: Sequence[jax.core.ShapedArray] = (),
    checked: bool = False,
) -> Sequence[Any]:
    """Emit a call that executes a launch plan; return the MLIR values of the rule's own results.

    Operands are MLIR values, row-major in memory unless the plan has other orders of dimensions,
    and not always the rule's own. XLA copies an operand whose buffer is a result's by ``aliases``
    first if something else still reads it.
    ``scratch`` has types of more results, after the rule's own, and ``checked`` runs the checks of
    ``debug`` of :func:`jax_tilekern.cuda_kernel`.
    """
    avals = (*ctx.avals_out, *scratch)
    if len(operands) + len(avals) != len(plan.alignments):
        raise ValueError(
            f"plan {plan.name} is for {len(plan.alignments)} operands and results, "
            f"not {len(operands)} and {len(avals)}"
        )
    workspaces = tuple(
        jax.core.ShapedArray((size,), np.dtype(np.uint8)) for size in plan.workspace_bytes
    )

    def attributes() -> dict[str, Any]:
        extra = {"checked_results": len(avals)} if checked else {}
        return plan.attributes() | extra

    target = CUDA_LAUNCH_CHECKED if checked else CUDA_LAUNCH
    if plan.exchange is not None:
        target = CUDA_LAUNCH_OVERLAPPED
    results = (*avals, *workspaces)
    values = _call(
        ctx, plan.name, target, operands, results, plan.digest, attributes, aliases, plan.orders
    )
    return values[: len(ctx.avals_out)]


@dataclass(frozen=True)
class CpuCall:
    """A call of a CPU handler."""

    target: str  # one of FFI_TARGETS
    # The handler reads integers, and tuples of integers. A tuple must not be empty.
    attributes: Mapping[str, int | tuple[int, ...]]


def emit(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Any],
    call: LaunchPlan | CpuCall,
    aliases: Mapping[int, int] | None = None,
    *,
    scratch: Sequence[jax.core.ShapedArray] = (),
    checked: bool = False,
) -> Sequence[Any]:
    """Emit a call of either kind; as :func:`cuda_launch`, whose last two arguments are its own."""
    if not isinstance(call, CpuCall):
        return cuda_launch(ctx, operands, call, aliases=aliases, scratch=scratch, checked=checked)
    name = call.target.removeprefix("jax_tilekern_")
    digest = repr(sorted(call.attributes.items()))

    def attributes() -> dict[str, Any]:
        # The handler receives a Python int as an int64_t.
        return {
            name: np.array(value, np.int64) if isinstance(value, tuple) else value
            for name, value in call.attributes.items()
        }

    return _call(ctx, name, call.target, operands, ctx.avals_out, digest, attributes, aliases)


def cpu_matmul_kernel(types: Sequence[str], attributes: Mapping[str, Any]) -> str:
    """Return the kernel of a ``CPU_MATMUL`` call of the types of lhs, rhs and the result."""
    lhs, rhs, out = types
    lists = {name: list(values) for name, values in attributes.items()}
    return _core.cpu_matmul_kernel(lhs, rhs, out, **lists)


def _call(
    ctx: mlir.LoweringRuleContext,
    name: str,
    target: str,
    operands: Sequence[Any],
    results: Sequence[jax.core.ShapedArray],
    digest: str,
    attributes: Callable[[], Mapping[str, Any]],
    aliases: Mapping[int, int] | None = None,
    orders: Sequence[Sequence[int]] = (),
) -> Sequence[Any]:
    """Emit a custom call; ``digest`` identifies its attributes and ``orders``."""
    # Only the layouts depend on the operands, by their shapes.
    shapes = [tuple(operand.type.shape) for operand in operands]
    avals_in = [jax.core.ShapedArray(shape, np.dtype(np.uint8)) for shape in shapes]
    # The innermost dimension is the first one of a layout. ``None`` is row-major.
    layouts: list[Any] = [tuple(x[::-1]) for x in orders]
    layouts += [None] * (len(operands) + len(results) - len(layouts))
    rule = jax.ffi.ffi_lowering(
        target,
        operand_layouts=layouts[: len(operands)],
        result_layouts=layouts[len(operands) :],
        operand_output_aliases=dict(aliases) if aliases else None,
    )
    # dataclasses.replace does what ctx.replace does, with types.
    inner = dataclasses.replace(ctx, avals_in=avals_in, avals_out=list(results))
    # The program contains a kernel with its cubin once, even if every layer of a model calls it.
    types = [str(operand.type) for operand in operands]
    key = repr((target, types, [str(aval) for aval in results], digest, aliases))
    return call_private(
        ctx,
        name,
        hashlib.sha256(key.encode()).hexdigest()[:16],
        operands,
        lambda values: rule(inner, *values, **attributes()),
    )


def call_private(
    ctx: Any,
    name: str,
    digest: str,
    operands: Sequence[Any],
    emit: Callable[[Sequence[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """Call a private function of the module that is being lowered; the first call defines it.

    XLA inlines the calls before it optimises anything. What ``emit(operands)`` emits then has the
    ``op_name`` of the call, with ``name`` at its end. ``digest`` differs wherever what is emitted
    does, and does not depend on the process.
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
    # Nothing of the function depends on its first call.
    with ir.Location.name(name):
        function = func.FuncOp(symbol, ir.FunctionType.get(types, []), ip=ctx.module_context.ip)
        function.attributes["sym_visibility"] = ir.StringAttr.get("private")
        with ir.InsertionPoint(function.add_entry_block()):
            results = list(emit(function.arguments))
            func.ReturnOp(results)
    made = ir.FunctionType.get(types, [result.type for result in results])
    function.attributes["function_type"] = ir.TypeAttr.get(made)
    return function
