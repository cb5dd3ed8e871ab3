"""``tables``: write the tables and draw the figures that pages have of the records.

A table is a query of the records, which are one frame: a line for each ratio of a row. A page has
it between ``<!-- table NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import plots
from benchmarks.catalog import DESCRIPTIONS
from benchmarks.catalog.call import Description
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import namesake
from benchmarks.ladder import LADDERS, Problem, first_sentence, problems_of, time_cells
from benchmarks.record import RESULTS, Record, read
from benchmarks.report import SLOWER, WRONG, table
from benchmarks.rows import Row
from jax_tilekern.cli.console import duration, size

ROOT = Path(__file__).parent.parent
_DATA = ROOT / "jax_tilekern/plans/policy/data"
PAGES = tuple(
    ROOT / name
    for name in (
        "README.md", "docs/fp8.md", "docs/ladder.md", "docs/performance.md",
        "docs/reference/index.md", "docs/testing.md",
    )
)  # fmt: skip
_MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Folders of records, and what users call the machines.
DEVICES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "h100x2": "2 x NVIDIA H100 80GB HBM3",
    "h200x2": "2 x NVIDIA H200",
    "h100x4": "4 x NVIDIA H100 80GB HBM3",
    "amd-epyc": "AMD EPYC with AVX-512 and bfloat16, two cores",
    "sapphire-rapids": "Xeon, Sapphire Rapids, two cores",
    "cascade-lake": "Xeon, Cascade Lake, two cores",
}
# Peers as tables call them.
_PEERS = {
    "dense": "one dense product", "lax": "`lax.ragged_dot`", "XLA": "`lax.ragged_dot`",
    "parts": "`ragged_dot`",
}  # fmt: skip
_JAX = "0.11.2"


def write() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    for name, figure in figures().items():
        (ROOT / "docs" / name).write_text(figure)


def with_tables(text: str) -> str:
    """Return a page's text with its tables as the records have them."""

    def found(match: re.Match[str]) -> str:
        return "\n".join([match[1].strip(), *_TABLES[match[2]](), match[3]])

    return _MARKED.sub(found, text)


@functools.cache
def record(path: str) -> Record:
    """Return a record by its path in the folder of results, without the suffix."""
    return read(RESULTS / f"{path}.jsonl")


@functools.cache
def ratios() -> pd.DataFrame:
    """Return all rows of the records: a line for each peer, with the fields of row and record."""
    lines = []
    for path in sorted(RESULTS.glob("*/*.jsonl")) + sorted(RESULTS.glob("*/[rs]*/*.jsonl")):
        if path.stem == "times":
            continue
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        found = record(name)
        device, *folder = name.split("/")[:-1]
        of_record = {
            "device": device, "record": path.stem, "drawn": bool(folder),
            "operation": found.get("operation"), "date": found.get("date"),
            "digests": str(found.get("source_digests")),
        }  # fmt: skip
        for row in found["rows"]:
            for peer, ratio in _ratios_of(row):
                label = _label(found, row, path.stem)
                if label is not None and ("{peer}" in label or peer == next(iter(row["ratio"]))):
                    label = label.format(peer=_PEERS.get(peer, peer))
                    wrong = (row.get("error") or {}).get(peer, 0) or 0
                    lines.append({**of_record, "name": row["name"], "label": label, "peer": peer,
                                  "ratio": ratio, "wrong": wrong})  # fmt: skip
    return pd.DataFrame(lines)


def _ratios_of(row: Record) -> Iterable[tuple[str, float]]:
    if "chosen" in row:  # The policy's choice among timed candidates.
        row["ratio"] = {"XLA": row["microseconds"]["xla"] / row["microseconds"][row["chosen"]]}
    found: Mapping[str, float] = row.get("ratio", {})
    return found.items()


def _label(found: Record, row: Record, stem: str) -> str | None:
    """Return the line of tables that a row is part of, if any."""
    if "chosen" in row:
        return f"`matmul`{', 1 to 256 rows' if stem.startswith('decode') else ''}"
    if "sample" in found:
        return f"`{found['operation']}`" + (" {peer}" if "lax" in row["ratio"] else "")
    if "suite" not in found:
        return row.get("group")
    if found["operation"] == "ragged_dot":
        groups = Row.of(row["name"], "ragged_dot").sizes["g"]
        return f"`ragged_dot` of {groups} groups, {{peer}} / ours"
    version = found["versions"]["jax"]
    jax = f" of jax {version}" if version != _JAX else ""
    return f"`{found['operation']}`: {row['group']}{jax}"


@functools.cache
def drawn() -> pd.DataFrame:
    """Return the calls drawn at random, of the newest sources that an operation was measured with.

    Grouped GEMMs are compared with JAX's own; calls that a peer gets wrong do not count.
    """
    found = ratios()
    found = found[found.drawn & (found.wrong < WRONG)]
    found = found[(found.operation != "ragged_dot") | (found.peer == "lax")]
    found = found.assign(label=found.label.str.replace(r" `lax.*| one dense.*", "", regex=True))
    by_date = found.sort_values("date").groupby(["device", "operation"], dropna=False)
    found = found[found.digests == by_date.digests.transform("last").reindex(found.index)]
    # Samples first, then what is left to XLA of random products.
    return pd.concat([found[found.operation.notna()], found[found.operation.isna()]])


@functools.cache
def recorded() -> pd.DataFrame:
    found = ratios()
    return found[~found.drawn]


def _distribution(found: pd.DataFrame, kind: str) -> Iterator[str]:
    """Yield a table of the distribution of the ratios of each label."""
    groups = found.groupby("label", sort=False).ratio
    lines = groups.agg(
        calls=lambda x: f"{len(x):,}",
        mean=lambda x: _number(np.exp(np.log(x).mean())),
        p10=lambda x: _number(np.percentile(x, 10)),
        worst=lambda x: _number(x.min()),
        slower=lambda x: str((x < SLOWER).sum()),
    )
    heads = (f"calls {kind}", "calls", "mean", "10th percentile", "worst", f"below {SLOWER}")
    yield from table(heads, lines.reset_index().to_numpy())


def _devices() -> Iterator[str]:
    """Yield a section for each device: its random calls, then its suites."""
    for folder, title in DEVICES.items():
        yield f"\n## {title}\n"
        yield f"[Every row](../benchmarks/results/{folder})."
        for kind, found in (("drawn at random", drawn()), ("recorded", recorded())):
            of_device = found[found.device == folder]
            if len(of_device):
                yield ""
                yield from _distribution(of_device, kind)


def _random() -> Iterator[str]:
    found = drawn()
    is_product, on_gpu = found.label.str.startswith("`matmul`"), found.device == "h100"
    lines = pd.concat([
        found[on_gpu & is_product].assign(label=lambda x: "H100: " + x.label),
        found[on_gpu & ~is_product].assign(label="H100: four other operations"),
        found[found.device == "amd-epyc"].assign(
            label=f"{DEVICES['amd-epyc']}: seven operations"
        ),
    ])  # fmt: skip
    return _distribution(lines, "drawn at random")


_LAX, _DENSE = r"of {} groups, `lax", r"of {} groups, one dense"
# Lines of the performance page: each part of a line is a pattern of labels.
SPEED: Mapping[str, Sequence[str]] = {
    "`ragged_dot` against `lax.ragged_dot`: 128 experts; 8 large ones":
        (_LAX.format(128), _LAX.format(8)),
    "float32 `inv`, `solve`, `cholesky`: 100,000 matrices up to 64x64; one of 1000 to 8192":
        ("`(?:inv|solve|cholesky)` of .* small", "one large matrix, float32"),
    "`svd`; `eigh`; `qr` of 10,000 to 100,000 matrices up to 32x32":
        ("`svd(?:vals)?` of .* small", "`eig(?:h|valsh)` of .* small", "`qr` of .* small"),
    "`moe` against the same by `ragged_dot`: forward; with gradient; decode, 1 to 256 tokens":
        tuple(f"`moe` .* parts, {x}$" for x in ("forward", "forward and backward", "decode")),
    "training step of a mixture of experts: `lax.ragged_dot`; tokamax":
        ("mixture .*lax", "mixture .*tokamax"),
    "16-bit products with a symmetric result, 2048 rows and more; a step of `muon`":
        ("^symmetric .* alone, 2048", "^`muon`"),
    "8-bit products with scales over 16-bit: up to 128 rows; 4096 and more; groups; layers":
        ("8-bit .* up to", "8-bit .* and more", "8-bit, grouped", "8-bit layers, forward and"),
    "complex64 products: default precision; `HIGHEST`":
        ("`matmul`: complex64$", "`matmul`: complex64 HIGHEST"),
    "`kernel` of functions with loops against `vmap`, wall time": ("`kernel` against",),
    "float32 products at `HIGHEST`; 16-bit products of odd sizes":
        ("`matmul`: float32$", "16-bit odd"),
    "8-bit products: both operands k-major; other orders":
        ("8-bit K-major", "8-bit other orders"),
    "large aligned 16-bit products; the same with collectives on 2 H100":
        ("16-bit large", "^rows|^k sharded|^MLP"),
    "the same, overlapped with 16 to 64 MiB sent: gathered; scattered; MLP; with gradient":
        tuple(f"^overlapped .*: {what}$" for what in (
            "rows gathered", "rows scattered", "MLP, forward", "MLP, forward and backward")),
    "transposes of odd sizes": ("`transpose`: odd",),
    "bias, activation, residual in the product's kernel; their gradient; `gated_linear`":
        ("^epilogues", "gradient of an epilogue", "gated_linear"),
    "`linear_cross_entropy`: value; gradient": ("entropy`, value", "entropy`, gradient"),
    "segments: rows; sorted rows; scalars; messages of a graph; gradient of a table; `top_k`":
        ("`segment_(?:sum|max)`$", "sorted$", "of scalars", "messages", "of `take`", "`top_k`"),
    "`ragged_dot` against one dense product, an upper bound: 8 experts; 128":
        (_DENSE.format(8), _DENSE.format(128)),
    "parallel efficiency of `ragged_dot` on 2 H100: no communication; with an all-reduce":
        ("without comm", "with an all"),
}  # fmt: skip


def speed_of(pattern: str) -> str:
    """Return the smallest and the largest ratio of labels that match a pattern."""
    found = recorded()
    found = found[found.device.isin(("h100", "h100x2")) & found.label.str.contains(pattern)]
    return " to ".join(dict.fromkeys(map(_number, (found.ratio.min(), found.ratio.max()))))


def _speed() -> Iterator[str]:
    lines = ((text, "; ".join(map(speed_of, patterns))) for text, patterns in SPEED.items())
    return table(("H100", "XLA / ours"), lines)


# Lines of the README: what users have, what they write, what they get.
START = (
    ("a mixture of experts", "`jtk.moe`, `jtk.route` ([guide](docs/moe.md))",
     "{moe} tokens a second; by tokamax {tokamax}, and by `lax.ragged_dot` out of memory"),
    ("batches of small matrices", "`jtk.linalg` for `jnp.linalg` ([guide](docs/linalg.md))",
     "{small} times JAX, of 10,000 and more"),
    ("samplers, solvers, loops over a few numbers",
     "`jtk.kernel(f)` for `jax.vmap(f)` ([guide](docs/jax-kernel.md))",
     "{kernel} times `vmap`, wall time"),
    ("graphs, embeddings, scatter-adds",
     "`jtk.segment_sum`, `segment_reduce`, `take` ([guide](docs/segments.md))",
     "on an H200, random calls: {segments}"),
    ("Muon", "`jtk.muon` for `optax.contrib.muon` ([guide](docs/muon.md))",
     "{muon} times optax; {muon_of_two} on two H200"),
    ("a CUDA kernel", "`jtk.cuda_kernel(source, ...)` ([guide](docs/cuda-kernel.md))",
     "a JAX operation with derivatives, `vmap` and sharding, without a CUDA toolkit"),
    ("any model", "`with jtk.patch():` ([guide](docs/frameworks.md))",
     "random products: {products}"),
)  # fmt: skip


def _start() -> Iterator[str]:
    tokens = {side: number for side, number, _ in _mixture_lines()}
    found = pd.concat([drawn(), recorded()])
    is_product = found.label.str.startswith("`matmul`") & found.drawn & (found.device == "h100")
    of_segments = found.label.str.endswith("drawn at random") & (found.device == "h200")
    (step_of_two,) = found[found.device == "h200x2"].ratio
    values = {
        "moe": tokens["`moe`"],
        "tokamax": tokens["tokamax"],
        "small": speed_of("`(?:inv|solve|cholesky|svd|svdvals|eigh|eigvalsh|qr)` of .* small"),
        "kernel": speed_of("`kernel` against"),
        "segments": _mean_and_slower(found[of_segments].ratio),
        "muon": speed_of("^`muon`"),
        "muon_of_two": _number(step_of_two),
        "products": _mean_and_slower(found[is_product].ratio),
    }
    lines = ([cell.format(**values) for cell in line] for line in START)
    return table(("you have", "you write", "you get: speed over the peer on an H100"), lines, 3)


def _mean_and_slower(ratios: Any) -> str:
    mean, share = np.exp(np.log(ratios).mean()), (ratios < SLOWER).mean()
    slower = f"{share:.0%} are slower by 3 % or more" if share else "none is slower by 3 %"
    return f"{_number(mean)} times XLA on average; {slower}, the worst {_number(ratios.min())}"


def _mixture() -> Iterator[str]:
    return table(("experts", "tokens a second", "memory"), _mixture_lines())


def _mixture_lines() -> list[tuple[str, str, str]]:
    row = max(record("h100/moe_model")["rows"], key=lambda row: row["sizes"]["layers"])
    tokens = row["sizes"]["batch"] * row["sizes"]["sequence"]
    names = {"ours": "`moe`", "XLA": "`lax.ragged_dot`", "parts": "`ragged_dot`, by parts"}
    return [
        (names.get(side, side), f"{tokens / row['seconds'][side]:,.0f}", size(row["bytes"][side]))
        if side in row["seconds"]
        else (names.get(side, side), "-", row["failures"][side])
        for side in ("ours", "XLA", "parts", "tokamax")
    ]


def _segment_calls() -> Iterator[str]:
    """Yield a section of each recorded call of segments."""
    found = record("h100/segments")
    yield f"\n## Segments\n\nThe times of each recorded call on an {found['device']}.\n"
    lines = (
        (row["name"], *(duration(row["seconds"][x]) for x in ("ours", "XLA")),
         _number(row["ratio"]["XLA"]))
        for row in found["rows"] if not row["group"].endswith("drawn at random")
    )  # fmt: skip
    yield from table(("call", "ours", "XLA", "XLA / ours"), lines)


_RUNS = {
    "tests": "default selection",
    "tests.large": "arrays of more than 2**31 elements",
    "tests.several": "several GPUs",
}


def _tests() -> Iterator[str]:
    lines = []
    for folder, title in DEVICES.items():
        for path in sorted((RESULTS / folder).glob("tests*.json")):
            found = json.loads(path.read_text())
            what = "several GPUs" if folder == "h100x2" else _RUNS[path.stem]
            counts = (f"{found['outcome'][key]:,}" for key in ("passed", "failed", "skipped"))
            link = f"[{what}](../benchmarks/results/{folder}/{path.name})"
            lines.append((title, link, found["date"][:10], *counts))
    return table(("device", "tests", "day", "passed", "failed", "skipped"), lines, text=3)


def _policy() -> Iterator[str]:
    lines = []
    for path in sorted(_DATA.glob("*.json")):
        content = json.loads(path.read_text())
        for operation, model in content["models"].items():
            unseen = model["unseen"]
            shares = (f"{unseen[name]:.0%}" for name in ("taken", "below_0.97"))
            found = (f"{unseen[name]:.2f}" for name in ("over_xla", "over_best", "worst"))
            lines.append((content["device"], operation, f"{unseen['pairs']:,}", *found, *shares))
    heads = ("device", "operation", "calls", "over XLA", "over the best", "worst")
    return table((*heads, "kernels taken", f"below {SLOWER}"), lines, text=2)


def fp8_accuracy() -> pd.DataFrame:
    return pd.DataFrame(record("amd-epyc/fp8_accuracy")["rows"])


def _fp8_errors() -> Iterator[str]:
    found = fp8_accuracy()
    measured = ["of_sums", "with_rounding"]
    lines = found[found.kind == "error"].pivot_table(
        index="product", columns="operands", values=measured, sort=False
    )
    ordered = lines[[(key, operands) for operands in ("normal", "spread") for key in measured]]
    heads = (
        DEVICES["amd-epyc"], "sums", "with quantisation", "sums, spread",
        "with quantisation, spread",
    )  # fmt: skip
    return table(heads, ((name, *(f"{x:.1e}" for x in xs)) for name, *xs in ordered.itertuples()))


# Operations.

# Types in the order of tables.
_TYPES = (
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64",
    "complex128", "int8", "uint8", "int16", "int32", "bool",
)  # fmt: skip
_CALLS = 200


def _operations() -> Iterator[str]:
    """Yield a line for each operation of what its descriptions draw."""
    variants: dict[str, list[Description]] = {}
    for name, description in DESCRIPTIONS.items():
        variants.setdefault(name.partition(",")[0], []).append(description)
    lines = []
    for name, descriptions in sorted(variants.items()):
        calls = [
            x.draw(Draw(np.random.default_rng(i))) for x in descriptions for i in range(_CALLS)
        ]
        types = {x.dtype.name for call in calls for x in call.operands if x.values is None}
        texts = " ".join(call.arguments for call in calls)
        precisions, results = (
            sorted(set(re.findall(rf"\b{option}=(\w+)", texts)))
            for option in ("precision", "preferred_element_type")
        )
        derivatives = max(x.derivatives for x in descriptions)
        lines.append((
            f"`{name}`", f"`{namesake(name)}`" if namesake(name) else "",
            ", ".join(x for x in _TYPES if x in types), ", ".join(precisions),
            ", ".join(x for x in _TYPES if x in results), ("none", "first", "second")[derivatives],
        ))  # fmt: skip
        assert types <= {*_TYPES}, types
    heads = ("operation", "JAX's", "types of operands", "`precision`", "`preferred_element_type`")
    yield from table((*heads, "derivatives"), lines, text=6)


# The ladder.


def _ideas(ladder: str) -> Iterator[str]:
    """Yield a line for each file of a ladder: its number and the idea that it adds."""
    files = {rung.source for problem in problems_of(ladder) for rung in problem.rungs}
    lines = (
        (f"[{file.rpartition('/')[2].partition('_')[0]}](../examples/ladder/{file})",
         first_sentence(file))
        for file in sorted(filter(None, files))
    )  # fmt: skip
    return table(("file", "idea"), lines, text=2)


def _times(ladder: str) -> Iterator[str]:
    """Yield a table of each problem's rungs; of several sizes, the largest."""
    found = record(f"h100/ladder/{ladder}")
    largest: dict[str, Problem] = {}
    for problem in problems_of(ladder):
        kind = re.sub(r"\b\d+(x\d+)*\b", "", problem.title)
        largest[kind] = max(largest.get(kind, problem), problem, key=lambda x: x.bytes)
    for i, problem in enumerate(largest.values()):
        rows = [row for row in found["rows"] if row["problem"] == problem.title]
        timed = [row for row in rows if "seconds" in row]
        lines = ((row["name"], *time_cells(found, problem, rows, row)) for row in timed)
        yield from [""] * bool(i)
        yield from table((problem.title, "time", "rate", "of ceiling"), lines)


_TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "devices": _devices,
    "fp8": _fp8_errors,
    "policy": _policy,
    "random": _random,
    "segments": _segment_calls,
    "speed": _speed,
    "start": _start,
    "mixture": _mixture,
    "operations": _operations,
    "tests": _tests,
    **{f"ideas_{name}": functools.partial(_ideas, name) for name in LADDERS},
    **{f"times_{name}": functools.partial(_times, name) for name in LADDERS},
}


def _number(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 2 else 1 if ratio < 10 else 0}f}"


# Figures.


def figures() -> dict[str, str]:
    """Return the drawings of ``docs``, by their files."""
    return {
        "overview.svg": plots.ratios(
            "XLA's time / our time, NVIDIA H100, jax 0.11.2 (right of 1: ours is faster)",
            _overview(),
        ),
        "fp8-training.svg": plots.curves(fp8_accuracy().query("kind == 'training'")),
        "muon-step.svg": plots.bars("Time of a step of Muon, 1.1 billion float32", _muon_steps()),
    }


def _overview() -> dict[str, dict[str, list[float]]]:
    """Return the ratios of an H100 by section and group."""
    found = recorded()
    found = found[found.device == "h100"]
    products = found[(found.record == "matmul")]
    grouped = found[(found.record == "ragged_dot") & (found.peer == "lax")]
    memory = ["transpose", "matvec", "vdot", "sum", "add"]
    small = found[found.record == "linalg"]

    def groups(frame: pd.DataFrame, names: Any) -> dict[str, list[float]]:
        return {key: x.tolist() for key, x in frame.groupby(names, sort=False).ratio}

    by_count = groups(grouped, grouped.label.str.extract(r"of (\d+) groups")[0].astype(int))
    return {
        "matmul": groups(products, products.label.str.replace("`matmul`: ", "")),
        "bound by memory": {x: found[found.record == x].ratio.tolist() for x in memory},
        "ragged_dot, against lax.ragged_dot (cuDNN 9.19)": {
            f"{count} groups": by_count[count] for count in sorted(by_count)
        },
        "linalg, 100,000 float32 matrices of 2x2 to 64x64": groups(
            small, small.label.str.extract("`(.*)`")[0]
        ),
    }


def _muon_steps() -> dict[str, dict[str, float]]:
    sides = {"XLA": "optax", "standard": 'ns="standard"', "ours": "jtk.muon"}

    def times(folder: str, name: str) -> dict[str, float]:
        row = next(row for row in record(f"{folder}/muon")["rows"] if row["name"] == name)
        return {text: row["seconds"][x] for x, text in sides.items() if x in row["seconds"]}

    return {
        "one H100": times("h100", "step"),
        "two H200, which share the rows of each matrix": times("h200x2", "step on 2 devices, rows"),
    }
