"""The program that each device runs for its part of a call.

It takes the operands in XLA's sharding, moves digits between dimensions, binds the call's own
primitive on the local operands, and combines partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.partitioning.split import Move, Outcome, Split


class FunctionOfSum(NamedTuple):
    """A call whose results are an elementwise function of a sum, in its two steps.

    Attributes
    ----------
    sum
        ``sum(*operands)`` returns a device's term of the sum.
    dtype
        Type of the sum, to which it is rounded after the devices' terms are added.
    epilogue
        ``epilogue(sum, *operands)`` returns the results. It has all operands of the call; those of
        the epilogue are the parts that belong to the part of the sum.
    """

    sum: Callable[..., Any]
    dtype: np.dtype[Any]
    epilogue: Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Shard:
    """One device's part of a call.

    Operations whose operands hold indices along a label, such as the bounds of groups, query the
    start of their part.

    Attributes
    ----------
    split
        The partition of the call.
    digits
        For each label that is split, the digits that split it, major to minor.
    """

    split: Split
    digits: Mapping[int, tuple[int, ...]]

    @classmethod
    def of_call(cls, split: Split) -> Shard:
        """Return the part of the call that a device computes."""
        return cls(split, split.digits)

    @classmethod
    def of_sum(cls, split: Split) -> Shard:
        """Return the part of the sum that a device's epilogue reads."""
        assert split.sum is not None
        pairs = zip(split.rule.epilogue_sum, split.sum.digits, strict=True)
        return cls(split, {label: digits for label, digits in pairs if label is not None})

    def is_split(self, label: int) -> bool:
        """Return whether a label is split."""
        return bool(self.digits.get(label))

    def size(self, label: int) -> int:
        """Return the label's size on each device."""
        return self.split.rule.size(label, self.parts(label))

    def axis_names(self, label: int) -> tuple[str, ...]:
        """Return the mesh axes that split a label."""
        return axis_names(self.digits.get(label, ()))

    def parts(self, label: int) -> int:
        """Return the number of parts of a label."""
        return self.split.parts(self.digits.get(label, ()))

    def start(self, label: int) -> Array:
        """Return the first index of this device's part, an ``int32``."""
        index: Array = lax.axis_index(self.axis_names(label))
        return index.astype(np.int32) * self.size(label)


def axis_names(digits: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the local program's mesh axes, one for each digit."""
    return tuple(f"digit{a}" for a in digits)


def local_program(
    split: Split,
    dtypes: Sequence[np.dtype[Any]],
    bind: Callable[..., Sequence[Array]],
    localised: Callable[..., Sequence[Array]] | None = None,
) -> Callable[..., list[Array]]:
    """Return the function from one device's operands to its results.

    Parameters
    ----------
    split
        The partition of the call.
    dtypes
        Types of the results; what devices combine is rounded to these.
    bind
        Computes the call on local shapes.
    localised
        ``localised(shard, *operands)`` rewrites operands that hold indices along a label.
    """

    def program(*operands: Array) -> list[Array]:
        local = _local_operands(split, operands)
        if localised is not None:
            local = list(localised(Shard.of_call(split), *local))
        return _completed_results(split, bind(*local), dtypes)

    return program


def epilogue_program(
    split: Split,
    dtypes: Sequence[np.dtype[Any]],
    function: FunctionOfSum,
    localised: Callable[..., Sequence[Array]] | None = None,
) -> Callable[..., list[Array]]:
    """Return the same function for results that an epilogue computes from a sum over devices.

    Parameters
    ----------
    split
        The partition of the call.
    dtypes
        Types of the results.
    function
        The call in its two steps.
    localised
        As for :func:`local_program`. The epilogue's operands are those of the part of the sum.
    """

    def program(*operands: Array) -> list[Array]:
        local = _local_operands(split, operands)
        factors, read = local, local
        if localised is not None:
            factors = list(localised(Shard.of_call(split), *local))
            read = list(localised(Shard.of_sum(split), *local))
        assert split.sum is not None
        term = function.sum(*factors[: split.rule.epilogue_from])
        total = _completed(split, split.sum, term, function.dtype)
        return _completed_results(split, function.epilogue(total, *read), dtypes)

    return program


def _local_operands(split: Split, operands: Sequence[Array]) -> list[Array]:
    return [
        _padded_with_zeros(split, i, _moved(split, x, split.operand_moves[i]))
        for i, x in enumerate(operands)
    ]


def _moved(split: Split, x: Array, moves: Sequence[Move]) -> Array:
    for move in moves:
        names = axis_names(move.digits)
        if move.kind == "gather":
            x = lax.all_gather(x, names, axis=move.target, tiled=True)
        elif move.kind == "slice":
            size = x.shape[move.target] // split.parts(move.digits)
            start = lax.axis_index(names) * size
            x = lax.dynamic_slice_in_dim(x, start, size, move.target)
        else:
            x = lax.all_to_all(x, names, move.target, move.source, tiled=True)
    return x


def _padded_with_zeros(split: Split, operand: int, x: Array) -> Array:
    """Clear the padding of a reduction whose last part is not full."""
    for dim, label in enumerate(split.rule.operands[operand]):
        if label is None or label not in split.rule.summed:
            continue
        shard = Shard.of_call(split)
        size, parts = split.rule.sizes[label], shard.parts(label)
        if size % parts == 0:
            continue
        index = lax.broadcasted_iota(np.int32, x.shape, dim)
        x = jnp.where(index < size - shard.start(label), x, jnp.zeros((), x.dtype))
    return x


def _completed_results(
    split: Split, results: Sequence[Array], dtypes: Sequence[np.dtype[Any]]
) -> list[Array]:
    combined_by = split.rule.combined_by or ("sum",) * len(results)
    own = zip(split.results, results, dtypes, combined_by, strict=True)
    return [_completed(split, *x) for x in own]


def _completed(
    split: Split, outcome: Outcome, x: Array, dtype: np.dtype[Any], combined_by: str = "sum"
) -> Array:
    """Combine the parts of an array over devices, and move what they have."""
    for dim, digits in enumerate(outcome.scattered):
        if digits:
            x = lax.psum_scatter(x, axis_names(digits), scatter_dimension=dim, tiled=True)
    if outcome.reduced:
        x = _COMBINE[combined_by](x, axis_names(outcome.reduced))
    return _moved(split, x.astype(dtype), outcome.moves)


def _max(x: Array, names: tuple[str, ...]) -> Array:
    """Return the maximum over devices, NaN if one of them has NaN."""
    largest: Array
    if not jnp.issubdtype(x.dtype, jnp.floating):
        largest = lax.pmax(x, names)
        return largest
    # An all-reduce of floats may ignore NaN. Integers in the order of floats have it last.
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")

    def reordered(bits: Array) -> Array:
        return jnp.where(bits < 0, bits ^ np.iinfo(integers).max, bits)

    positive = jnp.where(jnp.isnan(x), jnp.array(np.nan, x.dtype), x)
    largest = lax.pmax(reordered(lax.bitcast_convert_type(positive, integers)), names)
    return lax.bitcast_convert_type(reordered(largest), x.dtype)


def _logsumexp(x: Array, names: tuple[str, ...]) -> Array:
    largest = lax.pmax(x, names)
    # Infinities do not cancel.
    origin = jnp.where(jnp.isfinite(largest), largest, 0)
    return jnp.log(lax.psum(jnp.exp(x - origin), names)) + origin


_COMBINE: Mapping[str, Callable[[Array, tuple[str, ...]], Array]] = {
    "sum": lax.psum,
    "max": _max,
    "logsumexp": _logsumexp,
}
