"""XLA's shardings in terms of the digits of the device number.

Device numbers start at 0. In a mixed radix whose bases are the prime factors of the number of
devices, a mesh axis is one digit or several, and a sharding states which dimension of an array each
digit splits. Two arrays are split alike along a label if they use the same digits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.partitioning import xla


class Digit(NamedTuple):
    """The dimension that a digit splits, in steps of ``weight`` parts."""

    dimension: int
    weight: int


# The dimension of an array that each digit of the device number splits, or None.
Digits = tuple[Digit | None, ...]
Radix = tuple[int, ...]


def common_digits(
    shardings: Sequence[Any], ranks: Sequence[int]
) -> tuple[Radix, tuple[Digits, ...]]:
    """Return a radix in which every sharding splits dimensions digit by digit.

    Parameters
    ----------
    shardings
        ``HloSharding`` of each array.
    ranks
        The number of each array's dimensions.

    Returns
    -------
    tuple[Radix, tuple[Digits, ...]]
        The bases, major to minor, and the digits of each array. A sharding that no common radix
        expresses counts as replicated, so that XLA gathers that array.
    """
    devices = max((s.num_devices() for s in shardings if not s.is_replicated()), default=1)
    radix: Radix = ()
    found: list[Digits | None] = [() for _ in shardings]
    for radix in _orders(_prime_factors(devices)):
        found = [digits_of(s, rank, radix) for s, rank in zip(shardings, ranks, strict=True)]
        if None not in found:
            break
    nothing: Digits = (None,) * len(radix)
    return radix, tuple(nothing if digits is None else digits for digits in found)


def digits_of(sharding: Any, rank: int, radix: Radix) -> Digits | None:
    """Return the dimension that each digit splits, or ``None`` if digits cannot express it.

    Raises
    ------
    NotImplementedError
        If the sharding is manual over some axes or has partial sums, which callers exclude.
    """
    others = set(sharding.subgroup_types()) - {xla.REPLICATED}
    if sharding.is_manual() or sharding.is_unreduced() or others:
        raise NotImplementedError(f"jax_tilekern does not partition {sharding}")
    if sharding.is_replicated() or sharding.is_maximal() or sharding.is_unknown():
        return (None,) * len(radix)
    tiles = sharding.tile_assignment_dimensions()
    devices = np.array(sharding.tile_assignment_devices()).reshape(tiles)
    parts = np.empty((math.prod(radix), rank), np.int64)
    for index in np.ndindex(*tiles):
        parts[devices[index]] = index[:rank]
    # Device number 0...010...0 shows the effect of one digit. If the sharding is linear, these
    # suffice.
    digits: list[Digit | None] = []
    for a in range(len(radix)):
        unit = parts[math.prod(radix[a + 1 :])]
        (dimensions,) = np.nonzero(unit)
        if len(dimensions) > 1:
            return None
        dimension = int(dimensions[0]) if len(dimensions) else None
        digits.append(None if dimension is None else Digit(dimension, int(unit[dimension])))
    linear = np.zeros_like(parts)
    for a, values in enumerate(np.indices(radix).reshape(len(radix), -1)):
        digit = digits[a]
        if digit is not None:
            linear[:, digit.dimension] += values * digit.weight
    return tuple(digits) if (linear == parts).all() else None


def by_dimension(digits: Digits, rank: int) -> list[tuple[int, ...]]:
    """Return the digits that split each dimension, major to minor."""
    found = [[a for a, x in enumerate(digits) if x and x.dimension == i] for i in range(rank)]
    return [tuple(sorted(own, key=lambda a: -digits[a].weight)) for own in found]  # type: ignore[union-attr]


def number_of_parts(digits: Sequence[int], radix: Radix) -> int:
    """Return the number of parts that some digits make."""
    return math.prod(radix[a] for a in digits)


def sharding_of(splits: Sequence[Sequence[int]], radix: Radix) -> Any:
    """Return the ``HloSharding`` that splits each dimension by digits, major to minor."""
    used = [a for digits in splits for a in digits]
    if not used:
        return xla.replicated()
    rest = [a for a in range(len(radix)) if a not in used]
    tiles = [number_of_parts(digits, radix) for digits in splits]
    copies = number_of_parts(rest, radix)
    return xla.tiled(tiles, copies, radix, used + rest)


def _prime_factors(number: int) -> list[int]:
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors


def _orders(factors: list[int]) -> Iterator[Radix]:
    """Yield the distinct orders of the factors."""
    if not factors:
        yield ()
    for i, factor in enumerate(factors):
        if factor not in factors[:i]:
            for rest in _orders(factors[:i] + factors[i + 1 :]):
                yield (factor, *rest)
