"""How a contraction is lowered on each platform: state the problem, then plan its kernel.

The types choose the arithmetic. The MLIR value of an operand tells what transposes it, so that a
kernel reads the operand where it lies. A contraction that no kernel computes as it is may be
rewritten to another one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.originals import lax
from jax_tilekern.ops.arrays.transpose import is_moved_by_kernel, transpose
from jax_tilekern.ops.planned_kernel import chosen_cpu_kernel, planned_kernel
from jax_tilekern.ops.products.groups import gathered
from jax_tilekern.ops.products.labelled_operands import broadcasted, converted
from jax_tilekern.plans.contraction import Contraction, Labels, matmul_geometry
from jax_tilekern.plans.cpu import product_reason
from jax_tilekern.plans.gemm.arithmetic import (
    Converted,
    cpu_arithmetic,
    cuda_arithmetic,
    precision_name,
)
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.policy.workload import product_workload
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Params,
    PlannedKernel,
    Planner,
    Rewrite,
)

# ``contract(*operands, **params)``, in which a call is rewritten to another contraction.
Contract = Callable[..., Array]


class Platform(NamedTuple):
    """The capabilities of a platform's product kernels.

    Attributes
    ----------
    arithmetic
        ``arithmetic(lhs, rhs, out, precision)`` chooses from the types.
    needs_unit_stride
        Whether each matrix must have a unit stride in memory.
    transpose
        ``transpose(x, axes)`` moves what no kernel reads as it lies.
    moves
        ``moves(aval, axes)`` says whether a kernel does, and no operation of XLA's.
    """

    arithmetic: Callable[..., str | Converted | None]
    needs_unit_stride: bool
    transpose: Callable[[Array, Sequence[int]], Array]
    moves: Callable[[Any, Sequence[int]], bool]

    def obstacle(self, geometry: MatmulGeometry) -> str | None:
        """Return in words why no kernel supports a geometry, if none does."""
        return geometry.without_unit_stride if self.needs_unit_stride else None


CPU = Platform(
    cpu_arithmetic, needs_unit_stride=False, transpose=transpose, moves=is_moved_by_kernel
)
# XLA fuses transposes with what makes their operands.
CUDA = Platform(
    cuda_arithmetic, needs_unit_stride=True, transpose=lax.transpose, moves=lambda *_: False
)


class LabelledOperand(NamedTuple):
    """An operand of a call that is being lowered, with the labels of its dimensions."""

    value: Any
    aval: Any
    labels: Labels

    @property
    def source(self) -> LabelledOperand:
        """The array that one or more transposes make this operand of, or the operand itself."""
        found = compat.transposed_from(self.value)
        if found is None:
            return self
        value, permutation = found
        inverse = [permutation.index(i) for i in range(len(permutation))]
        shape = tuple(self.aval.shape[i] for i in inverse)
        labels = tuple(self.labels[i] for i in inverse)
        return LabelledOperand(value, jax.core.ShapedArray(shape, self.aval.dtype), labels).source


def _factors(
    operands: Sequence[Operand], contraction: Contraction
) -> tuple[LabelledOperand, LabelledOperand]:
    lhs, rhs, *_ = operands
    return LabelledOperand(*lhs, contraction.lhs), LabelledOperand(*rhs, contraction.rhs)


def source(
    operands: Sequence[Operand], *, contraction: Contraction, **params: Any
) -> tuple[Sequence[Operand], Params]:
    """Return the operands where they lie in memory, and the contraction of those."""
    lhs, rhs = (x.source for x in _factors(operands, contraction))
    labels = dataclasses.replace(contraction, lhs=lhs.labels, rhs=rhs.labels)
    read = [*(Operand(x.value, x.aval) for x in (lhs, rhs)), *operands[2:]]
    return read, {**params, "contraction": labels}


def chosen_arithmetic(
    platform: Platform,
    lhs: Any,
    rhs: Any,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> str | Converted | Fallback:
    """Return the arithmetic of a product of two abstract values, or why there is no kernel."""
    name = precision_name(precision)
    arithmetic = platform.arithmetic(lhs.dtype, rhs.dtype, out_dtype, name)
    if arithmetic is None:
        types = f"{lhs.dtype} x {rhs.dtype} -> {out_dtype}"
        return Fallback(f"no kernel for {types} at precision {name}")
    if arithmetic == "f32_emulated" and contraction.group is not None:
        # Split-float16 emulation has no grouped kernel, and plain float32 is as accurate.
        return "f32"
    return arithmetic


class LoweredProduct(NamedTuple):
    """A contraction as a kernel sees it."""

    product: Product
    # MLIR values of the arrays that the kernel reads: the product's operands in its order, and the
    # bounds if there are groups.
    operands: tuple[Any, ...]
    # For each extra array: batch strides, that of the group if there is one, and those of m and n.
    extra_strides: tuple[tuple[int, ...], ...]


def state_problem(
    contract: Contract,
    platform: Platform,
    operands: Sequence[Operand],
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    extra: Sequence[Labels] = (),
) -> LoweredProduct | Rewrite | Fallback:
    """State the product that a contraction is, or return how it is computed without stating one.

    ``extra`` has the labels of extra arrays that an epilogue reads and writes.
    """
    c = contraction
    lhs, rhs = _factors(operands, c)
    bounds = operands[2:]
    arithmetic = chosen_arithmetic(platform, lhs.aval, rhs.aval, c, precision, out_dtype)
    if isinstance(arithmetic, Fallback):
        return arithmetic
    again = functools.partial(contract, precision=precision)
    if isinstance(arithmetic, Converted):
        types = f"{arithmetic.operands} -> {arithmetic.result}"
        return Rewrite(
            f"computed as {types}: {arithmetic.reason}",
            functools.partial(_converted, again, arithmetic, c, out_dtype),
        )
    again = functools.partial(again, out_dtype=out_dtype)
    if c.ragged_dimension == "k" and c.contracted:
        together = (c.ragged, *c.contracted)
        if math.prod(lhs.aval.shape[c.lhs.index(x)] for x in together) >= 2**31:
            return Fallback("more rows than an int32 counts, if all indices' rows are one's")
        return Rewrite(
            "rows gathered by group first: other dimensions are contracted with the ragged one",
            functools.partial(_gathered, again, c),
        )
    obstacle: str | None = None
    # A kernel reads the operands before their transposes, or as they are.
    for left, right in ((lhs.source, rhs.source), (lhs, rhs)):
        labels = dataclasses.replace(c, lhs=left.labels, rhs=right.labels)
        avals = (left.aval, right.aval, *(x.aval for x in bounds))
        found = matmul_geometry(labels, *(x.shape for x in avals), extra=extra)
        if isinstance(found, str):
            obstacle = found
            # A transpose that is left to XLA would be looked through again.
            moves = _moves(left, right, labels)
            if moves and all(platform.moves(x.aval, axes) for x, axes in moves):
                factors = [Operand(x.value, x.aval) for x in (left, right)]
                return _reordering(again, platform, [*factors, *bounds], labels, obstacle)
            continue
        if found.swapped:
            left, right = right, left
        types_of = (left.aval.dtype, right.aval.dtype, out_dtype)
        is_symmetric = (
            c.group is None
            and left.value == right.value
            and found.geometry.is_of_transpose
            and not any({*c.rows, *c.columns}.intersection(own) for own in extra)
        )
        product = Product(found.geometry, *types_of, arithmetic, symmetric=is_symmetric)
        obstacle = platform.obstacle(product.geometry)
        if obstacle is None:
            read = (left.value, right.value, *(x.value for x in bounds))
            return LoweredProduct(product, read, found.extra_strides)
    assert obstacle is not None
    if c.mergeable() == c:
        return Fallback(obstacle)
    return _reordering(again, platform, operands, c, obstacle)


def _moves(
    lhs: LabelledOperand, rhs: LabelledOperand, contraction: Contraction
) -> list[tuple[LabelledOperand, Sequence[int]]]:
    """Return the operands that have to be reordered, and their dimensions in the new order."""
    plain = contraction.mergeable()
    pairs = ((lhs, plain.lhs), (rhs, plain.rhs))
    return [(x, tuple(map(x.labels.index, wanted))) for x, wanted in pairs if x.labels != wanted]


def _reordering(
    contract: Contract,
    platform: Platform,
    operands: Sequence[Operand],
    contraction: Contraction,
    obstacle: str,
) -> Rewrite:
    return Rewrite(
        f"operands reordered first: {obstacle}",
        functools.partial(_reordered, contract, platform.transpose, contraction),
        operands=operands,
    )


def stated_product(
    contract: Contract,
    platform: Platform,
    operands: Sequence[Operand],
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Product | None:
    """Return the product that a kernel computes of a contraction, in the types of its arithmetic.

    There is none of a contraction that no kernel computes as it lies.
    """
    lhs, rhs = (x.aval for x in operands[:2])
    types = chosen_arithmetic(platform, lhs, rhs, contraction, precision, out_dtype)
    if isinstance(types, Converted):
        own, out_dtype = types.operands, types.result
        operands = [x._replace(aval=x.aval.update(dtype=own)) for x in operands[:2]]
    params = {"contraction": contraction, "precision": precision, "out_dtype": out_dtype}
    problem = state_problem(contract, platform, operands, **params)
    return problem.product if isinstance(problem, LoweredProduct) else None


# Other contractions that compute a call.


def _converted(
    contract: Contract,
    types: Converted,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    lhs: Array,
    rhs: Array,
    *bounds: Array,
) -> Array:
    lhs, rhs = converted(types, lhs, rhs)
    out = contract(lhs, rhs, *bounds, contraction=contraction, out_dtype=types.result)
    return out.astype(out_dtype)


def _gathered(contract: Contract, contraction: Contraction, *operands: Array) -> Array:
    lhs, rhs, bounds, contraction = gathered(*operands, contraction=contraction)
    return contract(lhs, rhs, bounds, contraction=contraction)


def _reordered(
    contract: Contract,
    transpose: Callable[[Array, Sequence[int]], Array],
    contraction: Contraction,
    lhs: Array,
    rhs: Array,
    *bounds: Array,
) -> Array:
    c, plain = contraction, contraction.mergeable()

    def moved(x: Array, labels: Labels, wanted: Labels) -> Array:
        return x if labels == wanted else transpose(x, tuple(map(labels.index, wanted)))

    sizes: dict[int, int] = {}
    for labels, x in zip(c.operands, (lhs, rhs, *bounds), strict=True):
        sizes |= zip(labels, x.shape, strict=True)
    out = contract(
        moved(lhs, c.lhs, plain.lhs),
        moved(rhs, c.rhs, plain.rhs),
        *(broadcasted(x, c.bounds, plain.bounds, sizes) for x in bounds),
        contraction=plain,
    )
    return moved(out, plain.out, c.out)


# Planners.


def planners(contract: Contract) -> dict[str, Planner]:
    """Return the planners of contractions."""
    return {
        "cpu": _planner(contract, CPU, cpu_kernel),
        "cuda": _planner(contract, CUDA, cuda_kernel),
    }


def _planner(
    contract: Contract, platform: Platform, emit: Callable[..., PlannedKernel | Fallback]
) -> Planner:
    """Return the planner of a platform, whose kernels ``emit(product, operands)`` plans."""

    def plan(
        operands: Sequence[Operand],
        avals: Any,
        *,
        contraction: Contraction,
        precision: Any,
        out_dtype: np.dtype[Any],
        **_: Any,
    ) -> PlannedKernel | Rewrite | Fallback:
        call_params = {"contraction": contraction, "precision": precision}
        lhs, rhs = (x.aval for x in operands[:2])
        arithmetic = chosen_arithmetic(platform, lhs, rhs, **call_params, out_dtype=out_dtype)
        wraps = lhs.dtype == rhs.dtype and lhs.dtype.kind == out_dtype.kind == "i"
        if isinstance(arithmetic, Converted) and wraps and contraction.group is None:
            wide = plan(operands, avals, **call_params, out_dtype=arithmetic.result)
            if isinstance(wide, Fallback):
                # XLA computes the call as it is, and nothing wider.
                return wide
        problem = state_problem(contract, platform, operands, **call_params, out_dtype=out_dtype)
        return (
            emit(problem.product, problem.operands)
            if isinstance(problem, LoweredProduct)
            else problem
        )

    return Planner(functools.partial(_refusal, platform), plan)


NOT_CONTRACTED = "nothing is contracted, and XLA fuses an outer product into what uses it"


def contracts_nothing(lhs: Any, contraction: Contraction) -> bool:
    """Return whether a product is one of vectors, element by element, which groups may mask."""
    c = contraction
    sizes = dict(zip(c.lhs, lhs.shape, strict=True))
    ragged = (c.ragged,) if c.ragged_dimension == "k" else ()
    return all(sizes[x] == 1 for x in (*c.contracted, *ragged))


def _refusal(
    platform: Platform,
    lhs: Any,
    rhs: Any,
    *bounds: Any,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Fallback | None:
    if any(x.shape[-1] == 1 for x in bounds):
        return Fallback("a product of no groups has nothing to compute", is_loss=False)
    if contraction.ragged_dimension != "m" and contracts_nothing(lhs, contraction):
        # XLA fuses for example the norms of per-example gradients, which then need no memory.
        return Fallback(NOT_CONTRACTED, is_loss=False)
    arithmetic = chosen_arithmetic(platform, lhs, rhs, contraction, precision, out_dtype)
    return arithmetic if isinstance(arithmetic, Fallback) else None


def cuda_kernel(product: Product, operands: Sequence[Any]) -> PlannedKernel | Fallback:
    """Plan the kernel of a product on a GPU, given the MLIR values of the arrays that it reads."""
    return planned_kernel(operands, plan_matmul, product)


def cpu_kernel(product: Product, operands: Sequence[Any]) -> PlannedKernel | Fallback:
    """Plan the kernel of a product on a CPU, given the MLIR values of the arrays that it reads."""
    geometry = product.geometry
    attributes: dict[str, int | tuple[int, ...]] = {
        "sizes": (*geometry.batch, geometry.m, geometry.n, geometry.k),
        "lhs_strides": geometry.lhs_strides,
        "rhs_strides": geometry.rhs_strides,
        "out_strides": geometry.out_strides,
    }
    if product.is_grouped:
        # An attribute that is an array must not be empty.
        attributes["bounds_strides"] = product.groups.bounds_strides or (0,)
        attributes["ragged_k"] = int(product.groups.ragged == "k")
        return PlannedKernel(
            "ragged_matmul",
            "each group's rows by the kernel of a product of their number; computes in "
            f"{product.arithmetic}",
            ffi.CpuCall(ffi.CPU_RAGGED_MATMUL, attributes),
            operands,
        )
    is_dot = geometry.m == geometry.n == 1
    if is_dot and not geometry.lhs_strides[-1] == geometry.rhs_strides[-2] == 1:
        return Fallback("no kernel reads the vectors of a dot product unless they are contiguous")
    name = ffi.cpu_matmul_kernel([str(dtype) for dtype in product.dtypes], attributes)
    call = ffi.CpuCall(ffi.CPU_MATMUL, attributes)
    kernel = PlannedKernel(name, product_reason(name, product.arithmetic), call, operands)
    return chosen_cpu_kernel(product_workload(product), kernel)
