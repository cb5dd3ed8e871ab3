"""Recorded calls as the policy sees them: a workload, candidates, and the times of both sides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.calls.case import Case, types_enabled
from benchmarks.calls.row import Row
from benchmarks.records.record import timed
from benchmarks.records.record_file import load_record
from benchmarks.samples.sample import draw_sample
from jax_tilekern.ops import planned_kernel
from jax_tilekern.plans.gpu import Gpu, gpu_target
from jax_tilekern.plans.policy import Choice, choice
from jax_tilekern.plans.policy.choice import Device
from jax_tilekern.plans.policy.workload import Workload
from jax_tilekern.plans.tuned import XLA

_NAMES = [field.name for field in dataclasses.fields(Row)]


@dataclass(frozen=True)
class MeasuredCall:
    """A call and its times in microseconds.

    Attributes
    ----------
    name
        The row's name in its record.
    workload
        What is computed.
    candidates
        The ways to compute it, best first by their own estimates.
    device
        What they are for.
    xla
        XLA's time, if it was measured.
    ours
        Times of candidates, by their positions.
    """

    name: str
    workload: Workload
    candidates: Sequence[Any]
    device: Device
    xla: float | None
    ours: Mapping[int, float]


def measured_calls(paths: Sequence[Path], device: Device) -> list[MeasuredCall]:
    """Return the calls of records of ``benchmarks OPERATION --sample`` and ``benchmarks regret``.

    Calls of which records have several times have the sides of all of them.
    """
    found: dict[tuple[str, str], MeasuredCall] = {}
    for path in paths:
        record = json.loads(path.read_text())
        if "operation" in record["sample"]:
            calls = _of_regret(record, device)
        else:
            record = load_record(path)
            calls = _of_sample(record, device)
        for call in calls:
            key = str(record["sample"]["seed"]), call.name
            before = found.get(key)
            if before is not None:
                call = dataclasses.replace(
                    call, xla=call.xla or before.xla, ours={**before.ours, **call.ours}
                )
            found[key] = call
    return list(found.values())


def _of_sample(record: Mapping[str, Any], device: Device) -> Iterator[MeasuredCall]:
    for entry in timed(dict(record)):
        fields = {name: entry[name] for name in _NAMES if name in entry}
        row = Row(**{"operation": record["operation"], **fields})
        seconds = entry["seconds"]
        is_kernel = not entry["kernel"].startswith("XLA")
        ours = {0: 1e6 * seconds["ours"]["median"]} if is_kernel else {}
        yield from _stated(row, device, 1e6 * seconds["peer"]["median"], {}, ours)


def _of_regret(record: Mapping[str, Any], device: Device) -> Iterator[MeasuredCall]:
    sample = record["sample"]
    rows = {
        row.name: row
        for row in draw_sample(sample["operation"], "gpu", sample["count"], sample["seed"]).rows
    }
    for entry in record["rows"]:
        times = dict(entry["microseconds"])
        yield from _stated(rows[entry["name"]], device, times.pop(XLA, None), times, {})


def _stated(
    row: Row,
    device: Device,
    xla: float | None,
    by_key: Mapping[str, float],
    ours: Mapping[int, float],
) -> Iterator[MeasuredCall]:
    """Lower a row for the device, and yield what its planner asks the policy, if it asks once."""
    asked: list[tuple[Workload, Sequence[Any]]] = []

    def choose(workload: Workload, candidates: Sequence[Any], *_: Any) -> Choice[Any]:
        asked.append((workload, candidates))
        return Choice(None, "only the question is wanted")

    with ExitStack() as stack:
        for module in (choice, planned_kernel):
            stack.enter_context(mock.patch.object(module, "choose", choose))
        if isinstance(device, Gpu):
            stack.enter_context(gpu_target(device))
        stack.enter_context(types_enabled(row))
        traced = jax.jit(Case.of(row).ours).trace(*row.structs)
        traced.lower(lowering_platforms=("cuda" if isinstance(device, Gpu) else "cpu",))
    if len(asked) == 1:
        ((workload, candidates),) = asked
        positions = {x.key: i for i, x in enumerate(candidates)} if by_key else {}
        found = {positions[key]: time for key, time in by_key.items() if key in positions}
        yield MeasuredCall(row.name, workload, candidates, device, xla, {**ours, **found})
