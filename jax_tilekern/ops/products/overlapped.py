"""Products that overlap with their communication along a mesh axis.

``gathered_product`` multiplies the rows of all devices, ``scattered_product`` sums the products of
all devices, of which each gets its rows. They are each other's cotangents. On GPUs of one process
parts of the rows are copied while others are multiplied; elsewhere a product follows
``all_gather``, or ``psum_scatter`` follows a product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.epilogues import as_dot_general
from jax_tilekern.ops.products.fused_lowering import planners
from jax_tilekern.ops.products.labelled_operands import common_type, swapped_precision
from jax_tilekern.ops.products.overlapped_lowering import (
    exchange_parts,
    exchanged_kernel,
    result_type,
    scattered_kernel,
)
from jax_tilekern.partitioning.call import register_exchange
from jax_tilekern.partitioning.row_exchange import RowExchange
from jax_tilekern.plans import overlap
from jax_tilekern.plans.contraction import Contraction, labelled
from jax_tilekern.plans.overlap import MeshAxis
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import Operation, define


@jitted("axis_name", "precision", "preferred_element_type")
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: str,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Any:
    """Matrix product ``lax.all_gather(x, axis_name, tiled=True) @ w`` inside ``shard_map``.

    On GPUs of one process that access each other's memory, rows are sent while others are
    multiplied, if that is predicted to be faster. The gradient with respect to ``x`` is that of
    :func:`matmul_reduce_scatter`. Of several matrices, such as those of queries, keys and values,
    the first is multiplied while rows are sent, and the others by the gathered rows; in the
    gradient one collective scatters the sum over all of them.

    Parameters
    ----------
    x
        This device's rows, of shape ``(m, ..., k)``.
    w
        Matrix of shape ``(k, n)``, or a sequence of matrices of one type.
    axis_name
        The mesh axis along which rows are gathered.
    precision, preferred_element_type
        As in :func:`matmul`.

    Returns
    -------
    Array
        Shape ``(devices * m, ..., n)``, where ``devices`` are those along the axis. A list of such
        arrays for a sequence of matrices.

    Raises
    ------
    ValueError
        If ``x`` has fewer than two dimensions, ``w`` is no matrix, or there is none.
    TypeError
        If contracted sizes or the types of matrices differ.
    NameError
        If there is no such axis.

    See Also
    --------
    matmul_reduce_scatter : the product whose rows are scattered.
    """
    is_several = isinstance(w, list | tuple)
    matrices = [jnp.asarray(each) for each in (w if is_several else [w])]  # type: ignore[union-attr]
    dtypes = dict.fromkeys(each.dtype.name for each in matrices)
    if len(dtypes) != 1:
        raise TypeError(f"w has matrices of one type, not of {[*dtypes]}")
    axis, keeps = _mesh_axis(axis_name), len(matrices) > 1
    x, first, *others = _varying([x, *matrices], axis)

    def product(multiply: Callable[..., list[Array]], x: Array, w: Array) -> list[Array]:
        x, w, contraction, result = _operands(x, w, precision, preferred_element_type)
        found, *gathered = multiply(x, w, **_params(contraction, precision, result))
        return [compat.with_type(found, result.dtype, result.weak_type), *gathered]

    def with_gather(x: Array, w: Array, **params: Any) -> list[Array]:
        return gathered_product(x, w, axis=axis, keeps=keeps, **params)

    def by_gathered(x: Array, w: Array, **params: Any) -> list[Array]:
        return [contract(x, w, **params)]

    multiplied = _operands(x, first, precision, preferred_element_type)[0].dtype
    if axis is None or x.dtype.itemsize < multiplied.itemsize:
        # Rows of a narrower type than is multiplied are gathered in their own.
        rows = [lax.all_gather(x, axis_name, tiled=True)]
        products, others = [], [first, *others]
    else:
        found, *rows = product(with_gather, x, first)
        products = [found]
    products += [product(by_gathered, rows[0], each)[0] for each in others]
    return products if is_several else products[0]


@jitted("axis_name", "precision", "preferred_element_type")
def matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: str,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Matrix product ``lax.psum_scatter(x @ w, axis_name, tiled=True)`` inside ``shard_map``.

    On GPUs of one process that access each other's memory, the product's rows are sent while others
    are computed, if that is predicted to be faster. A device then adds the terms of the others to
    the accumulators of its own, in an order that only its place along the axis decides. The
    gradient with respect to ``x`` is that of :func:`all_gather_matmul`.

    Parameters
    ----------
    x
        This device's columns, of shape ``(devices * m, ..., k)``, where ``devices`` are those along
        the axis.
    w
        This device's rows, of shape ``(k, n)``.
    axis_name
        The mesh axis along which products are added and rows are scattered.
    precision, preferred_element_type
        As in :func:`matmul`.

    Returns
    -------
    Array
        Shape ``(m, ..., n)``.

    Raises
    ------
    ValueError
        If ``x`` has fewer than two dimensions, ``w`` is no matrix, or the number of devices does
        not divide the rows.
    TypeError
        If contracted sizes differ.
    NameError
        If there is no such axis.

    See Also
    --------
    all_gather_matmul : the product whose rows are gathered.
    """
    axis = _mesh_axis(axis_name)
    x, w = _varying([x, w], axis)
    x, w, contraction, result = _operands(x, w, precision, preferred_element_type)
    params = _params(contraction, precision, result)
    if axis is None:
        product = lax.psum_scatter(contract(x, w, **params), axis_name, tiled=True)
    else:
        product = scattered_product(x, w, axis=axis, **params)
    return compat.with_type(product, result.dtype, result.weak_type)


def _varying(operands: Sequence[ArrayLike], axis: MeshAxis | None) -> Sequence[Array]:
    """Return arrays of which devices along the axis have their own, cast as they are given."""
    arrays = [jnp.asarray(x) for x in operands]
    return arrays if axis is None else compat.unify_varying(*arrays, over=(axis.name,))


def _operands(
    x: ArrayLike, w: ArrayLike, precision: Any, preferred_element_type: Any
) -> tuple[Array, Array, Contraction, Any]:
    if jnp.ndim(x) < 2 or jnp.ndim(w) != 2:
        raise ValueError(
            f"x of shape {jnp.shape(x)} has at least two dimensions, and w of shape {jnp.shape(w)} "
            "is a matrix"
        )
    by_matmul = functools.partial(
        jnp.matmul, precision=precision, preferred_element_type=preferred_element_type
    )
    result = compat.result_type(by_matmul, x, w)
    x, w = jnp.asarray(x), jnp.asarray(w)
    *rows, k = range(x.ndim)
    n = x.ndim
    contraction = Contraction((*rows, k), (k, n), (*rows, n))
    x, w = common_type(x, w, result.dtype, compat.canonicalize_precision(precision))
    return x, w, contraction, result


def _params(contraction: Contraction, precision: Any, result: Any) -> dict[str, Any]:
    return {
        "contraction": contraction,
        "precision": compat.canonicalize_precision(precision),
        "out_dtype": np.dtype(result.dtype),
    }


def _mesh_axis(name: Any) -> MeshAxis | None:
    """Return the mesh axis of this name that is manual here, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not isinstance(name, str) or name not in mesh.manual_axes or mesh.shape[name] == 1:
        return None
    names = list(mesh.shape)
    minor = names[names.index(name) + 1 :]
    return MeshAxis(name, mesh.shape[name], math.prod(mesh.shape[other] for other in minor))


# Products along a mesh axis. The first label of ``lhs`` and of the result is that of the rows which
# devices exchange: those of ``x`` are gathered, or those of the result are scattered. The transpose
# in ``x`` of the one is the other.


def gathered_product(x: Array, w: Array, *, keeps: bool, **params: Any) -> list[Array]:
    """Return the product of all devices' rows, and also the gathered rows if ``keeps``."""
    results: list[Array] = _bind(x, w, scatters=False, keeps=keeps, **params)
    return results


def scattered_product(x: Array, w: Array, **params: Any) -> Array:
    """Return this device's rows of the sum of all devices' products."""
    (result,) = _bind(x, w, scatters=True, keeps=False, **params)
    return result  # type: ignore[no-any-return]


def _all_gather(x: Array, axis: MeshAxis) -> Array:
    gathered: Array = lax.all_gather(x, axis.name, tiled=True)
    return gathered


def _reduce_scatter(x: Array, axis: MeshAxis) -> Array:
    scattered: Array = lax.psum_scatter(x, axis.name, tiled=True)
    return scattered


def _reference(
    x: Array, w: Array, *, axis: MeshAxis, scatters: bool, keeps: bool, **params: Any
) -> list[Array]:
    if scatters:
        return [_reduce_scatter(contract(x, w, **params), axis)]
    gathered = _all_gather(x, axis)
    return [contract(gathered, w, **params), *[gathered] * keeps]


def _reference_of_tangent(
    x_tangent: Array, w_tangent: Array, x: Array, w: Array, *, axis: MeshAxis, **params: Any
) -> Array:
    terms = contract(x_tangent, w, **params) + contract(x, w_tangent, **params)
    return _reduce_scatter(terms, axis)


def _reference_of_sum(x: Array, w: Array, term: Array, *, axis: MeshAxis, **params: Any) -> Array:
    return _reduce_scatter(contract(x, w, **params) + term, axis)


# Derivatives. The gathered rows are kept for the cotangent of ``w``.


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    axis: MeshAxis,
    scatters: bool,
    keeps: bool,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    (x, w), (x_tangent, w_tangent) = primals, tangents
    x_moves, w_moves = (type(tangent) is not ad.Zero for tangent in tangents)
    multiply = functools.partial(_bind, axis=axis, scatters=scatters, keeps=keeps, **params)
    if scatters and x_moves and w_moves:
        return multiply(x, w), [_tangent(x_tangent, w_tangent, x, w, axis=axis, **params)]
    results = multiply(x, w, keeps=keeps or (w_moves and not scatters))
    given = results[: 1 + keeps]
    derived = [compat.zero_tangent(result) for result in given]
    if x_moves:
        derived = multiply(x_tangent, w)
    if w_moves:
        by_w = multiply(x, w_tangent)[0] if scatters else contract(results[1], w_tangent, **params)
        derived[0] = ad.add_tangents(derived[0], by_w)
    return given, derived


def _cotangent_contraction(c: Contraction) -> Contraction:
    """Return the product of the result's cotangent and ``rhs`` that is the cotangent of ``lhs``."""
    return dataclasses.replace(c, lhs=c.out, out=c.lhs)


def _cotangent_of_w(x: Array, cotangent: Array, w: Any, contraction: Contraction, p: Any) -> Array:
    c = dataclasses.replace(contraction, rhs=contraction.out, out=contraction.rhs)
    return contract(x, cotangent, contraction=c, precision=p, out_dtype=w.dtype)


def _for_x(
    cotangents: Sequence[Array],
    x: Any,
    w: Array,
    *,
    contraction: Contraction,
    axis: MeshAxis,
    scatters: bool,
    precision: Any,
    **_: Any,
) -> Array:
    c, (product_bar, *rows_bar) = _cotangent_contraction(contraction), cotangents
    params = {"contraction": c, "precision": precision, "out_dtype": x.dtype}
    if rows_bar:
        # One scatter for the cotangents by both results.
        found: Array = _scattered_sum(product_bar, w, rows_bar[0], axis=axis, **params)
        return found
    (found,) = _bind(product_bar, w, axis=axis, scatters=not scatters, keeps=False, **params)
    return found


def _for_w(
    cotangents: Sequence[Array],
    x: Array,
    w: Any,
    *,
    contraction: Contraction,
    axis: MeshAxis,
    scatters: bool,
    precision: Any,
    **_: Any,
) -> Array:
    cotangent, *_rows = cotangents
    if scatters:
        cotangent = _all_gather(cotangent, axis)
    else:
        x = _all_gather(x, axis)
    return _cotangent_of_w(x, cotangent, w, contraction, precision)


def _tangent_for(
    first: int,
    cotangent: Array,
    *operands: Any,
    contraction: Contraction,
    precision: Any,
    **params: Any,
) -> tuple[Array, Array]:
    """Return the cotangents of a pair ``x`` and ``w``, which share the gathered cotangent."""
    x, w = operands[2 - first : 4 - first]
    wanted_x, wanted_w = operands[first : first + 2]
    params_of_x = {
        **params,
        "contraction": _cotangent_contraction(contraction),
        "precision": precision,
        "out_dtype": wanted_x.dtype,
    }
    for_x, gathered = gathered_product(cotangent, w, keeps=True, **params_of_x)
    return for_x, _cotangent_of_w(x, gathered, wanted_w, contraction, precision)


def _jvp_of_sum(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    _, tangent = jvp_of(_reference_of_sum, primals, tangents, **params)
    return _scattered_sum(*primals, **params), tangent


def _for_x_and_term(
    cotangent: Array, x: Any, w: Array, term: Any, *, contraction: Contraction, **params: Any
) -> list[Array]:
    c, params = _cotangent_contraction(contraction), {**params, "out_dtype": x.dtype}
    return gathered_product(cotangent, w, keeps=True, contraction=c, **params)


# Batching: a mapped dimension follows the rows.


def _batch(
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    **params: Any,
) -> tuple[list[Array], list[int | None]]:
    x, w = operands
    new = 1 + max(*contraction.lhs, *contraction.rhs)
    rows = None if dims[0] is None else 1
    if dims[0] is not None:
        x = jnp.moveaxis(x, dims[0], 1)
    contraction = dataclasses.replace(
        contraction,
        lhs=labelled(contraction.lhs, new, rows),
        rhs=labelled(contraction.rhs, new, dims[1]),
        out=labelled(contraction.out, new, 1),
    )
    results = _bind(x, w, contraction=contraction, **params)
    return results, [1, rows][: len(results)]


def _batch_by(reference: Callable[..., Array]) -> Callable[..., tuple[Array, int]]:
    def batch(
        _: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
    ) -> tuple[Array, int]:
        return jax.vmap(functools.partial(reference, **params), dims)(*operands), 0

    return batch


# Partitioning: a product along an axis takes the place of a product and a collective.


def _along_axis(
    exchange: RowExchange,
    lhs: Any,
    rhs: Any,
    *_: Any,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    function: Any = None,
    **__: Any,
) -> Callable[..., list[Array]] | None:
    """Return the function of local operands in which devices exchange rows, if it is faster."""
    if contraction.group is not None or function is not None:
        return None
    is_swapped = exchange.operand == 1
    if is_swapped:
        lhs, rhs, contraction = rhs, lhs, contraction.swapped()
        precision = swapped_precision(precision)
    params = {"contraction": contraction, "precision": precision, "out_dtype": out_dtype}
    if exchange.is_shared and not exchange.keeps and not overlap.is_asked_for():
        # One all-gather serves all readers.
        return None
    size = exchange.axis.size
    out = result_type(lhs, rhs, 1 / size if exchange.scatters else size, contraction, out_dtype)
    if isinstance(
        exchange_parts(lhs, rhs, out, exchange.axis, contraction, scatters=exchange.scatters), str
    ):
        return None

    def exchanged(*operands: Array, **_: Any) -> list[Array]:
        x, w = reversed(operands) if is_swapped else operands
        if exchange.scatters:
            return [scattered_product(x, w, axis=exchange.axis, **params)]
        return gathered_product(x, w, axis=exchange.axis, keeps=exchange.keeps, **params)

    return exchanged


register_exchange("tilekern_contract", _along_axis)


# Primitives.


def _in_words(scatters: bool, **_: Any) -> tuple[str, str]:
    how = "terms added and scattered afterwards" if scatters else "rows gathered first"
    return how, "CPUs share their memory"


def _described(contraction: Contraction, axis: MeshAxis, scatters: bool, **_: Any) -> str:
    return f"{contraction}, rows {'scattered' if scatters else 'gathered'} over {axis.name}"


_bind = define(
    Operation(
        name="tilekern_exchanged_product",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        transposes={0: _for_x, 1: _for_w},
        batch=_batch,
        sharding_rule=None,
        planners=planners(exchanged_kernel, _reference, _in_words),
        describe=_described,
        stands_for=as_dot_general,
    )
)
# The tangent of a scattered product: linear in each pair of ``x`` and ``w``.
_tangent = define(
    Operation(
        name="tilekern_scattered_product_tangent",
        reference=_reference_of_tangent,
        transposes={
            (0, 1): functools.partial(_tangent_for, 0),
            (2, 3): functools.partial(_tangent_for, 2),
        },
        batch=_batch_by(_reference_of_tangent),
        sharding_rule=None,
        planners={},
        describe=functools.partial(_described, scatters=True),
    )
)
# A scattered product and a further term of the sum. The other products of rows that were gathered
# once have this term in the rows' cotangent.
_scattered_sum = define(
    Operation(
        name="tilekern_scattered_sum",
        reference=_reference_of_sum,
        jvp=_jvp_of_sum,
        transposes={(0, 2): _for_x_and_term},
        batch=_batch_by(_reference_of_sum),
        sharding_rule=None,
        planners=planners(
            scattered_kernel, _reference_of_sum, functools.partial(_in_words, scatters=True)
        ),
        describe=functools.partial(_described, scatters=True),
    )
)
