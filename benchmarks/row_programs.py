"""Rows as programs: their sides, what is right, and how they are timed.

An error is the Frobenius norm of the difference from float64, in terms of the root of the sum of
the squares of all terms, which is what random terms add up to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern as jtk
from benchmarks.programs import SIDE_BY_SIDE, Arrays, Errors, Program, WrongResult
from benchmarks.rows import (
    DENSE,
    OPERATIONS,
    OURS,
    Function,
    Row,
    dense_operands,
    in_float64,
    jitted,
)
from benchmarks.timing import Runs, Times, device_times, stable_times, wall_rounds
from jax_tilekern.tuning.random_operands import Operands
from jax_tilekern.tuning.wall_time import wall_seconds

Policy = Literal["auto", "kernels"]

# How many times the peer's error ours may have, beyond the rounding of the result.
_ERROR_MARGIN = 4.0
# How many times the errors of both a single one of some hundred million elements may deviate.
_DEVIATION_MARGIN = 16.0
# Roundings of the accumulator that ours may be off by, whatever the peer is: the error of a single
# sum may be small by luck, and in float64 the peer is compared with itself.
_ROUNDINGS = 16.0
# The rounding of sums of float8 on Hopper's tensor cores.
_FAST_ACCUMULATION = 2.0**-13
# The most by which a right result of another peer differs from ours, relative to its norm.
_ROUGH = 0.05
# The error is measured on this many indices of each of the result's dimensions, at most.
_SAMPLED = 64
# And that of grouped GEMMs on this many groups, besides the largest.
_JUDGED_GROUPS = 3
# A call of the CPU backend costs tens of microseconds; in calls this long that is a few percent.
_LONG_CALL = 1e-3
_LONGEST_CHAIN = 64
# Another peer of a sample that takes longer is not timed.
_LONGEST_CALL = 1.0
# A kernel that never ends would keep the GPU for as long as somebody pays for it.
_LONGEST_ROW = 240.0

# Knows JAX's types as well as numpy's; has no types itself.
_finfo: Callable[[Any], Any] = jnp.finfo


def program_of(row: Row, policy: Policy = "auto", *, drawn: bool = False) -> Program:
    """Return the program of a row.

    Parameters
    ----------
    row
        What is computed.
    policy
        That of ours.
    drawn
        Whether the row is one of many of a sample, which are timed in one profile.
    """
    operation = OPERATIONS[row.operation]
    peers = dict.fromkeys((operation.peer, *row.target))
    is_cpu = jax.default_backend() == "cpu"
    timing = (
        partial(_times_on_cpu, row, policy) if is_cpu else device_times if drawn else stable_times
    )
    return Program(
        row.name,
        row.random_operands,
        {"ours": operation.call(row, OURS)} | {name: _side(row, name) for name in peers},
        partial(_checked_errors, row),
        group=row.group,
        wide=row.is_wide,
        peer=operation.peer,
        contexts={"ours": partial(jtk.policy, policy)},
        timing=timing,
        rough=_ROUGH,
        beyond_cache=True,
        required=("ours", operation.peer),
        arguments_of={"dense": dense_operands},
        fields=_fields(row),
        longest_call=_LONGEST_CALL if drawn else math.inf,
        deadline=_LONGEST_ROW,
        also_compiled=partial(_compile_errors, row),
        side_by_side=SIDE_BY_SIDE if drawn else 1,
    )


def _side(row: Row, name: str) -> Function:
    """Return the function of a peer, whose module is imported where it is called."""
    operation = OPERATIONS[row.operation]
    return lambda *operands: operation.call(row, operation.sides[name]())(*operands)


def _fields(row: Row) -> dict[str, Any]:
    """Return what a record has of a row besides what is measured."""
    text = {} if row.name.rpartition(": ")[2] == row.text else {"call": row.text}
    limits = {"share": row.share, "temporary": row.temporary}
    more = {key: value for key, value in limits.items() if value}
    return {**text, "target": dict(row.target), **more}


# Errors.


def _checked_errors(row: Row, operands: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the errors of both sides, and the differences of other peers from ours."""
    peer, ours = OPERATIONS[row.operation].peer, results["ours"]
    of_ours, of_peer, deviation = errors(row, (*operands,), ours, results[peer])
    found = {"ours": of_ours, peer: of_peer}
    if why := fault(row, of_ours, of_peer, deviation):
        raise WrongResult(found, why)
    for name in results.keys() - found.keys():
        pairs = zip(*map(jax.tree.leaves, (results[name], ours)), strict=True)
        found[name] = max(float(_relative(*pair)) for pair in pairs)
    return found


def _compile_errors(row: Row) -> None:
    if not row.split:
        with jax.enable_x64(True):
            result = jax.ShapeDtypeStruct(row.shape(row.out), row.result_type)
            _sampled_errors.lower(row, row.structs, result, result).compile()


@jax.jit
def _relative(result: Array, ours: Array) -> Array:
    wide = ours.astype(jnp.float32)
    return jnp.asarray(jnp.linalg.norm(result.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))


def errors(row: Row, operands: Operands, ours: Any, peer: Any) -> tuple[float, float, float]:
    """Return our error, the peer's, and the most by which elements of both differ.

    For grouped GEMMs the peer is the dense product of each of some groups.
    """
    if row.split:
        return _grouped_errors(row, operands, ours)
    with jax.enable_x64(True):
        found = _sampled_errors(row, operands, ours, peer)
        return float(found[0]), float(found[1]), float(found[2])


def _grouped_errors(row: Row, operands: Operands, ours: Any) -> tuple[float, float, float]:
    """Return the errors of the results of some groups: a dense product of each is what is right."""
    # Their speed is not worth XLA's autotuning.
    product, exact_product = (
        jitted(x, DENSE, xla_gpu_autotune_level=0) for x in (row, in_float64(row))
    )
    found: list[tuple[list[Any], ...]] = []
    for group in judged_groups(row):
        given = row.group_slices(group, operands, row.operands)
        peer = jax.tree.leaves(product(*given))
        with jax.enable_x64(True):
            exact = jax.tree.leaves(exact_product(*map(_wide, given)))
        found.append((row.group_slices(group, jax.tree.leaves(ours), row.results), peer, exact))
    with jax.enable_x64(True):
        each = [
            [float(x) for x in _whole_errors(*map(jnp.concatenate, zip(*of_groups, strict=True)))]
            for of_groups in zip(*(zip(*sides, strict=True) for sides in found), strict=True)
        ]
    of_ours, of_peer, deviation = np.array(each).max(0).tolist()
    return of_ours, of_peer, deviation


def judged_groups(row: Row) -> list[int]:
    """Return the groups of a grouped GEMM on which errors are measured, the largest among them."""
    spread = np.linspace(0, row.sizes["g"] - 1, _JUDGED_GROUPS).round().astype(int)
    return sorted({int(row.group_sizes.argmax()), *spread.tolist()})


@jax.jit
def _whole_errors(ours: Array, peer: Array, exact: Array) -> tuple[Array, ...]:
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.linalg.norm(exact)
    of_each = (jnp.linalg.norm(_wide(x) - exact) / norm for x in (ours, peer))
    # Groups with more rows have larger sums. Where all is zero, any difference is beyond measure.
    size = jnp.sqrt(jnp.mean(jnp.square(exact), -1, keepdims=True))
    size = jnp.maximum(size, np.finfo(np.float64).tiny)
    return *of_each, jnp.max(jnp.abs(_wide(ours) - _wide(peer)) / size)


@functools.partial(jax.jit, static_argnums=0)
def _sampled_errors(row: Row, operands: Operands, ours: Array, peer: Array) -> tuple[Array, ...]:
    indices = {x: sampled_indices(row.sizes[x]) for x in row.out}
    samples = [
        _wide(_sample(x, dimensions, indices))
        for x, dimensions in zip(operands, row.operands, strict=True)
    ]
    call = jitted(in_float64(row), OPERATIONS[row.operation].sides["XLA"]())
    exact = call(*samples)
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.sqrt(jnp.sum(call(*(jnp.square(jnp.abs(x)) for x in samples))))
    of_each = (
        jnp.sqrt(jnp.sum(jnp.square(jnp.abs(_wide(_sample(x, row.out, indices)) - exact)))) / norm
        for x in (ours, peer)
    )
    deviation = jnp.max(jnp.abs(_wide(ours) - _wide(peer))) / (norm / math.sqrt(exact.size))
    return *of_each, deviation


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


def fault(row: Row, ours: float, peer: float, deviation: float) -> str | None:
    """Return what is wrong with a result of these errors."""
    rounding = 0.0
    if jnp.issubdtype(row.result_type, jnp.inexact):
        rounding = float(_finfo(row.result_type).eps)
    # By default sums of float8 are those of the tensor cores, on our side, on XLA's, or on both.
    is_float8 = all(jnp.dtype(t).itemsize == 1 and "float8" in str(t) for t in row.types[:2])
    of_sums = min(rounding, float(_finfo(jnp.float32).eps))
    if is_float8 and row.precision is None:
        of_sums = _FAST_ACCUMULATION
    # The reference, which adds in float64, errs as well: the random roundings of a sum of n terms
    # add up to a third of the root of n, in terms of what random terms add up to.
    terms = math.prod(size for name, size in row.sizes.items() if name not in row.out)
    accumulated = _ROUNDINGS * of_sums + math.sqrt(terms) * float(np.finfo(np.float64).eps)
    # Written so that an error that is not a number is wrong.
    if not ours <= _ERROR_MARGIN * peer + rounding + accumulated:
        return f"wrong: relative error {ours:.1e}, the peer's {peer:.1e}"
    if not deviation <= _DEVIATION_MARGIN * (ours + peer + rounding + of_sums):
        return f"wrong: an element is {deviation:.1e} root mean squares from the peer's"
    return None


# Times.


def _times_on_cpu(row: Row, policy: Policy, runs: Runs, seconds: float) -> Times:
    """Measure by wall time, with operands where the caches keep them.

    A product too short to be timed alone is done several times in one call, each on the result of
    the one before, if the result can be an operand; both sides do the same. Other operations are
    not chained: XLA makes one of many transposes or additions.
    """
    fastest = min(min(wall_seconds(run) for _ in range(3)) for run in runs.values())
    count = min(_LONGEST_CHAIN, math.ceil(_LONG_CALL / fastest)) if _chains(row) else 1
    if count > 1:
        lhs, rhs = row.random_operands()
        # Random factors of this size keep the result's size as it is.
        scaled = (rhs * (1 / math.sqrt(row.sizes["k"]))).astype(rhs.dtype)
        sides = {name: _side(row, name) for name in runs if name != "ours"}
        sides["ours"] = jtk.policy(policy)(OPERATIONS[row.operation].call(row, OURS))
        runs = {name: partial(jax.jit(_chain(sides[name], count)), lhs, scaled) for name in runs}
    wall_seconds(lambda: [run() for run in runs.values()])
    times = wall_rounds(runs, seconds)
    each = {name: tuple(x / count for x in found) for name, found in times.items()}
    return Times(each, {}, "wall time of a call")


def _chains(row: Row) -> bool:
    lhs, *_ = row.structs
    if row.operation != "matmul" or not jnp.issubdtype(lhs.dtype, jnp.floating):
        return False  # Integers overflow.
    return (row.shape(row.out), row.result_type) == (lhs.shape, lhs.dtype)


def _chain(product: Function, length: int) -> Function:
    def chained(lhs: Array, rhs: Array) -> Array:
        for _ in range(length):
            lhs = product(lhs, rhs)
        return lhs

    return chained
