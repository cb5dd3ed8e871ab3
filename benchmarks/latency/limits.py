"""The groups of latencies, and how much ours may be above XLA's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Groups of a suite: each is measured in its own way.
DISPATCH, FIRST_RESULT = "dispatch", "first result"
# Seconds that ours may take longer than XLA until a call returns,
MOST_DISPATCH = 5e-6
# and may add to the first result, with an empty and with a filled cache of kernels.
MOST_FIRST = {"cold": 2.0, "warm": 20e-3}


def measured(row: Mapping[str, Any]) -> bool:
    """Say whether a row has times."""
    return "added_seconds" in row


def losses(row: Mapping[str, Any]) -> Iterator[str]:
    """Name the limits that a measured row is above: ``dispatch``, ``cold``, ``warm``, ``XLA``."""
    added = row["added_seconds"]
    if row["group"] == DISPATCH:
        if added["median"] > MOST_DISPATCH:
            yield DISPATCH
        return
    yield from (kind for kind, most in MOST_FIRST.items() if added[kind]["median"] > most)
    if row["ratio"]["median"] < row["target"]:
        yield "XLA"
