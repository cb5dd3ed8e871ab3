"""The documentation site: every public name, every page, and drawings as the records have them."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys

import pytest
from guides import DOCS

import jax_tilekern

ROOT = DOCS.parent
MODULES = (
    "jax_tilekern",
    "jax_tilekern.linalg",
    "jax_tilekern.out_of_core",
    "jax_tilekern.tuning",
)
REFERENCE = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))
# A directive, or a heading of what has no docstring of its own.
DOCUMENTED = set(re.findall(r"^(?::::|###) `?([\w.]+)", REFERENCE, re.MULTILINE))
WITHOUT_DOCSTRING = {"jax_tilekern.FFI_TARGETS", "jax_tilekern.checkpoint_policies"}


def public_names():
    """Return the full name of each public function, class and constant; modules have pages."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if not inspect.ismodule(getattr(importlib.import_module(module), name))
        or name == "checkpoint_policies"
    ]


def test_every_public_name_is_on_a_reference_page():
    names = public_names()
    assert len(names) > 45
    assert set(names) == DOCUMENTED


@pytest.mark.parametrize("name", sorted(set(public_names()) - WITHOUT_DOCSTRING))
def test_every_public_name_has_a_docstring_of_its_own(name):
    module, _, name = name.rpartition(".")
    docstring = vars(importlib.import_module(module))[name].__doc__
    assert docstring
    # What a class inherits, or a dataclass is given.
    assert not docstring.startswith(f"{name}(")


def test_every_page_is_in_the_navigation():
    configuration = (ROOT / "mkdocs.yml").read_text()
    navigation = re.search(r"^nav:\n(.*?)^\w", configuration, re.MULTILINE | re.DOTALL)[1]
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))
    generated = {f"performance/{path.name}.md" for path in results()} | {"performance/method.md"}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages | generated


def results():
    return [path for path in (ROOT / "benchmarks/results").iterdir() if path.is_dir()]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=str)
def test_files_that_a_page_links_to_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link


@pytest.fixture
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    # Not the benchmarks of another package.
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_overview_is_drawn_from_the_records(from_the_root):
    # `python -m benchmarks overview` makes it.
    drawing = importlib.import_module("benchmarks.overview").overview()
    assert drawing == (DOCS / "overview.svg").read_text()


def test_a_drawing_shows_each_ratio_and_its_mean(from_the_root):
    plot = importlib.import_module("benchmarks.records.ratio_plot")
    drawing = plot.ratio_plot(
        "title", "axis", [("heading", [plot.Group("a", [0.5, 2, 4]), plot.Group("b", [0.9])])]
    )
    assert drawing.count("<circle") == 3 + 1 + 2
    assert "1.59 (0.50 to 4.00)" in drawing
    assert ">0.90</text>" in drawing
    assert drawing.count('class="row loss"') == 2
    assert drawing.count('class="row win"') == 2
    # Each mark on the axis, 0.5 at the left end and 5 at the right.
    assert re.findall(r">([\d.]+)</text>\n(?=<text class=\"small\"|</svg>)", drawing)[-4:] == [
        "0.5", "1", "2", "5",
    ]  # fmt: skip


def test_the_readme_names_what_it_compares_with():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 170
    assert "jax 0.11.2" in text
    assert "cuDNN 9.19" in text
    for name in jax_tilekern.__all__:
        if name.islower() and callable(getattr(jax_tilekern, name)) and name != "cxx_type":
            assert f"`{name}`" in text, name


# Ratios that pages quote are those of the records.


def rows(record):
    return json.loads((ROOT / "benchmarks/results" / f"{record}.json").read_text())["rows"]


def ratio(row, peer=None):
    seconds = row["others"][peer].get("seconds") if peer else row["seconds"]
    return seconds and seconds["ratio"]["median"]


def spread(values, digits):
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def grouped(count, peer=None):
    found = [row for row in rows("h100/ragged_dot") if row["sizes"]["g"] == count]
    return [value for row in found if (value := ratio(row, peer))]


def of_group(operation, group):
    return [ratio(row) for row in rows(f"h100/{operation}") if row["group"] == group]


def worst(sample):
    found = rows(sample)
    return min(ratio(row) for row in found if "seconds" in row)


def sharded(of_ragged_dot):
    found = rows("h100x2/sharded")
    return [row["ratio"] for row in found if ("ragged_dot" in row["group"]) == of_ragged_dot]


QUOTED = {
    "`ragged_dot` of 128 experts against": lambda: spread(grouped(128, "lax"), 0),
    "the same of 8 large experts": lambda: " to ".join(
        (f"{min(grouped(8, 'lax')):.1f}", f"{max(grouped(8, 'lax')):.0f}")
    ),
    "`inv`, `solve`, `cholesky`": lambda: " to ".join(
        f"{end(map(ratio, rows('h100/linalg'))):.{digits}f}" for end, digits in ((min, 1), (max, 0))
    ),
    "`inv` of one float32 matrix": lambda: "; ".join(
        spread(
            [
                ratio(row)
                for row in rows(f"{device}/linalg_large")
                if row["operation"] in operations and row["type"] == dtype
            ],
            1,
        )
        for device, operations, dtype in (
            ("h100", ("inv",), "float32"),
            ("h100", ("solve",), "float32"),
            ("h100", ("cholesky",), "float32"),
            ("h100", ("inv", "solve"), "float64"),
        )
    ),
    "float32 products at": lambda: spread(of_group("matmul", "float32"), 1),
    "16-bit products of odd": lambda: spread(of_group("matmul", "16-bit odd"), 1),
    "8-bit products that are not": lambda: spread(of_group("matmul", "8-bit other orders"), 1),
    "transposes of odd": lambda: "; ".join(
        spread(of_group("transpose", group), 1) for group in ("odd", "colors")
    ),
    "large aligned 16-bit": lambda: spread(of_group("matmul", "16-bit large"), 2),
    "`ragged_dot` against one dense": lambda: "; ".join(
        spread(grouped(count), 2) for count in (8, 128)
    ),
    "8-bit products, both": lambda: spread(of_group("matmul", "8-bit K-major"), 2),
    "200 products drawn at random": lambda: "; ".join(
        f"from {worst(x):.2f}" for x in ("h100/samples/matmul-25", "h200/samples/matmul-21")
    ),
    "48 to 60 random calls each": lambda: (
        "from "
        + ", ".join(
            f"{worst(f'h100/samples/{name}-25'):.2f}"
            for name in ("transpose", "matvec", "sum", "vdot", "add")
        )
    ),
    "dense products with collectives": lambda: spread(sharded(False), 2),
    "`ragged_dot` of 64 experts on 2": lambda: "; ".join(
        spread([r for r in sharded(True) if (r > 0.5) == alone], 2) for alone in (True, False)
    ),
}


@pytest.mark.parametrize("row", QUOTED)
def test_ratios_of_the_readme_are_those_of_the_records(row):
    text = (ROOT / "README.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {row}"))
    assert line.split(" | ")[-1].removesuffix(" |") == QUOTED[row]()


SPLITS = ("balanced", "multinomial", "zipf")
GROUPED_ROWS = {
    "8 experts 4096 to 14336, 8,192 rows: forward": "bf16 8x4096x14336 {}",
    "128 experts 2048 to 1536, 65,536 rows: forward": "bf16 128x2048x1536 {}",
    "a gated layer of 8 experts, forward": "bf16 8x4096x14336 {} layer",
    "of 128 experts, forward": "bf16 128x2048x1536 {} layer",
}


@pytest.mark.parametrize("row", GROUPED_ROWS)
def test_ratios_of_grouped_gemms_are_those_of_the_records(row):
    """Each line of the page, and those of its gradients below it."""
    lines = (DOCS / "performance.md").read_text().splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {row} |"))
    layer = GROUPED_ROWS[row].endswith("layer")
    found = {found["name"]: found for found in rows("h100/ragged_dot")}
    parts = ("", ", gradients") if layer else ("", " dx", " dw")
    for line, what in zip(lines[start:], parts, strict=False):
        of_splits = [found.get(GROUPED_ROWS[row].format(split) + what) for split in SPLITS]
        _, dense, lax, tokamax = line.strip("| ").split(" | ")
        assert dense == " / ".join(f"{ratio(one):.2f}" if one else "-" for one in of_splits)
        measured = [one for one in of_splits if one]
        for quoted, peer in ((lax, "lax"), (tokamax, "tokamax")):
            values = [ratio(one, peer) for one in measured]
            if None in values:
                assert quoted == "(out of memory)"
            else:
                assert quoted == spread(values, 0 if min(values) > 20 else 1)
