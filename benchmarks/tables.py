"""``tables``: write the tables and draw the figures that pages have of the records.

A table is a query of the records, which are one frame: a line for each ratio of a row. A page has
it between ``<!-- table NAME -->`` and ``<!-- end -->``; ``tables.toml`` has its texts.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import plots
from benchmarks.ladder import Problem, first_sentence, problems_of, time_cells
from benchmarks.listings import families, operations, programs, types
from benchmarks.record import RESULTS, Record, read
from benchmarks.report import SLOWER, WRONG, error_of, table
from benchmarks.rows import Row
from benchmarks.translations import primitives
from jax_tilekern.cli.console import duration, size

ROOT = Path(__file__).parent.parent
# A table's function and its argument, if any.
_MARKED = re.compile(r"(<!-- table ([^_\W]+)_?(\w*) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = tuple(
    page
    for page in (
        *(ROOT / x for x in ("README.md", "benchmarks/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if _MARKED.search(page.read_text())
)
_TEXTS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_DEVICES: Mapping[str, str] = _TEXTS["devices"]
_JAX = "0.11.2"


def write() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for name, figure in figures().items():
        (ROOT / "docs" / name).write_text(figure)


def with_tables(text: str) -> str:
    """Return a page's text with its tables as the records have them."""
    return _MARKED.sub(lambda x: "\n".join([x[1][:-1], *_TABLES[x[2]](*x[3].split()), x[4]]), text)


# Records.


@functools.cache
def record(path: str) -> Record:
    """Return a record by its path in the results, without the suffix."""
    return read(RESULTS / f"{path}.jsonl")


@functools.cache
def ratios() -> pd.DataFrame:
    """Return the ratios of all records, which have a device, a label, a peer and a date."""
    patterns = ("*/*.jsonl", "*/samples/*.jsonl", "*/regret/*.jsonl")
    paths = [path for pattern in patterns for path in sorted(RESULTS.glob(pattern))]
    names = [path.relative_to(RESULTS).with_suffix("").as_posix() for path in paths]
    measured = (name for name in names if not name.endswith("/times"))
    return pd.DataFrame([line for name in measured for line in frame_lines(name, record(name))])


def frame_lines(name: str, found: Record) -> Iterator[Record]:
    """Yield the lines of the frame that a record has."""
    device, *folder, stem = name.split("/")
    of_record = {
        "device": device, "record": stem, "drawn": bool(folder), "date": found.get("date"),
        "digests": str(found.get("source_digests")),
    }  # fmt: skip
    for row in found["rows"]:
        label, ratio = _label(found, row, stem), row.get("ratio", {})
        if times := row.get("microseconds"):  # Of candidates, of which the policy chooses one.
            ratio = {"XLA": times["xla"] / times[row["chosen"]]}
        # JAX's own grouped GEMM, or else the first peer.
        one = "lax" if found.get("operation") == "ragged_dot" else next(iter(ratio), None)
        for peer in ratio:
            if label and (peer == one or "{peer}" in label):
                text = label.format(peer=_TEXTS["peers"].get(peer, peer))
                yield {**of_record, "label": text, "peer": peer, "ratio": ratio[peer],
                       "error": error_of(row, peer)}  # fmt: skip


def _label(found: Record, row: Record, stem: str) -> str | None:
    """Return the line of tables that a row is part of, if any."""
    if "chosen" in row:
        return f"`matmul`{', 1 to 256 rows' if stem.startswith('decode') else ''}"
    if "draw" in row:
        operation, *variant = row["draw"][0].split(",", 1)
        name = "linalg" if operation.startswith("linalg.") else operation
        if row["draw"][0] == "matmul":
            variant = [" any types"]  # Rows of other commands have a line of this operation.
        return ",".join([f"`{name}`", *variant])
    if "sample" in found:
        return f"`{found['operation']}`"
    if "suite" not in found:
        return row.get("group")
    if found["operation"] == "ragged_dot":
        groups = Row.of(row["name"], "ragged_dot").sizes["g"]
        return f"`ragged_dot` of {groups} groups, {{peer}} / ours"
    version = found["versions"]["jax"]
    jax = f" of jax {version}" if version != _JAX else ""
    return f"`{found['operation']}`: {row['group']}{jax}"


def newest(found: pd.DataFrame) -> pd.DataFrame:
    """Return the calls of the newest sources that a label was measured with on a device."""
    by_date = found.sort_values("date", kind="stable").groupby(["device", "label"])
    return found[found.digests == by_date.digests.transform("last").reindex(found.index)]


@functools.cache
def drawn() -> pd.DataFrame:
    """Return the calls drawn at random, but for those that a peer gets wrong."""
    found = ratios()
    return newest(found[found.drawn & (found.error < WRONG)])


@functools.cache
def recorded() -> pd.DataFrame:
    return ratios().query("not drawn")


def _number(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 2 else 1 if ratio < 10 else 0}f}"


def _mean(ratios: Any) -> str:
    return _number(np.exp(np.log(ratios).mean()))


def _select(found: pd.DataFrame, pattern: str, *devices: str) -> pd.DataFrame:
    """Return the lines of some devices whose labels match a pattern."""
    return found[found.device.isin(devices) & found.label.str.contains(pattern)]


def _speed(pattern: str) -> str:
    """Return the smallest and the largest ratio on an H100 of labels that match a pattern."""
    found = _select(recorded(), pattern, "h100", "h100x2").ratio
    return " to ".join(dict.fromkeys(map(_number, (found.min(), found.max()))))


# Tables, each a function of its name.


def _distribution(found: pd.DataFrame, kind: str) -> Iterator[str]:
    """Yield a table of the distribution of the ratios of each label."""
    cells = found.groupby("label", sort=False).ratio.agg(
        calls=lambda x: f"{len(x):,}",
        mean=_mean,
        p10=lambda x: _number(np.percentile(x, 10)),
        worst=lambda x: _number(x.min()),
        slower=lambda x: str((x < SLOWER).sum()),
    )
    heads = (f"calls {kind}", "calls", "mean", "10th percentile", "worst", f"below {SLOWER}")
    return table(heads, cells.reset_index().to_numpy())


def devices() -> Iterator[str]:
    """Yield a section for each device: its random calls, then its suites."""
    for folder, title in _DEVICES.items():
        yield f"\n## {title}\n\n[Every row](../benchmarks/results/{folder})."
        for kind, found in (("drawn at random", drawn()), ("recorded", recorded())):
            of_device = _select(found, "", folder)
            if len(of_device):
                yield from ("", *_distribution(of_device, kind))


def random() -> Iterator[str]:
    parts = (_select(drawn(), *of).assign(label=x) for x, of in _TEXTS["random"].items())
    return _distribution(pd.concat(parts), "drawn at random")


def speed() -> Iterator[str]:
    cells = ((text, "; ".join(map(_speed, x))) for text, x in _TEXTS["speed"].items())
    return table(("H100", "XLA / ours"), cells)


def _over_peer(path: str, name: str, peer: str = "") -> float:
    """Return the ratio of a row to a peer: XLA, or else the only other side, if none is named."""
    row = _row(path, name)
    found = _ratio(row, peer or ("XLA" if "XLA" in row["ratio"] else next(iter(row["ratio"]))))
    assert found is not None, (name, peer)
    return found


def _ratio(row: Record, side: str) -> float | None:
    """Return the ratio of a side's time to ours, if the row has both."""
    seconds = row["seconds"]
    quotient = seconds[side] / seconds["ours"] if {side, "ours"} <= seconds.keys() else None
    found: float | None = row["ratio"].get(side, quotient)
    return found


def start() -> Iterator[str]:
    weights, _ = _by_size_of_weights().values()
    values = {
        **{name: _speed(pattern) for name, pattern in _TEXTS["start"]["ratios"].items()},
        **{side: tokens for side, (_, tokens, _) in _mixture().items()},
        **{x: _number(_over_peer(*of)) for x, of in _TEXTS["start"]["rows"].items()},
        **{
            x: _mean_and_slower(_select(drawn(), _TEXTS["start"][x], "h200").ratio)
            for x in ("segments", "selection")
        },
        "muon_of_two": _mean(_select(recorded(), "^`muon`", "h200x2").ratio),
        "products": _mean_and_slower(_select(drawn(), "^`matmul`", "h100").ratio),
        **{f"weights_{x}": _mean(_over_all(weights, x)) for x in ("bfloat16", "dequantised")},
    }
    cells = ([cell.format(**values) for cell in line] for line in _TEXTS["start"]["lines"])
    gain = "you get: speed over the peer, on an H100 unless a GPU is named"
    return table(("you have", "you write", gain), cells, 3)


def _mean_and_slower(ratios: pd.Series[float]) -> str:
    share = (ratios < SLOWER).mean()
    slower = f"{100 * share:.0f} % are slower by 3 % or more" if share else "none is slower by 3 %"
    return f"{_mean(ratios)} times XLA on average; {slower}, the worst {_number(ratios.min())}"


def mixture() -> Iterator[str]:
    return table(("experts", "tokens a second", "memory"), _mixture().values())


def _mixture() -> dict[str, tuple[str, str, str]]:
    """Return the title, tokens a second and memory of each side of a training step."""
    row = max(record("h100/moe_model")["rows"], key=lambda row: row["sizes"]["layers"])
    tokens = row["sizes"]["batch"] * row["sizes"]["sequence"]
    cells = {x: ("-", why) for x, why in row["failures"].items()}
    for x, seconds in row["seconds"].items():
        cells[x] = (f"{tokens / seconds:,.0f}", size(row["bytes"][x]))
    return {x: (title, *cells[x]) for x, title in _TEXTS["mixture"].items()}


def story(name: str) -> Iterator[str]:
    """Yield the recorded times of a story, with temporaries, and links to the records."""
    texts = _TEXTS["stories"][name]
    sides, cells = texts["sides"], []
    records: dict[str, list[Record]] = {}
    for path, row_name, title in texts["rows"]:
        row = _row(path, row_name)
        records.setdefault(path, []).append(row)
        ratio = _ratio(row, next(iter(sides)))
        times = (_time_and_temporaries(row, side) for side in sides)
        cells.append((title, *times, _number(ratio) if ratio else "-"))
    yield from table((texts["call"], *sides.values(), "speedup"), cells)
    yield "\nTimes, with the memory of temporaries, from records:\n"
    for path, rows in records.items():
        yield f"- {_source(path, rows, texts.get('root', '../..'))}"


def _row(path: str, name: str) -> Record:
    """Return the row of a record that has a name."""
    rows: list[Record] = [row for row in record(path)["rows"] if row["name"] == name]
    (found,) = rows
    return found


def _source(path: str, rows: list[Record], root: str) -> str:
    """Return a link to a record from a page, with the methods by which some rows are timed."""
    found = record(path)
    methods = [x.partition(":")[0] for row in rows for x in row.get("method", "").split("; ")]
    device = f"{found['device']}, jax {found['versions']['jax']}"
    link = f"[{device}]({root}/benchmarks/results/{path}.jsonl)"
    return ": ".join(filter(None, [link, ", ".join(dict.fromkeys(methods))]))


def _time_and_temporaries(row: Record, side: str) -> str:
    if side not in row["seconds"]:
        return str(row["failures"][side])
    temporary = row["temporaries"][side]
    return duration(row["seconds"][side]) + (f", {size(temporary)}" if temporary >= 1024 else "")


def attention() -> Iterator[str]:
    """Yield a table of an H200's random calls of attention, by what has the call."""
    path = "h200/samples/attention-5"
    rows = [row for row in record(path)["rows"] if "failure" not in row]
    groups: dict[str, list[Record]] = {}
    for row in rows:
        pass_name = row["draw"][0].removeprefix("attention ")
        has = "cuDNN and the kernels have" if "cuDNN" in row["seconds"] else "the kernels have"
        groups.setdefault(f"{pass_name}s that {has}", []).append(row)

    def cell(found: list[Record], side: str) -> str:
        ratios = [
            row["seconds"][side] / row["seconds"]["ours"] for row in found if side in row["seconds"]
        ]
        return f"{_mean(ratios)}, {_number(min(ratios))}" if ratios else "-"

    sides = {"XLA": "XLA's blocks / ours", "cuDNN": "cuDNN / ours", "kernels": "kernels / ours"}
    cells = ((name, str(len(x)), *(cell(x, side) for side in sides)) for name, x in groups.items())
    yield from table(("H200: mean, worst", "calls", *sides.values()), cells)
    yield ""
    yield f"- {_source(path, rows, '..')}"


def first() -> Iterator[str]:
    """Yield a table of first calls for each device that has a record."""
    paths = {f"{folder}/first_calls": title for folder, title in _DEVICES.items()}
    found = [path for path in paths if (RESULTS / f"{path}.jsonl").exists()]
    if not found:
        yield "No device has a record. `python -m benchmarks first_calls` measures yours."
    for path in found:
        title = f"[{paths[path]}](../benchmarks/results/{path}.jsonl)"
        cells = (
            (row["name"], *(duration(row["seconds"][kind]) for kind in _TEXTS["first"]),
             duration(row["later_seconds"]["ours"]), str(row["compiled"]))
            for row in record(path)["rows"]
        )  # fmt: skip
        heads = (title, *_TEXTS["first"].values(), "ours, later calls", "CUDA kernels")
        yield from ("", *table(heads, cells))


def counts(name: str) -> Iterator[str]:
    """Yield the drawing and the times of programs of few to many lanes."""
    texts = _TEXTS["counts"][name]
    if not _has_counts():
        yield f"No device has a record. `{texts['command']}` measures yours."
        return
    yield f"![{texts['title']}]({name}.svg)\n"
    found = {title: _by_count(prefix) for title, prefix in texts["panels"].items()}
    cells = (
        (title, f"{count:,}", *(duration(row["seconds"][x]) for x in ("XLA", "ours")),
         _number(row["ratio"]["XLA"]))
        for title, rows in found.items() for count, row in rows.items()
    )  # fmt: skip
    heads = ("program", texts["axis"], "`jax.vmap`", "`jtk.kernel`", "speedup")
    yield from table(heads, cells)
    yield f"\n{_source(_COUNTS, [row for rows in found.values() for row in rows.values()], '..')}"


_COUNTS = "h200/jax_kernel_counts"


def _has_counts() -> bool:
    return (RESULTS / f"{_COUNTS}.jsonl").exists()


def _by_count(prefix: str) -> dict[int, Record]:
    """Return the rows of a program by the number of their lanes."""
    rows = (row for row in record(_COUNTS)["rows"] if row["name"].startswith(prefix))
    return {int(row["name"].rpartition(" ")[2]): row for row in rows}


def _curves(name: str) -> str:
    """Return the drawing of the same times."""
    texts, sides = _TEXTS["counts"][name], {"XLA": "jax.vmap", "ours": "jtk.kernel"}
    panels = {
        title: {
            text: {n: row["seconds"][side] for n, row in _by_count(prefix).items()}
            for side, text in sides.items()
        }
        for title, prefix in texts["panels"].items()
    }
    return plots.times(texts["axis"], panels)


def lanes() -> Iterator[str]:
    """Yield a table of each call of ``kernel`` that an H200 has measured."""
    # The second one has other rows, and the same ones by other numbers of threads.
    paths = "h200/jax_kernel", "h200/jax_kernel_threads"
    found = {path: {row["name"]: row for row in record(path)["rows"]} for path in paths}
    cells = (
        (name, *(duration(row["seconds"][x]) for x in ("XLA", "ours")),
         _number(row["ratio"]["XLA"]))
        for name, row in {**found[paths[1]], **found[paths[0]]}.items()
    )  # fmt: skip
    yield from table(("call", "`jax.vmap`", "`jtk.kernel`", "speedup"), cells)
    for path, rows in found.items():
        yield f"\n{_source(path, list(rows.values()), '..')}"


def tests() -> Iterator[str]:
    cells = []
    for folder, title in _DEVICES.items():
        for path in sorted((RESULTS / folder).glob("tests*.json")):
            found = json.loads(path.read_text())
            what = _TEXTS["tests"]["tests.several" if folder == "h100x2" else path.stem]
            counts = (f"{found['outcome'][key]:,}" for key in ("passed", "failed", "skipped"))
            link = f"[{what}](../benchmarks/results/{folder}/{path.name})"
            cells.append((title, link, found["date"][:10], *counts))
    return table(("device", "tests", "day", "passed", "failed", "skipped"), cells, text=3)


def policy() -> Iterator[str]:
    cells = []
    for path in sorted((ROOT / "jax_tilekern/plans/policy/data").glob("*.json")):
        content = json.loads(path.read_text())
        for operation, model in content["models"].items():
            unseen = model["unseen"]
            speeds = (f"{unseen[name]:.2f}" for name in ("over_xla", "over_best", "worst"))
            shares = (f"{unseen[name]:.0%}" for name in ("taken", "below_0.97"))
            head = (content["device"], operation, f"{unseen['pairs']:,}")
            cells.append((*head, *speeds, *shares))
    heads = ("device", "operation", "calls", "over XLA", "over the best", "worst")
    return table((*heads, "kernels taken", f"below {SLOWER}"), cells, text=2)


def fp8_accuracy(kind: str) -> pd.DataFrame:
    return pd.DataFrame(record("amd-epyc/fp8_accuracy")["rows"]).query("kind == @kind")


def fp8() -> Iterator[str]:
    heads = ("sums", "with quantisation", "sums, spread", "with quantisation, spread")
    found = fp8_accuracy("error").pivot_table(
        index="product", columns="operands", values=["of_sums", "with_rounding"], sort=False
    )
    cells = found.sort_index(axis=1, level="operands").map("{:.1e}".format).reset_index()
    return table((_DEVICES["amd-epyc"], *heads), cells.to_numpy())


_WEIGHTS, _RANDOM_WEIGHTS = "h200/small_weights", "h200/samples/decode-int4-5"
_LARGE = 1 << 23


def weights(kind: str) -> Iterator[str]:
    """Yield a table of an H200's products by small weights: random ones, a model's, or errors."""
    queries = {"random": _random_weights, "decoding": _decoding, "errors": _errors_of_weights}
    return queries[kind]()


def _by_size_of_weights() -> dict[str, list[Record]]:
    """Return the rows of random products, large matrices first."""
    groups: dict[str, list[Record]] = {"2^23 weights and more": [], "fewer weights": []}
    for row in record(_RANDOM_WEIGHTS)["rows"]:
        _, n, k = (int(x) for x in re.findall(r"(\d+) x (\d+) x (\d+)", row["name"])[0])
        groups["2^23 weights and more" if n * k >= _LARGE else "fewer weights"].append(row)
    return groups


def _over_all(rows: list[Record], side: str) -> pd.Series:
    """Return the ratios of the rows that have a side."""
    return pd.Series(ratio for row in rows if (ratio := _ratio(row, side)) is not None)


def _random_weights() -> Iterator[str]:
    sides = {"bfloat16": "weights of bfloat16", "dequantised": "XLA, dequantised"}
    cells = []
    for weights, rows in _by_size_of_weights().items():
        for side, title in sides.items():
            over = _over_all(rows, side)
            slower = str((over < SLOWER).sum())
            cells.append((weights, title, str(len(over)), _mean(over), _number(over.min()), slower))
    heads = ("int4, 1 to 64 rows of `x`", "over", "calls", "mean", "worst", f"below {SLOWER}")
    yield from table(heads, cells, text=2)
    yield from _source_of_weights(_RANDOM_WEIGHTS, record(_RANDOM_WEIGHTS)["rows"])


def _decoding() -> Iterator[str]:
    path = "h200/decoding"
    rows = record(path)["rows"]
    cells = []
    for row in rows:
        rates = (f"{row['tokens_in_a_second'][side]:,.0f}" for side in ("bfloat16", "ours"))
        speedup = _ratio(row, "bfloat16")
        cells.append((row["name"].partition(", ")[2], *rates, _number(speedup) if speedup else "-"))
    heads = ("tokens in a second", "weights of bfloat16", "int4", "speedup")
    yield from table(heads, cells)
    yield from _source_of_weights(path, rows)


def _errors_of_weights() -> Iterator[str]:
    path = "h200/small_weights_accuracy"
    rows = record(path)["rows"]
    results = {"float32": "float32 results", "bfloat16": "bfloat16 results"}
    sides = {"ours": "`scaled_matmul`", "XLA": "XLA, dequantised", "bfloat16": "bfloat16"}
    heads = [f"{side}, {out}" for out in results.values() for side in sides.values()]
    cells = (
        (row["name"], *(f"{row[out][side]:.1e}" for out in results for side in sides))
        for row in rows
    )
    yield from table(("relative to the norm", *heads), cells)
    yield from _source_of_weights(path, rows)


def _source_of_weights(path: str, rows: list[Record]) -> Iterator[str]:
    """Yield a link to a record, which says if its kernels are not those of the products' record."""
    digests = (record(each)["source_digests"]["cuda"] for each in (path, _WEIGHTS))
    earlier = "; the kernels were earlier ones than those of the first table"
    yield f"\n- {_source(path, rows, '..')}{earlier if len({*digests}) > 1 else ''}"


def ideas(ladder: str) -> Iterator[str]:
    """Yield a line for each file of a ladder: its number and the idea that it adds."""
    files = {rung.source for problem in problems_of(ladder) for rung in problem.rungs}
    cells = (
        (f"[{Path(file).name.partition('_')[0]}](../examples/ladder/{file})", first_sentence(file))
        for file in sorted(filter(None, files))
    )
    return table(("file", "idea"), cells, text=2)


def times(ladder: str) -> Iterator[str]:
    """Yield a table of each problem's rungs; of several sizes, the largest."""
    found = record(f"h100/ladder/{ladder}")
    largest: dict[str, Problem] = {}
    for problem in problems_of(ladder):
        kind = re.sub(r"\b\d+(x\d+)*\b", "", problem.title)
        largest[kind] = max(largest.get(kind, problem), problem, key=lambda x: x.bytes)
    for i, problem in enumerate(largest.values()):
        rows = [row for row in found["rows"] if row["problem"] == problem.title]
        timed = [row for row in rows if "seconds" in row]
        cells = ((row["name"], *time_cells(found, problem, rows, row)) for row in timed)
        yield from [""] * bool(i)
        yield from table((problem.title, "time", "rate", "of ceiling"), cells)


_TABLES: Mapping[str, Callable[..., Iterator[str]]] = {
    query.__name__: query
    for query in (
        attention, counts, devices, families, first, fp8, ideas, lanes, mixture, operations, policy,
        primitives, programs, random, speed, start, story, tests, times, types, weights,
    )
}  # fmt: skip


# Figures.


def figures() -> dict[str, str]:
    """Return the drawings of ``docs``, by their files."""
    return {
        "overview.svg": plots.ratios(
            "XLA's time / our time, NVIDIA H100, jax 0.11.2 (right of 1: ours is faster)",
            dict(_overview()),
        ),
        "fp8-training.svg": plots.curves(fp8_accuracy("training")),
        "attention.svg": plots.ratios(
            "the peer's time / our time, NVIDIA H200, jax 0.11.2 (right of 1: ours is faster)",
            {
                "over jnp": _speedups("attention_jnp"),
                "over cuDNN": _speedups("attention_cudnn"),
                "with a score function or a mask, over the same without": _speedups(
                    "attention_functions"
                ),
            },
        ),
        **{f"{name}.svg": _curves(name) for name in _TEXTS["counts"] if _has_counts()},
    }


def _speedups(story: str) -> pd.Series[float]:
    """Return the speedups of a story by the titles of its rows, of which some continue another."""
    texts, found, first = _TEXTS["stories"][story], {}, ""
    peer = next(iter(texts["sides"]))
    for path, name, title in texts["rows"]:
        label = title.replace("`", "")
        if label == "with gradient":
            label = f"{first}, {label}"
        else:
            first = label
        found[label] = _ratio(_row(path, name), peer)
    return pd.Series(found)


def _overview() -> Iterator[tuple[str, pd.Series[float]]]:
    """Yield sections of an H100's ratios, which are indexed by their group."""
    found = recorded().query("device == 'h100'").set_index("record")
    for title, (records, pattern) in _TEXTS["overview"].items():
        groups = found.label.loc[records].str.extract(pattern)[0]
        section = found.ratio.loc[records].set_axis(groups)
        # Groups with a count are in ascending order, others in that of the record.
        count = lambda x: x.str.extract(r"^(\d+) groups", expand=False).astype(float)  # noqa: E731
        yield title, section.sort_index(key=count, kind="stable")
