"""The record of a run: what is written as JSON, and where and with what it was measured."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_tilekern.cli import machine
from jax_tilekern.cli.bench.case import Case, types_enabled
from jax_tilekern.cli.bench.measure import measure_on_cpu, measure_on_gpu
from jax_tilekern.cli.bench.suite import Row, Suite
from jax_tilekern.cli.timing import Pairs, Spread

SCHEMA = 1
# How many times the peer's error ours may have, beyond the rounding of the result.
_ERROR_MARGIN = 4.0

Record = dict[str, Any]

# Knows JAX's types as well as numpy's; has no types itself.
_finfo: Callable[[Any], Any] = jnp.finfo


class RecordError(ValueError):
    """A file that is not a record of this version."""


def new_record(suite: Suite, command: Sequence[str], read_bandwidth: float) -> Record:
    """Return a record without rows.

    Parameters
    ----------
    suite
        What is measured.
    command
        The command line's arguments.
    read_bandwidth
        What :func:`jax_tilekern.cli.bench.measure.read_bandwidth` returned.
    """
    found, errors = machine.facts(
        "versions", "cpu", "driver", "nvidia_smi", "nvrtc", "source_digests"
    )
    now = datetime.datetime.now(datetime.UTC)
    return {
        "schema": SCHEMA,
        "suite": suite.name,
        "about": suite.about,
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "jax_tilekern", *command]),
        "backend": jax.default_backend(),
        "device": device_name(),
        **found,
        "errors": errors,
        "read_bytes_per_second": read_bandwidth,
        "rows": [],
    }


def device_name() -> str:
    """Return the GPU's name, or the CPU's model with its threads."""
    if jax.default_backend() != "cpu":
        return str(jax.devices()[0].device_kind)
    cpu = machine.cpu()
    return f"{cpu['model']}, {cpu['threads']} threads"


def measured(row: Row, seconds: float, l2_bytes: int) -> Record:
    """Measure a row and return its record; whatever fails is in it.

    Parameters
    ----------
    row
        The product.
    seconds
        Time to spend on timing.
    l2_bytes
        Size of the GPU's second-level cache.
    """
    record: Record = {
        "name": row.name,
        "type": row.type,
        "result": str(row.result_type),
        "precision": row.precision,
        "lhs": row.lhs,
        "rhs": row.rhs,
        "sizes": dict(row.sizes),
        "flops": row.flops,
        "bytes": row.bytes,
    }
    try:
        with types_enabled(row):
            record |= _results(Case.of(row), seconds, l2_bytes)
    # A row may exhaust the memory, or meet a bug anywhere below; the others are still to come.
    except Exception as error:
        record["failure"] = f"{type(error).__name__}: {error}"
    return record


def _results(case: Case, seconds: float, l2_bytes: int) -> Record:
    operands = case.operands()
    kernel = case.kernel(operands)
    ours, peer = case.errors(operands)
    if jax.default_backend() == "cpu":
        measurement = measure_on_cpu(case, operands, seconds)
    else:
        measurement = measure_on_gpu(case, operands, seconds, l2_bytes)
    return {
        "kernel": kernel,
        "error": {"ours": ours, "peer": peer},
        "failure": _wrong(case.row, ours, peer),
        "method": measurement.method,
        "products_per_call": measurement.products_per_call,
        "pairs": len(measurement.pairs.ours),
        "seconds": _spreads(measurement.pairs),
        "wall_seconds": _spreads(measurement.wall),
    }


def _wrong(row: Row, ours: float, peer: float) -> str | None:
    result = row.result_type
    rounding = float(_finfo(result).eps) if jnp.issubdtype(result, jnp.floating) else 0.0
    # Written so that an error that is not a number is wrong.
    if not ours <= _ERROR_MARGIN * peer + rounding:
        return f"wrong: relative error {ours:.1e}, the peer's {peer:.1e}"
    return None


def _spreads(pairs: Pairs) -> dict[str, dict[str, float]]:
    return {
        "ours": asdict(Spread.of(pairs.ours)),
        "peer": asdict(Spread.of(pairs.peer)),
        "ratio": asdict(pairs.ratio),
    }


def geometric_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the geometric mean of the ratios, by type and of ``all``; of timed rows only."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if "seconds" in row:
            for key in ("all", row["type"]):
                ratios.setdefault(key, []).append(row["seconds"]["ratio"]["median"])
    return {key: math.exp(sum(map(math.log, r)) / len(r)) for key, r in ratios.items()}


def load_record(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    RecordError
        If the file is none.
    """
    try:
        record = json.loads(path.read_text())
        schema = record["schema"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a record of a bench run: {error!r}") from error
    if schema[0] != SCHEMA:
        raise RecordError(f"{path} has schema {schema[0]}, and this version reads {SCHEMA}")
    return dict(record)
