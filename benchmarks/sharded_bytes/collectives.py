"""What a compiled program of several devices communicates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}


class Collective(NamedTuple):
    """One collective of a compiled program, and the bytes that each device sends for it."""

    kind: str
    bytes_sent: float


def collectives(compiled: Any) -> list[Collective]:
    """Return the collectives of a program with what each device sends, by ring algorithms."""
    found = []
    for line in compiled.as_text().splitlines():
        match = _COLLECTIVE.search(line)
        if match:
            types = match[1]
            if match[3] and (match[2] != "all-reduce" or types.startswith("((")):
                # The start of an asynchronous one has operands, results and what else it needs.
                _, types, *_ = _elements(types)
            size, group = _bytes(types), _group_size(line)
            share = (group - 1) / group
            factor = {
                "all-gather": share,
                "all-reduce": 2 * share,
                "reduce-scatter": group - 1,
                "all-to-all": share,
                "collective-permute": 1,
            }[match[2]]
            found.append(Collective(match[2], factor * size))
    return found


def bytes_sent(compiled: Any) -> float:
    """Return the bytes that each device sends for all collectives of a program."""
    return total_bytes(collectives(compiled))


def total_bytes(found: Iterable[Collective]) -> float:
    """Return the bytes that each device sends for some collectives."""
    return sum(collective.bytes_sent for collective in found)


def _elements(tuple_type: str) -> list[str]:
    """Return the types in a tuple's type."""
    elements, depth = [""], 0
    for character in tuple_type[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _bytes(arrays: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(arrays):
        bits = _BITS.get(kind) or int(re.sub(r"\D+", "", kind.split("e")[0]) or 8)
        total += bits // 8 * math.prod(int(size) for size in dims.split(",") if size)
    return total


def _group_size(line: str) -> int:
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 8
