"""``tables``: write the tables that pages have of the records.

A page has a table between ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ladder.claims import claims
from benchmarks.ladder.report import LADDERS, ideas, times
from benchmarks.records.sample_report import SLOWER, Distribution, ratio_to_jax, with_right_peer
from benchmarks.segments import CALLS as SEGMENT_CALLS
from jax_tilekern.cli.console import duration, size

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
_DATA = ROOT / "jax_tilekern/plans/policy/data"
PAGES = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/fp8.md",
        "docs/ladder.md",
        "docs/performance.md",
        "docs/testing.md",
    )
)
_MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Record = dict[str, Any]
Ratios = dict[str, list[float]]

HELP = "write the tables of README.md and of pages of docs from the records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: none."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    return 0


def with_tables(text: str) -> str:
    """Return a page's text with its tables as the records have them."""

    def table(match: re.Match[str]) -> str:
        return "\n".join([match[1].strip(), *_TABLES[match[2]](), match[3]])

    return _MARKED.sub(table, text)


class Device(NamedTuple):
    """A folder of records and what users call the machine."""

    folder: str
    title: str


DEVICES = (
    Device("h100", "NVIDIA H100 80GB HBM3"),
    Device("h200", "NVIDIA H200"),
    Device("h100x2", "2 x NVIDIA H100 80GB HBM3"),
    Device("h200x2", "2 x NVIDIA H200"),
    Device("h100x4", "4 x NVIDIA H100 80GB HBM3"),
    Device("amd-epyc", "AMD EPYC with AVX-512 and bfloat16, two cores"),
    Device("sapphire-rapids", "Xeon, Sapphire Rapids, two cores"),
    Device("cascade-lake", "Xeon, Cascade Lake, two cores"),
)


def fp8_accuracy() -> tuple[str, list[Record]]:
    """Return the first device that has a record of ``fp8_accuracy``, and the record's rows."""
    paths = {device.title: RESULTS / device.folder / "fp8_accuracy.json" for device in DEVICES}
    title, path = next(item for item in paths.items() if item[1].exists())
    return title, _read(path)["rows"]


def _fp8_errors() -> Iterator[str]:
    device, found = fp8_accuracy()
    rows = {(row["product"], row["operands"]): row for row in found if row["kind"] == "error"}
    heads = (
        device, "sums", "with quantisation", "sums, spread", "with quantisation, spread",
    )  # fmt: skip
    measured = ("of_sums", "with_rounding")
    return _table(
        heads,
        (
            (
                product,
                *(
                    f"{rows[product, operands][key]:.1e}"
                    for operands in ("normal", "spread")
                    for key in measured
                ),
            )
            for product in dict.fromkeys(name for name, _ in rows)
        ),
    )


@functools.cache
def drawn(folder: str) -> Ratios:
    """Return JAX's time over ours of calls drawn at random, by operation.

    They are those of the newest sources with which an operation was measured.
    """
    newest: dict[str, tuple[str, Record]] = {}
    records = [_read(path) for path in sorted((RESULTS / folder / "samples").glob("*.json"))]
    for record in records:
        operation = record["operation"]
        newest[operation] = max(
            newest.get(operation, ("", {})), (record["date"], record["source_digests"]), key=_first
        )
    found: Ratios = {}
    for record in records:
        operation = record["operation"]
        if record["source_digests"] == newest[operation][1]:
            timed = with_right_peer(row for row in record["rows"] if "seconds" in row)
            found.setdefault(f"`{operation}`", []).extend(
                ratio_to_jax(row) for row in timed if "seconds" in row["others"].get("lax", row)
            )
    for path in sorted((RESULTS / folder / "regret").glob("*.json")):
        name = f"`matmul`{', 1 to 256 rows' if path.stem.startswith('decode') else ''}"
        sides = ((row["microseconds"], row["chosen"]) for row in _read(path)["rows"])
        found.setdefault(name, []).extend(times["xla"] / times[taken] for times, taken in sides)
    return found


@functools.cache
def suites(folder: str) -> Ratios:
    """Return the other side's time over ours of the recorded suites, by group."""
    found: Ratios = {}
    for path in sorted((RESULTS / folder).glob("*.json")):
        reader = _READERS.get(path.stem.partition("-")[0])
        if reader is None:
            continue
        for name, ratio in reader(_read(path)):
            found.setdefault(name, []).append(ratio)
    return found


def _suite(record: Record) -> Iterator[tuple[str, float]]:
    jax = f" of jax {version}" if (version := record["versions"]["jax"]) != "0.11.2" else ""
    for row in _timed(record):
        operation = record.get("operation", "matmul")
        yield f"`{operation}`: {row.get('group', row['type'])}{jax}", _ratio(row)


def _grouped(record: Record) -> Iterator[tuple[str, float]]:
    for row in _timed(record):
        what = f"`ragged_dot` of {row['sizes']['g']} groups"
        yield f"{what}, one dense product / ours", _ratio(row)
        for peer in ("lax", "tokamax"):
            if "seconds" in row["others"].get(peer, {}):
                yield f"{what}, {_PEERS[peer]} / ours", _ratio(row["others"][peer])


_PEERS = {"lax": "`lax.ragged_dot`", "tokamax": "tokamax"}


def _matrices(record: Record) -> Iterator[tuple[str, float]]:
    for row in _timed(record):
        size = "one large matrix" if row["count"] == 1 else f"{row['count']:,} small matrices"
        yield f"`{row['operation']}` of {size}, {row['type']}", _ratio(row)


def _fused(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        name = row["name"]
        kind = "`gated_linear`" if name.startswith("gated") else "gradient of an epilogue"
        if not name.startswith("gated") and not name.endswith("gradient"):
            kind = "epilogues"
        yield kind, row["ratio"]


def _cross_entropy(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        yield f"`linear_cross_entropy`, {row['name'].rpartition(', ')[2]}", row["ratio"]


def _segments(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        name = row["name"]
        group = next(group for text, group in _SEGMENT_GROUPS.items() if text in name)
        is_drawn = name not in SEGMENT_CALLS
        yield "reductions to segments, drawn at random" if is_drawn else group, row["ratio"]


# The first whose text is in a row's name.
_SEGMENT_GROUPS = {
    "top_k": "`top_k`",
    "gradient of take": "gradient of `take`",
    "silu": "`segment_reduce`, messages",
    "its gradient": "`segment_reduce`, gradient of messages",
    "scalars": "`segment_sum` of scalars",
    "sorted": "`segment_sum`, sorted",
    "max": "`segment_max`",
    "sum": "`segment_sum`",
}


def _jax_kernel(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        if row["peer"] == "XLA":
            yield "`kernel` against `vmap`", row["ratio"]


def _experts(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        what = row["name"].rpartition(", ")[2]
        if what != "routing":
            what = "decode" if "decode" in row["name"] else what
            yield f"`moe` against its parts, {what}", row["ratio"]


def _expert_models(record: Record) -> Iterator[tuple[str, float]]:
    peers = {"XLA": "`lax.ragged_dot`", "parts": "`ragged_dot`"}
    ours = {row["sizes"]["layers"]: row for row in record["rows"] if row["name"] == "ours"}
    for row in record["rows"]:
        if row["name"] != "ours" and "seconds" in row:
            peer = peers.get(row["name"], row["name"])
            ratio = row["seconds"] / ours[row["sizes"]["layers"]]["seconds"]
            yield f"training step of a mixture of experts, against {peer}", ratio


def _symmetric(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        name = row["name"]
        kind = "with an epilogue" if name.startswith("2 x") else "alone"
        rows = int(name.split(" ")[-2].split("x")[-2])
        if not name.startswith("newton"):
            size = "2048 rows and more" if rows >= _MANY_ROWS else "fewer rows"
            yield f"symmetric 16-bit products {kind}, {size}", row["ratio"]


_MANY_ROWS = 2048


def _muon(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        kind, _, which = row["name"].partition(" ")
        name = f"`muon` {which}".strip() if kind == "step" else "`newton_schulz`"
        yield name, row["ratio"]


def _fp8(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        kind, _, rest = row["name"].partition(" ")
        if kind == "product":
            rows = int(rest.split("x")[0])
            kind = "4096 rows and more" if rows > _FEW_ROWS else f"up to {_FEW_ROWS} rows"
            yield f"8-bit products with scales, {kind}", row["ratio"]
        elif kind in ("grouped", "quantize"):
            yield f"8-bit, {kind}", row["ratio"]
        elif kind == "layer":
            yield f"8-bit layers, {rest.rpartition(', ')[2]}", row["ratio"]


_FEW_ROWS = 128


def _sharded(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        name = row["group"]
        if name.startswith("ragged_dot"):
            alone = "without communication" if row["bound"] == 1 else "with an all-reduce"
            name = f"`ragged_dot` of 64 groups, parallel efficiency {alone}"
        yield name, row["ratio"]


def _overlapped(record: Record) -> Iterator[tuple[str, float]]:
    for row in record["rows"]:
        yield f"overlapped with communication: {row['name'].rpartition(', ')[0]}", row["ratio"]


_READERS: Mapping[str, Callable[[Record], Iterator[tuple[str, float]]]] = {
    **dict.fromkeys(("matmul", "transpose", "matvec", "vdot", "sum", "add"), _suite),
    "ragged_dot": _grouped,
    "linalg": _matrices,
    "linalg_decompositions": _matrices,
    "linalg_large": _matrices,
    "fused": _fused,
    "cross_entropy": _cross_entropy,
    "segments": _segments,
    "jax_kernel": _jax_kernel,
    "moe": _experts,
    "moe_model": _expert_models,
    "symmetric": _symmetric,
    "muon": _muon,
    "fp8": _fp8,
    "sharded": _sharded,
    "overlapped": _overlapped,
}


def _devices() -> Iterator[str]:
    """Yield a section for each device: its random calls, then its suites."""
    for folder, title in DEVICES:
        yield f"\n## {title}\n"
        yield f"[Every row](../benchmarks/results/{folder})."
        for kind, ratios in (("drawn at random", drawn(folder)), ("recorded", suites(folder))):
            if ratios:
                yield ""
                heads = (f"calls {kind}", "calls", "mean", "10th percentile", "worst")
                lines = ((name, *_distribution(found)) for name, found in ratios.items())
                yield from _table((*heads, f"below {SLOWER}"), lines)


def _random() -> Iterator[str]:
    """Yield the README's lines of calls drawn at random."""
    lines = [
        *(
            (f"H100: {name}", *_distribution(ratios))
            for name, ratios in drawn("h100").items()
            if name.startswith("`matmul`")
        ),
        ("H100: four other operations", *_distribution(_all("h100", without="`matmul`"))),
        *(
            (f"{title}: seven operations", *_distribution(_all(folder)))
            for folder, title in DEVICES
            if folder == "amd-epyc"
        ),
    ]
    heads = ("calls drawn at random", "calls", "mean", "10th percentile", "worst")
    yield from _table((*heads, f"below {SLOWER}"), lines)


def _all(folder: str, without: str = "") -> list[float]:
    return [
        x
        for name, ratios in drawn(folder).items()
        if not (without and name.startswith(without))
        for x in ratios
    ]


class Line(NamedTuple):
    """A line of the README: groups of suites, each part of the line by a pattern."""

    text: str
    patterns: tuple[str, ...]

    def ratios(self) -> str:
        """Return the smallest and the largest ratio of each part, or nothing without records."""
        parts = []
        for pattern in self.patterns:
            found = [
                ratio
                for folder in ("h100", "h100x2")
                for name, ratios in suites(folder).items()
                if re.search(pattern, name)
                for ratio in ratios
            ]
            if not found:
                return ""
            ends = dict.fromkeys(map(_number, (min(found), max(found))))
            parts.append(" to ".join(ends))
        return "; ".join(parts)


_LAX = r"of {} groups, `lax"
_DENSE = r"of {} groups, one dense"
SPEED = (
    Line("`ragged_dot` against `lax.ragged_dot`: 128 experts; 8 large ones",
         (_LAX.format(128), _LAX.format(8))),
    Line("float32 `inv`, `solve`, `cholesky`: 100,000 matrices up to 64x64; one of 1000 to 8192",
         ("`(inv|solve|cholesky)` of .* small", "one large matrix, float32")),
    Line("`svd`; `eigh`; `qr` of 10,000 to 100,000 matrices up to 32x32",
         ("`svd(vals)?` of .* small", "`eig(h|valsh)` of .* small", "`qr` of .* small")),
    Line("`moe` against the same by `ragged_dot`: forward; with gradient; decode, 1 to 256 tokens",
         tuple(f"`moe` .* parts, {x}$" for x in ("forward", "forward and backward", "decode"))),
    Line("training step of a mixture of experts: `lax.ragged_dot`; tokamax",
         ("mixture .*lax", "mixture .*tokamax")),
    Line("16-bit products with a symmetric result, 2048 rows and more; a step of `muon`",
         ("^symmetric .* alone, 2048", "^`muon`")),
    Line("8-bit products with scales over 16-bit: up to 128 rows; 4096 and more; groups; layers",
         ("8-bit .* up to", "8-bit .* and more", "8-bit, grouped", "8-bit layers, forward and")),
    Line("complex64 products: default precision; `HIGHEST`",
         ("`matmul`: complex64$", "`matmul`: complex64 HIGHEST")),
    Line("`kernel` of functions with loops against `vmap`, wall time", ("`kernel` against",)),
    Line("float32 products at `HIGHEST`; 16-bit products of odd sizes",
         ("`matmul`: float32$", "16-bit odd")),
    Line("8-bit products: both operands k-major; other orders",
         ("8-bit K-major", "8-bit other orders")),
    Line("large aligned 16-bit products; the same with collectives on 2 H100",
         ("16-bit large", "^rows|^k sharded|^MLP")),
    Line("the same, overlapped with 16 to 64 MiB sent: gathered; scattered; MLP; with gradient",
         tuple(f"^overlapped .*: {what}$"
               for what in ("rows gathered", "rows scattered", "MLP, forward",
                            "MLP, forward and backward"))),
    Line("transposes of odd sizes", ("`transpose`: odd",)),
    Line("bias, activation, residual in the product's kernel; their gradient; `gated_linear`",
         ("^epilogues", "gradient of an epilogue", "gated_linear")),
    Line("`linear_cross_entropy`: value; gradient",
         ("entropy`, value", "entropy`, gradient")),
    Line("segments: rows; sorted rows; scalars; messages of a graph; gradient of a table; `top_k`",
         ("`segment_(sum|max)`$", "sorted$", "of scalars", "messages", "of `take`", "`top_k`")),
    Line("`ragged_dot` against one dense product, an upper bound: 8 experts; 128",
         (_DENSE.format(8), _DENSE.format(128))),
    Line("parallel efficiency of `ragged_dot` on 2 H100: no communication; with an all-reduce",
         ("without comm", "with an all")),
)  # fmt: skip


def _speed() -> Iterator[str]:
    """Yield the README's lines of recorded suites."""
    lines = ((line.text, line.ratios()) for line in SPEED)
    yield from _table(("H100", "XLA / ours"), (line for line in lines if line[1]))


def _mixture() -> Iterator[str]:
    """Yield the README's lines of the training step of a mixture of experts."""
    rows = _read(RESULTS / "h100/moe_model.json")["rows"]
    most = max(row["sizes"]["layers"] for row in rows)
    names = {"ours": "`moe`", "parts": "`ragged_dot`, by parts", "XLA": "`lax.ragged_dot`"}
    lines = []
    for row in rows:
        if row["sizes"]["layers"] == most:
            speed = f"{row['tokens_per_second']:,.0f}" if "seconds" in row else "-"
            memory = size(row["bytes"]) if "seconds" in row else row["failure"]
            lines.append((names.get(row["name"], row["name"]), speed, memory))
    yield from _table(("experts", "tokens a second", "memory"), lines)


_SIDES = ("ours", "XLA")


def _segment_calls() -> Iterator[str]:
    """Yield a section of each recorded call of segments, where they are recorded."""
    path = RESULTS / "h100/segments.json"
    if not path.exists():
        return
    record = _read(path)
    yield f"\n## Segments\n\nThe times of each recorded call on an {record['device']}.\n"
    lines = (
        (row["name"], *(duration(row["seconds"][x]) for x in _SIDES), _number(row["ratio"]))
        for row in record["rows"]
        if row["name"] in SEGMENT_CALLS
    )
    yield from _table(("call", *_SIDES, "XLA / ours"), lines)


_RUNS = {
    "tests": "default selection",
    "tests.changed": "files that failed or changed since",
    "tests.large": "arrays of more than 2**31 elements",
    "tests.several": "several GPUs",
}


def _tests() -> Iterator[str]:
    """Yield the recorded runs of the tests."""
    lines = []
    for folder, title in DEVICES:
        for path in sorted((RESULTS / folder).glob("tests*.json")):
            record = _read(path)
            counts = (f"{record['outcome'][key]:,}" for key in ("passed", "failed", "skipped"))
            what = "several GPUs" if folder == "h100x2" and path.stem == "tests" else None
            link = f"[{what or _RUNS[path.stem]}](../benchmarks/results/{folder}/{path.name})"
            lines.append((title, link, record["date"][:10], *counts))
    yield from _table(("device", "tests", "day", "passed", "failed", "skipped"), lines, text=3)


def _policy() -> Iterator[str]:
    """Yield what the policy's choices reach on calls that its models were fitted without."""
    lines = []
    for path in sorted(_DATA.glob("*.json")):
        content = _read(path)
        for operation, model in content["models"].items():
            unseen = model["unseen"]
            shares = (f"{unseen[name]:.0%}" for name in ("taken", "below_0.97"))
            ratios = (f"{unseen[name]:.2f}" for name in ("over_xla", "over_best", "worst"))
            lines.append((content["device"], operation, f"{unseen['pairs']:,}", *ratios, *shares))
    heads = ("device", "operation", "calls", "over XLA", "over the best", "worst")
    yield from _table((*heads, "kernels taken", f"below {SLOWER}"), lines, text=2)


_TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "claims": claims,
    "devices": _devices,
    "fp8": _fp8_errors,
    "policy": _policy,
    "random": _random,
    "segments": _segment_calls,
    "speed": _speed,
    "mixture": _mixture,
    "tests": _tests,
    **{f"ideas_{name}": functools.partial(ideas, name) for name in LADDERS},
    **{f"times_{name}": functools.partial(times, name) for name in LADDERS},
}


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]], text: int = 1) -> Iterator[str]:
    marks = ["---"] * text + ["---:"] * (len(heads) - text)
    for cells in (heads, marks, *lines):
        yield f"| {' | '.join(cells)} |"


def _distribution(ratios: Sequence[float]) -> tuple[str, ...]:
    found = Distribution.of(ratios)
    numbers = (found.geometric_mean, found.tenth_percentile, found.worst)
    return f"{len(ratios):,}", *map(_number, numbers), str(round(found.slower * len(ratios)))


def _number(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 2 else 1 if ratio < 10 else 0}f}"


@functools.cache
def _read(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    return record


def _timed(record: Record) -> Iterator[Record]:
    return (row for row in record["rows"] if "seconds" in row)


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["seconds"]["ratio"]["median"])


def _first(pair: tuple[str, Record]) -> str:
    return pair[0]
