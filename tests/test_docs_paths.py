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


DESIGN = (ROOT / "docs/design.md").read_text()
_FENCE = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Names of JAX and of packages that the design compares with, and parts of patterns.
NO_NAMES = {
    *("check_grads", "linearize", "find_nvidia_binary_utility", "load_nvidia_dynamic_lib"),
    *("pathfinder", "pyperf", "kernel_", "x256"),
}


def unknown_names(text, words):
    """What the code spans of a text name and no source has."""
    spans = re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
    named = {word for span in spans for word in re.findall(r"[A-Za-z_]\w+", span)}
    return named - words - NO_NAMES


@pytest.fixture(scope="module")
def words(known):
    folders = ("jax_tilekern/", "ffi/", "benchmarks/")
    suffixes = (".py", ".cc", ".h", ".cuh", ".inc", ".txt")
    ours = [path for path in known if path.startswith(folders) and path.endswith(suffixes)]
    sources = [ROOT / path for path in ours]
    found = {word for path in sources if path.is_file() for word in _WORD.findall(path.read_text())}
    return found | {Path(path).stem for path in known}


_WORD = re.compile(r"[A-Za-z_]\w+")


def test_names_of_code_in_the_design_exist(words):
    assert sorted(unknown_names(DESIGN, words)) == []
    assert unknown_names("`Shard.of_resultats` of `plan_matmul()`", words) == {"of_resultats"}


def test_files_and_functions_in_the_design_s_listings_exist(known, words):
    folders = {path for path in known if "." not in path.rpartition("/")[2]}
    listings = _FENCE.findall(DESIGN)
    assert len(listings) == 2
    for text in listings:
        for name in re.findall(r"(?<![\w/.])(?!jax\.)([\w/]+(?:\.\w+|\.\*|/))(?![\w*])", text):
            if name.endswith("/"):
                assert name.strip("/") in folders, name
            else:
                assert any(path.startswith(name.removesuffix("*")) for path in known), name
        assert set(re.findall(r"(\w+)\(", text)) <= words
