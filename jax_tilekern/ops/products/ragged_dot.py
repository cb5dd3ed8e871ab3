"""``ragged_dot`` and ``ragged_dot_general``: JAX's signatures and semantics over one primitive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import lax
from jax_tilekern.interop.patch import replace
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.ops.products.groups import group_bounds
from jax_tilekern.ops.products.labelled_operands import check_operands
from jax_tilekern.plans.contraction import Contraction, Labels

# Dimension numbers of rows times a matrix per group.
_ROWS_BY_MATRICES = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


@jitted(
    "precision",
    "preferred_element_type",
    "out_sharding",
    "debug",
    functions=["epilogue"],
    unless=["debug"],
)
def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    debug: bool = False,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[ArrayLike] = (),
    group_operands: Sequence[ArrayLike] = (),
) -> Any:
    """Multiply consecutive groups of rows by a matrix each, as :func:`jax.lax.ragged_dot`.

    The sizes of the groups are data, known only where the product is computed: no group is padded
    and nothing is read back to the host. Derivatives to any order, in both operands, are ragged
    products as well, and so is what ``vmap`` makes of one over any of the operands.

    Parameters
    ----------
    lhs
        Rows, shape ``(m, k)``.
    rhs
        A matrix for each group, shape ``(groups, k, n)``. ``w.swapaxes(1, 2)`` is read where ``w``
        lies.
    group_sizes
        Integers of shape ``(groups,)``: the first ``group_sizes[0]`` rows are those of group 0, and
        so on. Rows past the last group are zeros in the result. Sizes that make no sense are
        defined too: a negative one counts as 0, and groups are cut off at the last row.
    precision
        As in :func:`matmul`.
    preferred_element_type
        Type of the result. By default that of the operands after promotion.
    group_offset
        The first group that ``rhs`` has, an integer of shape ``(1,)`` or ``()``; 0 by default.
        ``group_sizes`` still has all groups, ``rhs`` may have any number of them, and the rows of
        other groups are zeros in the result. So where the groups are shared out among devices, the
        sum of their results is the whole.
    out_sharding
        Sharding of the result. On a mesh with explicit axes it is required, as in JAX.
    debug
        Check on the host, whenever the product is computed, that no size is negative, that the
        groups do not exceed the rows and that the groups from the offset on exist. Sizes that are
        NumPy's are checked when the call is traced.
    epilogue
        ``epilogue(accumulator, *operands, *group_operands)``, a JAX function of scalars that is
        applied to every element; see :func:`matmul`. Rows of no group stay zeros in every result,
        and have no derivatives.
    operands
        Arrays that broadcast to the result by NumPy's rules.
    group_operands
        Arrays that broadcast to ``(groups, n)``, such as a bias of each expert: every row reads the
        elements of its group.

    Returns
    -------
    Array
        Shape ``(m, n)``. With an epilogue, an array for each scalar that it returns.

    Raises
    ------
    TypeError
        If shapes or types do not fit, or the epilogue is not a function of scalars.
    ValueError or jax.errors.JaxRuntimeError
        If ``debug`` finds an error in the sizes; the latter where a compiled program is run. The
        former if an operand of the epilogue does not broadcast.

    See Also
    --------
    ragged_dot_general : with any dimension numbers.
    explain : which kernel computes a product, and why.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((6, 4)), jnp.ones((3, 4, 5)) * jnp.arange(1, 4)[:, None, None]
    >>> sizes = jnp.array([2, 0, 3])
    >>> jtk.ragged_dot(x, w, sizes)[:, 0].tolist()
    [4.0, 4.0, 12.0, 12.0, 12.0, 0.0]
    >>> jax.grad(lambda w: jtk.ragged_dot(x, w, sizes).sum())(w)[:, 0, 0].tolist()
    [2.0, 0.0, 3.0]
    >>> bias = jnp.array([[1.0], [2.0], [3.0]])
    >>> jtk.ragged_dot(x, w, sizes, epilogue=jnp.add, group_operands=(bias,))[:, 0].tolist()
    [5.0, 5.0, 15.0, 15.0, 15.0, 0.0]
    """
    call = functools.partial(
        ragged_dot_general,
        lhs,
        rhs,
        group_sizes,
        _ROWS_BY_MATRICES,
        precision,
        preferred_element_type,
        group_offset,
        out_sharding=out_sharding,
    )
    check_operands("ragged_dot", epilogue, operands=operands, group_operands=group_operands)
    if epilogue is None:
        return call(debug=debug)
    result = compat.result_type(call)
    if debug:
        _check_sizes(group_sizes, np.shape(lhs)[0], group_offset, np.shape(rhs)[0])
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    offset = None if group_offset is None else jnp.asarray(group_offset)
    return contract_with_epilogue(
        lhs,
        rhs,
        group_bounds(group_sizes, lhs.shape[0], offset, rhs.shape[0]),
        contraction=rows_by_matrices(),
        precision=compat.canonicalize_precision(precision),
        product=result.dtype,
        shape=result.shape,
        epilogue=epilogue,
        operands=operands,
        group_operands=group_operands,
        role=Role("ragged_dot"),
        out_sharding=None if out_sharding is None else compat.explicit_sharding(result),
    )


@jitted(
    "ragged_dot_dimension_numbers",
    "precision",
    "preferred_element_type",
    "out_sharding",
    "debug",
    unless=["debug"],
)
def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    debug: bool = False,
) -> Array:
    """General ragged contraction, as :func:`jax.lax.ragged_dot_general`.

    What it computes depends on the kind of the ragged dimension of ``lhs``:

    - a row: ``[b..., m..., k...], [g, b..., k..., n...] -> [b..., m..., n...]``, every row with its
      own group's part of ``rhs``;
    - contracted: ``[b..., m..., k...], [b..., k..., n...] -> [g, b..., m..., n...]``, for every
      group the sum over its own rows;
    - a batch dimension: ``lax.dot_general``, whatever the groups are.

    Parameters
    ----------
    lhs, rhs
        Arrays of any rank.
    group_sizes
        Integers of shape ``(groups,)`` or ``(b..., x..., groups)``, where ``x...`` are the
        dimensions of the ragged one's kind that come before it in ``lhs``. Sizes that make no
        sense are defined as for :func:`ragged_dot`.
    ragged_dot_dimension_numbers
        Contracted and batch dimensions, the ragged one and that of the groups.
    precision, preferred_element_type, out_sharding, debug
        As for :func:`ragged_dot`.
    group_offset
        As for :func:`ragged_dot`. With a contracted ragged dimension the result has as many groups
        as ``group_sizes``: those from the offset on, and zeros for those that do not exist.

    Returns
    -------
    Array
        Its dimensions are the batch dimensions, then those of ``lhs`` that are neither batch nor
        contracted, then those of ``rhs``; before them the groups, if the ragged dimension is
        contracted.

    Raises
    ------
    TypeError
        If the dimension numbers do not fit the operands, or sizes or types do not match.
    NotImplementedError
        If there is a ``group_offset`` and the ragged dimension is a batch dimension, if the ragged
        dimension has 2**31 rows or more, or, as in JAX, if the mesh has explicit axes and there is
        no ``out_sharding``.
    ValueError or jax.errors.JaxRuntimeError
        If ``debug`` finds an error in the sizes; the latter where a compiled program is run.
    """
    numbers = ragged_dot_dimension_numbers
    if preferred_element_type is not None:
        # lax.ragged_dot_general accepts a float64 without x64, and fails when it is lowered.
        preferred_element_type = compat.canonicalize_dtype(preferred_element_type, "ragged_dot")
    result = compat.result_type(
        functools.partial(
            lax.ragged_dot_general,
            ragged_dot_dimension_numbers=numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        ),
        lhs,
        rhs,
        group_sizes
        if group_offset is None
        else _sizes_from_offset(rhs, group_sizes, group_offset, numbers),
    )
    given_sizes = group_sizes
    lhs, rhs, group_sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    offset = None if group_offset is None else jnp.asarray(group_offset)
    (lhs_contracting, _), (lhs_batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    precision = compat.canonicalize_precision(precision)
    sharding = None if out_sharding is None else compat.explicit_sharding(result)
    dense = Contraction.from_dot_general(lhs.ndim, rhs.ndim, numbers.dot_dimension_numbers)
    if ragged in lhs_batch:
        if offset is not None:
            raise NotImplementedError("group_offset with a ragged batch dimension")
        product = contract(
            lhs,
            rhs,
            contraction=dense,
            precision=precision,
            out_dtype=result.dtype,
            out_sharding=sharding,
        )
        return compat.with_type(product, result.dtype, result.weak_type)

    # The labels of lhs are its dimensions.
    if ragged in lhs_contracting:
        group = lhs.ndim + rhs.ndim
        out = (group, *dense.dot_general_out)
        before = tuple(lhs_contracting)[: tuple(lhs_contracting).index(ragged)]
        count = group_sizes.shape[-1]
    else:
        (group_dim,) = numbers.rhs_group_dimensions
        group = dense.rhs[group_dim]
        out = tuple(label for label in dense.dot_general_out if label != group)
        before = tuple(x for x in dense.rows if x < ragged)
        count = rhs.shape[group_dim]
    prefix: Labels = () if group_sizes.ndim == 1 else (*lhs_batch, *before)
    rows = lhs.shape[ragged]
    if isinstance(rows, int) and rows >= 2**31:
        raise NotImplementedError(f"ragged dimension of size {rows} in lhs: less than 2**31 only")
    if debug:
        _check_sizes(given_sizes, rows, group_offset, 0 if ragged in lhs_contracting else count)
    product = contract(
        lhs,
        rhs,
        group_bounds(group_sizes, rows, offset, count),
        contraction=Contraction(dense.lhs, dense.rhs, out, (*prefix, group), ragged, group),
        precision=precision,
        out_dtype=result.dtype,
        out_sharding=sharding,
    )
    return compat.with_type(product, result.dtype, result.weak_type)


def rows_by_matrices() -> Contraction:
    """Return the contraction of rows with a matrix for each group, ``mk,gkn->mn``."""
    dense = Contraction.from_dot_general(2, 3, _ROWS_BY_MATRICES.dot_dimension_numbers)
    rows, group = dense.lhs[0], dense.rhs[0]
    out = tuple(label for label in dense.dot_general_out if label != group)
    return Contraction(dense.lhs, dense.rhs, out, (group,), rows, group)


def _sizes_from_offset(
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    group_offset: ArrayLike,
    numbers: lax.RaggedDotDimensionNumbers,
) -> jax.ShapeDtypeStruct:
    """Sizes of the groups that ``rhs`` has, as JAX expects them, once the offset is checked."""
    offset, sizes = jax.typeof(group_offset), jax.typeof(group_sizes)
    if not jnp.issubdtype(offset.dtype, np.integer) or offset.shape not in ((), (1,)):
        raise TypeError(
            f"ragged_dot_general requires an integer group_offset of shape (1,) or (), got "
            f"{offset.str_short()}."
        )
    shape, rhs_shape = tuple(sizes.shape), np.shape(rhs)
    # JAX rejects dimension numbers that do not fit.
    for dim in numbers.rhs_group_dimensions:
        if not shape or not 0 <= dim < len(rhs_shape):
            continue
        count = rhs_shape[dim]
        if count > shape[-1]:
            raise TypeError(
                f"expected rhs to have at most the groups of group_sizes, got {count} groups in "
                f"rhs of shape {rhs_shape} and group_sizes of shape {shape}."
            )
        shape = (*shape[:-1], count)
    return jax.ShapeDtypeStruct(shape, sizes.dtype)


def _check_sizes(group_sizes: ArrayLike, rows: int, offset: ArrayLike | None, count: int) -> None:
    """Raise on the host if sizes are invalid, or there are no ``count`` groups from an offset.

    At once if both are NumPy's, whose 64 bits JAX may cut off.
    """

    def check(sizes: Any, offset: Any) -> None:
        sizes = np.asarray(sizes)
        what = f"ragged_dot: group_sizes {sizes.tolist()}"
        if (sizes < 0).any():
            raise ValueError(f"{what} have negative sizes")
        if (sizes.sum(-1, dtype=np.float64) > rows).any():
            raise ValueError(f"{what} exceed the {rows} rows of lhs")
        first = int(np.asarray(offset).reshape(()))
        if not 0 <= first <= sizes.shape[-1] - count:
            raise ValueError(
                f"{what}, group_offset {first}: there are no {count} groups from there on"
            )

    values = group_sizes, 0 if offset is None else offset
    if any(isinstance(x, Array) for x in values):
        jax.debug.callback(check, *values)
    else:
        check(*values)


replace(compat.ragged_dot_general_p, ragged_dot_general)
