"""A row of a suite made runnable: operands, both sides of the comparison, and their errors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from benchmarks.calls.operations import OPERATIONS, OURS, Function
from benchmarks.calls.row import Row
from jax_tilekern.tuning.random_operands import Operands, random_array

# The error is measured on this many indices of each of the result's dimensions, at most.
_SAMPLED = 64


class Errors(NamedTuple):
    """How wrong the results of a row are, in terms of what random terms add up to.

    That is, for each element of the result, the root of the sum of the squares of its terms: of
    many elements it is their norm, and a single sum may be small only because its terms cancel.

    Attributes
    ----------
    ours, peer
        Frobenius norms of the errors against float64, on a sample of each dimension's indices.
    deviation
        The most by which an element of ours differs from the peer's, of all elements: no sample
        misses the one tile that is wrong.
    """

    ours: float
    peer: float
    deviation: float


@dataclass(frozen=True)
class Case:
    """A row with functions that compute it.

    Attributes
    ----------
    row
        The call.
    ours, peer
        This package's function and JAX's with the row's arguments, jitted.
    """

    row: Row
    ours: Function
    peer: Function

    @classmethod
    def of(cls, row: Row) -> Case:
        """Return the case of a row."""
        return cls(row, jitted(row, OURS), jitted(row, OPERATIONS[row.operation].peer.side()))

    def operands(self, seed: int = 0) -> Operands:
        """Return random operands of ours."""
        return self.row.random_operands(seed)

    def peer_operands(self, operands: Operands) -> Operands:
        """Return what the peer takes in place of ours."""
        return OPERATIONS[self.row.operation].peer.operands(operands)

    def kernel(self, operands: Operands) -> str:
        """Return our kernel, or why XLA computes the row."""
        choices = jax_tilekern.explain(self.ours, *operands)
        names = dict.fromkeys(choice.kernel for choice in choices if choice.kernel)
        reasons = [choice.reason for choice in choices] or ["no call of a kernel is left"]
        return ", ".join(names) or f"XLA: {reasons[0]}"

    def programs(self) -> Iterator[Callable[[], Any]]:
        """Return what compiles each program that the row runs, before there is any operand.

        They may be called in several threads. Later calls find what was compiled.
        """
        yield self._compile_peer
        yield self._compile_ours
        yield from (partial(self._compile_random, struct) for struct in self.row.structs)
        if OPERATIONS[self.row.operation].judge is None:
            yield self._compile_errors
        else:
            yield self._compile_judge

    def _compile_peer(self) -> None:
        with types_enabled(self.row):
            operands = jax.eval_shape(
                OPERATIONS[self.row.operation].peer.operands, self.row.structs
            )
            self.peer.lower(*operands).compile()  # type: ignore[attr-defined]

    def _compile_ours(self) -> None:
        with types_enabled(self.row):
            self.ours.lower(*self.row.structs).compile()  # type: ignore[attr-defined]

    def _compile_random(self, struct: jax.ShapeDtypeStruct) -> None:
        with types_enabled(self.row):
            random_array.lower(jax.random.key(0), struct.shape, struct.dtype).compile()

    def _compile_judge(self) -> None:
        row = self.row
        with types_enabled(row):
            result = _judge(row).lower(*row.structs)
            result.compile()
        with jax.enable_x64(True):
            wide = jax.eval_shape(lambda *operands: _wide_operands(row, operands), *row.structs)
            exact = _judge(_in_float64(row)).lower(*wide)
            exact.compile()
            ours = jax.tree.leaves(jax.eval_shape(jitted(row, OURS), *row.structs))
            found = (jax.tree.leaves(x.out_info) for x in (result, exact))
            for leaves in zip(ours, *found, strict=True):
                _whole_errors.lower(*leaves).compile()

    def _compile_errors(self) -> None:
        with types_enabled(self.row):
            result = jax.eval_shape(self.peer, *self.row.structs)
        with jax.enable_x64(True):
            _errors.lower(self.row, self.row.structs, result, result).compile()

    def errors(self, operands: Operands) -> Errors:
        """Compare both results with float64 and with each other.

        Large results are compared with float64 on a sample of the indices of each dimension, the
        last included. Where the operation has a judge, that is the peer here, and results are
        compared as a whole.
        """
        row, judge = self.row, OPERATIONS[self.row.operation].judge
        if judge is not None:
            return judged(row, operands, self.ours(*operands))
        results = self.ours(*operands), self.peer(*operands)
        with jax.enable_x64(True):
            return Errors(*map(float, _errors(row, operands, *results)))


@functools.cache
def _jitted(call: Row, side: Any, options: tuple[tuple[str, Any], ...] = ()) -> Any:
    function = OPERATIONS[call.operation].call(call, side)
    return jax.jit(function, compiler_options=dict(options) or None)


def jitted(row: Row, side: Any) -> Function:
    """Return the function of a row by a side, jitted; rows of the same call share it."""
    return _jitted(row.call, side)  # type: ignore[no-any-return]


def _judge(row: Row) -> Any:
    """Return the judge's function of a row, jitted. Its speed is not worth XLA's autotuning."""
    judge = OPERATIONS[row.operation].judge
    return _jitted(row.call, judge, (("xla_gpu_autotune_level", 0),))


def _wide_operands(row: Row, operands: Operands) -> Operands:
    """Return operands in float64, but for sizes of groups."""
    return tuple(
        _wide(x) if len(dimensions) > 1 else x
        for x, dimensions in zip(operands, row.operands, strict=True)
    )


def judged(row: Row, operands: Operands, ours: Any) -> Errors:
    """Compare results as a whole with the judge's, and both with its own in float64.

    Each element's deviation is in terms of the root mean square of those along the last axis:
    groups with more rows have larger sums.
    """
    peer = _judge(row)(*operands)
    with jax.enable_x64(True):
        exact = _judge(_in_float64(row))(*_wide_operands(row, operands))
        errors = [
            _whole_errors(*result)
            for result in zip(*map(jax.tree.leaves, (ours, peer, exact)), strict=True)
        ]
        return Errors(*(float(max(values)) for values in zip(*errors, strict=True)))


@jax.jit
def _whole_errors(ours: Array, peer: Array, exact: Array) -> tuple[Array, ...]:
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.linalg.norm(exact)
    ours_error, peer_error = (jnp.linalg.norm(_wide(x) - exact) / norm for x in (ours, peer))
    size = jnp.sqrt(jnp.mean(jnp.square(exact), -1, keepdims=True))
    # Where all is zero, any difference is beyond measure.
    size = jnp.maximum(size, np.finfo(np.float64).tiny)
    return ours_error, peer_error, jnp.max(jnp.abs(_wide(ours) - _wide(peer)) / size)


@functools.partial(jax.jit, static_argnums=0)
def _errors(row: Row, operands: Operands, ours: Array, peer: Array) -> tuple[Array, ...]:
    indices = {x: sampled_indices(row.sizes[x]) for x in row.out}
    samples = [
        _wide(_sample(x, dimensions, indices))
        for x, dimensions in zip(operands, row.operands, strict=True)
    ]
    call = jitted(_in_float64(row), OPERATIONS[row.operation].peer.side())
    exact = call(*samples)
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.sqrt(jnp.sum(call(*(jnp.square(jnp.abs(x)) for x in samples))))
    ours_error, peer_error = (
        jnp.sqrt(jnp.sum(jnp.square(jnp.abs(_wide(_sample(x, row.out, indices)) - exact)))) / norm
        for x in (ours, peer)
    )
    deviation = jnp.max(jnp.abs(_wide(ours) - _wide(peer))) / (norm / math.sqrt(exact.size))
    return ours_error, peer_error, deviation


def _in_float64(row: Row) -> Row:
    """Return the row in the type of operands that were converted, whatever it asks for."""
    return replace(row, precision=None, result=None)


def _wide(x: Array) -> Array:
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _sample(x: Array, dimensions: str, indices: Mapping[str, np.ndarray[Any, Any]]) -> Array:
    for axis, dimension in enumerate(dimensions):
        if dimension in indices:
            x = jnp.take(x, indices[dimension], axis)
    return x


def sampled_indices(size: int) -> np.ndarray[Any, Any]:
    """Return the indices of a dimension of the result on which errors are measured."""
    return np.unique(np.linspace(0, size - 1, min(size, _SAMPLED)).round().astype(int))


def rotating(row: Row, side: Function, rotation: Iterator[Operands]) -> Callable[[], Any]:
    """Return what calls a side of a row with the next operands of a rotation."""

    def run() -> Any:
        with types_enabled(row):
            return side(*next(rotation))

    return run


@contextlib.contextmanager
def types_enabled(row: Row) -> Iterator[None]:
    """Let JAX have 64-bit types inside the context if the row has them."""
    with jax.enable_x64(np.zeros((), row.types[0]).real.itemsize == 8):
        yield
