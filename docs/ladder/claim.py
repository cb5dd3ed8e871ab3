"""What a claim is, and what its rule may say: the parts that all claims share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from records import Measured, NotMeasured, Records
from tables import markdown

CONFIRMED = "confirmed"
REFUTED = "refuted"
THAT_GPU = "true of that GPU only"
NOT_MEASURED = "not measured yet"

# Two times that differ by less are not told apart.
NOISE = 0.03
# Operations per second of 132 SMs at 1980 MHz without tensor cores.
PEAK = {"float32": 132 * 128 * 2 * 1.98e9, "float64": 132 * 64 * 2 * 1.98e9}

T_SIZE, LARGE, S_SIZE = "2048x512", "8192x8192", "1024x1024"
SHORT, LONG = "1024", str(1 << 26)
PRODUCT = "4096x4096x4096"


class Finding(NamedTuple):
    """What the records say of a claim: our numbers, the verdict, and why, by counters."""

    numbers: str
    verdict: str
    why: str


@dataclass(frozen=True)
class Claim:
    """A sentence of a source, and the rule that decides about it."""

    text: str
    rule: Callable[[Records], Finding]

    def finding(self, records: Records) -> Finding:
        """Decide, or say what is missing."""
        try:
            return self.rule(records)
        except NotMeasured as missing:
            return Finding("-", NOT_MEASURED, f"The records lack {missing}.")


def table(claims: list[Claim], records: Records) -> str:
    """Return claims as a table."""
    rows = ((claim.text, *claim.finding(records)) for claim in claims)
    return markdown(("claim", "here", "verdict", "why"), rows, left=4)


# Rules speak of changes: of a rung against another, as a fraction.


def change(of: float, against: float) -> float:
    """Return by what fraction ``of`` is more than ``against``."""
    return of / against - 1


def signed(fraction: float) -> str:
    """Return a change as text."""
    return f"{fraction:+.0%}"


def same_direction(ours: float, theirs: float) -> str:
    """Judge a change that depends on a GPU: confirmed if ours has the same sign and is no noise."""
    return CONFIRMED if ours * theirs > 0 and abs(ours) >= NOISE else THAT_GPU


def mechanism(holds: bool) -> str:
    """Judge what follows from how memory works, and so on every GPU alike."""
    return CONFIRMED if holds else REFUTED


def near(value: float, expected: float, within: float = 0.02) -> bool:
    """Say whether a counter is what it should be, but for a small part."""
    return abs(value - expected) <= within * max(abs(expected), 1)


def transpose(records: Records, name: str, size: str = T_SIZE) -> Measured:
    """Return a rung of the transpose."""
    return records.rung("transpose", size, name)


def shares_of(measured: Measured) -> str:
    """Return what shares of their peaks a kernel uses."""
    return (
        f"compute {measured.counter('compute_percent'):.1f} %, "
        f"memory pipes {measured.counter('memory_pipe_percent'):.1f} %"
    )


def sectors_of(measured: Measured) -> str:
    """Return the sectors of a request to global memory."""
    load, store = (measured.counter(f"{op}_sectors_per_request") for op in ("load", "store"))
    return f"{load:.1f} sectors a load, {store:.1f} a store"


def stalls_of(measured: Measured) -> str:
    """Return the two reasons that warps wait for longest."""
    stalls = list(measured.kernel["stalls"].items())[:2]
    words = (f"{reason.replace('_', ' ')} {cycles:.1f}" for reason, cycles in stalls)
    return ", ".join(words) + " cycles"


def changes(of: Measured, against: Measured) -> tuple[float, float, float]:
    """Return the changes of time, compute and memory pipes."""
    return (
        change(of.seconds, against.seconds),
        change(of.counter("compute_percent"), against.counter("compute_percent")),
        change(of.counter("memory_pipe_percent"), against.counter("memory_pipe_percent")),
    )


def changes_of(of: Measured, against: Measured) -> str:
    """Return the same as text."""
    time, compute, memory = map(signed, changes(of, against))
    return f"time {time}, compute {compute}, memory pipes {memory}"


def matmul(records: Records, name: str, dtype: str, size: str = PRODUCT) -> Measured:
    """Return a rung of the matrix product."""
    return records.rung("matmul", size, name, dtype)


def share_of_peak(measured: Measured, dtype: str) -> float:
    """Return what part of the CUDA cores' peak a product reaches."""
    return measured.speed / PEAK[dtype]


def limits_of(measured: Measured) -> str:
    """Return what the counters say about what limits a kernel."""
    return (
        f"*{measured.name}* is at {measured.counter('compute_percent'):.0f} % compute and "
        f"{measured.counter('memory_percent'):.0f} % memory, waits {stalls_of(measured)}"
    )
