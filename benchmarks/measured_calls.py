"""Recorded calls as the policy sees them: a workload, candidates, and the times of both sides.

``times.json`` of a device has the calls of many records in a short form, to which data is fitted.
"""

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
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops import planned_kernel
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy import PolicyChoice, choice
from jax_tilekern.plans.policy.choice import Device
from jax_tilekern.plans.policy.workload import Workload
from jax_tilekern.plans.tuned import XLA

# Instead of a candidate's key: the one that the planner ranks first.
_FIRST = "first"
# What decides a row's call, beside its name.
_FIELDS = (
    "operation", "type", "lhs", "rhs", "out", "sizes", "rhs_type", "result", "precision",
)  # fmt: skip
_DEFAULTS = {x.name: x.default for x in dataclasses.fields(Row)}


@dataclass(frozen=True)
class CallTimes:
    """A call and its times, as records have them.

    Attributes
    ----------
    seed
        Of the sample that it was drawn for.
    row
        The call.
    microseconds
        Of XLA and of candidates, by their keys.
    """

    seed: int
    row: Row
    microseconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return what a file has of it."""
        values = {name: getattr(self.row, name) for name in ("name", *_FIELDS)}
        fields = {name: x for name, x in values.items() if x != _DEFAULTS[name]}
        return {"seed": self.seed, **fields, "microseconds": dict(self.microseconds)}


def read_times(paths: Sequence[Path]) -> list[CallTimes]:
    """Return the calls of records, each once.

    Records are those of ``benchmarks OPERATION --sample``, ``benchmarks regret`` and
    :func:`write_times`. A call that several of them have gets the sides of all.
    """
    found: dict[tuple[int, str, str], CallTimes] = {}
    for path in paths:
        for call in _times_in(path):
            key = call.seed, call.row.operation, call.row.name
            before = found[key].microseconds if key in found else {}
            found[key] = dataclasses.replace(call, microseconds={**before, **call.microseconds})
    return list(found.values())


def write_times(path: Path, calls: Sequence[CallTimes]) -> None:
    """Write calls to a file, one a line."""
    lines = ",\n".join(json.dumps(call.to_json()) for call in calls)
    path.write_text(f'{{"calls": [\n{lines}\n]}}\n')


def _times_in(path: Path) -> Iterator[CallTimes]:
    record = json.loads(path.read_text())
    if "calls" in record:
        for entry in record["calls"]:
            entry = dict(entry)
            seed, times = entry.pop("seed"), entry.pop("microseconds")
            yield CallTimes(seed, Row(group="", target=1.0, **entry), times)
        return
    sample = record["sample"]
    if "operation" in sample:
        drawn = draw_sample(sample["operation"], "gpu", sample["count"], sample["seed"])
        rows = {row.name: row for row in drawn.rows}
        for entry in record["rows"]:
            yield CallTimes(sample["seed"], rows[entry["name"]], entry["microseconds"])
        return
    record = load_record(path)
    for entry in timed(record):
        fields = {name: entry[name] for name in _FIELDS if name in entry}
        row = Row(entry["name"], "", 1.0, **{"operation": record["operation"], **fields})
        medians = {side: 1e6 * x["median"] for side, x in entry["seconds"].items()}
        stated_otherwise = record["backend"] == "gpu" and _has_16_bit_vector(row)
        times = {} if stated_otherwise else {XLA: round(medians["peer"], 3)}
        if not entry["kernel"].startswith("XLA"):
            times[_FIRST] = round(medians["ours"], 3)
        yield CallTimes(sample["seed"], row, times)


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


def _has_16_bit_vector(row: Row) -> bool:
    """Return whether ``jax.numpy`` rounds every product on GPUs; what is left to XLA does not."""
    is_product = row.operation in ("matmul", "matvec", "vdot")
    narrow = all(dtype.itemsize == 2 for dtype in row.types)
    return is_product and narrow and 1 in (row.sizes.get("m", 1), row.sizes.get("n", 1))


def measured_calls(calls: Sequence[CallTimes], device: Device) -> list[MeasuredCall]:
    """Return what the policy is asked about each call, for those that it is asked about once."""
    stated = (_stated(call, device) for call in calls)
    return [call for call in stated if call is not None]


def _stated(call: CallTimes, device: Device) -> MeasuredCall | None:
    """Lower a call for the device, and return what its planner asks the policy."""
    asked: list[tuple[Workload, Sequence[Any]]] = []

    def choose(workload: Workload, candidates: Sequence[Any], *_: Any) -> PolicyChoice[Any]:
        asked.append((workload, candidates))
        return PolicyChoice(None, "only the question is wanted")

    row = call.row
    with ExitStack() as stack:
        for module in (choice, planned_kernel):
            stack.enter_context(mock.patch.object(module, "choose", choose))
        if isinstance(device, Gpu):
            stack.enter_context(gpu_target(device))
        stack.enter_context(types_enabled(row))
        traced = jax.jit(Case.of(row).ours).trace(*row.structs)
        traced.lower(lowering_platforms=("cuda" if isinstance(device, Gpu) else "cpu",))
    if len(asked) != 1:
        return None
    ((workload, candidates),) = asked
    times = dict(call.microseconds)
    xla = times.pop(XLA, None)
    positions = {getattr(x, "key", _FIRST): i for i, x in enumerate(candidates)}
    positions[_FIRST] = 0
    ours = {positions[key]: time for key, time in times.items() if key in positions}
    return MeasuredCall(row.name, workload, candidates, device, xla, ours)
