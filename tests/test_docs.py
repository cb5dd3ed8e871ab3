"""The guides' snippets run, in their order, and print what the guide says."""

from __future__ import annotations

import re

import jax
import pytest
from guides import DOCS, run_snippets, snippets

from jax_tilekern.compilation.compiler import compile_source
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc

try:
    nvrtc()
except NvrtcNotFound as error:
    pytest.skip(str(error), allow_module_level=True)

GUIDE = DOCS / "cuda-kernel.md"
SHARDING = DOCS / "sharding.md"
_HEADER = re.compile(r"^\| `<(tilekern/\w+\.cuh)>` \|.*\| (\w+) \|$", re.MULTILINE)


@pytest.mark.parametrize("guide", [GUIDE, DOCS / "ragged-dot.md"], ids=lambda guide: guide.stem)
@pytest.mark.thorough
def test_snippets_of_the_guide_run(guide):
    text = guide.read_text()
    assert len(snippets(text)) >= 10
    run_snippets(text, str(guide))


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="four devices")
@pytest.mark.thorough
def test_snippets_about_sharding_run():
    text = SHARDING.read_text()
    assert len(snippets(text)) == 5
    run_snippets(text, str(SHARDING))


@pytest.mark.parametrize(
    "page", ["getting-started", "epilogues", "linalg", "linear-cross-entropy", "strassen"]
)
@pytest.mark.thorough
def test_snippets_of_other_pages_run(page):
    text = (DOCS / f"{page}.md").read_text()
    assert snippets(text)
    run_snippets(text, page)


def test_examples_of_the_readme_run():
    text = (DOCS.parent / "README.md").read_text()
    assert len(snippets(text)) == 3
    run_snippets(text, "README.md")


HEADERS = _HEADER.findall(GUIDE.read_text())
ARCHS = ("sm_80", "sm_90a", "sm_120")


def test_every_header_of_the_guide_is_looked_at():
    assert len(HEADERS) == GUIDE.read_text().count("| `<tilekern/")
    assert len(HEADERS) >= 9


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("header", "least"), HEADERS)
@pytest.mark.one_in(2)
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
