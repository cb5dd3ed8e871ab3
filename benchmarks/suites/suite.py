"""Suites: lists of calls of an operation, read from the TOML files in this folder."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.calls.operations import OPERATIONS
from benchmarks.calls.row import Row
from benchmarks.errors import BenchmarkError

_FOLDER = Path(__file__).parent
# What follows the operation in the name of its suite for each of JAX's backends.
_DEVICES = {"cpu": "cpu", "gpu": "h100"}
_TEXTS = {"name", "type", "rhs_type", "lhs", "rhs", "out", "result", "precision", "split"}
# What a group says of all of its rows.
_LIMITS = ("share", "others", "temporary")


class SuiteError(BenchmarkError):
    """A suite that cannot be read; the message names the row."""


def product_out(lhs: str, rhs: str) -> str:
    """Return the dimensions of a product in ``dot_general``'s order, given its operands'."""
    both = [x for x in lhs if x in rhs and x != "k"]
    free = [x for x in lhs + rhs if x not in both and x != "k"]
    return "".join(both + free)


@dataclass(frozen=True)
class Suite:
    """A named list of calls of an operation.

    Attributes
    ----------
    name, about
        What it is called, and what is in it.
    operation
        Whose calls they are.
    rows
        Those of a group one after the other.
    means
        The least geometric mean of XLA / ours that is no loss, of groups that ask for one.
    """

    name: str
    about: str
    operation: str
    rows: tuple[Row, ...]
    means: Mapping[str, float]

    def matching(self, pattern: str) -> Suite:
        """Return the suite with only the rows that a pattern picks.

        It is a shell pattern for the name of the row or of its group, or a part of one of them.

        Raises
        ------
        SuiteError
            If none does.
        """

        def picked(name: str) -> bool:
            return fnmatch.fnmatch(name, pattern) or pattern in name

        rows = tuple(row for row in self.rows if picked(row.name) or picked(row.group))
        if not rows:
            names = ", ".join(row.name for row in self.rows)
            raise SuiteError(f"no row of {self.name} matches {pattern!r}; there are {names}")
        return replace(self, rows=rows)


def suite_names(operation: str = "") -> list[str]:
    """Return the names of an operation's suites, or of all."""
    pattern = f"{operation}-*.toml" if operation else "*.toml"
    return sorted(file.stem for file in _FOLDER.glob(pattern))


def default_suite(operation: str, backend: str) -> str:
    """Return the name of an operation's suite for one of JAX's backends."""
    return f"{operation}-{_DEVICES[backend]}"


def load_suite(name: str) -> Suite:
    """Read a suite of this folder.

    Raises
    ------
    SuiteError
        If there is none of that name, or it is malformed.
    """
    file = _FOLDER / f"{name}.toml"
    if not file.is_file():
        raise SuiteError(f"no suite {name!r}; there are {', '.join(suite_names())}")
    return parse_suite(name, file.read_text(encoding="utf-8"))


def parse_suite(name: str, text: str) -> Suite:
    """Read a suite from the text of a TOML file.

    Raises
    ------
    SuiteError
        If it is malformed.
    """
    try:
        table = tomllib.loads(text)
        groups, about = table["groups"], table["about"]
        operation = table["operation"]
        if operation not in OPERATIONS:
            raise SuiteError(f"suite {name}: {operation!r} is none of {', '.join(OPERATIONS)}")
        rows = tuple(_row(entry, operation, group) for group in groups for entry in group["rows"])
        means = {group["name"]: group["mean"] for group in groups if "mean" in group}
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise SuiteError(f"suite {name}: {error!r}") from error
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise SuiteError(f"suite {name}: two rows have one name")
    return Suite(name, about, operation, rows, means)


def _row(entry: Mapping[str, Any], operation: str, group: Mapping[str, Any]) -> Row:
    kind = OPERATIONS[operation].row
    known = _TEXTS & {field.name for field in fields(kind)}
    texts = {key: entry[key] for key in entry if key in known}
    sizes = {key: value for key, value in entry.items() if key not in texts}
    if operation == "matmul" and {"lhs", "rhs"} <= set(texts):
        # dot_general has no choice.
        texts["out"] = product_out(texts["lhs"], texts["rhs"])
    operands = ("lhs", "rhs")[: OPERATIONS[operation].operands]
    if missing := {"name", "type", *operands, "out"} - set(texts):
        raise SuiteError(f"row {dict(entry)} lacks {', '.join(sorted(missing))}")
    row = kind(
        **{"rhs": None, **texts},
        **{key: group[key] for key in _LIMITS if key in group},
        group=group["name"],
        target=group["target"],
        sizes=sizes,
        operation=operation,
    )
    if why := _malformed(row):
        raise SuiteError(f"row {row.name!r}: {why}")
    return row


def _malformed(row: Row) -> str | None:
    """Return what is wrong with the dimensions, the sizes, the types or the peers of a row."""
    if row.malformed:
        return row.malformed
    sizes = dict(row.sizes)
    dimensions = "".join(row.operands)
    if set(sizes) != set(dimensions):
        return f"dimensions {' and '.join(row.operands)} need a size each, and {sizes} is given"
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return f"sizes are positive integers, not {sizes}"
    if not set("".join(row.results)) <= set(dimensions):
        return f"result {row.out!r} has dimensions that no operand has"
    for one in (*row.operands, *row.results):
        if len(set(one)) < len(one):
            return f"{one!r} has a dimension twice"
    if row.operation in ("matmul", "matvec"):
        for operand, allowed in zip(row.operands, ("bmk", "bkn"), strict=True):
            if "k" not in operand or not set(operand) <= set(allowed):
                return f"operand {operand!r} is not made of {', '.join(allowed)}, with k"
    for name in (row.type, row.rhs_type, row.result):
        try:
            jnp.dtype(name or row.type)
        except TypeError as error:
            return str(error)
    known = OPERATIONS[row.operation].others
    if unknown := set(row.others) - set(known):
        return f"others {', '.join(sorted(unknown))} are not among {', '.join(known)}"
    return None
