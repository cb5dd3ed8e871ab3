"""Contractions with an epilogue: any JAX function of each element of a product.

The function is one of scalars, ``f(accumulator, *operands)``. Operands have some of the result's
labels and are broadcast over the others, so a bias, a scale of rows and a residual are one thing,
and ``vmap`` adds a label to whatever has the mapped axis. With groups an operand may have the
group's label: then each row reads the element of its own group. Rows of no group stay zeros in
every result. A function of two accumulators is one of a pair of products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.scalar_function import OWN, Role, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.products.contraction import contract, contract_with_scalar_function
from jax_tilekern.ops.products.epilogues import with_blocks_last
from jax_tilekern.ops.products.fused_lowering import InPlace
from jax_tilekern.ops.products.labelled_operands import common_type
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype


def contract_with_epilogue(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    second: Array | None = None,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    shape: Sequence[int],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    group_operands: Sequence[Any] = (),
    in_place: InPlace = (),
    symmetric: bool = False,
    out_sharding: NamedSharding | None = None,
    role: Role = OWN,
) -> Any:
    """Contract two arrays and apply a function to every element of the result.

    Parameters
    ----------
    lhs, rhs, bounds, contraction, precision
        As for ``contract``. The result has the ragged label.
    second
        What takes the place of ``rhs`` in a second product, of its shape. The epilogue then has
        two accumulators.
    product
        Type of each product without an epilogue.
    shape
        Shape of the result; ``contraction.out`` has its labels.
    epilogue
        ``epilogue(accumulator, *operands, *group_operands)`` on scalars. The accumulator of a
        second product follows the first one.
    operands
        Arrays that broadcast to ``shape``.
    group_operands
        Arrays that broadcast to ``shape`` with the groups in place of the rows.
    in_place
        Pairs of an operand of the epilogue and a result. A kernel writes the result over the
        operand where both have one type and shape, unless the call is differentiated. XLA copies
        the operand first if something else still reads it.
    symmetric
        Whether the caller knows that the product is symmetric in its last two dimensions, and so
        are the operands. A kernel may then compute half of each result.
    out_sharding
        Sharding of the result on a mesh with explicit axes.
    role
        What errors call the function.

    Raises
    ------
    ValueError
        If an operand does not broadcast, or rows of a vector are quantised.
    TypeError
        If the epilogue is not a function of scalars.
    """
    lhs, rhs = common_type(lhs, rhs, product, precision)
    accumulator = accumulator_dtype(lhs.dtype, product)
    dtypes = [jnp.asarray(x).dtype for x in (*operands, *group_operands)]
    if second is not None:
        second, dtypes = compat.as_type(second, rhs.dtype), [accumulator, *dtypes]
    function, closed_over, nested = trace_scalars(epilogue, accumulator, product, dtypes, role)
    if function.is_identity and not symmetric:
        plain = contract(
            lhs,
            rhs,
            *bounds,
            contraction=contraction,
            precision=precision,
            out_dtype=product,
            out_sharding=out_sharding,
        )
        return nested([plain])
    if bounds and function.elements < len(function.reductions):
        raise TypeError(
            f"{role.of(epilogue)} returns a result of rows, which {role.call} does not have; it is "
            "a result of epilogues of matmul and dot_general"
        )
    if function.quantizes and len(shape) < 2:
        raise ValueError(
            f"{role.of(epilogue)} quantises rows, which takes a product of at least 2 dimensions; "
            f"its shape is {tuple(shape)}"
        )
    read = labelled_operands(
        operands, group_operands, *bounds, contraction=contraction, shape=shape, role=role
    ) + [(jnp.asarray(x), ()) for x in closed_over]
    results = contract_with_scalar_function(
        lhs,
        rhs,
        *bounds,
        second=second,
        contraction=contraction,
        precision=precision,
        product=product,
        function=function,
        operands=read,
        in_place=in_place,
        symmetric=symmetric,
        out_sharding=out_sharding,
    )
    return nested(with_blocks_last(results, function))


def labelled_operands(
    operands: Sequence[Any],
    group_operands: Sequence[Any],
    *bounds: Array,
    contraction: Contraction,
    shape: Sequence[int],
    role: Role = OWN,
) -> list[tuple[Array, Labels]]:
    """Label the operands of an epilogue, which are those of :func:`contract_with_epilogue`."""
    names = (f"{role.call}: {role.operand.format(i)}" for i in itertools.count())
    return [
        _with_labels(name, jnp.asarray(x), contraction.out, shape)
        for x, name in zip(operands, names, strict=False)
    ] + [
        _with_labels(
            name,
            jnp.asarray(x),
            *_group_labels_and_shape(contraction, shape, *bounds),
            "the groups'",
        )
        for x, name in zip(group_operands, names, strict=False)
    ]


def _with_labels(
    name: str, x: Array, out: Labels, shape: Sequence[int], whose: str = "the product's"
) -> tuple[Array, Labels]:
    """Label an operand's dimensions as NumPy broadcasts them, without those of size 1."""
    aligned = tuple(shape[len(shape) - x.ndim :])
    if x.ndim > len(shape) or any(
        own not in (1, size) for own, size in zip(x.shape, aligned, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to {whose}, {tuple(shape)}"
        )
    labels = out[len(out) - x.ndim :]
    dropped = [i for i, size in enumerate(x.shape) if size == 1]
    return lax.squeeze(x, dropped), tuple(
        label for i, label in enumerate(labels) if i not in dropped
    )


def _group_labels_and_shape(
    contraction: Contraction, shape: Sequence[int], bounds: Array
) -> tuple[Labels, list[int]]:
    """Return the result's labels and shape with the groups in place of the rows."""
    assert contraction.group is not None
    place = contraction.out.index(contraction.ragged)
    labels, sizes = list(contraction.out), list(shape)
    labels[place], sizes[place] = contraction.group, bounds.shape[-1] - 1
    return tuple(labels), sizes
