"""Imports of the package's folders point one way (docs/design.md, "Where things live")."""

import ast
import graphlib
import math
from pathlib import Path

import jax_tilekern

PACKAGE = Path(jax_tilekern.__file__).parent

# A folder imports from itself and from the folders below it.
LAYERS = [
    {"cli"},
    {"tuning", "out_of_core", "linalg", "fusion"},
    {"ops"},
    {"primitives", "epilogue"},
    {"partitioning"},
    {"interop", "inspection"},
    {"plans"},
    {"compilation"},
]


def _imports(file, package="jax_tilekern"):
    """The folders of a package that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == package
                else [node.module]
            )
            for name in names:
                if name.startswith(f"{package}."):
                    yield name.removeprefix(f"{package}.").split(".")[0]


def _folders(folder):
    return {x.name for x in folder.iterdir() if x.is_dir() and (x / "__init__.py").exists()}


def test_imports_point_one_way():
    level = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}
    files = {file: file.relative_to(PACKAGE).parts[0] for file in sorted(PACKAGE.rglob("*.py"))}
    assert not [
        f"{file.relative_to(PACKAGE)} imports {other}"
        for file, own in files.items()
        for other in _imports(file)
        if level.get(other, math.inf) < level.get(own.removesuffix(".py"), -1)
    ]


def test_imports_of_families_point_one_way():
    ops = PACKAGE / "ops"
    graphlib.TopologicalSorter(
        {
            family: {
                other
                for file in (ops / family).rglob("*.py")
                for other in _imports(file, "jax_tilekern.ops")
                if other != family
            }
            for family in _folders(ops)
        }
    ).prepare()  # The error names a cycle.


def test_every_folder_has_a_layer():
    assert _folders(PACKAGE) <= set().union(*LAYERS)
