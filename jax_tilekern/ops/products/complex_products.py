"""Complex products that are computed as real ones, on the device where their operands are.

A complex contraction is differentiated, batched and partitioned as such. Where it is lowered, it is
rewritten to a real one, whose kernel reads and writes pairs of parts where they lie if it can.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.products import contraction_lowering
from jax_tilekern.ops.products.contraction_lowering import (
    CPU,
    CUDA,
    Contract,
    cpu_kernel,
    cuda_kernel,
)
from jax_tilekern.ops.products.labelled_operands import swapped_precision, transposed
from jax_tilekern.plans.contraction import Contraction, Oriented, matmul_geometry
from jax_tilekern.plans.gemm.arithmetic import precision_name
from jax_tilekern.plans.gemm.complex_product import (
    REAL_PARTS,
    ComplexProduct,
    Pairing,
    Parts,
    Verdict,
    complex_product,
    verdict_on_cpu,
    verdict_on_gpu,
)
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


class _Platform(NamedTuple):
    """How a platform computes complex products."""

    real: contraction_lowering.Platform  # what its kernels of real products support
    kernel: Callable[..., PlannedKernel | Fallback]  # kernel(product, operands) plans one.
    verdict: Callable[[ComplexProduct], Verdict]  # whether a real product computes a complex one

    def arithmetic(self, dtype: np.dtype[Any], precision: Any) -> str | None:
        """Return the arithmetic of products of parts."""
        found = self.real.arithmetic(*[dtype] * 3, precision_name(precision))
        return found if isinstance(found, str) else None


_PLATFORMS = {
    "cpu": _Platform(CPU, cpu_kernel, verdict_on_cpu),
    "cuda": _Platform(CUDA, cuda_kernel, lambda product: verdict_on_gpu(product, current_gpu())),
}


def planners(contract: Contract) -> dict[str, Planner]:
    """Return the planners of contractions, those of complex numbers included."""
    by_copies = functools.partial(_by_copies, contract)
    in_place = _define_in_place(by_copies)

    def by_pairs(product: ComplexProduct, *operands: Array, precision: Any) -> Array:
        contract_parts = in_place if product.in_place else by_copies
        c, parts = product.pairing.contraction, product.pairing.parts
        result: Array = contract_parts(*operands, contraction=c, parts=parts, precision=precision)
        return result

    return {
        name: _planner(by_pairs, _PLATFORMS[name], planner)
        for name, planner in contraction_lowering.planners(contract).items()
    }


# ``by_pairs(product, pairs, matrices, precision=precision)`` computes a complex product.
_ByPairs = Callable[..., Array]


def _planner(by_pairs: _ByPairs, platform: _Platform, real_planner: Planner) -> Planner:
    def real_parts(operands: Sequence[Any], params: dict[str, Any]) -> np.dtype[Any] | None:
        """Return the type of the parts, if a call may be computed by a product of them."""
        types = [*(x.dtype for x in operands), params["out_dtype"]]
        real = REAL_PARTS.get(types[0])
        if real is None or len(types) != 3 or len(set(types)) != 1:
            return None
        return real if platform.arithmetic(real, params["precision"]) else None

    def refusal(*operands: Any, **params: Any) -> Rewrite | Fallback | None:
        real = real_parts(operands, params)
        if real is not None:
            operands = tuple(jax.core.ShapedArray(x.shape, real) for x in operands)
            params["out_dtype"] = real
        return real_planner.refusal(*operands, **params)

    def plan(operands: Sequence[Operand], results: Any, **params: Any) -> Outcome:
        lhs, rhs, *_ = avals = [x.aval for x in operands]
        real = real_parts(avals, params)
        if real is None:
            return real_planner.plan(operands, results, **params)
        return _complex_product(
            by_pairs, platform, real, lhs, rhs, params["contraction"], params["precision"]
        )

    return Planner(refusal, plan)


def _complex_product(
    by_pairs: _ByPairs,
    platform: _Platform,
    real: np.dtype[Any],
    lhs: Any,
    rhs: Any,
    contraction: Contraction,
    precision: Any,
) -> Rewrite | Fallback:
    """Return the real product that computes a complex one, or why XLA computes it."""
    arithmetic = platform.arithmetic(real, precision)
    assert arithmetic is not None
    product = complex_product(
        contraction,
        lhs.shape,
        rhs.shape,
        real,
        arithmetic,
        k_major=platform.real.needs_unit_stride,
    )
    try:
        verdict = platform.verdict(product)
    except NoGpu as error:
        return Fallback(str(error))
    if not verdict.is_real:
        return Fallback(verdict.reason, verdict.predicted_us)
    function = functools.partial(_by_real_product, by_pairs, contraction, product, precision)
    return Rewrite(f"computed as a real product of twice the sizes: {verdict.reason}", function)


def _by_real_product(
    by_pairs: _ByPairs,
    contraction: Contraction,
    product: ComplexProduct,
    precision: Any,
    lhs: Array,
    rhs: Array,
) -> Array:
    if product.pairing.expanded == 0:
        matrices = _matrices(lhs, contraction.lhs, product.pairing)
        return by_pairs(product, rhs, matrices, precision=swapped_precision(precision))
    matrices = _matrices(rhs, contraction.rhs, product.pairing)
    return by_pairs(product, lhs, matrices, precision=precision)


def _matrices(x: Array, labels: tuple[int, ...], pairing: Pairing) -> Array:
    """Return the 2x2 matrices by which pairs are multiplied in place of complex numbers."""
    wanted = pairing.contraction.rhs
    x = transposed(x, labels, tuple(label for label in wanted if label not in pairing.parts))
    re, im = x.real, x.imag
    # Its rows are the parts that are contracted.
    matrix = [[re, im], [-im, re]]
    outer, inner = sorted(map(wanted.index, pairing.parts))
    if wanted[outer] == pairing.parts.result:
        matrix = [list(column) for column in zip(*matrix, strict=True)]
    return jnp.stack([jnp.stack(row, inner - 1) for row in matrix], outer)


def _by_copies(
    contract: Contract,
    pairs: Array,
    matrices: Array,
    *,
    contraction: Contraction,
    parts: Parts,
    precision: Any,
) -> Array:
    """Contract complex numbers, as pairs, with 2x2 matrices."""
    at = contraction.lhs.index(parts.contracted)
    out = contract(
        jnp.stack([pairs.real, pairs.imag], at),
        matrices,
        contraction=contraction,
        precision=precision,
        out_dtype=matrices.dtype,
    )
    at = contraction.out.index(parts.result)
    re, im = (lax.index_in_dim(out, i, at, keepdims=False) for i in (0, 1))
    return lax.complex(re, im)


# A kernel computes the same in place: it reads complex arrays as real ones whose innermost
# dimension has the parts. The primitive is bound where a call is lowered, so it is never
# differentiated.


def _define_in_place(by_copies: Callable[..., Array]) -> Callable[..., Any]:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("a complex product is batched before it is lowered")

    return define(
        Operation(
            name="tilekern_contract_complex",
            reference=by_copies,
            batch=unreachable,
            sharding_rule=None,
            planners={
                name: Planner(no_refusal, functools.partial(_in_place, platform))
                for name, platform in _PLATFORMS.items()
            },
            describe=lambda contraction, **_: f"{contraction}, parts in place",
        )
    )


def _in_place(
    platform: _Platform,
    operands: Sequence[Operand],
    results: Any,
    *,
    contraction: Contraction,
    parts: Parts,
    precision: Any,
) -> PlannedKernel | Fallback:
    pairs, matrices = operands
    real = matrices.aval.dtype
    found = matmul_geometry(contraction, (*pairs.aval.shape, 2), matrices.aval.shape)
    arithmetic = platform.arithmetic(real, precision)
    assert isinstance(found, Oriented)
    assert isinstance(found.geometry, MatmulGeometry)
    assert arithmetic is not None
    # The result's innermost dimension is a column of the matrices, so nothing is swapped.
    product = Product(found.geometry, real, real, real, arithmetic)
    return platform.kernel(product, (pairs.value, matrices.value))
