"""Suites: lists of calls of an operation, from ``suites.toml`` or drawn at random."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.rows import OPERATIONS, Row

# What follows the operation in the name of its suite for each of JAX's backends.
_DEVICES = {"cpu": "cpu", "gpu": "h100"}
_GROUPS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


@dataclass(frozen=True)
class Suite:
    """A named list of calls of an operation.

    Attributes
    ----------
    name, operation
        What it is called, and whose calls they are.
    rows
        Those of a group one after the other.
    fields
        What a record has of it besides: the least geometric ``means`` that are no loss, or the
        ``sample``.
    """

    name: str
    operation: str
    rows: tuple[Row, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)


def suite_names(operation: str) -> list[str]:
    """Return the names of an operation's suites."""
    return [name for name in _GROUPS if name.rpartition("-")[0] == operation]


def load_suite(operation: str, name: str) -> Suite:
    """Return a suite of an operation, by its name or that of one of JAX's backends.

    Raises
    ------
    BenchmarkError
        If there is none of that name.
    """
    name = f"{operation}-{_DEVICES[name]}" if name in _DEVICES else name
    if name not in suite_names(operation):
        raise BenchmarkError(f"no suite {name!r}; there are {', '.join(suite_names(operation))}")
    return suite_of(name, operation, _GROUPS[name])


def suite_of(name: str, operation: str, groups: Mapping[str, Any]) -> Suite:
    """Return the suite of some groups."""
    peer = OPERATIONS[operation].peer
    rows = tuple(
        Row.of(
            text, operation, group=title, target=group.get("target", {peer: 0.97}),
            **{key: group[key] for key in ("share", "temporary") if key in group},
        )
        for title, group in groups.items()
        for pattern in group["calls"]
        for text in expanded(pattern)
    )  # fmt: skip
    means = {title: group["mean"] for title, group in groups.items() if "mean" in group}
    return Suite(name, operation, rows, {"means": means} if means else {})


def expanded(pattern: str) -> Iterator[str]:
    """Yield the texts of a pattern, in which ``{a|b}`` stands for either."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = [x.split("|") if i % 2 else [x] for i, x in enumerate(parts)]
    return map("".join, itertools.product(*choices))
