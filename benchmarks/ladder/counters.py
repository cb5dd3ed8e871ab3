"""Hardware counters of rungs: what is counted, and which rung each kernel launch belongs to."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ladder import ncu
from benchmarks.ladder.ncu import Launch, NoCounters

Counters = dict[str, Any]

# The kernel that counted_launches.py launches between rungs. Its grid says which rung follows.
MARKER = "ladder_marker"
# What the program takes besides the launches: starting JAX, compiling and making operands.
_STARTUP_SECONDS = 120.0

_OF_PEAK = "avg.pct_of_peak_sustained"
_METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "instructions": "smsp__inst_executed.sum",
    "sm_active_cycles": "sm__cycles_active.avg",
    "occupancy_percent": f"sm__warps_active.{_OF_PEAK}_active",
    "issue_percent": f"smsp__issue_active.{_OF_PEAK}_active",
    "compute_percent": f"sm__throughput.{_OF_PEAK}_elapsed",
    "memory_percent": f"gpu__compute_memory_throughput.{_OF_PEAK}_elapsed",
    "memory_pipe_percent": f"sm__memory_throughput.{_OF_PEAK}_elapsed",
    "l2_percent": f"lts__throughput.{_OF_PEAK}_elapsed",
    "dram_percent": f"dram__throughput.{_OF_PEAK}_elapsed",
    "fma_percent": f"sm__pipe_fma_cycles_active.{_OF_PEAK}_active",
    "float64_percent": f"sm__pipe_fp64_cycles_active.{_OF_PEAK}_active",
    "tensor_percent": f"sm__pipe_tensor_cycles_active.{_OF_PEAK}_active",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l2_write_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared_load_requests": "smsp__inst_executed_op_shared_ld.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_requests": "smsp__inst_executed_op_shared_st.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
}
# A quotient of two counters, or None without requests.
_PER_REQUEST = {
    "load_sectors_per_request": ("load_sectors", "load_requests"),
    "store_sectors_per_request": ("store_sectors", "store_requests"),
    "load_conflicts_per_request": ("shared_load_conflicts", "shared_load_requests"),
    "store_conflicts_per_request": ("shared_store_conflicts", "shared_store_requests"),
}
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# The reasons for which Hopper's warps wait. "selected" is the issue itself.
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction",
    "not_selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip

METRICS = (*_METRICS.values(), *(_STALL.format(reason) for reason in _STALLS))


class Kernel(NamedTuple):
    """A kernel that a rung is known to launch."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Kernel:
        """Return the kernel of a rung's record, without its template arguments."""
        name = record["name"].partition("<")[0]
        return cls(name, tuple(record["grid"]), tuple(record["block"]))


class Wanted(NamedTuple):
    """A rung to count.

    Attributes
    ----------
    size, title, name
        Of the rung's problem, and its own.
    kernels
        What it launches, or ``None`` where XLA decides. Markers surround the latter.
    """

    size: str
    title: str
    name: str
    kernels: list[Kernel] | None

    def follows(self, before: Wanted) -> bool:
        """Whether its launches are told from those of the rung before it without a marker."""
        same = (self.size, self.title) == (before.size, before.title)
        return same and self.kernels is not None and before.kernels is not None


def count(
    ladder: str, wanted: Sequence[Wanted], seconds: float, log: Path | None = None
) -> list[Counters | None]:
    """Launch rungs once each under ``ncu`` and return their counters.

    Parameters
    ----------
    ladder
        The operation.
    wanted
        The rungs; those of a problem are adjacent.
    seconds
        No rung is launched later than this; those left out have ``None``.
    log
        Where what ``ncu`` wrote is kept if a rung has none.

    Raises
    ------
    NoCounters
        If ``ncu`` is missing, fails, or may not read the counters.
    """
    with tempfile.TemporaryDirectory() as folder:
        order, csv = Path(folder) / "order.json", Path(folder) / "ncu.csv"
        order.write_text(json.dumps({"ladder": ladder, "seconds": seconds, "wanted": wanted}))
        module = "benchmarks.ladder.counted_launches"
        launches = ncu.profile(
            [sys.executable, "-m", module, str(order)],
            METRICS,
            csv,
            # The parent process holds most of the GPU's memory, and ncu saves and restores whatever
            # a kernel might write, so the allocator must not keep a pool.
            environment={
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
            },
            seconds=seconds + _STARTUP_SECONDS,
        )
        found = assign(launches, wanted)
        if log is not None and None in found:
            shutil.copyfile(csv, log)
    return found


def assign(launches: Iterable[Launch], wanted: Sequence[Wanted]) -> list[Counters | None]:
    """Return the counters of each rung.

    Launches follow their rung's marker. A rung whose kernels are known ends with the last of them,
    and the next one begins if it needs no marker. A launch that is not what is expected, as after
    one that ``ncu`` could not profile, ends the counting of rungs until the next marker.

    Raises
    ------
    NoCounters
        If a marker names no rung.
    """
    found: list[list[Counters]] = [[] for _ in wanted]
    # Of the rung that the next launch belongs to; none before the first marker.
    current = len(wanted)
    for launch in launches:
        if launch.name == MARKER:
            current = launch.grid[0] - 1
            if not 0 <= current < len(wanted):
                raise NoCounters(f"ncu shows a marker of rung {current} of {len(wanted)}")
            continue
        current = _next(current, wanted, found)
        if current == len(wanted):
            continue
        expected = wanted[current].kernels
        if expected is not None and expected[len(found[current])] != launch[:3]:
            current = len(wanted)
        else:
            found[current].append(_kernel(launch))
    return [
        {"kernels": kernels}
        if kernels and (one.kernels is None or len(kernels) == len(one.kernels))
        else None
        for one, kernels in zip(wanted, found, strict=True)
    ]


def _next(current: int, wanted: Sequence[Wanted], found: Sequence[Sequence[Counters]]) -> int:
    """Return the rung that a launch belongs to, which follows the current one if that is whole."""
    if current == len(wanted):
        return current
    kernels = wanted[current].kernels
    if kernels is None or len(found[current]) < len(kernels):
        return current
    if current + 1 < len(wanted) and wanted[current + 1].follows(wanted[current]):
        return current + 1
    return len(wanted)


def _kernel(launch: Launch) -> Counters:
    counted = {name: _whole(launch.metrics.get(metric)) for name, metric in _METRICS.items()}
    ratios = {name: _ratio(counted, *of) for name, of in _PER_REQUEST.items()}
    stalls = {reason: launch.metrics.get(_STALL.format(reason), 0.0) for reason in _STALLS}
    longest = sorted(stalls, key=lambda reason: stalls[reason], reverse=True)
    return {
        "name": launch.name,
        "grid": list(launch.grid),
        "block": list(launch.block),
        **counted,
        **ratios,
        # In cycles for each instruction that a warp issues.
        "stalls": {
            reason: round(stalls[reason], 3) for reason in longest if stalls[reason] >= 0.005
        },
    }


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and value == int(value) else value


def _ratio(counted: Mapping[str, float | None], of: str, over: str) -> float | None:
    count, requests = counted[of], counted[over]
    return None if count is None or not requests else round(count / requests, 3)


def write_efficiency(counters: Mapping[str, Any], result_bytes: int) -> float | None:
    """Return a result's bytes over those of the sectors of 32 bytes that threads stored.

    ``None`` where threads store nothing, as with TMA.
    """
    sectors = sum(kernel["store_sectors"] or 0 for kernel in counters["kernels"])
    return round(result_bytes / (32 * sectors), 4) if sectors else None


def longest_kernel(counters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kernel of a rung that takes the most time."""
    kernels: Sequence[Mapping[str, Any]] = counters["kernels"]
    return max(kernels, key=lambda kernel: kernel["nanoseconds"] or 0)


HEADINGS = (
    "sectors ld, st", "conflicts ld, st", "compute, memory, DRAM", "occupancy", "warps stalled on",
)  # fmt: skip


def cells(counters: Mapping[str, Any]) -> Iterable[str]:
    """Yield the counters of a rung's longest kernel as entries under :data:`HEADINGS`."""
    kernel = longest_kernel(counters)
    for what in ("sectors", "conflicts"):
        yield ", ".join(
            shown(kernel[f"{op}_{what}_per_request"], ".1f") for op in ("load", "store")
        )
    yield ", ".join(shown(kernel[f"{what}_percent"], ".0f") for what in _SHARES) + " %"
    yield shown(kernel["occupancy_percent"], ".0f") + " %"
    yield ", ".join(f"{reason} {cycles:.1f}" for reason, cycles in top_stalls(kernel))


_SHARES = ("compute", "memory", "dram")


def shown(value: float | None, form: str) -> str:
    """Return a counter as text, and a dash for one that does not exist."""
    return "-" if value is None else format(value, form)


def top_stalls(kernel: Mapping[str, Any], most: int = 2) -> list[tuple[str, float]]:
    """Return the reasons that a kernel's warps wait for longest, with cycles per instruction."""
    return list(kernel["stalls"].items())[:most]
