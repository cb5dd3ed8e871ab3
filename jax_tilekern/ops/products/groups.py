"""Groups of rows: their bounds, and what a contraction with groups means.

Kernels read one array of groups, their bounds. In terms of ``jax.lax`` a contraction with groups is
one without, of operands whose rows of other groups are zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.element_types import clipped
from jax_tilekern.ops.products.labelled_operands import broadcasted, transposed
from jax_tilekern.ops.segments.take import take
from jax_tilekern.partitioning.explicit import split_alike
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.plans.contraction import Contraction, Labels

_MOST = np.iinfo(np.int32).max
_BITS = 10
_DIGIT = (1 << _BITS) - 1


def checked_offset(function: str, group_offset: Any) -> Array | None:
    """Return the first group as a scalar, or raise a ``TypeError``."""
    if group_offset is None:
        return None
    offset = jnp.asarray(group_offset)
    if not jnp.issubdtype(offset.dtype, np.integer) or offset.shape not in ((), (1,)):
        raise TypeError(
            f"group_offset of {function} is an integer of shape (1,) or (), not "
            f"{offset.dtype}{list(offset.shape)}"
        )
    return offset.reshape(())


# The function is not inlined, because it has many equations.
@functools.partial(jax.jit, static_argnames=("rows", "count"))
@mode_independent
def group_bounds(sizes: Array, rows: Any, offset: Array | None = None, count: Any = None) -> Array:
    """Return where each group's rows begin and end.

    XLA makes one small fusion of it: a masked sum, with no loop over the groups.

    Parameters
    ----------
    sizes
        Integers of shape ``(..., groups)``. A negative size counts as 0.
    rows
        The number of rows. Groups are cut off there.
    offset
        The first group of interest, an integer of shape ``()`` or ``(1,)``; 0 by default. Any
        value is defined: there are no rows before the first group or behind the last.
    count
        How many groups from there on; all by default.

    Returns
    -------
    Array
        ``int32`` of shape ``(..., count + 1)``: group ``offset + j`` has rows ``bounds[..., j]``
        to ``bounds[..., j + 1]``.
    """
    groups = sizes.shape[-1]
    count = groups if count is None else count
    first = 0 if offset is None else clipped(offset.reshape(()), -count, groups)
    sizes = clipped(sizes, 0, _MOST).astype(np.uint32)
    # The digits are summed, so that the sums of up to two million groups do not overflow. XLA does
    # not partition a sum that saturates.
    digits = jnp.stack([sizes & _DIGIT, sizes >> _BITS & _DIGIT, sizes >> 2 * _BITS])
    shape = (*digits.shape[:-1], count + 1, groups)
    group = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    bound = lax.broadcasted_iota(np.int32, shape, len(shape) - 2)
    low, middle, high = jnp.where(group - bound < first, digits[..., None, :], np.uint32(0)).sum(-1)
    middle += low >> _BITS
    high += middle >> _BITS
    sums = (high << 2 * _BITS) + ((middle & _DIGIT) << _BITS) + (low & _DIGIT)
    sums = jnp.where(high >> (31 - 2 * _BITS) > 0, np.uint32(_MOST), sums)
    sums = sums.astype(np.int32)
    return jnp.where(sums < rows, sums, rows)


def masked(
    lhs: Array, rhs: Array, bounds: Array, *, contraction: Contraction
) -> tuple[Array, Array, Contraction]:
    """Give the operands the group label, with zeros in rows of other groups, as JAX does."""
    c = contraction
    ragged, _ = _ragged_and_group(c)
    position = _positions(bounds, lhs.shape[c.lhs.index(ragged)])[..., None, :]
    mask = (bounds[..., :-1, None] <= position) & (position < bounds[..., 1:, None])
    mask_labels = (*c.bounds, ragged)

    def expanded(x: Array, labels: Labels) -> tuple[Array, Labels]:
        wanted = (*(label for label in mask_labels if label not in labels), *labels)
        sizes = dict(zip((*mask_labels, *labels), (*mask.shape, *x.shape), strict=True))
        x = broadcasted(x, labels, wanted, sizes)
        own = broadcasted(mask, mask_labels, wanted, sizes)
        return _kept(own, x, wanted), wanted

    lhs, lhs_labels = expanded(lhs, c.lhs)
    rhs_labels = c.rhs
    if c.ragged_dimension == "k":
        rhs, rhs_labels = expanded(rhs, rhs_labels)
    return lhs, rhs, Contraction(lhs_labels, rhs_labels, c.out)


def _kept(mask: Array, x: Array, labels: Labels) -> Array:
    """Set elements outside of a mask to zero."""
    mask, x = split_alike([labels, labels], [mask, x])
    return lax.select(mask, x, lax.full_like(x, 0))


def used(lhs: Array, rhs: Array, bounds: Array, *, contraction: Contraction) -> tuple[Array, Array]:
    """Set rows of no group to zero, and matrices of groups without rows.

    No product reads them. Their cotangents are zeros, but they may be NaN.
    """
    c = contraction
    ragged, group = _ragged_and_group(c)
    position = _positions(bounds, lhs.shape[c.lhs.index(ragged)])
    inside = (bounds[..., :1] <= position) & (position < bounds[..., -1:])
    filled = bounds[..., :-1] < bounds[..., 1:]

    def kept(x: Array, labels: Labels, mask: Array, label: int) -> Array:
        mask_labels = (*c.bounds[:-1], label)
        # An array that batches share is used where one of them uses it.
        mask = mask.any([i for i, each in enumerate(mask_labels) if each not in labels])
        own = tuple(each for each in mask_labels if each in labels)
        mask = broadcasted(mask, own, labels, dict(zip(labels, x.shape, strict=True)))
        return _kept(mask, x, labels)

    return kept(lhs, c.lhs, inside, ragged), kept(rhs, c.rhs, filled, group)


def gathered(
    lhs: Array, rhs: Array, bounds: Array, *, contraction: Contraction
) -> tuple[Array, Array, Array, Contraction]:
    """Contract other dimensions along with the ragged one: bring the rows of a group together.

    The rows of all indices of those dimensions become rows of one ragged dimension, ordered by
    their groups.
    """
    c = contraction
    ragged, group = _ragged_and_group(c)
    sizes = dict(zip((*c.lhs, *c.bounds), (*lhs.shape, *bounds.shape), strict=True))
    rows = sizes[ragged]
    batch = tuple(x for x in c.batch if x in c.bounds)
    bounds = broadcasted(bounds, c.bounds, (*batch, *c.contracted, group), sizes)
    shape = bounds.shape
    bounds = bounds.reshape(*shape[: len(batch)], -1, shape[-1])
    together = bounds.shape[-2] * rows

    position = _positions(bounds, rows)
    group_of = (bounds[..., 1:, None] <= position[..., None, :]).sum(-2, dtype=np.int32)
    group_of = jnp.where(position < bounds[..., :1], bounds.shape[-1], group_of)
    order = jnp.argsort(group_of.reshape(*shape[: len(batch)], together), stable=True)

    def in_order(x: Array, labels: Labels) -> tuple[Array, Labels]:
        own = tuple(label for label in batch if label in labels)
        outer = (*own, *c.contracted, ragged)
        rest = tuple(label for label in labels if label not in outer)
        x = transposed(x, labels, (*outer, *rest))
        x = x.reshape(*x.shape[: len(own)], together, *x.shape[len(outer) :])
        rows_of = functools.partial(jnp.take, axis=0, unique_indices=True, mode="clip")
        for label in reversed(batch):
            rows_of = jax.vmap(rows_of, (0 if label in own else None, 0))
        return rows_of(x, order), (*batch, ragged, *rest)

    lhs, lhs_labels = in_order(lhs, c.lhs)
    rhs, rhs_labels = in_order(rhs, c.rhs)
    sums = jnp.diff(bounds).sum(-2, dtype=np.int32)
    labels = Contraction(lhs_labels, rhs_labels, c.out, (*batch, group), ragged, group)
    return lhs, rhs, group_bounds(sums, together), labels


def over_groups(
    function: ScalarFunction, contraction: Contraction, operand_labels: Sequence[Labels]
) -> Callable[..., list[Array]]:
    """Return a function of the accumulators, of the bounds and of the operands of an epilogue.

    Rows of no group are zeros in its results.
    """
    c = contraction
    ragged, _ = _ragged_and_group(c)
    prefix = c.bounds[:-1]

    def call(accumulators: Array, bounds: Array, *operands: Array) -> list[Array]:
        position = _positions(bounds, accumulators.shape[c.out.index(ragged)])
        group_of = (bounds[..., 1:-1, None] <= position[..., None, :]).sum(-2, dtype=np.int32)
        inside = (bounds[..., :1] <= position) & (position < bounds[..., -1:])
        sizes = dict(zip(c.out, accumulators.shape, strict=True))
        inside = broadcasted(inside, (*prefix, ragged), c.out, sizes)
        read = [
            _at_rows(x, own, group_of, c) for x, own in zip(operands, operand_labels, strict=True)
        ]
        # Rows of no group have no derivatives, though those of the function there may be NaN.
        values = [broadcasted(x, own, c.out, sizes) for x, own in read]
        arrays = [inside, accumulators, *values]
        inside, accumulators, *values = split_alike([c.out] * len(arrays), arrays)
        within = [_constant_outside(inside, x) for x in values]
        results = function.over_labels(c.out, [c.out] * len(within))(accumulators, *within)
        return [jnp.where(inside, x, jnp.zeros((), x.dtype)) for x in results]

    return call


def _constant_outside(inside: Array, x: Array) -> Array:
    return jnp.where(inside, x, lax.stop_gradient(x))


def _at_rows(
    x: Array, labels: Labels, group_of: Array, contraction: Contraction
) -> tuple[Array, Labels]:
    """Give an operand of groups the elements that each row reads."""
    ragged, group = _ragged_and_group(contraction)
    if group not in labels:
        return x, labels
    prefix = contraction.bounds[:-1]
    if x.shape[labels.index(group)] == 0:
        # All rows are of no group, but a gather needs an element.
        sizes = [1 if label == group else n for n, label in zip(x.shape, labels, strict=True)]
        x = jnp.zeros(sizes, x.dtype)
    rest = [label for label in labels if label not in (*prefix, group)]
    own = [label for label in prefix if label in labels]
    x = transposed(x, labels, (*own, group, *rest))
    # Its gradient is a sum over the rows of each group, in a fixed order.
    rows_of: Callable[..., Array] = functools.partial(
        take, axis=0, mode="clip", indices_are_sorted=True
    )
    for label in reversed(prefix):
        rows_of = jax.vmap(rows_of, (0 if label in own else None, 0))
    return rows_of(x, group_of), (*prefix, ragged, *rest)


def local_bounds(shard: Shard, bounds: Array, contraction: Contraction) -> Array:
    """Return the bounds of a device's own rows and groups."""
    ragged, group = _ragged_and_group(contraction)
    if shard.is_split(group):
        # Groups that pad the last device's part have no rows.
        bounds = part_of(shard, bounds, bounds.ndim - 1, group, overlap=1)
    if shard.is_split(ragged):
        bounds = jnp.clip(bounds - shard.start(ragged), 0, shard.size(ragged))
    return bounds


def part_of(shard: Shard, x: Array, dim: int, label: int, overlap: int = 0) -> Array:
    """Return a device's part of an array that it has whole, and ``overlap`` elements more."""
    size = shard.size(label)
    pads = [(0, 0)] * x.ndim
    pads[dim] = (0, size * shard.parts(label) + overlap - x.shape[dim])
    return lax.dynamic_slice_in_dim(
        jnp.pad(x, pads, mode="edge"), shard.start(label), size + overlap, axis=dim
    )


def _positions(bounds: Array, rows: int) -> Array:
    """Return the position of each row, for each of the bounds' other indices."""
    return lax.broadcasted_iota(np.int32, (*bounds.shape[:-1], rows), bounds.ndim - 1)


def _ragged_and_group(contraction: Contraction) -> tuple[int, int]:
    assert contraction.ragged is not None
    assert contraction.group is not None
    return contraction.ragged, contraction.group
