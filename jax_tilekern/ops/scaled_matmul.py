"""``scaled_matmul``: products of 8-bit floats that have a scale for each block.

The primitive contracts the last dimensions of its operands. The shape of an array of scales states
the blocks. Scales of rows, of blocks of 128 rows and of all rows differ in their strides alone, so
one kernel takes them all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role, ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.contraction import as_dot_general, contract
from jax_tilekern.ops.contraction_lowering import LoweredProduct, cuda_kernel
from jax_tilekern.ops.epilogues import (
    described_function,
    elementwise_function,
    jvp_at_pre_activation,
    quantized_after,
    saved_pre_activation,
    with_blocks_last,
    with_epilogue,
)
from jax_tilekern.ops.fused_contraction import labelled_operands
from jax_tilekern.ops.fused_lowering import fused_kernel
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.labelled_operands import check_operands, product_by_lax
from jax_tilekern.ops.scaled_layout import (
    scales_in_memory,
    stored_scales,
    strided_product,
    with_columns_first,
)
from jax_tilekern.ops.scaled_operands import (
    blocks_of,
    check_scales,
    check_types,
    dequantized,
    refuse_tangent,
)
from jax_tilekern.partitioning.local_program import FunctionOfSum
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.contraction import (
    Contraction,
    Labels,
    labelled,
)
from jax_tilekern.plans.gemm.arithmetic import TYPES
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import copies_rows_first
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.linearity import tangents_out
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Params,
    Planner,
    Rewrite,
    Transposes,
    define,
)
from jax_tilekern.primitives.remat import Saved

_F32: np.dtype[Any] = np.dtype(np.float32)


@jitted("preferred_element_type", "out_sharding", functions=["epilogue"])
def scaled_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
    *,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
) -> Any:
    """Product of two arrays of 8-bit floats, each with scales of its blocks, and an epilogue.

    The result is the sum over blocks of 128 of ``k`` of each block's product times the scales of
    both operands, all in float32. The names are those of :func:`jax.nn.scaled_matmul`, which has
    other blocks. Scales are differentiable; 8-bit floats have no useful tangent, so a tangent of
    an operand is refused. :func:`fp8_dot_general` has the derivatives of training.

    Parameters
    ----------
    lhs
        ``(..., M, K)`` of float8_e4m3fn or float8_e5m2.
    rhs
        ``(..., N, K)`` of either type. The dimensions before the last two are those of ``lhs``,
        or one of both operands has none.
    lhs_scales
        float32, with the leading dimensions of ``lhs``. The last two are ``M``, ``ceil(M / 128)``
        or 1 by ``ceil(K / 128)`` or 1: scales of single rows, of blocks of 128 rows or of all
        rows, for each 128 of ``k`` or for all.
    rhs_scales
        The same of ``rhs``, with ``N`` for ``M``.
    preferred_element_type
        Type of the result, to which it is rounded once.
    out_sharding
        Sharding of the product on a mesh with explicit axes.
    epilogue, operands
        A function ``epilogue(accumulator, *operands)`` of scalars and the arrays that it reads, as
        in :func:`matmul`. The accumulator is the scaled sum, in float32.

    Returns
    -------
    Array
        ``(..., M, N)``. With an epilogue, an array for each scalar that it returns.

    Raises
    ------
    TypeError
        If a type is another one, or an operand has a tangent, or the epilogue is not a function
        of scalars.
    ValueError
        If shapes do not match. The message has the shapes of scales that are possible.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((2, 256), jnp.float8_e4m3fn)
    >>> w = jnp.ones((3, 256), jnp.float8_e4m3fn)
    >>> jtk.scaled_matmul(x, w, jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.ones((1, 1)))
    Array([[384., 384., 384.],
           [896., 896., 896.]], dtype=float32)
    """
    lhs, rhs, lhs_scales, rhs_scales = map(jnp.asarray, (lhs, rhs, lhs_scales, rhs_scales))
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    _check(lhs, rhs, lhs_scales, rhs_scales, out_dtype)
    batch = max(lhs.ndim, rhs.ndim) - 2
    shared = tuple(range(batch))
    m, n, k = range(batch, batch + 3)
    contraction = Contraction(
        (*(shared if lhs.ndim > 2 else ()), m, k),
        (*(shared if rhs.ndim > 2 else ()), n, k),
        (*shared, m, n),
    )
    check_operands("scaled_matmul", epilogue, operands=operands)
    arrays = [jnp.asarray(x) for x in operands]
    factors = (lhs, rhs, lhs_scales, rhs_scales)
    sharding = None
    if out_sharding is not None:

        def by_jax(lhs: Array, rhs: Array) -> Array:
            columns = jnp.swapaxes(rhs, -1, -2)
            return jnp.matmul(lhs, columns, preferred_element_type=_F32, out_sharding=out_sharding)

        sharding = compat.explicit_sharding(compat.result_type(by_jax, lhs, rhs))

    def product(dtype: np.dtype[Any]) -> Array:
        multiply = functools.partial(
            _product, contraction=contraction, product=dtype, columns_first=False
        )
        result: Array = compat.with_automatic_axes(multiply, sharding)(*factors)
        return result

    if epilogue is not None:
        role = Role("scaled_matmul")
        function, closed_over, nested = trace_scalars(
            epilogue, _F32, out_dtype, [x.dtype for x in arrays], role
        )
        if not function.is_identity:
            shape = (*max(lhs.shape[:-2], rhs.shape[:-2], key=len), lhs.shape[-2], rhs.shape[-2])
            read = labelled_operands(arrays, (), contraction=contraction, shape=shape, role=role)
            read += [(jnp.asarray(x), ()) for x in closed_over]
            own_labels = tuple(labels for _, labels in read)
            if sharding is not None:
                elementwise = elementwise_function(function, contraction, own_labels)
                results = elementwise(product(_F32), *(x for x, _ in read))
                return nested(with_blocks_last(results, function))
            compute = _unfused if function.is_closure else _bind
            results = compute(
                *factors,
                *(x for x, _ in read),
                contraction=contraction,
                product=out_dtype,
                columns_first=False,
                function=function,
                operand_labels=own_labels,
            )
            return nested(with_blocks_last(results, function))
    own = out_dtype if out_dtype in TYPES["fp8"].results else _F32
    result = product(own).astype(out_dtype)
    return result if epilogue is None else nested([result])


def _check(lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, out: Any) -> None:
    check_types("scaled_matmul", lhs, rhs, out)
    if lhs.ndim > 2 and rhs.ndim > 2 and lhs.shape[:-2] != rhs.shape[:-2]:
        raise ValueError(
            "the leading dimensions of scaled_matmul's operands are equal, or one has none: "
            f"lhs {lhs.shape}, rhs {rhs.shape}"
        )
    for name, x, scales in (("lhs", lhs, lhs_scales), ("rhs", rhs, rhs_scales)):
        rows = x.shape[-2]
        check_scales("scaled_matmul", name, x, scales, (rows, blocks_of(rows), 1))


# The primitive has an epilogue, or ``None`` for none. What computes the product alone has the same
# parameters without it.


def _product(*factors: Array, **params: Any) -> Array:
    """Multiply without an epilogue."""
    (result,) = _bind(*factors, **params, function=None, operand_labels=())
    return result  # type: ignore[no-any-return]


# Meaning.


def _by(
    multiply: Callable[..., Array],
    *operands: Array,
    contraction: Contraction,
    product: np.dtype[Any],
    columns_first: bool,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
) -> list[Array]:
    """Contract the operands in float32."""
    lhs, rhs, lhs_scales, rhs_scales, *arrays = operands
    if columns_first:
        rhs_scales = jnp.swapaxes(rhs_scales[..., : rhs.shape[-2]], -1, -2)
    result = multiply(
        dequantized(lhs, lhs_scales),
        dequantized(rhs, rhs_scales),
        contraction=contraction,
        precision=(lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        out_dtype=_F32,
    )
    if function is None:
        return [result.astype(product)]
    return elementwise_function(function, contraction, operand_labels)(result, *arrays)


_reference = functools.partial(_by, product_by_lax)
_by_contraction = functools.partial(_by, contract)


def _unfused(
    *operands: Array,
    function: ScalarFunction,
    operand_labels: tuple[Labels, ...],
    contraction: Contraction,
    product: np.dtype[Any],
    columns_first: bool,
) -> list[Array]:
    """Compute the product by a kernel, and the epilogue in XLA."""
    if function.quantizes:

        def fused(function: ScalarFunction, *operands: Array) -> list[Array]:
            call = _unfused if function.is_closure else _bind
            return call(
                *operands, function=function, operand_labels=operand_labels,
                contraction=contraction, product=product, columns_first=columns_first,
            )  # fmt: skip

        return quantized_after(fused, function, *operands)
    accumulators = _product(
        *operands[:4], contraction=contraction, product=_F32, columns_first=columns_first
    )
    elementwise = elementwise_function(function, contraction, operand_labels)
    return elementwise(accumulators, *operands[4:])


# Rules.


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    function: ScalarFunction,
    operand_labels: tuple[Labels, ...],
    **params: Any,
) -> tuple[list[Array], list[Any]]:
    """Differentiate a call with an epilogue."""
    for operand, tangent in enumerate(tangents[:2]):
        if type(tangent) is not ad.Zero:
            refuse_tangent("scaled_matmul", operand)

    def multiply(*factors: Array) -> list[Array]:
        return [_product(*factors, **params)]

    def change(product: Array) -> Any:
        return tangents_out(multiply, [(2,), (3,)], primals[:4], tangents[:4], [product])[0]

    def elementwise(function: ScalarFunction) -> Callable[..., list[Array]]:
        return elementwise_function(function, params["contraction"], operand_labels)

    bind = functools.partial(_bind, operand_labels=operand_labels, **params)
    return jvp_at_pre_activation(
        bind, change, elementwise, function, _F32, params["product"], 4, primals, tangents
    )


def _refuse_tangent(operand: int, **_: Any) -> None:
    refuse_tangent("scaled_matmul", operand)


def _cotangent(operand: int, cotangents: Sequence[Array], *operands: Any, **params: Any) -> Array:
    def linear(scales: Array) -> list[Array]:
        return _reference(*operands[:operand], scales, *operands[operand + 1 :], **params)

    of_scales = operands[operand]
    (result,) = jax.linear_transpose(linear, of_scales)(list(cotangents))
    return result  # type: ignore[no-any-return]


def _transposes(*, function: ScalarFunction | None, **_: Any) -> Transposes:
    """Return the rules of both arrays of scales, in which a product alone is linear."""
    if function is not None:
        return {}
    return {i: functools.partial(_cotangent, i) for i in (2, 3)}


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Put the mapped axis first. An operand and its scales have it together."""
    out_dims = [0] if function is None else function.mapped_dims
    if all(dim is None for dim in dims[:4]):
        # One product has an epilogue for each element of the batch.
        assert function is not None
        params["product"] = _F32
        accumulators = _product(*operands[:4], contraction=contraction, **params)
        elementwise = elementwise_function(function, contraction, operand_labels)
        results = jax.vmap(elementwise, (None, *dims[4:]), out_dims)(accumulators, *operands[4:])
        return results, out_dims
    mapped = [dims[i] is not None or dims[i + 2] is not None for i in (0, 1)] * 2

    def moved(x: Array, dim: int | None, is_mapped: bool) -> Array:
        if not is_mapped:
            return x
        if dim is None:
            return jnp.broadcast_to(x, (axis_data.size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    of_labels = contraction.mapped(*(0 if x else None for x in mapped[:2]))
    factors = map(moved, operands[:4], dims[:4], mapped)
    results = _bind(
        *factors,
        *operands[4:],
        contraction=of_labels,
        function=function,
        operand_labels=tuple(
            labelled(own, of_labels.out[0], dim)
            for own, dim in zip(operand_labels, dims[4:], strict=True)
        ),
        **params,
    )
    return results, out_dims


def sharding_rule(
    lhs: Any,
    rhs: Any,
    lhs_scales: Any,
    rhs_scales: Any,
    *_: Any,
    contraction: Contraction,
    columns_first: bool = False,
    function: ScalarFunction | None = None,
    operand_labels: tuple[Labels, ...] = (),
    **__: Any,
) -> ShardingRule:
    """Let devices share whole blocks, along dimensions that consist of those."""
    c = contraction
    of_scales = [lhs_scales.shape, rhs_scales.shape]
    if columns_first:
        *leading, blocks, _ = rhs_scales.shape
        of_scales[1] = (*leading, rhs.shape[-2], blocks)
    sizes: dict[int, int] = {}
    blocked: set[int] = set()
    for labels, x, scales in zip((c.lhs, c.rhs), (lhs, rhs), of_scales, strict=True):
        for label, size, count in zip(labels, x.shape, scales, strict=True):
            if count not in (1, size):
                blocked.add(label)
            sizes[label] = size
    whole = {label for label in blocked if sizes[label] % BLOCK}
    blocked -= whole
    sizes = {
        label: size // BLOCK if label in blocked else size
        for label, size in sizes.items()
        if label not in whole
    }

    def kept(labels: Sequence[int]) -> Dims:
        return tuple(None if x in whole else x for x in labels)

    def kept_of_scales(labels: Sequence[int], shape: Sequence[int]) -> Dims:
        return tuple(
            label if count > 1 else None for label, count in zip(kept(labels), shape, strict=True)
        )

    left, right = map(kept_of_scales, (c.lhs, c.rhs), of_scales)
    if columns_first:
        right = (*right[:-2], right[-1], right[-2])
    m, n, k = c.lhs[-2], c.rhs[-2], c.lhs[-1]
    extents = dict(zip((*c.lhs, *c.rhs), (*lhs.shape, *rhs.shape), strict=True))
    rule = ShardingRule(
        (kept(c.lhs), kept(c.rhs), left, right),
        (kept(c.out),),
        sizes,
        flops=2 * math.prod(extents.values()),
        names={**dict.fromkeys(c.out[:-2], "batch"), m: "m", n: "n", k: "k"},
        blocked=frozenset(blocked),
    )
    return rule if function is None else with_epilogue(rule, [*map(kept, operand_labels)], function)


# Partitioning: the sum over devices is completed before the epilogue, which is not linear.


def _in_float32(*, function: ScalarFunction | None, **params: Any) -> Params:
    if function is None:
        # As XLA adds the terms of its own products.
        return {**params, "function": None}
    return {**params, "function": function.with_reductions_in_float32(), "product": _F32}


def _function_of_sum(
    *,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
    product: np.dtype[Any],
    **params: Any,
) -> FunctionOfSum:
    def term(*operands: Array) -> Array:
        return _product(*operands, product=product, **params)

    def epilogue(total: Array, *operands: Array) -> list[Array]:
        assert function is not None
        elementwise = elementwise_function(function, params["contraction"], operand_labels)
        return elementwise(total.astype(_F32), *operands[4:])

    return FunctionOfSum(term, product, epilogue)


# Checkpoint policies.


def _as_dot_general(
    *, contraction: Contraction, product: np.dtype[Any], **_: Any
) -> tuple[compat.Primitive, dict[str, Any]] | None:
    return as_dot_general(contraction, None, product)


def _saved(
    *,
    contraction: Contraction,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
    **_: Any,
) -> Saved | None:
    if function is None:
        return None
    elementwise = elementwise_function(function, contraction, operand_labels)
    return saved_pre_activation(function, elementwise, _F32, between=2)


# Lowering.


def _refusal(*_: Any, **__: Any) -> Fallback | None:
    return None


def _described(
    *,
    contraction: Contraction,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
    **_: Any,
) -> str:
    call = f"scaled_matmul {contraction}"
    return (
        call
        if function is None
        else f"{call}, {described_function(function, contraction, operand_labels)}"
    )


def _cpu(_operands: Any, _avals: Any, **params: Any) -> Rewrite:
    function = functools.partial(_by_contraction, **params)
    return Rewrite("the operands are dequantised, and multiplied in float32", function)


def _cuda(
    operands: Sequence[Operand],
    _: Any,
    *,
    contraction: Contraction,
    product: np.dtype[Any],
    columns_first: bool,
    function: ScalarFunction | None,
    operand_labels: tuple[Labels, ...],
) -> Outcome:
    params: Params = {
        "contraction": contraction,
        "product": product,
        "function": function,
        "operand_labels": operand_labels,
    }
    factors, arrays = operands[:4], operands[4:]
    stored = [stored_scales(factors[2], False), stored_scales(factors[3], columns_first)]
    scales = [
        scales_in_memory(x.aval.shape[-2], own.shape[-2:], own.strides[-2:])
        for x, own in zip(factors, stored, strict=False)
    ]
    rows = [x.aval.shape[-2] for x in factors[:2]]
    if not columns_first and all(
        x.block_rows == 1 and x.row_stride and not x.fit_bulk_copies(count)
        for x, count in zip(scales, rows, strict=True)
    ):
        return Rewrite(
            "scales of rhs copied first: those of columns are adjacent, and a multiple of 4",
            functools.partial(_with_columns_first, **params),
        )
    read = (*(x.value for x in factors[:2]), *(x.value for x in stored))

    def state(_: Any, out_dtype: np.dtype[Any], extra: Sequence[Labels] = ()) -> LoweredProduct:
        shapes = [x.aval.shape for x in factors[:2]]
        geometry, of_both, strides = strided_product(
            contraction, shapes, scales, [x.strides for x in stored], extra
        )
        left_dtype, right_dtype = (x.aval.dtype for x in factors[:2])
        stated = Product(geometry, left_dtype, right_dtype, out_dtype, "fp8", scales=of_both)
        return LoweredProduct(stated, read, strides)

    stated = state(None, product)
    if copies_rows_first(stated.product, current_gpu()):
        return Rewrite(
            "scales of lhs copied first: those of rows are adjacent",
            functools.partial(_with_rows_first, columns_first=columns_first, **params),
        )
    if function is None:
        return cuda_kernel(stated.product, stated.operands)
    found = fused_kernel(
        factors, None, arrays, contraction=contraction, operand_labels=operand_labels,
        function=function, accumulator=_F32, state=state,
    )  # fmt: skip
    if not isinstance(found, str):
        return found
    unfused = functools.partial(_unfused, columns_first=columns_first, **params)
    return Rewrite(f"the epilogue runs in XLA, after the product: {found}", unfused)


def _with_rows_first(
    lhs: Array, rhs: Array, lhs_scales: Array, *operands: Array, **params: Any
) -> list[Array]:
    # The kernel reads them where they lie before the second transpose.
    rows = jnp.swapaxes(jnp.swapaxes(lhs_scales, -1, -2), -1, -2)
    results: list[Array] = _bind(lhs, rhs, rows, *operands, **params)
    return results


def _with_columns_first(
    lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, *arrays: Array, **params: Any
) -> list[Array]:
    columns = with_columns_first(rhs_scales, rhs.shape[-2])
    results: list[Array] = _bind(
        lhs, rhs, lhs_scales, columns, *arrays, columns_first=True, **params
    )
    return results


_bind = define(
    Operation(
        name="tilekern_scaled_matmul",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        is_linear=lambda function, **_: function is None,
        transposes=_transposes,
        refuse_tangent=_refuse_tangent,
        batch=_batch,
        sharding_rule=sharding_rule,
        planners={"cpu": Planner(_refusal, _cpu), "cuda": Planner(_refusal, _cuda)},
        describe=_described,
        in_float32=_in_float32,
        function_of_sum=_function_of_sum,
        stands_for=_as_dot_general,
        saved=_saved,
    )
)
