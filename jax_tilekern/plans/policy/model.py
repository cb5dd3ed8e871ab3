"""Predicted times of calls on a device: a bound by rates, corrected by regression trees.

A time is predicted as that of a roofline, or of a kernel's own cost model, times what trees have
learned from measured calls. Gradient boosting fits them (Friedman, "Greedy function approximation",
2001); ``python -m benchmarks fit_policy`` writes the files of ``data/``.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from jax_tilekern.plans.policy.workload import Workload

FORMAT = 1
_Array = np.ndarray[Any, np.dtype[Any]]
# The types of a forest's arrays in a file.
_TYPES = {"features": "<u1", "thresholds": "<f4", "values": "<f4"}


@dataclass(frozen=True)
class Forest:
    """The sum of regression trees, all of them complete binary trees of one depth."""

    features: _Array  # For each tree and inner node, breadth first, the number that it compares.
    thresholds: _Array  # The right child follows where the number is larger.
    values: _Array  # for each tree and leaf, its term
    constant: float

    def __call__(self, rows: Sequence[Sequence[float]]) -> _Array:
        """Return the sum for each row of numbers."""
        x = np.asarray(rows, np.float32)
        trees, inner = self.features.shape
        row = np.arange(len(x))[:, None] * x.shape[1]
        # Positions among all trees' nodes, of which each tree has ``inner``.
        first = np.arange(trees) * inner
        node = np.zeros((len(x), trees), np.int64)
        for _ in range(inner.bit_length()):
            at = first + node
            compared = x.take(row + self.features.take(at))
            node = 2 * node + 1 + (compared > self.thresholds.take(at))
        leaf = np.arange(trees) * self.values.shape[1] + node - inner
        total: _Array = self.values.take(leaf).sum(1) + self.constant
        return total

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Forest:
        arrays = {
            name: np.frombuffer(base64.b85decode(content[name]), dtype).reshape(
                content["trees"], -1
            )
            for name, dtype in _TYPES.items()
        }
        inner, leaves = arrays["features"].shape[1], arrays["values"].shape[1]
        if not (inner == arrays["thresholds"].shape[1] == leaves - 1 > 0):
            raise ValueError("trees are not complete")
        return cls(**arrays, constant=float(content["constant"]))

    def __add__(self, other: Forest) -> Forest:
        """Return the trees of both, which have the depth of the deeper ones."""
        leaves = max(self.values.shape[1], other.values.shape[1])
        pairs = zip(self._complete(leaves), other._complete(leaves), strict=True)
        features, thresholds, values = (np.concatenate(pair) for pair in pairs)
        return Forest(features, thresholds, values, self.constant + other.constant)

    def _complete(self, leaves: int) -> tuple[_Array, _Array, _Array]:
        """Return the arrays of trees with so many leaves, in which a leaf is above equal ones."""
        own = self.values.shape[1]
        padding = ((0, 0), (0, leaves - own))
        return (
            np.pad(self.features, padding),
            np.pad(self.thresholds, padding),
            np.repeat(self.values, leaves // own, axis=1),
        )

    def to_json(self) -> dict[str, Any]:
        arrays = {
            name: base64.b85encode(getattr(self, name).astype(dtype).tobytes()).decode()
            for name, dtype in _TYPES.items()
        }
        return {"trees": len(self.values), "constant": self.constant, **arrays}


@dataclass(frozen=True)
class OperationModel:
    """A model of an operation's times on a device."""

    xla: Forest  # The logarithm of XLA's time over the roofline's, by the numbers of a workload.
    # The logarithm of a kernel's time over its own estimate, or over XLA's time where it has none,
    # by those and the candidate's numbers.
    ours: Forest
    # The expected error of the logarithm of the ratio of both, by the numbers of a workload.
    error: Forest
    # A kernel is taken if the logarithm of the predicted ratio exceeds the first number, and the
    # second times the expected error.
    margin: tuple[float, float]
    device: str = ""  # of which it has data, if not of that of the file

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], corrected: OperationModel | None = None
    ) -> OperationModel:
        """Return a model of a file, whose trees may correct the times of another one."""
        least, of_error = map(float, content["margin"])
        xla, ours, error = (Forest.from_json(content[name]) for name in ("xla", "ours", "error"))
        if corrected is not None:
            xla, ours = corrected.xla + xla, corrected.ours + ours
        return cls(xla, ours, error, (least, of_error))


_NEAREST, _LEAST_DISTANCE, _RIDGE = 4, 0.05, 0.1


@dataclass(frozen=True)
class NearestCalls:
    """Measured calls of an operation, few enough to be kept.

    Times are predicted as a linear trend of their logarithms, and what the nearest calls differ by
    from it.
    """

    features: _Array  # of each call
    times: _Array  # logarithms of the microseconds of the kernel and of XLA
    device: str = ""  # of which they are, if not of that of the file

    def __call__(self, features: Sequence[float]) -> tuple[float, float]:
        """Return the predicted microseconds of the kernel and of XLA."""
        distances = _LEAST_DISTANCE + np.linalg.norm(self.features - features, axis=1)
        nearest = np.argsort(distances, kind="stable")[:_NEAREST]
        weights = distances[nearest] ** -2.0
        center, trend, rest = self._trend
        found = (features - center) @ trend + weights @ rest[nearest] / weights.sum()
        ours, xla = np.exp(found)
        return float(ours), float(xla)

    @functools.cached_property
    def _trend(self) -> tuple[_Array, _Array, _Array]:
        """The mean features, the slopes of times, and what each call differs by from them."""
        center = self.features.mean(0)
        x = self.features - center
        moments = x.T @ x + _RIDGE * np.eye(x.shape[1])
        trend = np.linalg.solve(moments, x.T @ (self.times - self.times.mean(0)))
        return center, trend, self.times - x @ trend

    @classmethod
    def from_json(cls, calls: Sequence[str]) -> NearestCalls:
        """Return the model of a file, whose lines have features and the microseconds of both."""
        found = np.array([line.split() for line in calls], np.float64)
        return cls(found[:, :-2], np.log(found[:, -2:]))


@dataclass(frozen=True)
class DeviceModel:
    """A model of the times on a device."""

    device: str
    launch: float  # microseconds of the shortest call
    bytes: float  # that memory moves in a microsecond
    operations: Mapping[str, float]  # by arithmetic, multiply-adds in a microsecond
    # By the arithmetic of the parts, real multiply-adds of XLA's complex products in a microsecond.
    complex_operations: Mapping[str, float]
    models: Mapping[str, OperationModel | NearestCalls]

    def predicts(self, workload: Workload) -> bool:
        """Whether there are data of a workload's operation, or an estimate by those of others."""
        return workload.operation in self.models or workload.estimate is not None

    def roofline(self, workload: Workload) -> float:
        """Return the microseconds that rates alone allow, or the workload's own estimate."""
        if workload.estimate is not None:
            return workload.estimate
        compute = workload.operations / self.operations.get(workload.arithmetic, math.inf)
        return self.launch + max(compute, workload.bytes / self.bytes)

    def numbers(self, workload: Workload) -> tuple[float, ...]:
        """Return the numbers of a workload that trees compare."""
        compute = workload.operations / self.operations.get(workload.arithmetic, math.inf)
        memory = workload.bytes / self.bytes
        return (math.log2(memory), math.log2(max(compute, 1e-6)), *workload.features)

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], scaled: DeviceModel | None = None
    ) -> DeviceModel:
        """Return the model of a file, which has what it lacks from another device's data."""
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, and this version reads {FORMAT}")
        rates = content["rates"]
        models: dict[str, OperationModel | NearestCalls] = {}
        if scaled is not None:
            for name, model in scaled.models.items():
                models[name] = dataclasses.replace(model, device=scaled.device)
        for name, x in content["models"].items():
            corrected: Any = models[name] if x.get("is_correction", False) else None
            models[name] = (
                NearestCalls.from_json(x["calls"])
                if "calls" in x
                else OperationModel.from_json(x, corrected)
            )
        return cls(
            content["device"],
            float(rates["launch"]),
            float(rates["bytes"]),
            {name: float(rate) for name, rate in rates["operations"].items()},
            {name: float(rate) for name, rate in rates.get("complex_operations", {}).items()},
            models,
        )


# The file of each device: GPUs by the driver's name.
FILES = {
    "NVIDIA H100 80GB HBM3": "h100.json",
    "NVIDIA H200": "h200.json",
    "CPU with avx2": "avx2.json",
    "CPU with avx512": "avx512_vnni.json",
    "CPU with avx512_vnni": "avx512_vnni.json",
    "CPU with avx512_vnni and AMX": "avx512_vnni_amx.json",
    "CPU with avx512_bf16": "avx512_bf16.json",
}
# Devices by which others are known: one that has the same SMs, and the memory's bandwidth over that
# one's.
SCALED = {"NVIDIA H200": ("NVIDIA H100 80GB HBM3", 1.37)}
# Devices whose file's models serve another one with the same SMs for operations that it lacks.
LENDERS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}
_FOLDER = Path(str(files(__package__))) / "data"


@functools.cache
def model_of(device: str) -> DeviceModel | None:
    """Return what is known of a device, or ``None``; a file that cannot be read is a warning."""
    found = _own(device)
    lender = LENDERS.get(device, "")
    lent = _own(lender) if lender in FILES else None
    if found is None or lent is None:
        return found
    models = {
        name: dataclasses.replace(model, device=lender)
        for name, model in lent.models.items()
        if name not in found.models
    }
    return dataclasses.replace(found, models={**found.models, **models})


@functools.cache
def _own(device: str) -> DeviceModel | None:
    """Return what a device's file says of it, and what another device's data do."""
    name, scaled = FILES.get(device), scaled_model(device)
    return scaled if name is None else _read(_FOLDER / name, scaled)


def scaled_model(device: str) -> DeviceModel | None:
    """Return what another device's data say of a device, or ``None``."""
    of, bandwidth = SCALED.get(device, ("", 1.0))
    found = _own(of) if of else None
    return found and dataclasses.replace(
        found,
        device=f"{of}, with {bandwidth:g} times its memory bandwidth",
        bytes=bandwidth * found.bytes,
    )


@functools.cache
def data_digest(device: str) -> str:
    """Return a digest of what is known of a device; that of nothing is empty."""
    devices = device, *SCALED.get(device, ())[:1], LENDERS.get(device, "")
    names = (FILES.get(x) for x in devices)
    read = [path.read_bytes() for name in names if name and (path := _FOLDER / name).is_file()]
    return hashlib.sha256(b"".join(read)).hexdigest()[:16] if read else ""


def _read(path: Path, scaled: DeviceModel | None) -> DeviceModel | None:
    try:
        content = json.loads(path.read_text())
        if FILES.get(content["device"]) != path.name:
            raise ValueError(f"it is of {content['device']}")
        return DeviceModel.from_json(content, scaled)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(
            f"jax_tilekern leaves calls to XLA, because it cannot read {path}: {error!r}; "
            "install the package again",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
