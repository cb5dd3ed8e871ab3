"""The primitive behind every matrix product: a contraction over labelled dimensions.

It is closed under differentiation and batching. The cotangent of an operand is a contraction of
the other operand with the output's cotangent, written straight into the operand's own dimension
order; ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any data.

With groups it is a grouped GEMM. The bounds of the groups follow its factors.

With a *function* it is not linear, and has several results: those of a function of each element,
whose further operands come last. With ``pair`` the function has the elements of two products of one
``lhs``. On a Hopper GPU one kernel may compute both: it reads ``lhs`` once. Elsewhere the second
contraction comes first, and the first one's epilogue reads its result. The derivatives, the
partition and most batches of a pair are those of these two calls, so a call that is differentiated
computes two products.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.plain_data import from_data, to_data
from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.products import complex_products, contraction_lowering
from jax_tilekern.ops.products.contraction_lowering import (
    CUDA,
    LoweredProduct,
    cuda_kernel,
    state_problem,
)
from jax_tilekern.ops.products.epilogues import ProductCall, define_product
from jax_tilekern.ops.products.fused_lowering import InPlace, fused_kernel, planners
from jax_tilekern.ops.products.groups import masked
from jax_tilekern.ops.products.labelled_operands import common_type, product_by_lax
from jax_tilekern.partitioning import params_text
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.contraction import Contraction, Labels, labelled
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Outcome,
    Params,
    PlannedKernel,
    Planner,
    Rewrite,
)


def contract(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract two arrays, group by group if there are groups.

    Parameters
    ----------
    lhs, rhs
        Operands; where their types differ, both are cast to a common one first.
    *bounds
        Those of the groups, if there are any: one array of ``int32``, in order along its last
        dimension and between 0 and the number of rows.
    contraction
        Labels of their dimensions and of the result's. A label of the bounds need not be the
        result's.
    precision
        Canonical, as :func:`jax_tilekern.interop.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    out_sharding
        Sharding of the result on a mesh with explicit axes, where groups require it; by default
        what follows from the operands'.
    """
    lhs, rhs = common_type(lhs, rhs, out_dtype, precision)
    summed = contraction.summed_bounds
    if summed:
        # Groups differ along these dimensions, so each index is a product of its own.
        sums = wide_dtype(out_dtype)
        products = contract(
            lhs,
            rhs,
            *bounds,
            contraction=dataclasses.replace(contraction, out=(*summed, *contraction.out)),
            precision=precision,
            out_dtype=sums,
            out_sharding=compat.with_leading_dims(out_sharding, len(summed)),
        )
        return products.sum(range(len(summed)), dtype=sums).astype(out_dtype)
    (result,) = _bind(
        lhs,
        rhs,
        *bounds,
        contraction=contraction,
        precision=precision,
        out_dtype=np.dtype(out_dtype),
        out_sharding=out_sharding,
    )
    return result


def contract_with_scalar_function(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    second: Array | None = None,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    function: ScalarFunction,
    operands: Sequence[tuple[Array, Labels]],
    in_place: InPlace = (),
    symmetric: bool = False,
    out_sharding: NamedSharding | None = None,
) -> list[Array]:
    """Contract two arrays and apply a traced function to every element of the result.

    Parameters
    ----------
    lhs, rhs
        Operands of a type that ``common_type`` of ``labelled_operands.py`` returns.
    second
        What takes the place of ``rhs`` in a second product, of its type and shape. The function
        then has the accumulators of both.
    bounds, contraction, precision, product, in_place, symmetric, out_sharding
        As in :func:`~jax_tilekern.ops.products.fused_contraction.contract_with_epilogue`.
    function
        The epilogue, for the accumulators' type.
    operands
        Its operands, and the result's dimension that each of their dimensions is.

    Returns
    -------
    list of Array
        The function's results.
    """
    call = _Call(
        contraction=contraction,
        precision=precision,
        out_dtype=product,
        out_sharding=out_sharding,
        function=function,
        operand_labels=tuple(labels for _, labels in operands),
        accumulator=accumulator_dtype(lhs.dtype, product),
        in_place=in_place,
        symmetric=symmetric,
        pair=second is not None,
    )
    right = [rhs] if second is None else [rhs, second]
    compute = _unfused if out_sharding is not None or function.is_closure else _bind
    results: list[Array] = compute(lhs, *right, *bounds, *(x for x, _ in operands), **vars(call))
    return results


class _Operands(NamedTuple):
    """The operands of a call, or what belongs to each of them."""

    lhs: Any
    # What ``lhs`` is multiplied with, once or twice.
    right: Sequence[Any]
    bounds: Sequence[Any]
    # What the function reads.
    read: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class _Call(ProductCall):
    """The parameters of a call."""

    precision: Any
    out_sharding: NamedSharding | None = None
    in_place: InPlace = ()
    symmetric: bool = False

    factors = 2
    linear_in = ((0,), (1,))

    def split(self, operands: Sequence[Any]) -> _Operands:
        """Take the operands apart."""
        n = 3 if self.pair else 2
        end = n + self.is_grouped
        return _Operands(operands[0], operands[1:n], operands[n:end], operands[end:])

    def product(self, **others: Any) -> Params:
        """Return the parameters of one product without the function, which has the accumulators."""
        dtype = self.accumulator
        if self.function is not None and self.function.is_identity:
            dtype = self.function.out_dtypes[0]
        own = {"contraction": self.contraction, "precision": self.precision, "out_dtype": dtype}
        return own | others

    def multiply(self, *factors: Array, **others: Any) -> Array:
        return contract(*factors, **self.product(**others))

    @property
    def product_in_words(self) -> str:
        c = self.contraction
        if self.function is None:
            return str(c)
        if not self.pair:
            return f"contract {c}"
        lhs, rhs, out = ("".join(c.names[x] for x in labels) for labels in (c.lhs, c.rhs, c.out))
        return f"contract {lhs},{rhs},{rhs}->{out}"


# Meaning.


def masked_product(
    lhs: Array, rhs: Array, *bounds: Array, contraction: Contraction, **params: Any
) -> Array:
    """Contract two arrays in terms of ``jax.lax``; rows of other groups count as zeros."""
    if bounds:
        lhs, rhs, contraction = masked(lhs, rhs, *bounds, contraction=contraction)
    return product_by_lax(lhs, rhs, contraction, **params)


def _reference(*operands: Array, **params: Any) -> list[Array]:
    call = _Call(**params)
    lhs, right, bounds, read = call.split(operands)
    if call.function is None:
        sharding = params.pop("out_sharding", None)
        if not bounds:
            return [masked_product(*operands, **params, out_sharding=sharding)]
        product = functools.partial(masked_product, **params)
        return [compat.with_automatic_axes(product, sharding)(*operands)]
    first, *second = (masked_product(lhs, rhs, *bounds, **call.product()) for rhs in right)
    if call.function.is_identity:
        return [first]
    return call.elementwise()(first, *bounds, *second, *read)


# Other calls that compute one with a function.


def _unfused(
    *operands: Array, out_sharding: NamedSharding | None = None, **params: Any
) -> list[Array]:
    """Compute the products by kernels, and the epilogue in XLA or in the kernel of the first."""
    call = _Call(**params)
    function, (lhs, right, bounds, read) = call.function, call.split(operands)
    assert function is not None
    if call.pair:
        rounded = call.multiply(lhs, right[1], *bounds, out_dtype=call.out_dtype)
        return contract_with_scalar_function(
            lhs,
            right[0],
            *bounds,
            contraction=call.contraction,
            precision=call.precision,
            product=call.out_dtype,
            function=_with_rounded_first(function, call.out_dtype),
            operands=[
                (rounded, call.contraction.out),
                *zip(read, call.operand_labels, strict=True),
            ],
            in_place=((0, 0),),
        )
    return call.unfused(functools.partial(_bind, **params), operands, out_sharding)


def _with_rounded_first(function: ScalarFunction, product: np.dtype[Any]) -> ScalarFunction:
    """Return the function of a second product that is rounded to its type."""
    accumulator, _, *scalars = (np.dtype(x.dtype) for x in function.jaxpr.in_avals)

    def with_rounded(x: Any, rounded: Any, *scalars: Any) -> list[Any]:
        return function.python(x, rounded.astype(accumulator), *scalars)

    with_rounded.__name__ = function.name
    traced = trace_scalars(with_rounded, accumulator, product, [product, *scalars]).function
    return dataclasses.replace(
        traced,
        names=function.names,
        out_dtypes=function.out_dtypes,
        reductions=function.reductions,
    )


# Differentiation and batching. Strassen's algorithm shares these rules.


def _cotangent(
    operand: int,
    contract: Callable[..., Array],
    cotangent: Array,
    lhs: Any,
    rhs: Any,
    *bounds: Array,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None,
    **params: Any,
) -> Array:
    """Return the cotangent of ``lhs`` or ``rhs``, with its own labels, type and sharding."""
    c = contraction
    like, labels = ((lhs, c.lhs), (rhs, c.rhs))[operand]
    factors = [(lhs, c.lhs), (rhs, c.rhs)]
    factors[operand] = (cotangent, c.out)
    if operand == 0 and c.ragged_dimension == "k":
        # The operand with the ragged label comes first.
        factors.reverse()
    (left, left_labels), (right, right_labels) = factors
    return contract(
        left,
        right,
        *bounds,
        contraction=dataclasses.replace(c, lhs=left_labels, rhs=right_labels, out=labels),
        out_dtype=like.dtype,
        out_sharding=compat.cotangent_sharding(like),
        **params,
    )


def transposes(
    contract: Callable[..., Array],
) -> dict[int | tuple[int, ...], Callable[..., Any]]:
    """Return the transpose rules of both operands, which ``contract`` computes.

    The last one is traced first. It gathers the cotangent's rows, and the other one contracts them.
    """
    return {i: functools.partial(_cotangent, i, contract) for i in (1, 0)}


def batched(
    contract: Callable[..., Array],
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> tuple[Array, int]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    factors, labels = mapped(contraction, operands, dims)
    out_sharding = compat.sharding_under_vmap(axis_data, out_sharding, 0)
    return contract(*factors, contraction=labels, out_sharding=out_sharding, **params), 0


def mapped(
    contraction: Contraction, operands: Sequence[Array], dims: Sequence[int | None]
) -> tuple[list[Array], Contraction]:
    """Return the operands of a contraction and their labels under ``vmap``."""
    operands, dims = list(operands), list(dims)
    for i in range(2, len(dims)):
        if (dim := dims[i]) is not None:
            # A few numbers, of which those of the groups stay adjacent.
            operands[i], dims[i] = jnp.moveaxis(operands[i], dim, 0), 0
    return operands, contraction.mapped(*dims)


def _of_results(rule: Callable[..., Array]) -> Callable[..., Array]:
    return lambda cotangents, *operands, **params: rule(*cotangents, *operands, **params)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Differentiate a call with a function, that of a pair as two calls."""
    call = _Call(**params)
    if call.pair:
        return jvp_of(_unfused, primals, tangents, **params)
    # The derivative reads the operands again, so none is overwritten.
    return call.jvp(functools.partial(_bind, **params | {"in_place": ()}), primals, tangents)


def _batch(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    call = _Call(**params)
    if call.function is None:
        result, dim = batched(contract, axis_data, operands, dims, **params)
        return [result], [dim]
    out_dims = call.function.mapped_dims
    lhs, right, bounds, read = call.split(operands)
    lhs_dim, right_dims, bounds_dims, read_dims = call.split(dims)
    is_mapped = any(dim is not None for dim in (lhs_dim, *right_dims))
    if call.pair and (not is_mapped or right_dims[0] != right_dims[1]):
        # The products do not have the axis in the same way.
        both = functools.partial(_unfused, **params)
        return jax.vmap(both, tuple(dims), out_dims, axis_size=axis_data.size)(*operands), out_dims
    if not is_mapped and all(dim is None for dim in bounds_dims):
        return call.batched_epilogue(operands, dims)
    places = [lhs_dim, right_dims[0], *bounds_dims]
    factors, labels = mapped(call.contraction, [lhs, right[0], *bounds], places)
    params["contraction"], new = labels, labels.out[0]
    params["operand_labels"] = tuple(
        labelled(own, new, dim) for own, dim in zip(call.operand_labels, read_dims, strict=True)
    )
    return _bind(*factors[:2], *right[1:], *factors[2:], *read, **params), out_dims


# Partitioning: the labels state which dimensions may be split among devices. Where these have parts
# of the contracted dimensions, or share the groups, the sum over devices is completed before the
# function, which is not linear.

params_text.register(ScalarFunction, to_data, from_data)


def sharding_rule(
    lhs: Any, rhs: Any, *bounds: Any, contraction: Contraction, **_: Any
) -> ShardingRule:
    """Return the rule of a contraction, whose labels are those of the product."""
    c = contraction
    # A device has the bounds of its own rows and groups.
    prefixes = [(*c.bounds[:-1], None) for _ in bounds]
    sizes = sizes_of(
        *((prefix, x.shape) for prefix, x in zip(prefixes, bounds, strict=True)),
        (c.lhs, lhs.shape),
        (c.rhs, rhs.shape),
    )
    # Each row is multiplied for one group only.
    flops = 2 * math.prod(size for label, size in sizes.items() if label != c.group)
    if c.group is not None:
        sizes[c.group] = bounds[0].shape[-1] - 1
    # A matrix for each group is the largest of the three arrays where groups have few rows.
    gatherable = frozenset(label for label in c.lhs if label == c.ragged) - set(c.out)
    return ShardingRule(
        (c.lhs, c.rhs, *prefixes), (c.out,), sizes, flops=flops, names=c.names,
        gatherable=gatherable,
    )  # fmt: skip


def _sharding_rule(*operands: Any, **params: Any) -> ShardingRule:
    call, n = _Call(**params), len(params["contraction"].operands)
    c, rule = call.contraction, sharding_rule(*operands[:n], **params)
    if call.function is None:
        return rule
    # Rows of any group may be in a device's part of the results. So every device has whole bounds,
    # and whole operands of groups, which are small.
    bounds = [(None,) * x.ndim for x in operands[2:n]]
    read = [tuple(None if x == c.group else x for x in own) for own in call.operand_labels]
    whole = dataclasses.replace(rule, operands=(c.lhs, c.rhs, *bounds))
    return call.with_epilogue(whole, read)


def _source(operands: Sequence[Operand], **params: Any) -> tuple[Sequence[Operand], Params]:
    """Return the operands where they lie, of a call that is partitioned.

    A device's part of a symmetric product may be a square of it that is not symmetric.
    """
    if "symmetric" in params:
        params["symmetric"] = False
    return contraction_lowering.source(operands, **params)


# Lowering.


def _kernel(operands: Sequence[Operand], **params: Any) -> PlannedKernel | Fallback | str:
    call = _Call(**params)
    lhs, (rhs, *second), bounds, read = call.split(operands)
    assert call.function is not None
    assert call.accumulator is not None
    state = functools.partial(
        state_problem, contract, CUDA, contraction=call.contraction, precision=call.precision
    )
    found = fused_kernel(
        (lhs, rhs, *bounds),
        second[0] if second else None,
        read,
        contraction=call.contraction,
        operand_labels=call.operand_labels,
        function=call.function,
        accumulator=call.accumulator,
        state=state,
        in_place=call.in_place,
        symmetric=call.symmetric,
    )
    if isinstance(found, str) and second and not bounds:
        plain = state((lhs, rhs), out_dtype=call.accumulator)
        has_kernel = isinstance(plain, LoweredProduct) and isinstance(
            cuda_kernel(plain.product, plain.operands), PlannedKernel
        )
        # XLA merges products of one operand that have one type.
        return found if has_kernel else Fallback(found)
    return found


def _unfused_in_words(pair: bool, **_: Any) -> tuple[str, str]:
    if pair:
        return "a kernel for each", "kernels of both are for Hopper GPUs"
    return "the epilogue runs in XLA, after the product", "XLA fuses it into one pass"


_PLAIN = complex_products.planners(contract)
_FUSED = planners(_kernel, _unfused, _unfused_in_words)


def _planner(platform: str) -> Planner:
    def of(params: Params) -> Planner:
        return (_FUSED if "function" in params else _PLAIN)[platform]

    def refusal(*operands: Any, **params: Any) -> Rewrite | Fallback | None:
        return of(params).refusal(*operands, **params)

    def plan(operands: Sequence[Operand], results: Sequence[Any], **params: Any) -> Outcome:
        outcome = of(params).plan(operands, results, **params)
        if isinstance(outcome, Rewrite) and "function" not in params:
            function = outcome.function
            return dataclasses.replace(outcome, function=lambda *x: [function(*x)])
        return outcome

    return Planner(refusal, plan)


_bind = define_product(
    _Call,
    "tilekern_contract",
    _reference,
    any_size=lambda contraction, **params: contraction.group is None and not params.get("function"),
    transposes={i: _of_results(rule) for i, rule in transposes(contract).items()},
    jvp=_jvp,
    batch=_batch,
    sharding_rule=_sharding_rule,
    planners={platform: _planner(platform) for platform in _PLAIN},
    # XLA partitions each of the two calls of a pair.
    composed=_unfused,
    is_composed=lambda **params: params.get("pair", False),
    source=_source,
)
