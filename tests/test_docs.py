"""The snippets and commands of every page run as they do for a user, and print what it says."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compiled_text import compile_source
from guides import DOCS, needs, snippets
from nvrtc_mark import has_nvrtc, needs_nvrtc

import benchmarks.command_line
import jax_tilekern.cli

ROOT = DOCS.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "tests/README.md",
        ROOT / "benchmarks/README.md",
        *sorted(DOCS.rglob("*.md")),
    )
}
# Their blocks are quotations of files, which test_arrays.py and test_kernel_apis.py compare.
QUOTATIONS = {"docs/add-an-operation.md", "docs/kernel-apis.md"}
RUN = {
    name: needs(text) for name, text in PAGES.items() if snippets(text) and name not in QUOTATIONS
}


def imported(name):
    """The packages that a page's snippets import."""
    trees = (ast.parse(code) for _, code, _ in snippets(PAGES[name]))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {
        module.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    } - sys.stdlib_module_names


def groups():
    """Pages that need the same; the README's default selection is a group of its own."""
    found = {}
    for name, needed in RUN.items():
        found.setdefault((name == "README.md", needed), []).append(name)
    return [
        pytest.param(needed, names, id=names[0], marks=() if readme else pytest.mark.thorough)
        for (readme, needed), names in found.items()
    ]


@pytest.mark.parametrize(("needed", "names"), groups())
def test_snippets_run_at_the_settings_of_a_user(needed, names, tmp_path):
    """In a process without this suite's fixtures and flags, with the flags that the page names."""
    if "NVRTC" in needed and not has_nvrtc:
        pytest.skip("no NVRTC")
    if "NVIDIA GPU" in needed and jax.default_backend() != "gpu":
        pytest.skip("no GPU")
    for package in set().union(*map(imported, names)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"no {package}")
    flags = re.findall(r"`XLA_FLAGS=(\S+)`", needed)
    environment = os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        # Outputs are those of a CPU. A cached kernel would need no NVRTC, and no choice is tuned.
        "JAX_PLATFORMS": "cuda,cpu" if "GPU" in needed else "cpu",
        "XDG_DATA_HOME": str(tmp_path),
    }
    if "NVRTC" not in needed:
        environment["XDG_CACHE_HOME"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("guides.py"), *(ROOT / name for name in names)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_a_page_names_what_its_snippets_import():
    for name, needed in RUN.items():
        for package in imported(name) - {"jax", "jax_tilekern", "numpy"}:
            assert f"`{package}`" in needed, f"{name} imports {package}"


PROGRAMS = {"jax_tilekern": jax_tilekern.cli, "benchmarks": benchmarks.command_line}
_COMMAND = re.compile(
    rf"(?:(?<=`)|^(?: {{4}})?)[^`\n]*?python -m ({'|'.join(PROGRAMS)})((?: [^`#&\n]*)?)",
    re.MULTILINE,
)
# What stands for a number, a file or an operation.
_PLACEHOLDERS = {
    r"<(cpu|device)>": "h100",
    r"\b[IJMNS]\b": "1",
    r"<operation>|OPERATION|COMMAND": "transpose",
    r"[][<>]|\.\.\.": "",
}


def commands():
    """Each command of a page: the page, the program and its arguments."""
    for name, text in PAGES.items():
        for program, arguments in _COMMAND.findall(text.replace("\\\n", " ")):
            for placeholder, instead in _PLACEHOLDERS.items():
                arguments = re.sub(placeholder, instead, arguments)
            yield name, program, shlex.split(arguments)


def test_commands_of_pages_are_those_of_the_programs(monkeypatch):
    """Their arguments are parsed, and nothing else is run."""
    for program in PROGRAMS.values():
        for command in program._COMMANDS.values():
            monkeypatch.setattr(command, "run", lambda arguments: 0)
    found = [(name, program, words) for name, program, words in commands() if words]
    assert len(found) > 30
    for name, program, words in found:
        print(f"{name}: python -m {program} {shlex.join(words)}")  # shown if it is refused
        if len(words) == 1:  # a name in a sentence
            assert words[0] in PROGRAMS[program]._COMMANDS
        else:
            assert PROGRAMS[program].main(words) == 0


GUIDE = PAGES["docs/cuda-kernel.md"]
HEADERS = re.findall(r"^\| `<(tilekern/\w+\.cuh)>` \|.*\| (\w+) \|$", GUIDE, re.MULTILINE)
ARCHS = ("sm_80", "sm_90a", "sm_120a")


@needs_nvrtc
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


def number(arch):
    return int(re.sub(r"\D", "", arch))
