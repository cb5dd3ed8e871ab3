"""Suites: lists of products, read from the TOML files in ``cli/suites``."""

from __future__ import annotations

import fnmatch
import importlib.resources
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

DEFAULT_SUITES = {"cpu": "matmul-cpu", "gpu": "matmul-h100"}
_TEXTS = ("name", "type", "rhs_type", "lhs", "rhs", "result", "precision")


class SuiteError(ValueError):
    """A suite that cannot be read; the message names the row."""


@dataclass(frozen=True)
class Row:
    """One product.

    Attributes
    ----------
    name
        What tables call it.
    group
        The group that it belongs to.
    floor
        The least XLA / ours that is no loss.
    type
        Of both operands.
    lhs, rhs
        The dimensions of each operand in the order in which they lie: ``b`` batch, ``m`` rows,
        ``n`` columns, ``k`` contracted. A batch that one operand lacks is broadcast.
    sizes
        Of each dimension.
    rhs_type
        Type of the right operand where it is another.
    result
        Type of the result; by default the operands'.
    precision
        As ``jax.lax.dot_general`` takes it.
    """

    name: str
    group: str
    floor: float
    type: str
    lhs: str
    rhs: str
    sizes: Mapping[str, int] = field(hash=False)
    rhs_type: str | None = None
    result: str | None = None
    precision: str | None = None

    @property
    def out(self) -> str:
        """The result's dimensions."""
        both = [x for x in self.lhs if x in self.rhs and x != "k"]
        free = [x for x in self.lhs + self.rhs if x not in both and x != "k"]
        return "".join(both + free)

    @property
    def dimension_numbers(self) -> Any:
        """As ``dot_general`` takes them."""
        batch = [x for x in self.lhs if x in self.rhs and x != "k"]
        lhs, rhs = self.lhs.index, self.rhs.index
        return (((lhs("k"),), (rhs("k"),)), (tuple(map(lhs, batch)), tuple(map(rhs, batch))))

    @property
    def types(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Types of the operands."""
        return jnp.dtype(self.type), jnp.dtype(self.rhs_type or self.type)

    @property
    def result_type(self) -> np.dtype[Any]:
        """Type of the result."""
        return jnp.dtype(self.result or self.type)

    @property
    def flops(self) -> int:
        """Operations, counting a multiplication and an addition as two."""
        return 2 * math.prod(self.sizes.values())

    @property
    def bytes(self) -> int:
        """Bytes of both operands and of the result: the least that must move."""
        arrays = zip((self.lhs, self.rhs, self.out), (*self.types, self.result_type), strict=True)
        return sum(math.prod(self.shape(x)) * type_.itemsize for x, type_ in arrays)

    def shape(self, dimensions: str) -> tuple[int, ...]:
        """Return the sizes of ``dimensions``."""
        return tuple(self.sizes[x] for x in dimensions)


@dataclass(frozen=True)
class Suite:
    """A named list of products.

    Attributes
    ----------
    name, about
        What it is called, and what is in it.
    rows
        Those of a group one after the other.
    means
        The least geometric mean of XLA / ours that is no loss, of groups that ask for one.
    """

    name: str
    about: str
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


def suite_names(operation: str) -> list[str]:
    """Return the names of an operation's suites."""
    files = importlib.resources.files("jax_tilekern.cli") / "suites"
    names = (file.name.removesuffix(".toml") for file in files.iterdir())
    return sorted(name for name in names if name.startswith(f"{operation}-"))


def load_suite(name: str) -> Suite:
    """Read a suite of the package.

    Raises
    ------
    SuiteError
        If there is none of that name, or it is malformed.
    """
    file = importlib.resources.files("jax_tilekern.cli") / "suites" / f"{name}.toml"
    if not file.is_file():
        raise SuiteError(f"no suite {name!r}; there are {', '.join(suite_names('matmul'))}")
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
        rows = tuple(
            _row(entry, group["name"], group["floor"])
            for group in groups
            for entry in group["rows"]
        )
        means = {group["name"]: group["mean"] for group in groups if "mean" in group}
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise SuiteError(f"suite {name}: {error!r}") from error
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise SuiteError(f"suite {name}: two rows have one name")
    return Suite(name, about, rows, means)


def _row(entry: Mapping[str, Any], group: str, floor: float) -> Row:
    texts = {key: entry[key] for key in _TEXTS if key in entry}
    sizes = {key: value for key, value in entry.items() if key not in texts}
    missing = {"name", "type", "lhs", "rhs"} - set(texts)
    if missing:
        raise SuiteError(f"row {dict(entry)} lacks {', '.join(sorted(missing))}")
    row = Row(group=group, floor=floor, sizes=sizes, **texts)

    def wrong(why: str) -> SuiteError:
        return SuiteError(f"row {row.name!r}: {why}")

    if set(sizes) != set(row.lhs + row.rhs):
        raise wrong(
            f"dimensions {row.lhs} and {row.rhs} need a size each, and {dict(sizes)} is given"
        )
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise wrong(f"sizes are positive integers, not {dict(sizes)}")
    for operand, allowed in ((row.lhs, "bmk"), (row.rhs, "bkn")):
        if (
            "k" not in operand
            or not set(operand) <= set(allowed)
            or len(set(operand)) < len(operand)
        ):
            raise wrong(
                f"operand {operand!r} is not made of {', '.join(allowed)}, once each, with k"
            )
    for name in (row.type, row.rhs_type, row.result):
        try:
            jnp.dtype(name or row.type)
        except TypeError as error:
            raise wrong(str(error)) from error
    return row
