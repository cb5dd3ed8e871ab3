"""``overview``: draw ``docs/overview.svg`` and ``docs/fp8-training.svg`` from records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.records.curve_plot import curve_plot
from benchmarks.records.ratio_plot import Group, ratio_plot
from benchmarks.tables import fp8_accuracy

RECORDS = Path(__file__).parent / "results/h100"
DOCS = Path(__file__).parent.parent / "docs"


HELP = "draw docs/overview.svg and docs/fp8-training.svg from the records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    (DOCS / "overview.svg").write_text(overview())
    (DOCS / "fp8-training.svg").write_text(fp8_training())
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


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_text())["rows"]
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
