"""Lists of what there is, of which pages have tables: operations, their families, and programs.

Nothing is listed here: names, imports, docstrings and the descriptions of the catalog are read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog import DESCRIPTIONS, NOT_OPERATIONS
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import namesake
from benchmarks.report import table

_ROOT = Path(__file__).parent.parent
_PACKAGE = _ROOT / "jax_tilekern"
# Types in the order of tables.
_TYPES = (
    "float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "complex64",
    "complex128", "int8", "uint8", "int16", "uint16", "int32", "uint32", "bool",
)  # fmt: skip
_CALLS = 200


def public() -> set[str]:
    """Return the operations: the public functions, but for those that compute nothing."""
    modules = {"": jtk, "linalg.": jtk.linalg, "out_of_core.": jtk.out_of_core}
    names = {prefix + name for prefix, module in modules.items() for name in module.__all__}
    functions = {x for x in names if callable(function(x)) and not inspect.isclass(function(x))}
    return functions - NOT_OPERATIONS


def function(name: str) -> Any:
    """Return a public function by its name, such as ``linalg.inv``."""
    return operator.attrgetter(name)(jtk)


@functools.cache
def variants() -> dict[str, list[Any]]:
    """Return the descriptions of each operation."""
    found: dict[str, list[Any]] = {}
    for name, description in DESCRIPTIONS.items():
        found.setdefault(name.partition(",")[0], []).append(description)
    return found


@functools.cache
def pages() -> dict[str, str]:
    """Return the pages of the reference by the names that they have, in the site's order."""
    order = re.findall(r"reference/([\w-]+\.md)$", (_ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    texts = {page: (_ROOT / "docs/reference" / page).read_text() for page in order}
    directive = re.compile(r"^::: jax_tilekern\.([\w.]+)", re.MULTILINE)
    return {name: page for page, text in texts.items() for name in directive.findall(text)}


def pages_of_operations() -> dict[str, str]:
    return {name: page for name, page in pages().items() if name in variants()}


def _folder(name: str) -> str:
    """Return the folder of an operation's code in the package."""
    _, *folders, _ = function(name).__module__.split(".")
    return "/".join(folders[: 1 + (folders[0] == "ops")])


@functools.cache
def _imports(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Return other families that a folder imports, plans with CUDA kernels, and CPU handlers."""
    text = "".join(file.read_text() for file in (_PACKAGE / folder).rglob("*.py"))
    families, plans = (
        sorted(set(re.findall(rf"^ *from jax_tilekern\.{x}\.(\w+)", text, re.MULTILINE)))
        for x in ("ops", "plans")
    )
    cuda, handlers = _ROOT / "ffi/cuda", set(re.findall(r"\bffi\.CPU_(\w+)", text))
    return (
        [x for x in families if (_PACKAGE / "ops" / x).is_dir() and f"ops/{x}" != folder],
        [x for x in plans if (cuda / x).is_dir() or (cuda / f"{x}.cuh").exists()],
        sorted(x.lower() for x in handlers),
    )


def _platforms(folder: str) -> set[str]:
    """Return the platforms that a folder has kernels for, or a family that it imports."""
    families, plans, handlers = _imports(folder)
    own = {"CPU" for _ in handlers} | {"CUDA" for _ in plans}
    return own.union(*(_platforms(f"ops/{x}") for x in families))


# Tables.


def families() -> Iterator[str]:
    """Yield a line for each family of operations: these, and what its files import."""
    cells = [
        (f"`{folder.removeprefix('ops/')}`", *map(_code, ([*names], *_imports(folder))))
        for folder, names in itertools.groupby(sorted(pages_of_operations(), key=_folder), _folder)
        if folder.startswith("ops/")
    ]
    heads = ("family", "operations", "other families", "plans and CUDA kernels", "CPU handlers")
    return table(heads, cells, text=5)


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def operations() -> Iterator[str]:
    """Yield a line for each operation: its page, docstring, and the platforms with kernels."""
    cells = (
        (f"[`{name}`]({page})", _summary(inspect.getdoc(function(name))),
         ", ".join(sorted(_platforms(_folder(name)))))
        for name, page in pages_of_operations().items()
    )  # fmt: skip
    return table(("operation", "", "kernels"), cells, text=3)


def _summary(docstring: str | None) -> str:
    """Return the first paragraph of a docstring as markdown."""
    text = " ".join((docstring or "").partition("\n\n")[0].split())
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").removesuffix(".")


def programs() -> Iterator[str]:
    """Yield a line for each module of the benchmarks: the first paragraph of its docstring."""
    folder = Path(__file__).parent
    files = {x.name: x for x in folder.glob("[!_]*.py")}
    files |= {f"{x.parent.name}/": x for x in folder.glob("*/__init__.py")}
    docstrings = {name: ast.get_docstring(ast.parse(files[name].read_text())) for name in files}
    cells = ((f"`{name}`", _summary(docstrings[name])) for name in sorted(files))
    return table(("file", ""), cells, text=2)


def types() -> Iterator[str]:
    """Yield a line for each operation of what its descriptions draw."""
    cells = []
    for name, described in sorted(variants().items()):
        calls = [x.draw(Draw(np.random.default_rng(i))) for x in described for i in range(_CALLS)]
        drawn = {x.dtype.name for call in calls for x in call.operands if x.values is None}
        texts = " ".join(call.arguments for call in calls)
        precisions = set(re.findall(r"\bprecision=(\w+)", texts))
        results = set(re.findall(r"\bpreferred_element_type=(\w+)", texts)) & {*_TYPES}
        derivatives = ("none", "first", "second")[max(x.derivatives for x in described)]
        cells.append((
            f"`{name}`", f"`{namesake(name)}`" if namesake(name) else "",
            ", ".join(sorted(drawn, key=_TYPES.index)), ", ".join(sorted(precisions)),
            ", ".join(sorted(results, key=_TYPES.index)), derivatives,
        ))  # fmt: skip
    heads = ("operation", "JAX's", "types of operands", "`precision`", "`preferred_element_type`")
    return table((*heads, "derivatives"), cells, text=6)
