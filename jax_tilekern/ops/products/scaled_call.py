"""A call of a product that has scales, as its public functions have it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.scalar_function import Role, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.products.epilogues import (
    ProductCall,
    define_product,
    elementwise_function,
    with_blocks_last,
)
from jax_tilekern.ops.products.fused_contraction import labelled_operands
from jax_tilekern.plans.contraction import Contraction, labelled
from jax_tilekern.plans.gemm.arithmetic import F32, TYPES
from jax_tilekern.primitives.linearity import OperandGroup
from jax_tilekern.primitives.operation import Params

_ROW, _K, _GROUP, _COLUMN = range(4)
# Rows times the transpose of a matrix for each group.
ROWS_BY_MATRICES = Contraction(
    (_ROW, _K), (_GROUP, _COLUMN, _K), (_ROW, _COLUMN), (_GROUP,), _ROW, _GROUP
)


@dataclass(frozen=True, kw_only=True)
class ScaledCall(ProductCall):
    """The parameters of a call of a product that has scales."""

    @property
    def together(self) -> Sequence[OperandGroup]:
        """Factors that have a mapped axis together."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The public function that it is."""
        return "scaled_ragged_dot" if self.is_grouped else "scaled_matmul"

    @property
    def product_in_words(self) -> str:
        return f"{self.name} {self.contraction}"

    def batched(
        self, operands: Sequence[Array], dims: Sequence[int | None], size: int
    ) -> tuple[list[Array], Params]:
        """Return the operands with the mapped axis first, and the parameters that it changes."""
        n, end = self.factors, self.first_read
        mapped = [dim is not None for dim in dims]
        for group in self.together:
            has_axis = any(mapped[i] for i in group)
            for i in group:
                mapped[i] = has_axis

        def moved(x: Array, dim: int | None, is_mapped: bool) -> Array:
            if not is_mapped:
                return x
            if dim is None:
                return jnp.broadcast_to(x, (size, *x.shape))
            return jnp.moveaxis(x, dim, 0)

        labels = self.contraction.mapped(*(0 if x else None for x in (*mapped[:2], *mapped[n:end])))
        read = zip(self.operand_labels, dims[end:], strict=True)
        changed: Params = {"contraction": labels}
        if self.function is not None:
            changed["operand_labels"] = tuple(labelled(x, labels.out[0], dim) for x, dim in read)
        factors = map(moved, operands[:end], dims[:end], mapped[:end])
        return [*factors, *operands[end:]], changed


class ScaledPrimitive(NamedTuple):
    """A product that has scales: what binds it, and what computes its epilogue in XLA."""

    bind: Callable[..., list[Array]]
    unfused: Callable[..., list[Array]]


def define_scaled(kind: type[ScaledCall], name: str, *args: Any, **rules: Any) -> ScaledPrimitive:
    """Define the primitive of a product whose calls are of a kind, as ``define_product``."""

    def batch(
        axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
    ) -> tuple[list[Array], list[int]]:
        call = kind(**params)
        if all(dim is None for dim in dims[: call.first_read]):
            return call.batched_epilogue(operands, dims)
        moved, changed = call.batched(operands, dims, axis_data.size)
        out_dims = [0] if call.function is None else call.function.mapped_dims
        return bind(*moved, **params | changed), out_dims

    def unfused(*operands: Array, **params: Any) -> list[Array]:
        """Compute the product by a kernel, and the epilogue in XLA."""
        return kind(**params).unfused(functools.partial(bind, **params), operands)

    bind = define_product(kind, name, *args, batch=batch, **rules)
    return ScaledPrimitive(bind, unfused)


def scaled_call(
    primitive: ScaledPrimitive,
    factors: Sequence[Array],
    bounds: Sequence[Array] = (),
    *,
    layout: Params,
    out_dtype: np.dtype[Any],
    shape: Sequence[int],
    role: Role,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[Any] = (),
    group_operands: Sequence[Any] = (),
    out_sharding: NamedSharding | None = None,
) -> Any:
    """Multiply in float32, and apply an epilogue if there is one.

    Parameters
    ----------
    factors, bounds
        Operands that are multiplied and their scales, and the bounds of groups if there are any.
    layout
        Parameters of the primitive without the type of the result: the contraction and others.
    out_dtype, shape
        Type of the result, and shape of the product.
    role
        What errors call the epilogue.
    epilogue, operands, group_operands, out_sharding
        As in ``contract_with_epilogue``.
    """
    contraction = layout["contraction"]

    def product(dtype: np.dtype[Any]) -> Array:
        def multiply(*operands: Array) -> Array:
            (result,) = primitive.bind(*operands, **layout, out_dtype=dtype)
            return result

        result: Array = compat.with_automatic_axes(multiply, out_sharding)(*factors, *bounds)
        return result

    def rounded() -> Array:
        own = out_dtype if out_dtype in TYPES["fp8"].results else F32
        return product(own).astype(out_dtype)

    if epilogue is None:
        return rounded()
    dtypes = [jnp.asarray(x).dtype for x in (*operands, *group_operands)]
    function, closed_over, nested = trace_scalars(epilogue, F32, out_dtype, dtypes, role)
    if function.is_identity:
        return nested([rounded()])
    read = labelled_operands(
        operands, group_operands, *bounds, contraction=contraction, shape=shape, role=role
    )
    read += [(jnp.asarray(x), ()) for x in closed_over]
    arrays, labels = [x for x, _ in read], tuple(labels for _, labels in read)
    if out_sharding is None:
        compute = primitive.unfused if function.is_closure else primitive.bind
        call = functools.partial(compute, function=function, operand_labels=labels)
        results = call(*factors, *bounds, *arrays, **layout, out_dtype=out_dtype)
    else:
        elementwise = elementwise_function(function, contraction, labels)
        results = elementwise(product(F32), *bounds, *arrays)
    return nested(with_blocks_last(results, function))
