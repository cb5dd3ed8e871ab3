"""A record as tables: for the terminal, and in markdown for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.calls.operations import OPERATIONS
from benchmarks.records.ceilings import Ceilings, has_bound
from benchmarks.records.record import Record, geometric_means, timed
from benchmarks.records.record_file import outdated, runs
from benchmarks.records.sample_report import sample_summary
from jax_tilekern.cli.console import duration, rate, size

if TYPE_CHECKING:
    from rich.console import RenderableType

# Shorter calls leave a GPU waiting for the host, which only the host's clock sees.
_LONG_CALL = 0.5e-3


def headings(record: Record) -> tuple[str, ...]:
    """Return the headings of a record's table."""
    operation = OPERATIONS[record["operation"]]
    peer, judge = operation.peer.name, "XLA" if operation.judge else operation.peer.name
    return (
        *("row", "kernel", "ours", peer, f"{peer} / ours", "p10 - p90"),
        *(f"{name} / ours (time, temporary)" for name in others(record)),
        *(["bound / ours"] if has_bound(record) else []),
        *(["ours does"] if operation.bound_by_arithmetic else []),
        *("ours moves", "of ceiling"),
        *(["temporary"] if any("temporary_bytes" in row for row in record["rows"]) else []),
        f"error ours, {judge}",
    )


def others(record: Record) -> tuple[str, ...]:
    """Return the other peers that any row of a record names."""
    return tuple(dict.fromkeys(name for row in record["rows"] for name in row["others"]))


def cells(record: Record, row: Mapping[str, Any], ceilings: Ceilings) -> tuple[str, ...]:
    """Return a row's entries under its :func:`headings`; without times only the first two."""
    if "seconds" not in row:
        return (row["name"], row["failure"])
    ours, peer, ratio = (row["seconds"][key] for key in ("ours", "peer", "ratio"))
    unit = "OP" if row["type"].startswith("int") else "FLOP"
    counted = [rate(row["flops"] / ours["median"], unit)] if ceilings.operations_per_second else []
    share, errors = ceilings.share(row), row["error"]
    return (
        row["name"],
        row["kernel"],
        duration(ours["median"]),
        duration(peer["median"]),
        _against(ratio["median"], row["target"]),
        f"{ratio['p10']:.2f} - {ratio['p90']:.2f}",
        *(_other(row["others"].get(name)) for name in others(record)),
        *([f"{ceilings.bound(row):#.3g}"] if has_bound(record) else []),
        *counted,
        rate(row["bytes"] / ours["median"], "B"),
        f"{share:.0%}" + (f" (below {row['share']:.0%})" if share < row["share"] else ""),
        *([_temporary(row)] if "temporary_bytes" in row else []),
        f"{errors['ours']:.1e}, {errors['peer']:.1e}",
    )


def _other(other: Mapping[str, Any] | None) -> str:
    """Return another peer's ratio, time and temporary memory, or why it has none."""
    if other is None:
        return ""
    temporary = other["temporary_bytes"]
    memory = [] if temporary is None else [size(temporary)]
    if "seconds" not in other:
        return ", ".join([other["failure"], *memory])
    seconds = other["seconds"]
    details = ", ".join([duration(seconds["peer"]["median"]), *memory])
    return f"{_against(seconds['ratio']['median'], other['target'])} ({details})"


def _temporary(row: Mapping[str, Any]) -> str:
    found, most = row["temporary_bytes"], row["temporary"]
    above = f" (above {size(most)})" if _takes_too_much(row) else ""
    return "" if found is None else size(found) + above


def _takes_too_much(row: Mapping[str, Any]) -> bool:
    found, most = row.get("temporary_bytes"), row["temporary"]
    return None not in (found, most) and found > most


def _against(ratio: float, target: float) -> str:
    """Return a ratio with three digits, and the target that it is below."""
    return f"{ratio:#.3g}" + (f" (below {target:g})" if ratio < target else "")


def loses(row: Mapping[str, Any], ceilings: Ceilings) -> bool:
    """Say whether a timed row is slower than its targets, or takes more memory than its limit."""
    targets = [(row["seconds"]["ratio"], row["target"])]
    targets += [
        (other["seconds"]["ratio"], other["target"])
        for other in row["others"].values()
        if "seconds" in other
    ]
    slower = any(ratio["median"] < target for ratio, target in targets)
    return bool(slower or ceilings.share(row) < row["share"] or _takes_too_much(row))


def table(record: Record) -> RenderableType:
    """Return a record as a table for a terminal."""
    ceilings = Ceilings.of(record)
    rows = [
        (cells(record, row, ceilings), style(row, "seconds" in row and loses(row, ceilings)))
        for row in record["rows"]
    ]
    return terminal_table(f"{record['suite']} on {record['device']}", headings(record), rows)


def style(row: Mapping[str, Any], lost: bool) -> str | None:
    """Return how a terminal shows a row that failed, or that lost."""
    return "bold red" if row["failure"] else "yellow" if lost else None


def terminal_table(
    title: str, headings: Sequence[str], rows: Iterable[tuple[Sequence[str], str | None]]
) -> RenderableType:
    """Return rows, each with its style, as a table for a terminal."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for heading in headings:
        text = heading in ("row", "rung", "kernel")
        result.add_column(
            heading,
            justify="left" if text else "right",
            overflow="fold",
            no_wrap=heading in ("row", "rung"),
        )
    for row, row_style in rows:
        result.add_row(*row, style=row_style)
    return result


def markdown(record: Record) -> str:
    """Return a record as a markdown table, with what it was measured on and by."""
    ceilings = Ceilings.of(record)
    return "\n".join(
        [
            *markdown_table(
                headings(record), (cells(record, row, ceilings) for row in record["rows"])
            ),
            "",
            summary(record),
            *provenance(record),
        ]
    )


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Return the lines of a markdown table, the first two columns of which are texts."""
    yield _line(headings)
    yield _line(["---"] * 2 + ["---:"] * (len(headings) - 2))
    for row in rows:
        yield _line([*row, *[""] * (len(headings) - len(row))])


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


def summary(record: Record) -> str:
    """Return what the rows say together, how they were measured, and what failed."""
    about_sample = sample_summary(record) if "sample" in record else ()
    return "\n".join([*about_sample, *_means(record), *_ceilings(record), *_cautions(record)])


def _means(record: Record) -> Iterator[str]:
    rows = timed(record)
    if not rows:
        return
    ceilings = Ceilings.of(record)
    lost = sum(loses(row, ceilings) for row in rows)
    yield f"{lost} of {len(rows)} rows below their target." if lost else "No row below its target."
    means = geometric_means(rows, lambda _: "all") | geometric_means(rows, lambda row: row["type"])
    entries = (f"{kind} {mean:#.3g}" for kind, mean in means.items())
    peer = OPERATIONS[record["operation"]].peer.name
    yield f"Geometric means of {peer} / ours: {', '.join(entries)}."
    means = geometric_means(rows, lambda row: row["group"])
    if len(means) > 1:
        targets = record["means"]
        entries = (
            f"{group} {_against(mean, targets.get(group, 0))}" for group, mean in means.items()
        )
        yield f"By group: {', '.join(entries)}."


def _ceilings(record: Record) -> Iterator[str]:
    ceilings = Ceilings.of(record)
    rates = (f"{name} {rate(most, 'OP')}" for name, most in ceilings.operations_per_second.items())
    bandwidths = OPERATIONS[record["operation"]].bandwidths
    memory = bandwidths[0] if len(bandwidths) == 1 else "memory"
    most = f"{memory} {rate(ceilings.bytes_per_second, 'B')}"
    yield f"Ceilings, as measured: {', '.join([most, *rates])}."


def _cautions(record: Record) -> Iterator[str]:
    rows = timed(record)
    if record["backend"] != "cpu":
        yield from _host_clock(rows)
        wall = [row["name"] for row in rows if row["method"].startswith("wall")]
        if wall:
            yield f"By wall time, since the profile was not clear: {', '.join(wall)}."
    if clocks := _sm_clocks(rows):
        yield f"SMs at {min(clocks)} to {max(clocks)} MHz."
    yield from leftovers(record)


def leftovers(record: Record) -> Iterator[str]:
    """Name the rows that are not of this run's code, and those that failed."""
    if old := outdated(record):
        yield f"Of an earlier run, with other kernels or another JAX: {', '.join(old)}."
    if failed := [row["name"] for row in record["rows"] if row["failure"]]:
        yield f"FAILED: {', '.join(failed)}."


def _host_clock(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say how far the host's clock and the profiler agree on calls that keep the GPU busy."""
    agreement = {
        f"{row['name']} {side}": row["wall_seconds"][side]["median"] / seconds
        for row in rows
        for side in ("ours", "peer")
        if row["method"].startswith("device")
        and (seconds := row["seconds"][side]["median"]) >= _LONG_CALL
    }
    if agreement:
        most = max(agreement, key=agreement.__getitem__)
        yield (
            f"The host's clock over the profiler, of {len(agreement)} calls longer than "
            f"{duration(_LONG_CALL)}: median {statistics.median(agreement.values()):.3f}, "
            f"at most {agreement[most]:.3f} ({most})."
        )


def _sm_clocks(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the clocks of the SMs in MHz, of rows that have them."""
    texts = (row.get("clocks", {}).get("clocks.sm", "").removesuffix(" MHz") for row in rows)
    return [int(text) for text in texts if text.isdigit()]


def provenance(record: Record) -> Iterator[str]:
    """Say where, when and by which command each row was measured."""
    needed = {row["run"] for row in record["rows"]}
    for date, run in runs(record).items():
        if date in needed:
            versions, gpus = run["versions"], run.get("nvidia_smi")
            driver = [f"driver {gpus[0]['driver_version']}"] if gpus else []
            where = [run["device"], f"jax {versions['jax']}", f"Python {versions['python']}"]
            yield f"{', '.join(where + driver)}; {date[:10]}; `{run['command']}`."
