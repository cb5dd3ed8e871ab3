"""Text and units of the output of the commands."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_tilekern.files import replace_text


def output_file(text: str) -> Path:
    """Return the path of a file to write; as the ``type`` of an argument it may be refused."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {text} in")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON that a person can read too."""
    replace_text(path, json.dumps(value, indent=1) + "\n")


def duration(seconds: float) -> str:
    """Return a time with three significant digits and its unit."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def rate(per_second: float, unit: str) -> str:
    """Return a rate with three significant digits, such as ``1.23 TFLOP/s``."""
    prefixes = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "": 1.0}
    return _scaled(per_second, {f"{x}{unit}/s": scale for x, scale in prefixes.items()})


def size(count: int) -> str:
    """Return a number of bytes with three significant digits, such as ``1.23 MiB``."""
    return _scaled(count, {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1})


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """Return a value in the largest unit that it reaches, or in the last one."""
    *_, last = units
    unit = next((unit for unit, scale in units.items() if value >= scale), last)
    scaled = value / units[unit]
    return f"{scaled:.3g} {unit}" if scaled < 1000 else f"{scaled:.0f} {unit}"
