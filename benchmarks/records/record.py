"""The record of a run: what is written as JSON, and where and with what it was measured."""

from __future__ import annotations

import datetime
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.case import Case, Errors, types_enabled
from benchmarks.calls.operations import OURS, flops
from benchmarks.calls.other_peers import OtherPeer, compiled, other_peers, temporary_bytes
from benchmarks.calls.row import Row
from benchmarks.measurement.measure import Measurement, measure_on_cpu, measure_on_gpu
from benchmarks.suites.suite import Suite
from jax_tilekern.cli import machine
from jax_tilekern.cli.timing import Pairs, Spread
from jax_tilekern.tuning.random_operands import Operands

SCHEMA = 1
# How many times the peer's error ours may have, beyond the rounding of the result.
_ERROR_MARGIN = 4.0
# How many times the errors of both a single one of some hundred million elements may deviate.
_DEVIATION_MARGIN = 16.0
# Roundings of the accumulator that ours may be off by, whatever the peer is: the error of a single
# sum may be small by luck, and in float64 the peer is compared with itself.
_ROUNDINGS = 16.0
# The rounding of sums of float8 on Hopper's tensor cores.
_FAST_ACCUMULATION = 2.0**-13

Record = dict[str, Any]

# Knows JAX's types as well as numpy's; has no types itself.
_finfo: Callable[[Any], Any] = jnp.finfo


def program_record(command: Sequence[str]) -> Record:
    """Return a record without rows, of a program that has no suite.

    Parameters
    ----------
    command
        The command line's arguments.
    """
    found, errors = machine.facts("versions", "cpu", "driver", "nvidia_smi", "nvrtc")
    return {
        "command": command_text(command),
        "date": now(),
        "device": jax.devices()[0].device_kind,
        **found,
        "errors": errors,
        "rows": [],
    }


def new_record(suite: Suite, command: Sequence[str], bandwidths: Mapping[str, float]) -> Record:
    """Return a record without rows.

    Parameters
    ----------
    suite
        What is measured.
    command
        The command line's arguments.
    bandwidths
        What :func:`benchmarks.measurement.measure.bandwidths` returned.
    """
    found, errors = machine.facts(
        "versions", "cpu", "driver", "nvidia_smi", "nvrtc", "source_digests"
    )
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "about": suite.about,
        "operation": suite.operation,
        "date": now(),
        "command": command_text(command),
        "backend": jax.default_backend(),
        "device": device_name(),
        **found,
        "errors": errors,
        **bandwidths,
        "means": dict(suite.means),
        "earlier_runs": [],
        "rows": [],
    }


def now() -> str:
    """Return the date and time."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command_text(arguments: Sequence[str]) -> str:
    """Return the command line of ``python -m benchmarks`` with these arguments."""
    return shlex.join(["python", "-m", "benchmarks", *arguments])


def device_name() -> str:
    """Return the GPU's name, or the CPU's model with its threads."""
    if jax.default_backend() != "cpu":
        return str(jax.devices()[0].device_kind)
    cpu = machine.cpu()
    return f"{cpu['model']}, {cpu['threads']} threads"


def unmeasured(row: Row, run: str) -> Record:
    """Return the record of a row whose measurement has begun.

    Parameters
    ----------
    row
        The call.
    run
        The date of the run's record, which tells whose row it is.
    """
    return {
        "name": row.name,
        "group": row.group,
        "target": row.target,
        "share": row.share,
        "type": row.type,
        "rhs_type": row.rhs_type,
        "result": str(row.result_type),
        "precision": row.precision,
        "lhs": row.lhs,
        "rhs": row.rhs,
        "out": row.out,
        "sizes": dict(row.sizes),
        "flops": flops(row),
        "bytes": row.bytes,
        "others": {name: {"target": target} for name, target in row.others.items()},
        "temporary": row.temporary,
        **row.details,
        "run": run,
        "failure": "the run ended while this row was measured",
    }


def measured(row: Row, run: str, seconds: float, l2_bytes: int) -> Record:
    """Measure a row and return its record; whatever fails is in it.

    Parameters
    ----------
    row
        The call.
    run
        The date of the run's record.
    seconds
        Time to spend on timing.
    l2_bytes
        Size of the GPU's L2.
    """
    return attempted(row, run, lambda: _results(Case.of(row), seconds, l2_bytes))


def attempted(row: Row, run: str, measurement: Callable[[], Record]) -> Record:
    """Return the record of a row with what a measurement returns, or with how it fails.

    Parameters
    ----------
    row
        The call.
    run
        The date of the run's record.
    measurement
        Returns the fields that it adds, ``failure`` included.
    """
    record, start = unmeasured(row, run), time.perf_counter()
    try:
        with types_enabled(row):
            record |= measurement()
    # A row may exhaust the memory, or meet a bug anywhere below; the others are still to come.
    except Exception as error:
        record["failure"] = f"{type(error).__name__}: {error}"
    return record | {"date": now(), "took_seconds": round(time.perf_counter() - start, 1)}


def _results(case: Case, seconds: float, l2_bytes: int) -> Record:
    operands = case.operands()
    found = checked(case, operands)
    if found["failure"]:
        return found  # The speed of a wrong result is no news.
    others = other_peers(case.row, operands, case.ours(*operands)) if case.row.others else {}
    functions = {name: other.function for name, other in others.items() if other.function}
    if jax.default_backend() == "cpu":
        measurement = measure_on_cpu(case, operands, seconds, functions)
    else:
        measurement = measure_on_gpu(case, operands, seconds, l2_bytes, functions)
    return {
        **found,
        **others_of(case.row, others, measurement.others),
        **times_of(measurement),
    }


def checked(case: Case, operands: Operands) -> Record:
    """Return what the record has of a row's kernel and its errors; ``failure`` if it is wrong."""
    kernel, errors = case.kernel(operands), case.errors(operands)
    return {"kernel": kernel, "error": errors._asdict(), "failure": _wrong(case.row, errors)}


def times_of(measurement: Measurement) -> Record:
    """Return what the record has of the times of a row."""
    return {
        "method": measurement.method,
        "products_per_call": measurement.products_per_call,
        "pairs": len(measurement.pairs.ours),
        "seconds": spreads(measurement.pairs),
        "wall_seconds": spreads(measurement.wall),
        "device_kernels": dict(measurement.kernels),
        "clocks": dict(measurement.clocks),
    }


def others_of(row: Row, others: Mapping[str, OtherPeer], times: Mapping[str, Pairs]) -> Record:
    """Return what the record has of a row's other peers, of which some have times."""
    return {
        **_temporary(row),
        "others": {
            name: _other(other, row.others[name], times.get(name)) for name, other in others.items()
        },
    }


def _temporary(row: Row) -> Record:
    """Return the temporary bytes of ours, where anything is said of them or of others'."""
    if row.temporary is None and not row.others:
        return {}
    return {"temporary_bytes": temporary_bytes(compiled(row, OURS))}


def _other(other: OtherPeer, target: float, pairs: Pairs | None) -> Record:
    """Return the record of another peer; one that failed has no times."""
    found = {"target": target, "temporary_bytes": other.temporary_bytes, "failure": other.failure}
    if pairs is None:
        return found
    return found | {"pairs": len(pairs.peer), "seconds": spreads(pairs)}


def _wrong(row: Row, errors: Errors) -> str | None:
    inexact = jnp.issubdtype(row.result_type, jnp.inexact)
    rounding = float(_finfo(row.result_type).eps) if inexact else 0.0
    of_sums = _rounding_of_sums(row, rounding)
    accumulated = _ROUNDINGS * of_sums
    ours, peer, deviation = errors
    # The reference, which adds in float64, errs as well: the random roundings of a sum of n terms
    # add up to a third of the root of n, in terms of what random terms add up to.
    terms = math.prod(size for name, size in row.sizes.items() if name not in row.out)
    accumulated += math.sqrt(terms) * float(np.finfo(np.float64).eps)
    # Written so that an error that is not a number is wrong.
    if not ours <= _ERROR_MARGIN * peer + rounding + accumulated:
        return f"wrong: relative error {ours:.1e}, the peer's {peer:.1e}"
    if not deviation <= _DEVIATION_MARGIN * (ours + peer + rounding + of_sums):
        return f"wrong: an element is {deviation:.1e} root mean squares from the peer's"
    return None


def _rounding_of_sums(row: Row, of_result: float) -> float:
    # By default sums of float8 are those of the tensor cores, on our side, on XLA's, or on both.
    is_float8 = row.type.startswith("float8") and (row.rhs_type or row.type).startswith("float8")
    if is_float8 and row.precision is None:
        return _FAST_ACCUMULATION
    return min(of_result, float(_finfo(jnp.float32).eps))


def spreads(pairs: Pairs) -> dict[str, dict[str, float]]:
    """Return the spread of each side and of their ratio."""
    return {
        "ours": asdict(Spread.of(pairs.ours)),
        "peer": asdict(Spread.of(pairs.peer)),
        "ratio": asdict(pairs.ratio),
    }


def timed(record: Record) -> list[Record]:
    """Return the rows that have times."""
    return [row for row in record["rows"] if "seconds" in row]


def geometric_means(
    rows: Iterable[Mapping[str, Any]], kind: Callable[[Mapping[str, Any]], str]
) -> dict[str, float]:
    """Return the geometric mean of timed rows' ratios for each kind of row, in their order."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(kind(row), []).append(row["seconds"]["ratio"]["median"])
    return {value: math.exp(sum(map(math.log, r)) / len(r)) for value, r in ratios.items()}
