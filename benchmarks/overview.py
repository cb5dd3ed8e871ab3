"""``overview``: draw the figures of ``docs`` that are made from records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.records.curve_plot import curve_plot
from benchmarks.records.ratio_plot import Group, ratio_plot
from benchmarks.records.time_bars import time_bars
from benchmarks.tables import fp8_accuracy

RECORDS = Path(__file__).parent / "results/h100"
DOCS = Path(__file__).parent.parent / "docs"


HELP = "draw overview.svg, fp8-training.svg and muon-step.svg of docs from the records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    (DOCS / "overview.svg").write_text(overview())
    (DOCS / "fp8-training.svg").write_text(fp8_training())
    (DOCS / "muon-step.svg").write_text(muon_step())
    return 0


def fp8_training() -> str:
    """Return the drawing of the losses of training in 8-bit floats."""
    rows = [row for row in fp8_accuracy()[1] if row["kind"] == "training"]
    return curve_plot(
        "Losses of two models over training steps, in bfloat16 and in 8-bit floats",
        {
            f"{model}, loss by step": (
                row["steps"],
                {x["product"]: x["losses"] for x in rows if x["model"] == model},
            )
            for model, row in {row["model"]: row for row in rows}.items()
        },
    )


def muon_step() -> str:
    """Return the drawing of the time of a step of Muon."""
    sides = {"XLA": "optax", "standard": 'ns="standard"', "ours": "jtk.muon"}

    def times(name: str, folder: Path) -> dict[str, float]:
        row = next(row for row in _rows("muon", folder) if row["name"] == name)
        return {text: row["seconds"][x] for x, text in sides.items() if x in row["seconds"]}

    two = RECORDS.parent / "h200x2"
    return time_bars(
        "Time of a step of Muon for 1.1 billion float32 parameters",
        {
            "one H100": times("step", RECORDS),
            "two H200, which share the rows of each matrix": times("step on 2 devices, rows", two),
        },
        "optax",
    )


def overview() -> str:
    """Return the drawing."""
    matmul = _rows("matmul")
    products = dict.fromkeys(row["group"] for row in matmul)
    others = [
        _group(name, _rows(name), _ratio) for name in ("transpose", "matvec", "vdot", "sum", "add")
    ]
    return ratio_plot(
        "Time of jitted jax.numpy over the time of jax_tilekern on an NVIDIA H100",
        "XLA's time / our time, NVIDIA H100, jax 0.11.2 (right of 1: ours is faster)",
        [
            ("matmul", [_group(name, matmul, _ratio, group=name) for name in products]),
            ("bound by memory", others),
            ("ragged_dot, against lax.ragged_dot (cuDNN 9.19)", _grouped_gemms()),
            ("linalg, 100,000 float32 matrices of 2x2 to 64x64", _small_matrices()),
        ],
    )


def _grouped_gemms() -> list[Group]:
    rows = [row for row in _rows("ragged_dot") if "seconds" in row["others"].get("lax", {})]
    counts = sorted({row["sizes"]["g"] for row in rows})
    return [
        _group(f"{count} groups", [row for row in rows if row["sizes"]["g"] == count], _lax_ratio)
        for count in counts
    ]


def _small_matrices() -> list[Group]:
    rows = _rows("linalg")
    return [
        _group(name, [row for row in rows if row["operation"] == name], _ratio)
        for name in dict.fromkeys(row["operation"] for row in rows)
    ]


def _rows(name: str, folder: Path = RECORDS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    return rows


def _ratio(row: dict[str, Any]) -> float:
    return float(row["seconds"]["ratio"]["median"])


def _lax_ratio(row: dict[str, Any]) -> float:
    return _ratio(row["others"]["lax"])


def _group(
    label: str,
    rows: list[dict[str, Any]],
    ratio: Callable[[dict[str, Any]], float],
    group: str | None = None,
) -> Group:
    return Group(label, [ratio(row) for row in rows if group is None or row["group"] == group])
