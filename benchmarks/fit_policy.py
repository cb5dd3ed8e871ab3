"""Fits what the policy knows of a device to measured calls, and reports its error on unseen ones.

    python -m benchmarks fit_policy DEVICE RECORD... [--times FILE] [--json FILE]
    python -m benchmarks fit_policy DEVICE --measure FOLDER [--minutes 30] [--json FILE]
    python -m benchmarks fit_policy DEVICE RECORD... --again --minutes 2 --times FILE

The second form draws calls of the operations that the policy predicts, times them on this machine,
and writes the records to the folder first. The third form times calls of records again on this CPU,
those that the file lacks, as many as there is time for. What another device's data says of a device
with the same SMs (``SCALED`` of ``plans/policy/model.py``) is corrected by its own calls. It stays
as it is where these are few, and where corrections choose no better on unseen calls. An operation
whose model gains nothing over XLA on unseen calls has none.
Every call is predicted by models that were fitted without it, five times a fifth of the calls. The
margin is chosen, and the error reported, on these predictions. The file has models of all calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from benchmarks.errors import BenchmarkError
from benchmarks.linalg import MatrixCall
from benchmarks.measure import compiled
from benchmarks.record import Record, command_text, read, write
from benchmarks.row_programs import program_of
from benchmarks.rows import OURS, Row, jitted
from benchmarks.sample import DrawnCall, drawn_program
from benchmarks.timing import wall_times
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops import planned_kernel
from jax_tilekern.ops.attention import choice as choice_of_attention
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gpu import KNOWN_GPUS, Gpu, NoGpu, current_gpu
from jax_tilekern.plans.policy import PolicyChoice, choice
from jax_tilekern.plans.policy.choice import Device, base_microseconds
from jax_tilekern.plans.policy.model import (
    FORMAT,
    DeviceModel,
    Forest,
    NearestCalls,
    OperationModel,
    model_of,
    scaled_model,
)
from jax_tilekern.plans.policy.workload import (
    FUSED,
    Workload,
    candidate_numbers,
)
from jax_tilekern.plans.tuned import XLA

HELP = "fit the policy's predictions for a device to measured calls"

# Instead of a candidate's key: the one that the planner ranks first.
_FIRST = "first"
_Array = np.ndarray[Any, np.dtype[Any]]
_DRAWN = "sample", "--count", "200", "--policy", "kernels"
_WITH_EPILOGUES = "linear", "matmul, epilogue", "matmul, residual"
_OF_MATRICES = (
    "linalg.inv", "linalg.lu_factor", "linalg.cholesky", "linalg.solve", "linalg.triangular_solve",
    "linalg.svd", "linalg.svdvals", "linalg.eigh", "linalg.eigvalsh", "linalg.qr",
)  # fmt: skip
_SIX = "--candidates", "6"
# The commands that time calls, by their records, and their shares of the time. On GPUs several
# candidates of a product are timed.
_ON_GPUS: Mapping[str, tuple[float, Sequence[str]]] = {
    "regret-matmul": (0.4, ("regret", "matmul", "--sample", "800", *_SIX)),
    "regret-decode": (0.15, ("regret", "decode", "--sample", "300", *_SIX)),
    "regret-matvec": (0.05, ("regret", "matvec", "--sample", "120")),
    "regret-vdot": (0.05, ("regret", "vdot", "--sample", "120")),
    "fused": (0.2, (*_DRAWN, *_SIX, "--operations", *_WITH_EPILOGUES)),
    "sample": (0.1, (*_DRAWN, "--operations", "sum", "transpose")),
    "linalg": (0.05, (*_DRAWN, "--operations", *_OF_MATRICES)),
}
_OF_CPUS = "matmul", "matvec", "vdot", "sum", "transpose", "add"
_ON_CPUS: Mapping[str, tuple[float, Sequence[str]]] = {
    "sample": (1.0, (*_DRAWN, "--operations", *_OF_CPUS))
}
_FOLDS = 5
# Boosting's trees, their depth, and the share of its fit that each adds: for many times, for few,
# and for errors.
_MANY, _FEW = (120, 5, 0.12), (60, 4, 0.15)
_MANY_TIMES = 800
_AGAIN_SECONDS = 0.05
_FEWEST = 25  # calls of an operation that has a model
# Operations whose calls are the model, and the fewest of these.
_KEPT, _FEWEST_KEPT = "matrix ", 10
_ERRORS = (40, 3, 0.1)
# What corrects another model.
_CORRECTION = (40, 3, 0.1)
_RATE_QUANTILE = 0.98
# How much more a model has to be worth than what it replaces, whose calls are few.
_LEAST_GAIN = 0.01
# Margins to try. The best has the largest mean of the logarithm of the speed over XLA's, less the
# share of calls slower than 0.97, as far as that exceeds what is allowed.
_LEAST = (0.0, 0.03, 0.06, 0.08, 0.1, 0.15)
_OF_ERROR = (0.0, 0.3, 0.5, 0.8, 1.0)
_SLOW, _SLOW_SHARE = 0.97, 0.03


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("device", help="the name of a GPU, or a CPU's, as doctor prints it")
    parser.add_argument("records", metavar="RECORD", nargs="*", type=Path)
    parser.add_argument("--measure", metavar="FOLDER", type=Path, help="time calls here first")
    parser.add_argument(
        "--again", action="store_true", help="time calls of the records that --times lacks; no fit"
    )
    parser.add_argument("--minutes", type=float, default=30, help="to time calls (%(default)s)")
    parser.add_argument("--seed", type=int, default=70, help="of these calls; even ones are to fit")
    parser.add_argument(
        "--times", metavar="FILE", type=output_file, help="write the calls of all records here"
    )
    parser.add_argument("--json", metavar="FILE", type=output_file, help="write the file here")


def run(arguments: argparse.Namespace) -> int:
    records = list(arguments.records)
    if arguments.measure is not None:
        arguments.measure.mkdir(parents=True, exist_ok=True)
        commands = _ON_CPUS if arguments.device.startswith("CPU") else _ON_GPUS
        for name, (share, command) in commands.items():
            record = arguments.measure / f"{name}.jsonl"
            limits = ["--seed", arguments.seed, "--minutes", share * arguments.minutes]
            # A process takes most of a GPU's memory.
            words = [sys.executable, "-m", "benchmarks", *command, *limits]
            subprocess.run(list(map(str, [*words, "--json", record])), check=False)
            records += [record] if record.exists() else []
    times = read_times(records)
    if arguments.again:
        times = _timed_again(times, arguments.times, arguments.minutes)
    if arguments.times is not None:
        rows = [_line(x) for x in times]
        write(arguments.times, {"rows": rows})
    if arguments.again:
        return 0
    target = _device(arguments.device)
    calls = _measured_calls(times, target)
    if not calls:
        raise BenchmarkError("the records have no calls with times")
    scaled = scaled_model(arguments.device)
    device = scaled or _rates(arguments.device, calls)
    known, models = dict(device.models), {}
    # Products with epilogues are predicted by what is known of those without.
    for operation in sorted({x.workload.operation for x in calls}, key=lambda x: (x == FUSED, x)):
        own = [x for x in calls if x.workload.operation == operation]
        if operation == FUSED:
            device = dataclasses.replace(device, models=known)
            own = _measured_calls([x.call for x in own], target, device)
        # Without a model, an operation has what its planner's rules say.
        is_kept = operation.startswith(_KEPT)
        if sum(x.is_pair for x in own) < (_FEWEST_KEPT if is_kept else _FEWEST):
            continue
        if is_kept:
            models[operation] = kept_calls(own, operation)
            continue
        base: Any = known.get(operation)
        fitted = _fitted(_Rows(device, own, base), operation)
        if fitted is not None:
            models[operation] = fitted
            known[operation] = OperationModel.from_json(fitted, base)
    if arguments.json is not None:
        content = {
            "format": FORMAT,
            "device": arguments.device,
            "command": command_text(arguments.command_line),
            "rates": {
                "launch": device.launch,
                "bytes": device.bytes,
                "operations": dict(device.operations),
                "complex_operations": dict(device.complex_operations),
            },
            "models": models,
        }
        write_json(arguments.json, content)
    return 0


def _timed_again(calls: Sequence[CallTimes], path: Path | None, minutes: float) -> list[CallTimes]:
    """Return the calls of a file, and as many others as there is time to time."""
    found = read_times([path]) if path is not None and path.exists() else []
    known, end = {call.name for call in found}, monotonic() + 60 * minutes
    for call in calls:
        if monotonic() > end:
            break
        if call.name not in known and not isinstance(call.row, MatrixCall):
            found.append(call._replace(microseconds=_times_on_cpu(call.row)))
    return found


def _times_on_cpu(row: Row | DrawnCall) -> dict[str, float]:
    """Return the microseconds of XLA and, where there is a kernel, of the first candidate."""
    program = program_of(row, "kernels") if isinstance(row, Row) else drawn_program(row, "kernels")
    found = compiled(program.with_sides(lambda side: side == program.peer))
    names = {_FIRST: "ours"} if _is_ours({"kernels": found.kernels["ours"]}) else {}
    with row.types_enabled():
        operands = jax.device_put(found.arguments)
        runs = {
            key: functools.partial(found.sides[side], *program.taken_by(side, operands))
            for key, side in {**names, XLA: program.peer}.items()
        }
        times = wall_times(runs, _AGAIN_SECONDS).medians()
    return {side: round(1e6 * seconds, 3) for side, seconds in times.items()}


def _device(name: str) -> Device:
    """Return the device that calls are lowered for.

    Raises
    ------
    BenchmarkError
        If it is no CPU, no GPU that is known and none of this machine's.
    """
    if name.startswith("CPU"):
        return Cpu("")
    known = next((x for x in KNOWN_GPUS if x.name == name), None)
    if known is not None:
        return known
    try:
        found = current_gpu()
    except NoGpu as error:
        raise BenchmarkError(f"{name!r} is not known here, and {error}") from error
    if found.name != name:
        raise BenchmarkError(f"this machine has {found.name!r}, not {name!r}")
    return found


# Calls, as records have them and as the policy sees them.


class CallTimes(NamedTuple):
    """A call and its times.

    Attributes
    ----------
    name
        That of the row, after the seed of its sample: ``sum 7/12: float32 ab->a a30 b40``. Products
        lack the operation.
    row
        The call, of a suite's text or of a description.
    microseconds
        Of XLA and of candidates, by their keys.
    """

    name: str
    row: Row | DrawnCall | MatrixCall
    microseconds: Mapping[str, float]


def _line(call: CallTimes) -> Record:
    fields: Record = {"name": call.name, "microseconds": call.microseconds}
    if isinstance(call.row, MatrixCall):
        return fields | {"matrices": list(call.row)}
    return fields | ({} if isinstance(call.row, Row) else {"draw": dataclasses.astuple(call.row)})


def read_times(paths: Sequence[Path]) -> list[CallTimes]:
    """Return the calls of records, each once.

    Records are those of ``benchmarks OPERATION --sample``, of ``benchmarks sample``, of
    ``benchmarks regret``, of ``benchmarks linalg`` and of ``--times``. A call that several of them
    have gets the sides of all.
    """
    found: dict[str, CallTimes] = {}
    for path in paths:
        for call in _times_in(path):
            before = found[call.name].microseconds if call.name in found else {}
            found[call.name] = call._replace(microseconds={**before, **call.microseconds})
    return list(found.values())


def _times_in(path: Path) -> Iterator[CallTimes]:
    record = read(path)
    for entry in record["rows"]:
        if "draw" in entry or "matrices" in entry:
            yield from _drawn_times(entry)
            continue
        prefix, _, text = entry["name"].partition(": ")
        if "sample" not in record:
            operation = prefix.rpartition(" ")[0] or "matmul"
            yield CallTimes(entry["name"], Row.of(text, operation), entry["microseconds"])
            continue
        sample = record["sample"]
        operation = record.get("operation", sample.get("operation"))
        operation = "matmul" if operation == "decode" else operation
        row = Row.of(text, operation)
        name = (
            f"{'' if operation == 'matmul' else f'{operation} '}{sample['seed']}/{prefix}: {text}"
        )
        if "microseconds" in entry:
            yield CallTimes(name, row, entry["microseconds"])
        elif "seconds" in entry:
            peer, ours = (1e6 * entry["seconds"][side] for side in ("XLA", "ours"))
            stated_otherwise = "driver" in record["versions"] and _has_16_bit_vector(row)
            times = {} if stated_otherwise else {XLA: round(peer, 3)}
            if _is_ours(entry):
                times[_FIRST] = round(ours, 3)
            yield CallTimes(name, row, times)


def _is_ours(row: Record) -> bool:
    """Return whether kernels compute every call of a row; ``kernel`` has those of a whole row."""
    if "kernel" in row:
        return not row["kernel"].startswith("XLA")
    return not any(kernel.startswith("-") for kernel in row["kernels"])


def _drawn_times(entry: Record) -> Iterator[CallTimes]:
    """Yield the call of a row of ``benchmarks sample`` or ``linalg``, if it has times."""
    is_drawn = "draw" in entry
    row = DrawnCall(*entry["draw"]) if is_drawn else MatrixCall(*entry["matrices"])
    times = entry.get("microseconds")
    if row.name != entry["name"]:
        raise BenchmarkError(f"the catalog draws {row.name}, where the record has {entry['name']}")
    if "seconds" in entry:
        times = {key: round(1e6 * time, 3) for key, time in entry["seconds"].items()}
        ours, xla = times.pop("ours"), times.pop("XLA", None)
        if not times and _is_ours(entry):
            times[_FIRST] = ours
        times |= {} if xla is None else {XLA: xla}
    if times:
        yield CallTimes(row.name, row, times)


def _has_16_bit_vector(row: Row) -> bool:
    """Return whether ``jax.numpy`` rounds every product on GPUs; what is left to XLA does not."""
    is_product = row.operation in ("matmul", "matvec", "vdot")
    narrow = all(dtype.itemsize == 2 for dtype in row.types)
    return is_product and narrow and 1 in (row.sizes.get("m", 1), row.sizes.get("n", 1))


class MeasuredCall(NamedTuple):
    """A call and its times in microseconds.

    Attributes
    ----------
    call
        The call as records have it.
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

    call: CallTimes
    workload: Workload
    candidates: Sequence[Any]
    device: Device
    xla: float | None
    ours: Mapping[int, float]

    @property
    def is_pair(self) -> bool:
        """Whether both sides were measured."""
        return bool(self.ours) and self.xla is not None


def _measured_calls(
    times: Sequence[CallTimes], device: Device, known: DeviceModel | None = None
) -> list[MeasuredCall]:
    """Return the calls of which a planner asks the policy once, which knows this of the device."""
    with ExitStack() as stack:
        if known is not None:
            jax.clear_caches()
            stack.enter_context(mock.patch.object(choice, "model_of", return_value=known))
        found = [measured_call(call, device) for call in times]
    return [call for call in found if call is not None]


def measured_call(call: CallTimes, device: Device) -> MeasuredCall | None:
    """Lower a call for the device; return what its planner asks the policy, if it asks once."""
    asked: list[tuple[Workload, Sequence[Any]]] = []

    def choose(workload: Workload, candidates: Sequence[Any], *_: Any) -> PolicyChoice[Any]:
        asked.append((workload, candidates))
        return PolicyChoice(None, "only the question is wanted")

    row, on_gpu = call.row, isinstance(device, Gpu)
    with ExitStack() as stack:
        for module in (choice, planned_kernel, choice_of_attention):
            stack.enter_context(mock.patch.object(module, "choose", choose))
        if isinstance(device, Gpu):
            stack.enter_context(gpu_target(device))
        stack.enter_context(row.types_enabled())
        function = jitted(row, OURS) if isinstance(row, Row) else jax.jit(row.function(OURS))
        traced = function.trace(*row.structs)
        traced.lower(lowering_platforms=("cuda" if on_gpu else "cpu",))
    # What XLA computes of a product with an epilogue is asked for later.
    if asked and asked[0][0].operation == FUSED:
        asked = asked[:1]
    if len(asked) != 1:
        return None
    ((workload, candidates),) = asked
    times = dict(call.microseconds)
    xla = times.pop(XLA, None)
    positions = {getattr(x, "key", _FIRST): i for i, x in enumerate(candidates)} | {_FIRST: 0}
    ours = {positions[key]: time for key, time in times.items() if key in positions}
    return MeasuredCall(call, workload, candidates, device, xla, ours)


# The fit.


def _rates(name: str, calls: Sequence[MeasuredCall]) -> DeviceModel:
    """Return the highest rates that XLA's calls reach, but for a few."""
    timed = [(call.workload, call.xla) for call in calls if call.xla is not None]
    launch = float(np.quantile([time for _, time in timed], 1 - _RATE_QUANTILE))

    def rate(rates: Sequence[float]) -> float:
        return float(np.quantile(rates, _RATE_QUANTILE))

    arithmetics = {w.arithmetic for w, _ in timed if w.operations}
    return DeviceModel(
        name,
        launch,
        rate([w.bytes / time for w, time in timed]),
        {
            arithmetic: rate([w.operations / t for w, t in timed if w.arithmetic == arithmetic])
            for arithmetic in sorted(arithmetics)
        },
        # The records have no complex products.
        present.complex_operations if (present := model_of(name)) else {},
        {},
    )


def _boosted(
    x: Sequence[Sequence[float]],
    y: _Array,
    settings: tuple[int, int, float] | None = None,
) -> Forest:
    """Fit regression trees by gradient boosting."""
    from sklearn.ensemble import GradientBoostingRegressor

    trees, depth, rate = settings or (_MANY if len(y) >= _MANY_TIMES else _FEW)
    fitted = GradientBoostingRegressor(
        loss="huber", n_estimators=trees, max_depth=depth, learning_rate=rate, subsample=0.6,
        max_features=0.5, min_samples_leaf=3, random_state=0,
    ).fit(np.asarray(x, np.float32), y)  # fmt: skip
    complete = [_complete(tree.tree_, depth, rate) for (tree,) in fitted.estimators_]
    features, thresholds, values = (np.stack(arrays) for arrays in zip(*complete, strict=True))
    constant = float(np.ravel(fitted.init_.constant_)[0])
    return Forest(features, thresholds, values, constant)


def _complete(tree: Any, depth: int, rate: float) -> tuple[_Array, _Array, _Array]:
    """Return a tree as a complete one, in which a leaf is above equal leaves."""
    inner = 2**depth - 1
    features = np.zeros(inner, np.uint8)
    thresholds = np.full(inner, np.inf, np.float32)
    values = np.zeros(inner + 1, np.float32)

    def fill(place: int, node: int) -> None:
        if place >= inner:
            values[place - inner] = rate * tree.value[node, 0, 0]
            return
        left, right = tree.children_left[node], tree.children_right[node]
        if left >= 0:
            features[place], thresholds[place] = tree.feature[node], tree.threshold[node]
        for child, below in ((1, left), (2, right)):
            fill(2 * place + child, below if left >= 0 else node)

    fill(0, 0)
    return features, thresholds, values


class _Rows:
    """The calls of an operation as numbers.

    Models correct ``base``, if there is one, or the estimates of XLA's times that workloads have.
    """

    def __init__(
        self, device: DeviceModel, calls: Sequence[MeasuredCall], base: OperationModel | None
    ) -> None:
        self.calls, self.base = calls, base
        workload = calls[0].workload
        # Whether models correct what data predict, or an estimate without any.
        self.corrects_data = base is not None or workload.operation == FUSED
        self.corrects_estimate = not self.corrects_data and workload.estimate is not None
        self.settings = _CORRECTION if self.corrects_data else None
        self.numbers = [device.numbers(call.workload) for call in calls]
        # What models correct: of XLA, and of each candidate that was timed.
        self.roofline = np.log([device.roofline(call.workload) for call in calls])
        self.xla = np.log([call.xla or np.nan for call in calls])
        self.of_candidates = [
            (i, position, (*self.numbers[i], *_candidate_numbers(call, position)), np.log(time))
            for i, call in enumerate(calls)
            # The first of equals is taken, as by the policy.
            for position, time in sorted(call.ours.items())
        ]
        self.known = np.zeros(len(self.of_candidates))
        if base is not None:
            self.roofline = self.roofline + base.xla(self.numbers)
            self.known = base.ours([numbers for *_, numbers, _ in self.of_candidates])

    def models(self, chosen: _Array) -> tuple[Forest, Forest]:
        """Fit XLA's times and ours of the chosen calls."""
        timed = [i for i, known in enumerate(chosen) if known and np.isfinite(self.xla[i])]
        of_xla = _boosted(
            [self.numbers[i] for i in timed], (self.xla - self.roofline)[timed], self.settings
        )
        own = self._estimated(chosen, self.xla)
        errors = np.array([time - base for _, base, _, time in own])
        return of_xla, _boosted([x for _, _, x, _ in own], errors, self.settings)

    def predicted_xla(self, xla: Forest) -> _Array:
        """Return the logarithm of XLA's predicted times."""
        result: _Array = self.roofline + xla(self.numbers)
        return result

    def best(
        self, ours: Forest, chosen: _Array, xla: _Array
    ) -> dict[int, tuple[float, float, float]]:
        """Return of each chosen call the predicted and the true time of our best, and the least."""
        rows = self._estimated(chosen, xla)
        if not rows:
            return {}
        predicted = np.array([base for _, base, _, _ in rows]) + ours([x for _, _, x, _ in rows])
        result: dict[int, tuple[float, float, float]] = {}
        for (i, *_, time), guess in zip(rows, predicted, strict=True):
            before = result.get(i, (np.inf, 0.0, np.inf))
            least = min(time, before[2])
            result[i] = (guess, time, least) if guess < before[0] else (*before[:2], least)
        return result

    def _estimated(
        self, chosen: _Array, xla: _Array
    ) -> list[tuple[int, float, tuple[float, ...], float]]:
        """Return the candidates of chosen calls, with estimates where XLA takes what is given."""
        found = []
        for (i, position, numbers, time), known in zip(self.of_candidates, self.known, strict=True):
            if chosen[i]:
                call = self.calls[i]
                base = base_microseconds(call.candidates[position], call.device, np.exp(xla[i]))
                if np.isfinite(base):
                    found.append((i, float(np.log(base) + known), numbers, time))
        return found


def _candidate_numbers(call: MeasuredCall, position: int) -> tuple[float, ...]:
    return candidate_numbers(
        call.candidates[position], call.candidates[0], call.workload, call.device
    )


class _Choices(NamedTuple):
    """The choices of predictions, with logarithms of times.

    Attributes
    ----------
    index
        Of the calls of which both sides are known.
    guess, time, least
        Our best candidate's prediction and time, and the least time of a candidate.
    guessed_xla, xla
        XLA's prediction and time.
    """

    index: Any
    guess: Any
    time: Any
    least: Any
    guessed_xla: Any
    xla: Any

    def gain(self, margin: tuple[float, float], expected: _Array) -> _Array:
        """Return the gain over XLA of what a margin takes, of predictions with expected errors."""
        limit = np.maximum(margin[0], margin[1] * expected)
        taken: _Array = np.where(self.guessed_xla - self.guess > limit, self.xla - self.time, 0.0)
        return taken

    def report(self, gain: _Array) -> Record:
        best = np.maximum(0.0, self.xla - self.least)
        return {
            "over_xla": round(float(np.exp(gain.mean())), 3),
            "over_best": round(float(np.exp((gain - best).mean())), 3),
            "worst": round(float(np.exp(gain.min())), 3),
            "below_0.97": round(float(np.mean(gain < np.log(_SLOW))), 3),
            "taken": round(float(np.mean(gain != 0)), 3),
        }


def _value(gain: _Array) -> float:
    """Return what gains are worth: their mean, less what is too often slow."""
    return float(gain.mean() - max(0.0, np.mean(gain < np.log(_SLOW)) - _SLOW_SHARE))


def _choices(rows: _Rows, folds: Sequence[tuple[Forest, Forest, _Array]]) -> _Choices:
    """Return the choices of the models of some calls each."""
    pairs: list[tuple[int, float, float, float, float, float]] = []
    for xla, ours, predicted in folds:
        of_xla = rows.predicted_xla(xla)
        for i, best_of_ours in rows.best(ours, predicted, of_xla).items():
            if np.isfinite(rows.xla[i]):
                pairs.append((i, *best_of_ours, of_xla[i], rows.xla[i]))
    return _Choices(*map(np.array, zip(*pairs, strict=True)))


def _fitted(rows: _Rows, operation: str) -> dict[str, Any] | None:
    """Fit the models of an operation, and print their error on unseen calls.

    Returns ``None`` where it chooses no better than XLA's programs, or than what it corrects.
    """
    calls = rows.calls
    folds = np.random.default_rng(0).integers(_FOLDS, size=len(calls))
    found = _choices(rows, [(*rows.models(folds != x), folds == x) for x in range(_FOLDS)])
    wrong = np.abs((found.guessed_xla - found.guess) - (found.xla - found.time))
    numbers = [rows.numbers[i] for i in found.index]
    error_folds = folds[found.index]
    expected = np.zeros(len(numbers))
    for fold in range(_FOLDS):
        seen = error_folds != fold
        model = _boosted([n for n, s in zip(numbers, seen, strict=True) if s], wrong[seen], _ERRORS)
        expected[~seen] = model([n for n, s in zip(numbers, seen, strict=True) if not s])
    margins = itertools.product(_LEAST, _OF_ERROR)
    margin = max(margins, key=lambda x: _value(found.gain(x, expected)))
    gain = found.gain(margin, expected)
    report = {
        "calls": len(calls),
        "pairs": len(numbers),
        "error_of_xla": _percentiles(np.abs(found.guessed_xla - found.xla)),
        "error_of_ours": _percentiles(np.abs(found.guess - found.time)),
        **found.report(gain),
    }
    print(operation, report, "margin", margin)
    least = 0.0  # the worth of XLA's choices
    if rows.corrects_data or rows.corrects_estimate:
        before = _choices(rows, [(_NOTHING, _NOTHING, folds >= 0)])
        numbers_before = [rows.numbers[i] for i in before.index]
        base_margin, of_base = (0.0, 0.0), np.zeros(len(numbers_before))
        if rows.base is not None:
            base_margin, of_base = rows.base.margin, rows.base.error(numbers_before)
        gain_before = before.gain(base_margin, of_base)
        print("  without corrections", before.report(gain_before))
        # Measured times replace an estimate without any if they choose no worse.
        least = max(least, _value(gain_before) - rows.corrects_estimate * _LEAST_GAIN)
    if _value(gain) < least + _LEAST_GAIN:
        return None
    xla, ours = rows.models(folds >= 0)
    error = _boosted(numbers, wrong, _ERRORS)
    forests = {"xla": xla, "ours": ours, "error": error}
    return {
        "unseen": report,
        "is_correction": rows.base is not None,
        "margin": margin,
        **{name: forest.to_json() for name, forest in forests.items()},
    }


def kept_calls(calls: Sequence[MeasuredCall], operation: str) -> dict[str, Any]:
    """Return the calls of an operation as its model, and print its error on each without it."""
    pairs = [
        (call.workload.features, call.ours[0], call.xla)
        for call in calls
        if call.xla is not None and 0 in call.ours
    ]
    lines = [" ".join(f"{x:.6g}" for x in (*features, *times)) for features, *times in pairs]
    others = [
        NearestCalls.from_json(lines[:i] + lines[i + 1 :])(features)
        for i, (features, *_) in enumerate(pairs)
    ]
    guess, of_xla = np.log(others).T
    time, xla = np.log([times for _, *times in pairs]).T
    found = _Choices(np.arange(len(lines)), guess, time, time, of_xla, xla)
    report = {
        "calls": len(calls),
        "pairs": len(lines),
        "error_of_xla": _percentiles(np.abs(of_xla - xla)),
        "error_of_ours": _percentiles(np.abs(guess - time)),
        **found.report(found.gain((0.0, 0.0), np.zeros(len(lines)))),
    }
    print(operation, report)
    return {"unseen": report, "calls": lines}


# A correction of nothing.
_NOTHING = Forest(
    np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.float32), np.zeros((1, 2), np.float32), 0.0
)


def _percentiles(errors: _Array) -> list[float]:
    """Return the median and the 90th percentile."""
    return [round(float(np.quantile(errors, q)), 3) for q in (0.5, 0.9)]
