"""Files that the pages name exist, and so do the names of code in the design."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "tests").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
]
_NAMED = re.compile(r"`((?:\w[\w-]*/)*[\w-]+\.(?:py|cuh|cu|h|cc|inc|md|toml|yml))`")
_FOLDERS = ("jax_tilekern", "ffi", "benchmarks", "docs", "examples", "tests")

# What is named as a file and is none of the repository's.
NO_FILES = {
    "atom.inc": "an instruction of PTX",
    "ops/x.py": "the operation that a guide adds",
    "plans/x.py": "the operation that a guide adds",
    "ffi/cuda/x.cuh": "the operation that a guide adds",
    "ffi/cpu/x.cc": "the operation that a guide adds",
}


def files():
    """The paths of the repository's files and folders, with each of their ends."""
    found = [*ROOT.glob("*"), *(x for folder in _FOLDERS for x in (ROOT / folder).rglob("*"))]
    return {
        "/".join(parts[start:])
        for parts in (path.relative_to(ROOT).parts for path in found)
        for start in range(len(parts))
    }


@pytest.fixture(scope="module")
def known():
    return files()


def test_files_that_a_page_names_exist(known):
    named = {(name, page.name) for page in PAGES for name in _NAMED.findall(page.read_text())}
    missing = {name for name, _ in named} - known - NO_FILES.keys()
    assert sorted(x for x in named if x[0] in missing) == []
