"""``associative_scan``: a scan of any elementwise function as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.primitives import is_elementwise
from jax_tilekern.epilogue.scalar_function import Role, ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.along_axis import define_along_axis
from jax_tilekern.ops.arguments import integer
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.scans.combinations import combination_of_scalars
from jax_tilekern.ops.scans.linear_recurrence import element_before, recurrence
from jax_tilekern.ops.scans.lowering import (
    planned_scan,
)
from jax_tilekern.plans.scans.problem import ScanInput
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)


def associative_scan(
    fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """Scan by an associative function, with the semantics of :func:`jax.lax.associative_scan`.

    On a GPU a scan by an elementwise function of real numbers is one kernel, which reads each array
    once. Others are JAX's, such as those of matrices.

    Parameters
    ----------
    fn
        ``fn(a, b)`` of two trees of arrays like ``elems``; it must be associative.
    elems
        A tree of arrays, equally long along the axis.
    reverse
        Whether the scan begins at the end of the axis.
    axis
        The axis; may be negative.

    Returns
    -------
    Any
        A tree like ``elems``. The derivative of a scan of one array is a linear recurrence, that of
        several arrays is JAX's.

    Raises
    ------
    TypeError
        If ``fn`` is no function, or ``elems`` has a leaf that is no array.
    ValueError
        If the arrays have different sizes along the axis, or it is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.associative_scan(jnp.maximum, jnp.array([1, 3, 2, 5]))
    Array([1, 3, 3, 5], dtype=int32)
    """
    if not callable(fn):
        raise TypeError("lax.associative_scan: fn argument should be callable.")
    axis = integer("associative_scan", "axis", axis)
    return _scanned(elems, fn=fn, reverse=bool(reverse), axis=axis)


@jitted("reverse", "axis", functions=["fn"])
def _scanned(elems: Any, *, fn: Callable[..., Any], reverse: bool, axis: int) -> Any:
    leaves, tree = jax.tree.flatten(elems)
    function = _of_scalars(fn, leaves, tree)
    if function is None:
        return lax.associative_scan(fn, elems, reverse, axis)
    rank = leaves[0].ndim
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is out of bounds for array of dimension {rank}")
    results = _bind(*leaves, function=function, axis=axis % rank, reverse=reverse)
    return jax.tree.unflatten(tree, results)


def _of_scalars(fn: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> ScalarFunction | None:
    """Return the function of the scalars of two elements, if it is elementwise."""
    shapes = {x.shape for x in leaves}
    if len(shapes) != 1 or () in shapes:
        return None
    (shape,) = shapes

    def flat(*arrays: Any) -> list[Any]:
        half = len(arrays) // 2
        earlier, later = (jax.tree.unflatten(tree, x) for x in (arrays[:half], arrays[half:]))
        return jax.tree.leaves(fn(earlier, later))

    dtypes = [np.dtype(x.dtype) for x in leaves]
    with compat.without_mesh():
        traced = jax.make_jaxpr(flat)(*(jax.core.ShapedArray(shape, x) for x in 2 * dtypes))
    results = [(x.shape, x.dtype) for x in traced.out_avals]
    if results != [(shape, x) for x in dtypes] or not _is_elementwise(traced, shape):
        return None
    first, *others = 2 * dtypes
    found = trace_scalars(flat, first, first, others, Role("associative_scan", "function"))
    # Values of the program that it reads would be more operands.
    return None if found.closed_over or found.function.is_closure else found.function


def _is_elementwise(closed: Any, shape: tuple[int, ...]) -> bool:
    """Whether each equation of a jaxpr computes each element of its results by itself."""
    if any(jnp.shape(x) for x in closed.consts):
        return False
    for eqn in compat.leaf_equations(closed.jaxpr):
        arrays = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if any(x.shape not in ((), shape) for x in arrays):
            return False
        name = eqn.primitive.name
        if not is_elementwise(name) and not (name == "broadcast_in_dim" and not arrays[0].shape):
            return False
    return True


def _of_arrays(function: ScalarFunction, rank: int, count: int) -> Callable[..., list[Array]]:
    """Return the function of so many arrays, first those of the earlier elements."""
    labels = tuple(range(rank))
    return function.over_labels(labels, [labels] * (count - 1))


def _reference(
    *operands: Array, function: ScalarFunction, axis: int, reverse: bool
) -> Sequence[Array]:
    of_arrays = _of_arrays(function, operands[0].ndim, 2 * len(operands))

    def combine(earlier: Sequence[Array], later: Sequence[Array]) -> list[Array]:
        return of_arrays(*earlier, *later)

    results: Sequence[Array] = lax.associative_scan(combine, list(operands), reverse, axis)
    return results


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    function: ScalarFunction,
    axis: int,
    reverse: bool,
) -> tuple[Any, Any]:
    """Return the tangent as a linear recurrence where there is one array, else as JAX's."""
    params = {"function": function, "axis": axis, "reverse": reverse}
    if len(primals) > 1:
        return jvp_of(_reference, primals, tangents, **params)
    (x,), (dx,) = primals, tangents
    (y,) = results = _bind(x, **params)
    # Nothing precedes the first element, whose result it is.
    number = x.shape[axis] - 1 if reverse else 0
    before = element_before(y, axis, reverse, lax.slice_in_dim(x, number, number + 1, axis=axis))
    ones, zeros = jnp.ones_like(x), jnp.zeros_like(x)
    of_arrays = _of_arrays(function, x.ndim, 2)
    a, b = (jax.jvp(of_arrays, (before, x), at)[1][0] for at in ((ones, zeros), (zeros, ones)))
    is_first = element_before(zeros, axis, reverse, 1)
    b = is_first + (1 - is_first) * b
    return results, [recurrence(a, b * dx, axis=axis, reverse=reverse, is_before=False)]


def _cuda(
    operands: Sequence[Operand], _: Any, *, function: ScalarFunction, axis: int, reverse: bool
) -> PlannedKernel | Fallback:
    dtypes = [np.dtype(x.aval.dtype) for x in operands]
    return planned_scan(
        f"associative_scan of {function.name}",
        operands,
        axis=axis,
        reverse=reverse,
        inputs=lambda: [ScanInput(dtype, computed_type(dtype)) for dtype in dtypes],
        combination=lambda: combination_of_scalars(function, dtypes),
        outputs=range(len(dtypes)),
        in_levels=True,
    )


_bind = define_along_axis(
    "tilekern_associative_scan",
    _reference,
    axis="axis",
    like_results=lambda *operands, **_: list(operands),
    jvp=_jvp,
    cuda=_cuda,
    describe=lambda function, axis, **_: f"scan by {function.name} along axis {axis}",
)
