"""What the ladder's sources claim, and what the recorded counters say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from benchmarks.ladder.report import LADDERS, RECORDS

# Times and counters that differ by less are not told apart.
_NOISE = 0.03
# Verdicts on what no record confirms: on how hardware works, and on speeds.
REFUTED, THAT_GPU = "refuted", "true of that GPU only"


class Claim(NamedTuple):
    """A sentence of a source about a rung.

    ``figures`` has values of counters or, with a rung to compare ``against``, their changes: "less"
    or "more" where the source has no number. ``otherwise`` is the verdict if one does not hold.
    """

    source: str
    problem: str
    text: str
    otherwise: str
    figures: Mapping[str, float | Literal["less", "more"]]
    rung: str
    against: str = ""

    def measured(self, problem: Mapping[str, Any], counter: str) -> float:
        """Return what is recorded of a counter."""
        value = _counter(problem, self.rung, counter)
        return value / _counter(problem, self.against, counter) - 1 if self.against else value

    def holds(self, counter: str, measured: float) -> bool:
        """Return whether a value is near the claimed one, or a change at least half as large."""
        claimed = self.figures[counter]
        if isinstance(claimed, str):
            return measured < -_NOISE if claimed == "less" else measured > _NOISE
        if claimed and self.against:
            return measured / claimed >= 0.5 and abs(measured) >= _NOISE
        return abs(measured - claimed) <= 0.1 * max(abs(claimed), 1)

    def cells(self, problem: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the claim's line of the table."""
        here = {counter: self.measured(problem, counter) for counter in self.figures}
        return (
            self.source,
            self.text,
            f"{self.rung} against {self.against}" if self.against else self.rung,
            "; ".join(f"`{name}` {self._text(claimed)}" for name, claimed in self.figures.items()),
            "; ".join(map(self._text, here.values())),
            "confirmed" if all(self.holds(*item) for item in here.items()) else self.otherwise,
        )

    def _text(self, value: float | str) -> str:
        if isinstance(value, str):
            return value
        # A change that rounds to none has no sign.
        return f"{round(value, 2) or 0:+.0%}" if self.against else f"{value:.3g}"


def _counter(problem: Mapping[str, Any], name: str, counter: str) -> float:
    """Return a counter of the kernel that takes most of a rung's time, or what follows from it."""
    rung = next(rung for rung in problem["rungs"] if rung["name"] == name)
    if counter == "seconds":
        return float(rung["seconds"])
    kernel = max(rung["counters"]["kernels"], key=lambda kernel: kernel["nanoseconds"])
    if counter == "dram_write_bytes / result":
        return float(kernel["dram_write_bytes"] / problem["result_bytes"])
    if counter == "flops / float64 loaded":
        return float(problem["flops"] * 8 / (kernel["load_sectors"] * 32))
    return float(kernel[counter])


_T, _T_LARGE = "transpose of 2048x512 float32", "transpose of 8192x8192 float32"
_S = "transpose of 1024x1024 float32"
_D_SHORT, _D = "dot product of 1024 float32", "dot product of 67108864 float32"
_D_PRODUCT, _M = (f"matrix product of 4096x4096x4096 float{bits}" for bits in (32, 64))
_LOAD, _STORE = "load_sectors_per_request", "store_sectors_per_request"
_COMPUTE, _PIPE = "compute_percent", "memory_pipe_percent"
_WRITTEN, _REUSE = "dram_write_bytes / result", "flops / float64 loaded"
_NAIVE, _NAIVE_8, _NAIVE_32, _NAIVE_16, _WIDE, _HIGH = (
    f"naive {shape}, along reads" for shape in ("64x8", "8x8", "32x32", "16x16", "8x4", "4x8")
)
_THROUGH, _THROUGH_8, _FLOAT4 = "pass-through 32x32", "pass-through 8x8", "float4, 8x8"
_FEW, _COLUMN = "tree and atomicAdd, 512 threads, 32 blocks", "column of b in registers"

CLAIMS = (
    Claim("T", _T, "a naive warp reads whole sectors, and writes to 32 rows", REFUTED,
          {_LOAD: 4, _STORE: 32}, _NAIVE),
    Claim("T", _T, "how busy it keeps the units", THAT_GPU,
          {_COMPUTE: 12.8, _PIPE: 49.5}, _NAIVE),
    Claim("T", _T, "it writes nothing to DRAM", REFUTED, {_WRITTEN: 0}, _NAIVE),
    Claim("T", _T_LARGE, "a result that exceeds L2 (8192x8192) is written to DRAM", REFUTED,
          {_WRITTEN: 1}, _NAIVE),
    Claim("T", _T, "shared memory is slower without a transpose inside the tile", THAT_GPU,
          {"seconds": 0.63, _COMPUTE: 0.116, _PIPE: -0.39, "sm_active_cycles": 0.607},
          _THROUGH, _NAIVE),
    Claim("T", _T, "that is for bank conflicts, most of all in blocks of 8x8", REFUTED,
          {"load_conflicts_per_request": 1, "store_conflicts_per_request": 1}, _THROUGH_8),
    Claim("T", _T, "blocks of 8x8 are faster without shared memory", THAT_GPU,
          {"seconds": -0.24, _PIPE: 0.26}, _NAIVE_8, _THROUGH_8),
    Claim("T", _T, "a block of 8x8 stores fewer sectors than one of 32x32", REFUTED,
          {"store_sectors": -0.75}, _NAIVE_8, _NAIVE_32),
    Claim("T", _T, "and keeps the units busier", THAT_GPU,
          {_COMPUTE: 1.488, _PIPE: 0.145}, _NAIVE_8, _NAIVE_32),
    Claim("T", _T, "8x8 is the fastest shape of a block", THAT_GPU,
          {"seconds": "less"}, _NAIVE_8, _NAIVE_16),
    Claim("T", _T, "a warp of 8x4 wastes half of what it writes", REFUTED, {_STORE: 8}, _WIDE),
    Claim("T", _T, "a warp of 4x8 wastes half of what it reads", REFUTED, {_LOAD: 8}, _HIGH),
    Claim("T", _T, "float4: loads before all stores are faster than by pointers", THAT_GPU,
          {"seconds": "less"}, _FLOAT4, "float4 straight, 8x8"),
    Claim("T", _T, "float4: a row is better stored as soon as it is formed", REFUTED,
          {"instructions": "less"}, _FLOAT4, "float4 rows first, 8x8"),
    Claim("T", _T, "float4 keeps the units busier than the tile of 32x32", THAT_GPU,
          {_COMPUTE: 1.83, _PIPE: 0.39}, _FLOAT4, _THROUGH),
    Claim("T", _T, "float4: blocks of 32x32 keep them less busy", THAT_GPU,
          {_COMPUTE: -0.34, _PIPE: -0.22}, "float4, 32x32", _FLOAT4),
    Claim("T", _T, "float4: blocks of 8x4 are slower", THAT_GPU,
          {"seconds": 0.08}, "float4, 8x4", _FLOAT4),
    Claim("T", _T, "float2 is slower in blocks of the same threads", THAT_GPU,
          {"seconds": 0.27, "dram_percent": -0.36}, "float2, 8x8", _FLOAT4),
    Claim("T", _T, "float2 is slower in blocks of the same data", THAT_GPU,
          {"seconds": 0.44, "dram_percent": -0.43}, "float2, 16x16", _FLOAT4),
    Claim("T", _T, "one row by two columns a thread is worth trying", THAT_GPU,
          {"seconds": "less"}, "one row by two columns", _NAIVE),
    Claim("S", _S, "a row a thread is faster than one thread", THAT_GPU,
          {"seconds": "less"}, "row per thread", "serial"),
    Claim("S", _S, "an element a thread is faster than a row", THAT_GPU,
          {"seconds": "less"}, _NAIVE_32, "row per thread"),
    Claim("S", _S, "a tile in shared memory is faster than none", THAT_GPU,
          {"seconds": "less"}, "tile of 1024 threads", _NAIVE_32),
    Claim("S", _S, "a padded tile is faster still", THAT_GPU,
          {"seconds": "less", "load_conflicts_per_request": -1}, "padded", "tile of 1024 threads"),
    Claim("S", _S, "a tile that is not square coalesces both sides", REFUTED,
          {_LOAD: 4, _STORE: 4}, "padded 64x8"),
    Claim("D", _D_SHORT, "a tree is faster than a serial sum of the block", THAT_GPU,
          {"nanoseconds": "less"},
          "tree, rest on the host", "serial sum of a block, rest on the host"),
    Claim("D", _D, "atomicAdd is faster than sums that the host adds", THAT_GPU,
          {"seconds": "less"}, _FEW, "tree, 512 threads, 32 blocks, rest on the host"),
    Claim("D", _D, "32 blocks of 512 threads are enough", THAT_GPU,
          {"seconds": 0}, _FEW, "tree and atomicAdd"),
    Claim("D", _D_PRODUCT, "a tile may add to the output in global memory", REFUTED,
          {"l2_write_bytes": 0}, "sums in global memory", "shared tiles"),
    *(Claim("M", _M, f"an element serves 2 / (1/{w} + 1/{w}) operations", REFUTED,
            {_REUSE: w}, rung)
      for rung, w in (("shared tiles", 32), ("register tiles", 64), ("warp tiles", 128))),
    Claim("M", _M, "a column of b in registers is faster than b in shared memory", THAT_GPU,
          {"seconds": "less"}, _COLUMN, "four sums a thread"),
    Claim("M", _M, "that is the peak of the units", THAT_GPU, {"float64_percent": 97}, _COLUMN),
    Claim("M", _M, "and equals cuBLAS", THAT_GPU, {"seconds": 0}, _COLUMN, "jnp.matmul"),
)  # fmt: skip


def claims() -> Iterator[str]:
    """Yield the lines of the table."""
    records = (json.loads((RECORDS / f"{ladder}.json").read_text()) for ladder in LADDERS)
    problems = {problem["title"]: problem for record in records for problem in record["problems"]}
    yield "| source | claim | rung | claimed | here | verdict |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for claim in CLAIMS:
        yield f"| {' | '.join(claim.cells(problems[claim.problem]))} |"
