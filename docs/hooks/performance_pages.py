"""A page for each device in ``benchmarks/results``, made of its records when the site is built."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.records.ratio_plot import Group, geometric_mean, ratio_plot  # noqa: E402
from benchmarks.records.record import timed  # noqa: E402
from benchmarks.records.sample_report import Distribution, ratio_to_jax  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
Record = dict[str, Any]

_OPERATIONS = ("matmul", "ragged_dot", "transpose", "matvec", "vdot", "sum", "add", "linalg")
_NOTES = {
    "amd-epyc": "The two cores had other work, so that sizes are exact and times are not.",
}
# What `lax.ragged_dot` is differs between versions of JAX and of cuDNN. No record has the latter.
_CUDNN = {"h100": "cuDNN 9.19 is installed, XLA does not call it"}
_DENSE = (
    "The first ratio is against one dense product of as many operations by XLA: an upper bound "
    "that ignores grouping, and no implementation of the operation. It reads one matrix of "
    "weights, which is why it is far ahead where groups are bound by memory."
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for device in sorted(RESULTS.iterdir()):
        files.append(
            File.generated(config, f"performance/{device.name}.md", content=device_page(device))
        )
    return files


def device_page(folder: Path) -> str:
    """Return the page of one device, as markdown."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    # The outcome of the tests is on the page about tests; choices of `tune` are data.
    names = sorted((x for x in records if not x.startswith(("tests", "tuned"))), key=_order)
    samples = {
        path: json.loads(path.read_text()) for path in sorted((folder / "samples").glob("*.json"))
    }
    device = next(iter([*records.values(), *samples.values()]))["device"]
    count = next((record["devices"] for record in records.values() if "devices" in record), 1)
    lines = [f"# {device if count == 1 else f'{count} x {device}'}", ""]
    for name in names:
        lines += [f"## {name}", "", *_section(folder, name, records[name]), ""]
    if samples:
        lines += ["## Calls drawn at random", "", *_samples(samples), ""]
    if (folder / "ladder").is_dir():
        lines += ["## ladder", "", "Each step from a naive kernel: [the ladder](../ladder.md).", ""]
    return "\n".join(lines)


def _order(name: str) -> tuple[int, str]:
    found = [number for number, start in enumerate(_OPERATIONS) if name.startswith(start)]
    return min(found, default=len(_OPERATIONS)), name


def _section(folder: Path, name: str, record: Record) -> Iterator[str]:
    path = f"../../{(folder / name).relative_to(ROOT)}"
    note = _NOTES.get(folder.name, "")
    yield f"{_made(folder, record)} [Record]({path}.json). {note}".rstrip()
    yield ""
    table = (folder / name).with_suffix(".md")
    if name.startswith("linalg"):
        yield from _matrices(record["rows"])
    elif record.get("kind") == "host":
        yield from _host(record["rows"])
    elif name == "before_after":
        yield from _before_after(record)
    elif name == "cross_entropy":
        yield from _cross_entropy(record["rows"])
    elif "bound_seconds" in record:
        yield from _out_of_core(record)
    elif "kind" in record:
        yield table.read_text()
    elif all(isinstance(x, float) for row in record["rows"] for x in row["seconds"].values()):
        yield from _sides(record["rows"])
    else:
        yield from _suite(folder.name, record)


def _made(folder: Path, record: Record) -> str:
    """Return by what, when and with which versions a record was made."""
    versions = record["versions"]
    runs = sorted({row["run"][:10] for row in record.get("rows", ()) if "run" in row})
    parts = [f"jax {versions['jax']}", f"Python {versions['python']}"]
    if cuda := (record.get("driver") or {}).get("cuda"):
        parts += [f"CUDA {cuda}"]
    if smi := record.get("nvidia_smi"):
        parts += [f"driver {smi[0]['driver_version']}"]
    days = " and ".join(runs or [record["date"][:10]])
    return f"{days}, {', '.join(parts)}."


def _suite(device: str, record: Record) -> Iterator[str]:
    """Return plot, losses and rows of a suite of ``bench``."""
    rows = [row for row in record["rows"] if not row["failure"]]
    others = sorted({peer for row in rows for peer in row.get("others", {})})
    peers = [peer for peer in others if any(_timed(row, peer) for row in rows)]
    grouped = bool(peers)
    peer = "one dense product" if grouped else "XLA"
    groups: dict[str, list[Record]] = {}
    for row in rows:
        # Older records have no groups.
        groups.setdefault(row.get("group", row["type"]), []).append(row)
    plots = [("", [Group(name, list(map(_ratio, some))) for name, some in groups.items()])]
    if grouped:
        plots = [(f"against {peer}", plots[0][1]), *_peer_plots(peers, groups, record, device)]
        yield _DENSE
        yield ""
    yield from _drawing(f"{peer}'s time over ours, by group", "their time / our time", plots)
    failed = [row for row in record["rows"] if row["failure"]]
    losing = [row for row in rows if _ratio(row) < 0.97]
    all_rows = geometric_mean([_ratio(row) for row in rows])
    yield (
        f"{len(rows)} rows, geometric mean {all_rows:.2f}. **{len(losing)} are slower than 0.97 of "
        f"{peer}**, {sum(_is_xla(row) for row in rows)} were left to XLA."
    )
    yield from (f"\n{row['name']} failed: {row['failure']}" for row in failed)
    for peer in set(others) - set(peers):
        failures = {row["others"][peer]["failure"] for row in rows if peer in row["others"]}
        yield f"\nNo row was measured with {peer}: {'; '.join(sorted(failures))}."
    yield ""
    heads = ["row", "ours", "dense" if grouped else "XLA", "ratio", *map("{} / ours".format, peers)]
    yield from _table([*heads, "kernel"], "lrrr" + "r" * len(peers) + "l", _cells(rows, peers))


def _samples(samples: dict[Path, Record]) -> Iterator[str]:
    """Return the distribution of the ratios of each sample."""
    ratios = {path: list(map(ratio_to_jax, timed(record))) for path, record in samples.items()}
    names = {
        path: f"{record['operation']}, seed {record['sample']['seed']}"
        for path, record in samples.items()
    }
    groups: dict[str, list[float]] = {}
    for path, name in names.items():
        groups.setdefault(name, []).extend(ratios[path])
    sections = [("", [Group(name, found) for name, found in groups.items()])]
    yield from _drawing("JAX's time over ours", "JAX's time / our time", sections)
    yield (
        "Each record is of the sources of its day. "
        "[How it is measured](../../benchmarks/README.md) says which seeds were fitted to."
    )
    yield ""
    cells = (
        (
            f"[{names[path]}](../../{path.relative_to(ROOT)})",
            record["date"][:10],
            str(len(ratios[path])),
            *_distribution(Distribution.of(ratios[path])),
        )
        for path, record in samples.items()
    )
    heads = ["calls of", "day", "calls", "mean", "10th percentile", "worst", "below 0.97"]
    yield from _table(heads, "llrrrrr", cells)


def _distribution(found: Distribution) -> tuple[str, ...]:
    numbers = (found.geometric_mean, found.tenth_percentile, found.worst)
    return (*map(_number, numbers), f"{found.slower:.0%}")


def _peer_plots(
    peers: Sequence[str], groups: dict[str, list[Record]], record: Record, device: str
) -> Iterator[tuple[str, list[Group]]]:
    for peer in peers:
        timed = {
            name: [_ratio(row["others"][peer]) for row in rows if _timed(row, peer)]
            for name, rows in groups.items()
        }
        heading = f"against {peer}"
        if peer == "lax":
            notes = [f"jax {record['versions']['jax']}", *filter(None, [_CUDNN.get(device)])]
            heading = f"against lax.ragged_dot ({', '.join(notes)})"
        if any(timed.values()):
            yield heading, [Group(name, ratios) for name, ratios in timed.items() if ratios]


def _cells(rows: Sequence[Record], peers: Sequence[str]) -> Iterator[Sequence[str]]:
    for row in rows:
        seconds, mean = row["seconds"], _ratio(row)
        ratio = f"**{_number(mean)}**" if mean < 0.97 else _number(mean)
        others = (_other(row, peer) for peer in peers)
        times = (_time(seconds[side]["median"]) for side in ("ours", "peer"))
        name = row["name"].replace(" ", "\N{NO-BREAK SPACE}")
        yield name, *times, ratio, *others, row["kernel"]


def _other(row: Record, peer: str) -> str:
    other = row.get("others", {}).get(peer)
    if other is None:
        return ""
    return _number(_ratio(other)) if _timed(row, peer) else str(other["failure"])


def _timed(row: Record, peer: str) -> bool:
    return "seconds" in row.get("others", {}).get(peer, {})


def _is_xla(row: Record) -> bool:
    return row["kernel"].startswith("XLA:")


def _ratio(row: Record) -> float:
    return row["seconds"]["ratio"]["median"]


def _matrices(rows: Sequence[Record]) -> Iterator[str]:
    kinds = list(dict.fromkeys((row["operation"], row["type"]) for row in rows))
    groups = [
        Group(
            " ".join(kind), [_ratio(row) for row in rows if (row["operation"], row["type"]) == kind]
        )
        for kind in kinds
    ]
    counts = ", ".join(f"{count:,}" for count in sorted({row["count"] for row in rows}))
    yield from _drawing("JAX's time over ours", "JAX's time / our time", [("", groups)])
    yield f"Batches of {counts} matrices." if counts != "1" else "One matrix each."
    yield ""
    cells = (
        (
            f"{row['operation']} {row['type']} {row['n']}x{row['n']}",
            _time(row["seconds"]["ours"]["median"]),
            _time(row["seconds"]["peer"]["median"]),
            _number(_ratio(row)),
        )
        for row in rows
    )
    yield from _table(["row", "ours", "JAX", "ratio"], "lrrr", cells)


def _sides(rows: Sequence[Record]) -> Iterator[str]:
    """Return the times of programs that have more sides than ours and JAX's."""
    sides = list(dict.fromkeys(side for row in rows for side in row["seconds"]))
    cells = (
        (
            row.get("name") or f"{row['type']}, {row['size']} cubed",
            *(_time(row["seconds"][side]) if side in row["seconds"] else "" for side in sides),
        )
        for row in rows
    )
    yield from _table(["row", *sides], "l" + "r" * len(sides), cells)


def _before_after(record: Record) -> Iterator[str]:
    """Return each group's old times over new ones, of the rows with device times."""
    old, new = (record["commits"][side][:7] for side in ("old", "new"))
    yield f"Kernels of commit {old} against those of {new}, with the same choices: old / new."
    yield ""
    yield "| group | rows | geometric mean | worst |"
    yield "|---|---:|---:|---:|"
    rows = [row for row in record["rows"] if row.get("method", "").startswith("device time")]
    for group in dict.fromkeys(row["group"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["group"] == group]
        mean = statistics.geometric_mean(ratios)
        yield f"| {group} | {len(ratios)} | {mean:.3f} | {min(ratios):.3f} |"


def _cross_entropy(rows: Sequence[Record]) -> Iterator[str]:
    """Return times and temporaries of the value and of the gradient."""
    cells = (
        (
            f"{row['type']} {row['rows']}x{row['features']}x{row['labels']}, {what}",
            *(_time(row[what]["seconds"][side]) for side in ("ours", "jnp")),
            _number(row[what]["seconds"]["jnp"] / row[what]["seconds"]["ours"]),
            *(f"{row[what]['temporaries'][side] / 2**30:.2f} GiB" for side in ("ours", "jnp")),
        )
        for row in rows
        for what in ("value", "gradient")
    )
    heads = ["row", "ours", "JAX", "ratio", "temporaries of ours", "of JAX"]
    yield from _table(heads, "lrrrrr", cells)


def _out_of_core(record: Record) -> Iterator[str]:
    yield f"{record['type']}, {record['plan']}."
    yield ""
    runs = ", then ".join(map(_time, record["seconds"]))
    bound = _time(record["bound_seconds"])
    yield f"{runs}; the slower of the product and the bus alone takes {bound}."


def _host(rows: Sequence[Record]) -> Iterator[str]:
    """Return what calls cost the host besides the operation, and the size of programs."""
    yield "Host time of a call, eager, and to trace it inside of another function."
    yield ""
    calls = (
        (row["name"], *(_time(row[what][side]["median"]) for what in _STEPS for side in _SIDES))
        for row in rows
        if row["group"] == "calls"
    )
    heads = ["call", "eager, ours", "eager, JAX", "traced, ours", "traced, JAX"]
    yield from _table(heads, "lrrrr", calls)
    yield ""
    yield "Size of a transformer as it is lowered, in bytes of HLO."
    yield ""
    programs = (
        (f"{row['name']}, {row['platform']}", *(f"{row['hlo_bytes'][side]:,}" for side in _SIDES))
        for row in rows
        if row["group"] == "programs"
    )
    yield from _table(["program", "ours", "JAX"], "lrr", programs)


_STEPS = ("eager", "trace")
_SIDES = ("ours", "peer")


def _drawing(title: str, axis: str, sections: Any) -> Iterator[str]:
    yield f'<div class="plot">\n{ratio_plot(title, axis, sections)}</div>'
    yield ""


def _table(heads: Sequence[str], align: str, rows: Any) -> Iterator[str]:
    marks: Callable[[str], str] = {"l": "---", "r": "---:"}.__getitem__
    for cells in (heads, [marks(side) for side in align], *rows):
        yield f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    units = (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, size = next(found for found in units if seconds >= found[1])
    # Joined by a space at which no line is broken.
    return f"{seconds / size:.3g}\N{NO-BREAK SPACE}{unit}"


def _number(ratio: float) -> str:
    return f"{ratio:#.3g}".rstrip(".")
