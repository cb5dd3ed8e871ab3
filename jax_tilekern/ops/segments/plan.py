"""The order of edges by segment, made once and used by several calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import GatherScatterMode
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.arguments import integer
from jax_tilekern.ops.explicit import by_automatic_axes, spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.segments.keys import keys_of
from jax_tilekern.ops.segments.order import bounds_of_sorted, order_by_key
from jax_tilekern.plans.segments.index_sort import MAX_ITEMS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SegmentPlan:
    """Edges in the order of their segments; :func:`jax_tilekern.segment_plan` makes one.

    It is a pytree, so it can be an argument or a result of jitted functions.

    Attributes
    ----------
    keys
        The segment of each edge, int32; those out of bounds belong to none.
    order
        The edges by ascending segment, between those that lie before and those that lie behind;
        ``None`` if they ascend as they are.
    bounds
        The positions where the edges before the segments, of each segment and behind them begin,
        and the number of edges.
    num_segments
        Number of segments.
    clip
        Whether its mode is ``"clip"``.
    """

    keys: Array
    order: Array | None
    bounds: Array
    num_segments: int = field(metadata={"static": True})
    clip: bool = field(metadata={"static": True})

    @property
    def size(self) -> int:
        """Number of edges."""
        return int(self.keys.shape[-1])

    @property
    def placed(self) -> tuple[Array, ...]:
        """Keys, order if there is one, and bounds."""
        return tuple(x for x in (self.keys, self.order, self.bounds) if x is not None)

    def __repr__(self) -> str:
        # A plan that vmap has made has the edges of a batch.
        edges = " x ".join(map(str, jnp.shape(self.keys)))
        return f"SegmentPlan({edges} edges, {self.num_segments} segments)"


Ids = ArrayLike | SegmentPlan
_IDS, _COUNT = "segment_ids", "num_segments"


def segment_plan(
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Any = None,
) -> SegmentPlan:
    """Order edges by segment, for any number of reductions to these segments.

    The sort is stable, so sums have a fixed order. On a GPU it is a radix sort of the bits that
    ``num_segments`` has.

    Parameters
    ----------
    segment_ids
        The segment of each edge: a vector of any integer type.
    num_segments
        Number of segments; by default one more than the largest id, which takes a concrete array.
    indices_are_sorted
        Whether the ids are known to ascend, so that nothing is sorted. If they do not, sums are
        wrong; no memory is read or written out of bounds.
    mode
        What ids out of bounds mean: ``"drop"`` (the default), that their edges belong to no
        segment; ``"clip"``, that they are those of the first and the last one. JAX's other names
        mean one of the two.

    Returns
    -------
    SegmentPlan
        Accepted in place of ``segment_ids`` by the functions of segments, and in place of indices
        by :func:`take`, :func:`scatter_add` and ``gather``.

    Raises
    ------
    TypeError
        If the ids are no integers.
    ValueError
        If they are no vector, ``num_segments`` is negative, ``mode`` is unknown, or there are more
        edges and segments than int32 counts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> plan = jtk.segment_plan(jnp.array([2, 0, 2]), 3)
    >>> jtk.segment_sum(jnp.array([1.0, 2.0, 4.0]), plan)
    Array([2., 0., 5.], dtype=float32)
    """
    return plan_of(
        "segment_plan",
        segment_ids,
        number_of_segments("segment_plan", segment_ids, num_segments),
        indices_are_sorted,
        clip=is_clipped("segment_plan", mode, segment_ids),
    )


def plan_of(
    name: str,
    ids: Ids,
    segments: int,
    is_sorted: bool,
    *,
    clip: bool,
    what: str = _IDS,
    argument: str = _COUNT,
) -> SegmentPlan:
    """Return the plan of a vector of ids, or the plan itself.

    In errors, ``what`` names the ids, and ``argument`` the number of segments.
    """
    if isinstance(ids, SegmentPlan):
        return checked_plan(name, ids)
    ids = integers(name, ids, what)
    if ids.ndim != 1:
        raise ValueError(f"{name}: {what} are a vector, not of shape {ids.shape}")
    if is_too_large(ids, segments):
        raise ValueError(
            f"{name}: {ids.size} {what} and {argument}={segments} are at most {MAX_ITEMS - 2} "
            "together"
        )
    return _plan(ids, segments, bool(is_sorted), clip)


def checked_plan(name: str, plan: SegmentPlan) -> SegmentPlan:
    """Return a plan, or raise an error if it is several that ``vmap`` has made."""
    if plan.keys.ndim != 1:
        raise ValueError(
            f"{name}: {plan} is a batch of plans; map {name} over it with jax.vmap as well"
        )
    return plan


def integers(name: str, ids: ArrayLike, what: str = _IDS) -> Array:
    """Return ids as an array, or raise an error unless they are integers."""
    _check_array(name, ids, what)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: {what} are integers, not {ids.dtype}")
    return ids


def _check_array(name: str, ids: ArrayLike, what: str) -> None:
    try:
        compat.check_arraylike(name, ids)
    except TypeError:
        kind = type(ids).__name__
        raise TypeError(f"{name}: {what} are an array of integers, not a {kind}") from None


def is_too_large(ids: Array, segments: int) -> bool:
    """Return whether positions of edges and of ends of bins exceed int32; symbolic ones do not."""
    items: Any = ids.size + segments + 2
    return isinstance(items, int) and items > MAX_ITEMS


def number_of_segments(name: str, ids: Ids, given: int | None, argument: str = _COUNT) -> int:
    """Return the number of segments, by default one more than the largest id."""
    if isinstance(ids, SegmentPlan):
        if given is not None and given != ids.num_segments:
            raise ValueError(
                f"{name}: {argument} is {given}, and the plan has {ids.num_segments} segments"
            )
        return ids.num_segments
    _check_array(name, ids, _IDS)
    if given is None:
        if isinstance(ids, jax.core.Tracer):
            raise jax.errors.ConcretizationTypeError(
                ids, f"{name}: without {argument} it is one more than the largest integer"
            )
        given = int(np.max(ids)) + 1 if np.size(ids) else 0
    count = integer(name, argument, given)
    if count < 0:
        raise ValueError(f"{name}: {argument} must be non-negative, not {count}")
    return count


def is_clipped(name: str, mode: Any, ids: Ids) -> bool:
    """Return whether ids out of bounds are those of the first and the last segment.

    A plan has its own mode, which ``mode`` must not contradict.
    """
    plan = ids if isinstance(ids, SegmentPlan) else None
    if mode is None:
        return plan is not None and plan.clip
    try:
        clip: bool = GatherScatterMode.from_any(mode) == GatherScatterMode.CLIP
    except ValueError:
        raise ValueError(
            f"{name}: mode is {mode!r}; it is 'drop', 'clip', 'fill' or 'promise_in_bounds'"
        ) from None
    if plan is not None and clip != plan.clip:
        own = "clip" if plan.clip else "drop"
        raise ValueError(f"{name}: mode is {mode!r}, and the plan has the mode {own!r}")
    return clip


@jitted("count", "is_sorted", "clip")
def _plan(ids: Array, count: int, is_sorted: bool, clip: bool) -> SegmentPlan:
    def arrays(ids: Array) -> list[Array]:
        keys = keys_of(ids, count, clip=clip)
        if is_sorted:
            return [keys, bounds_of_sorted(keys, bins=count + 2)]
        return [keys, *order_by_key(keys, bins=count + 2)]

    keys, *order, bounds = by_automatic_axes(
        arrays, ids, lambda: [spec_of(ids), *[(None,)] * (1 if is_sorted else 2)]
    )
    return SegmentPlan(keys, order[0] if order else None, bounds, count, clip)
