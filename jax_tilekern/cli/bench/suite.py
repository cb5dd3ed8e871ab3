"""Suites: lists of products, read from the TOML files in ``cli/suites``."""

from __future__ import annotations

import fnmatch
import importlib.resources
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

DEFAULT_SUITES = {"cpu": "matmul-cpu", "gpu": "matmul-h100"}
_TEXTS = ("name", "type", "lhs", "rhs", "result", "precision")


class SuiteError(ValueError):
    """A suite that cannot be read; the message names the row."""


@dataclass(frozen=True)
class Row:
    """One product.

    Attributes
    ----------
    name
        What tables call it.
    type
        Of both operands.
    lhs, rhs
        The dimensions of each operand in the order in which they lie: ``b`` batch, ``m`` rows,
        ``n`` columns, ``k`` contracted.
    sizes
        Of each dimension.
    result
        Type of the result; by default the operands'.
    precision
        As ``jax.lax.dot_general`` takes it.
    """

    name: str
    type: str
    lhs: str
    rhs: str
    sizes: Mapping[str, int] = field(hash=False)
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
        operands = (math.prod(self.shape(x)) for x in (self.lhs, self.rhs))
        result = math.prod(self.shape(self.out)) * self.result_type.itemsize
        return sum(operands) * jnp.dtype(self.type).itemsize + result

    def shape(self, dimensions: str) -> tuple[int, ...]:
        """Return the sizes of ``dimensions``."""
        return tuple(self.sizes[x] for x in dimensions)


@dataclass(frozen=True)
class Suite:
    """A named list of products."""

    name: str
    about: str
    rows: tuple[Row, ...]

    def matching(self, pattern: str) -> Suite:
        """Return the suite with only the rows whose name matches a shell pattern or contains it.

        Raises
        ------
        SuiteError
            If none does.
        """
        rows = tuple(
            row for row in self.rows if fnmatch.fnmatch(row.name, pattern) or pattern in row.name
        )
        if not rows:
            names = ", ".join(row.name for row in self.rows)
            raise SuiteError(f"no row of {self.name} matches {pattern!r}; there are {names}")
        return Suite(self.name, self.about, rows)


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
        rows = tuple(_row(entry) for entry in table["rows"])
        about = table["about"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise SuiteError(f"suite {name}: {error!r}") from error
    names = [row.name for row in rows]
    if len(set(names)) < len(names):
        raise SuiteError(f"suite {name}: two rows have one name")
    return Suite(name, about, rows)


def _row(entry: Mapping[str, Any]) -> Row:
    texts = {key: entry[key] for key in _TEXTS if key in entry}
    sizes = {key: value for key, value in entry.items() if key not in texts}
    missing = {"name", "type", "lhs", "rhs"} - set(texts)
    if missing:
        raise SuiteError(f"row {dict(entry)} lacks {', '.join(sorted(missing))}")
    row = Row(sizes=sizes, **texts)

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
    if ("b" in row.lhs) != ("b" in row.rhs):
        raise wrong("b is a dimension of both operands or of neither")
    try:
        jnp.dtype(row.type), row.result_type
    except TypeError as error:
        raise wrong(str(error)) from error
    return row
