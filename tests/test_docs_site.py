"""The documentation site: every public name, every page, and drawings as the records have them."""

from __future__ import annotations

import importlib
import inspect
import re

import jax
import pytest
from guides import DOCS

pandas = pytest.importorskip("pandas")
tables = pytest.importorskip("benchmarks.tables", reason="pandas and matplotlib are missing")

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


def test_every_public_name_has_a_docstring_of_its_own():
    for full_name in set(public_names()) - WITHOUT_DOCSTRING:
        module, _, name = full_name.rpartition(".")
        docstring = vars(importlib.import_module(module))[name].__doc__
        assert docstring, full_name
        # What a class inherits, or a dataclass is given.
        assert not docstring.startswith(f"{name}("), full_name


def test_figures_are_those_of_the_records():
    for name, figure in tables.figures().items():
        assert texts(figure) == texts((DOCS / name).read_text())


def texts(figure):
    """The labels and numbers of a drawing, whose lines differ between versions of matplotlib."""
    return re.findall(r">([^<>]+)</(?:text|tspan)>", figure)


def test_every_page_is_in_the_navigation():
    configuration = (ROOT / "mkdocs.yml").read_text()
    navigation = re.search(r"^nav:\n(.*?)^\w", configuration, re.MULTILINE | re.DOTALL)[1]
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))
    generated = {"performance/method.md"}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == pages | generated


def test_the_search_finds_names_without_their_modules():
    configuration = (ROOT / "mkdocs.yml").read_text()
    separator = re.search(r"separator: '(.*)'}", configuration)[1]
    words = re.split(separator, "jax_tilekern.strict(*) and jax.custom_vjp, `shard_map`: 2.5 times")
    assert {"strict", "custom_vjp", "shard_map", "2.5"} <= set(words)


def test_files_that_a_page_links_to_exist():
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text):
            assert (page.parent / link).exists(), (page, link)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_records(page):
    if page.name == "primitives.md" and f"jax {jax.__version__}." not in page.read_text():
        pytest.skip("the page has the primitives of another version of JAX")
    text = page.read_text()
    assert text == tables.with_tables(text), f"python -m benchmarks tables writes {page.name}"


def test_random_calls_are_of_the_newest_sources_of_each_operation():
    def lines(name, day, *rows):
        found = {"date": f"2026-11-{day}", "source_digests": {"library": day}, "rows": rows}
        return tables.frame_lines(f"h100/{name}", found)

    # Rows of `sample` have a group, and rows of `regret` candidates.
    top_k = {"name": "top_k 1/0", "group": "`top_k`", "ratio": {"XLA": 2.0}}
    qr = {"name": "qr 1/0", "group": "`linalg.qr`", "ratio": {"XLA": 3.0}}
    product = {"name": "0", "microseconds": {"xla": 4.0, "wgmma": 1.0}, "chosen": "wgmma"}
    records = (
        lines("samples/top_k-1", "20", top_k),
        lines("samples/both-3", "21", top_k | {"ratio": {"XLA": 5.0}}, qr),
        lines("regret/matmul-1", "22", product),
    )
    found = tables.newest(pandas.DataFrame([line for lines in records for line in lines]))
    assert dict(zip(found.label, found.ratio, strict=True)) == {
        "`top_k`": 5.0, "`linalg.qr`": 3.0, "`matmul`": 4.0,
    }  # fmt: skip
    assert len(found) == 3
