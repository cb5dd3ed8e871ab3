"""What benchmarks measure: programs of this package beside the same of ``jnp``.

A :class:`Program` declares the arguments and the sides; ``measure.py`` compiles, checks and times
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import jax_tilekern as jtk
from benchmarks.timing import Runs, Times, device_times

# Calls drawn at random that are compiled at the same time.
SIDE_BY_SIDE = 8
# A context of sides.
KERNELS = functools.partial(jtk.policy, "kernels")

Arrays = Sequence[Any]
Sides = Mapping[str, Callable[..., Any]]
Errors = dict[str, float]


def on_gpu() -> bool:
    """Return whether sizes are those for a GPU."""
    return jax.default_backend() != "cpu"


def random_arrays(*structs: Any, seed: int = 0) -> list[Any]:
    """Return normal numbers of shapes and types, given as such or as tuples of both."""
    keys = jax.random.split(jax.random.key(seed), len(structs))
    pairs = ((x.shape, x.dtype) if hasattr(x, "shape") else x for x in structs)
    return [jax.random.normal(key, *pair) for key, pair in zip(keys, pairs, strict=True)]


def relative(results: Mapping[str, Any], right: Any) -> Errors:
    """Return the largest difference of each result from what is right, over its largest element."""
    wide = np.asarray(right, np.float64)
    largest = max(float(np.abs(wide).max()), 1e-30)
    return {
        side: float(np.abs(np.asarray(x, np.float64) - wide).max()) / largest
        for side, x in results.items()
    }


def differences(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the errors of first results; XLA's is right, or else the first other side's."""
    first = {side: jax.tree.leaves(x)[0] for side, x in results.items()}
    other = next(x for side, x in first.items() if side != "ours")
    return relative(first, first.get("XLA", other))


def differences_from(right: str, _: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return our largest difference from a side among the first elements of first results."""
    ours, theirs = (
        np.asarray(jax.tree.leaves(results[side])[0].ravel()[: 2**20].astype(np.float32))
        for side in ("ours", right)
    )
    # Results of empty segments are infinite.
    with np.errstate(invalid="ignore"):
        differences = np.where(ours == theirs, 0, np.abs(ours - theirs))
    return {"ours": float(np.max(differences, initial=0))}


def gradient_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradients of a function, of its arguments and a cotangent."""
    return lambda *arguments: jax.vjp(function, *arguments[:-1])[1](arguments[-1])


class WrongResult(Exception):
    """A result of ours is wrong; the row has its errors, and no times."""

    def __init__(self, errors: Errors, why: str) -> None:
        super().__init__(why)
        self.errors = errors


@dataclass(frozen=True)
class Program:
    """What is computed, and by whom.

    Attributes
    ----------
    name, group
        Of the row, and the line of tables that it is part of, if any.
    arguments
        Makes the arguments of every side.
    sides
        Functions of the arguments, by name. ``XLA`` is the program of ``jnp``.
    errors
        The error of some of the sides, of the arguments and of each side's result; may raise
        :class:`WrongResult`.
    wide
        Whether 64-bit types are enabled.
    peer
        The side that ours is compared with, where it has no failure.
    contexts
        By side, a context in which it is compiled.
    timing
        Returns the times of compiled sides that make one call each. The profiler, which
        ``device_times`` takes, slows programs of thousands of launches and is that of one GPU.
    margin
        How many times the peer's error ours may have; a result beyond it has no time.
    rough
        The largest error of a side other than ours and the peer; one beyond it is not timed.
    beyond_cache
        Whether calls on a GPU alternate among copies of the arguments that exceed its L2.
    required
        Sides without which there is no row: what they raise ends it.
    arguments_of
        By side, what it takes in place of the arguments, as a function of them.
    fields
        What the row has besides. Sides that have a ``target`` have a ratio, too.
    longest_call
        In seconds: a side other than those required that takes longer is not timed.
    deadline
        In seconds: on a GPU, the process ends if checks, or times, take longer.
    also_compiled
        Compiles what checks run.
    side_by_side
        How many programs are compiled at the same time, so that their arguments fit into memory.
    """

    name: str
    arguments: Callable[[], Arrays]
    sides: Sides
    errors: Callable[[Arrays, Mapping[str, Any]], Errors] = differences
    group: str = ""
    wide: bool = False
    peer: str = "XLA"
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    timing: Callable[[Runs, float], Times] = device_times
    margin: float = math.inf
    rough: float = math.inf
    beyond_cache: bool = False
    required: Sequence[str] = ("ours",)
    arguments_of: Mapping[str, Callable[[Arrays], Arrays]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    longest_call: float = math.inf
    deadline: float = math.inf
    also_compiled: Callable[[], None] = lambda: None
    side_by_side: int = 1

    def taken_by(self, side: str, arguments: Arrays) -> Arrays:
        """Return the arguments of a side."""
        return self.arguments_of[side](arguments) if side in self.arguments_of else arguments

    def with_sides(self, wanted: Callable[[str], bool]) -> Program:
        """Return the program with the sides that are required or wanted."""
        sides = {x: side for x, side in self.sides.items() if x in self.required or wanted(x)}
        return replace(self, sides=sides)
