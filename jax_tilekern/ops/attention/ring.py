"""``ring_attention``: attention of a sequence that devices share along a mesh axis.

A device keeps its queries. Blocks of keys and values travel around the axis, and each device
computes :func:`attention` of its queries and the block at hand. The logarithms merge the results,
in the order in which blocks pass. The backward pass sends the blocks around once more, together
with their cotangents, so that a device keeps nothing of the others' blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.custom_rules import custom_vjp
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention import primitives
from jax_tilekern.ops.attention.attention import MaskMod, ScoreMod, attention, check, described
from jax_tilekern.ops.attention.blocks import score_type
from jax_tilekern.ops.attention.scores import Element, Scores, score_of, visible_jaxpr, visible_of
from jax_tilekern.ops.attention.tile_map import ALL, NONE, SOME, tile_kinds
from jax_tilekern.ops.jitted import jitted


def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    axis_name: str,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: bool = False,
) -> Any:
    """:func:`attention` of a sequence that is sharded along a mesh axis, inside ``shard_map``.

    Keys and values travel around the axis, and so do they in the backward pass. A device has one
    block of keys and values at a time, and the memory of the value and of the gradient is linear
    in the length of its part. Blocks of keys that no query of a device sees are not computed, and
    those that no device sees are not sent.

    Parameters
    ----------
    query
        This device's queries, of shape ``(batch, queries, heads, features)``, or without the
        batch. Those of the whole sequence are concatenated in the order of the devices.
    key, value
        This device's keys, of shape ``(batch, keys, key_heads, features)``, and their values. Their
        number may be another than that of queries.
    axis_name
        The mesh axis along which the sequence is sharded.
    scale, precision
        As in :func:`attention`.
    is_causal, local_window_size, score_mod, mask_mod
        As in :func:`attention`. Indices are those of the whole sequence; what functions read by
        them has the whole sequence, too.
    return_residual
        Whether to return the logarithms, too.

    Returns
    -------
    out
        As of :func:`attention`, for this device's queries.
    residual
        With ``return_residual``, the logarithms over the keys of all devices.

    Raises
    ------
    TypeError, ValueError
        As :func:`attention`. In forward mode, such as of ``jax.jvp``, JAX raises a ``TypeError``.
    NameError
        If there is no such axis.

    See Also
    --------
    attention : attention on one device, which a ``jit`` shares along the batch and heads.
    """
    given = {"query": query, "key": key, "value": value}
    compat.check_arraylike("ring_attention", **given)
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    check(arrays)
    scores, read = described(
        arrays, scale=scale, is_causal=is_causal, local_window_size=local_window_size,
        score_mod=score_mod, mask_mod=mask_mod, precision=precision,
    )  # fmt: skip
    query, key, value = arrays.values()
    out, residual = _ring_attention(query, key, value, read, axis_name=axis_name, scores=scores)
    return (out, residual) if return_residual else out


@jitted("axis_name", functions=("scores",))
@mode_independent
def _ring_attention(
    query: Array, key: Array, value: Array, arrays: Sequence[Array], axis_name: str, scores: Scores
) -> tuple[Array, Array]:
    size = lax.axis_size(axis_name)
    manual = {axis_name} & {*jax.sharding.get_abstract_mesh().manual_axes}
    # The transpose of a cast adds the cotangents of an array that devices share.
    operands = compat.unify_varying(query, key, value, *arrays, over=tuple(manual))
    missing = 4 - query.ndim
    first = [jnp.expand_dims(x, tuple(range(missing))) for x in operands[:3]]
    # A loop in a backward rule does not know the axis of a vmap.
    function: Any = _attention if manual else _value
    results = function(_Ring(axis_name, size, scores), *first, *operands[3:])
    out, lse = (x[0] if missing else x for x in results)
    return out, lse


# A block of keys and values is "visited" by each device: at step ``t``, device ``i`` visits the
# block of device ``i - t``.


class _Place(NamedTuple):
    """The index of the device's first query, and of the first key of the block at hand."""

    query: Any
    key: Any


@dataclass(frozen=True)
class _Ring:
    """A mesh axis, and what devices compute along it.

    Attributes
    ----------
    axis, size
        Name of the axis, and its number of devices.
    scores
        Those of the whole sequence.
    """

    axis: str
    size: int
    scores: Scores

    @property
    def dtypes(self) -> frozenset[Any]:
        """Types of values in functions, which decide the modes of rules."""
        return self.scores.dtypes

    def sent(self, values: Any, hops: int) -> Any:
        """Return what the device has that is so many places before this one."""
        if hops % self.size == 0:
            return values
        pairs = [(i, (i + hops) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), values)

    def kinds(self, query: Array, key: Array, arrays: Sequence[Array]) -> Any:
        """Return whether the queries of a device see none, some or all of each device's keys."""
        (batch, queries, heads, _), keys = query.shape, key.shape[1]
        if 0 in (batch, heads, queries, keys):
            return np.full((self.size, self.size), NONE)
        visible = visible_jaxpr(self.scores, arrays)
        if visible is None:
            return np.full((self.size, self.size), ALL)
        whole = batch, heads, queries * self.size, keys * self.size
        read = arrays[self.scores.score_arrays :]
        kinds = tile_kinds(visible, read, whole, queries, keys)
        low, high = kinds.min((0, 1)), kinds.max((0, 1))
        return low + (low == NONE) * (high != NONE)

    def part(self, place: _Place, is_masked: bool) -> Callable[..., tuple[Array, Array]]:
        """Return the attention of queries and a block, as a function of all arrays."""
        scores = self.scores

        def attend(query: Array, key: Array, value: Array, *arrays: Array) -> tuple[Array, Array]:
            own = scores.by_use(arrays)

            def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
                return score_of(scores, own, score, Element(b, h, place.query + q, place.key + k))

            def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
                return visible_of(scores, own, Element(b, h, place.query + q, place.key + k))

            results: tuple[Array, Array] = attention(
                query, key, value, scale=scores.scale, precision=scores.precision,
                score_mod=score_mod if scores.has_score else None,
                mask_mod=mask_mod if is_masked else None, return_residual=True,
            )  # fmt: skip
            return results

        return attend

    def steps(self, kinds: Any) -> range:
        """Return the steps at which a device sees keys, and those between them.

        They are the fewest, and may go on after the last step with the first one.
        """
        if not isinstance(kinds, np.ndarray):
            return range(self.size)
        devices = np.arange(self.size)
        seen = [t for t in range(self.size) if kinds[devices, devices - t].any()]
        spans = [(1 + max((t - first) % self.size for t in seen), first) for first in seen]
        count, first = min(spans, default=(0, 0))
        return range(first, first + count)

    def around(
        self, update: Callable[..., Any], query: Array, block: Sequence[Array],
        arrays: Sequence[Array], sums: Any, state: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Send blocks of keys around the axis, each with its sums, and visit them.

        ``update(attend, block, sums, state)`` returns the sums of a block and the state of a
        device after a visit.
        """
        kinds = self.kinds(query, block[0], arrays)
        steps = self.steps(kinds)
        if not steps:
            return sums, state
        present = [NONE, SOME, ALL]
        if isinstance(kinds, np.ndarray):
            devices = np.arange(self.size)[:, None]
            present = np.unique(kinds[devices, (devices - np.array(steps)) % self.size]).tolist()
        index = lax.axis_index(self.axis)
        own_kinds = jnp.asarray(kinds)[index]
        queries, keys = np.int32(query.shape[1]), np.int32(block[0].shape[1])

        def visit(kind: int, place: _Place) -> Callable[..., Any]:
            if kind == NONE:
                return lambda _, sums, state: (sums, state)
            return functools.partial(update, self.part(place, kind == SOME))

        def step(carry: Any, t: Any) -> tuple[Any, None]:
            block, sums, state = carry
            source = (index - t) % self.size
            place = _Place(index * queries, source * keys)
            # Blocks and sums are sent while the block at hand is computed.
            following, sums = self.sent(block, 1), self.sent(sums, 1)
            branches = [visit(kind, place) for kind in present]
            branch = jnp.searchsorted(np.array(present), own_kinds[source])
            sums, state = lax.switch(branch, branches, block, sums, state)
            return (following, sums, state), None

        carry = self.sent(block, steps[0]), sums, state
        if len(steps) > 1:
            carry, _ = lax.scan(step, carry, np.array(steps[:-1], np.int32))
        (_, sums, state), _ = step(carry, np.int32(steps[-1]))
        return self.sent(sums, -steps[-1]), state


def _share(lse: Array, total: Array) -> Array:
    """Return which part of a sum of exponentials another one is, by their logarithms."""
    return jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total))


def _value(ring: _Ring, *operands: Array) -> tuple[Array, Array]:
    query, key, value, *arrays = operands
    wide = score_type(query)

    def update(attend: Any, block: Sequence[Array], sums: Any, state: Sequence[Array]) -> Any:
        (out, lse), (own, own_lse) = state, attend(query, *block, *arrays)
        total = jnp.logaddexp(lse, own_lse)
        out = out * _share(lse, total)[..., None] + own * _share(own_lse, total)[..., None]
        return sums, [out, total]

    rows = query.shape[:3]
    nothing = jnp.zeros((*rows, value.shape[3]), wide), jnp.full(rows, -jnp.inf, wide)
    state = compat.unify_varying(query, *nothing)[1:]
    _, (out, lse) = ring.around(update, query, [key, value], arrays, [], [*state])
    return out.astype(query.dtype), lse


def _forward(ring: _Ring, *operands: Any) -> tuple[Any, Any]:
    values = [x.value for x in operands]
    moving = {i: () for i, x in enumerate(operands[3:]) if x.perturbed}
    results = tuple(checkpoint_name(x, primitives.NAME) for x in _attention(ring, *values))
    return results, (values, results, moving)


def _backward(ring: _Ring, residuals: Any, cotangents: Any) -> tuple[Array | None, ...]:
    """Return cotangents; those of arrays that functions read where they are wanted."""
    operands, (out, lse), moving = residuals
    query, key, value, *arrays = operands
    wide = score_type(query)
    wanted = [0, 1, 2, *(3 + i for i in moving)]

    def zeros_like(*like: Any) -> Sequence[Array]:
        found = (jnp.zeros(x.shape, jnp.promote_types(x.dtype, wide)) for x in like)
        return compat.unify_varying(query, *found)[1:]

    def instantiated(x: Any) -> Array:
        is_zero = isinstance(x, jax.custom_derivatives.SymbolicZero)
        return zeros_like(x)[0] if is_zero else x.astype(wide)

    d_out, d_lse = map(instantiated, cotangents)
    # A row without keys has no derivative, whatever the cotangent of its infinite logarithm is.
    d_lse = jnp.where(lse == -jnp.inf, 0, d_lse)

    def update(attend: Any, block: Sequence[Array], sums: Any, state: Any) -> Any:
        def of_wanted(*values: Array) -> Any:
            given = dict(zip(wanted, values, strict=True))
            own = query, *block, *arrays
            return attend(*(given.get(i, x) for i, x in enumerate(own)))

        values = [query, *block, *(arrays[i] for i in moving)]
        (own, own_lse), pull = jax.vjp(of_wanted, *values)
        share = _share(own_lse, lse)
        d_own = share[..., None] * d_out
        d_own_lse = share * (d_lse + jnp.sum(d_out * (own - out), -1))
        d_query, d_key, d_value, *others = pull((d_own.astype(own.dtype), d_own_lse))
        return added(sums, [d_key, d_value]), added(state, [d_query, *others])

    def added(sums: Sequence[Array], terms: Sequence[Array]) -> list[Array]:
        return [x + y for x, y in zip(sums, terms, strict=True)]

    sums, state = zeros_like(key, value), zeros_like(query, *(arrays[i] for i in moving))
    sums, (d_query, *others) = ring.around(update, query, [key, value], arrays, [*sums], [*state])
    found = dict(zip(wanted, [d_query, *sums, *others], strict=True))
    return tuple(found[i].astype(x.dtype) if i in found else None for i, x in enumerate(operands))


_attention = custom_vjp(mode_independent(_value), nondiff_argnums=(0,))
_attention.defvjp(_forward, mode_independent(_backward), symbolic_zeros=True)
