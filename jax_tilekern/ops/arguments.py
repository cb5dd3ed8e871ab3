"""Checks of arguments that are no arrays. Errors name the function and the argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax


def integer(function: str, argument: str, value: Any) -> int:
    """Return an argument that is an integer, or raise a ``TypeError``."""
    if isinstance(value, jax.core.Tracer):
        # JAX's error says where the value is traced.
        return operator.index(value)
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {argument} is {value!r}; it is an integer") from None


def number(function: str, argument: str, value: Any) -> float:
    """Return an argument that is a number and no array, or raise a ``TypeError``."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{function}: {argument} is traced; it is a number that a program is compiled for, so "
            "name it among the static arguments of jax.jit"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {argument} is {value!r}; it is a number") from None


def check_callable(function: str, argument: str, value: Any) -> None:
    """Raise a ``TypeError`` unless an argument is a function."""
    if not callable(value):
        raise TypeError(f"{function}: {argument} is {value!r}; it is a function")


def check_choice(function: str, argument: str, value: Any, choices: Sequence[str]) -> None:
    """Raise a ``ValueError`` unless an argument is one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"{function}: {argument} is {value!r}; it is {', '.join(others)} or {last}"
        )
