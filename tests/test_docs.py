"""The guides' snippets run, in their order, and print what the guide says."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

from jax_tilekern.compiler import compile_source
from jax_tilekern.nvrtc import NvrtcNotFound, nvrtc

try:
    nvrtc()
except NvrtcNotFound as error:
    pytest.skip(str(error), allow_module_level=True)

DOCS = Path(__file__).parent.parent / "docs"
GUIDE = DOCS / "cuda-kernel.md"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADER = re.compile(r"^\| `<(tilekern/\w+\.cuh)>` \|.*\| (\w+) \|$", re.MULTILINE)


def snippets(text):
    """Each Python block: its line, its code, and what it prints where the guide says."""
    found = []
    for block in _BLOCK.finditer(text):
        if block[1] == "text":
            found[-1][2] = block[2]
        else:
            found.append([text[: block.start(2)].count("\n"), block[2], None])
    return found


def run_snippets(text, name):
    namespace = {"__name__": "guide"}
    for line, code, expected in snippets(text):
        printed = io.StringIO()
        # Empty lines in front, so that errors have the guide's own line numbers.
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, name, "exec"), namespace)
        if expected is not None:
            check = doctest.OutputChecker().check_output
            assert check(expected, printed.getvalue(), doctest.ELLIPSIS), (line, printed.getvalue())


@pytest.mark.parametrize("guide", [GUIDE, DOCS / "ragged-dot.md"], ids=lambda guide: guide.stem)
def test_snippets_of_the_guide_run(guide):
    text = guide.read_text()
    assert len(snippets(text)) >= 10
    run_snippets(text, str(guide))


@pytest.mark.parametrize("page", ["linalg", "strassen"])
def test_snippets_of_other_pages_run(page):
    text = (DOCS / f"{page}.md").read_text()
    assert snippets(text)
    run_snippets(text, page)


def test_examples_of_the_readme_run():
    text, tuning, _ = (DOCS.parent / "README.md").read_text().partition("## Tuning")
    assert tuning
    assert len(snippets(text)) == 3
    run_snippets(text, "README.md")


HEADERS = _HEADER.findall(GUIDE.read_text())
ARCHS = ("sm_80", "sm_90a", "sm_120")


def test_every_header_of_the_guide_is_looked_at():
    assert len(HEADERS) == GUIDE.read_text().count("| `<tilekern/")
    assert len(HEADERS) >= 9


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("header", "least"), HEADERS)
def test_headers_of_the_guide_compile_alone(header, least, debug):
    source = f"#include <{header}>\n__global__ void nothing() {{}}\n"
    options = ("-DTILEKERN_DEBUG",) if debug else ()
    for arch in ARCHS:
        # What ends in a letter is for that architecture only.
        if arch == least or (
            least[-1] != "a" and (least == "all" or number(arch) >= number(least))
        ):
            assert compile_source(source, ["nothing"], arch=arch, options=options).log == ""


def test_headers_of_the_guide_compile_together():
    source = "".join(f"#include <{header}>\n" for header, _ in HEADERS)
    source += '#include "types.cuh"\n__global__ void nothing() {}\n'
    assert compile_source(source, ["nothing"], arch="sm_90a").log == ""


def number(arch):
    return int(re.sub(r"\D", "", arch))
