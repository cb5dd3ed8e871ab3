"""Imports of the package's folders point one way (docs/design.md, "Where things live")."""

import ast
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
# The same for the families of operations.
FAMILIES = [
    {"attention"},
    {"linalg", "kernel", "mixture", "cross_entropy"},
    {"muon", "cuda_kernel"},
    {"products"},
    {"quantisation", "segments", "selection", "scans", "convolution", "arrays"},
]


def _levels(layers):
    return {folder: level for level, folders in enumerate(layers) for folder in folders}


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


def _upward(folder, layers, package):
    level, found = _levels(layers), []
    for file in sorted(folder.rglob("*.py")):
        own = file.relative_to(folder).parts[0].removesuffix(".py")
        found += [
            f"{file.relative_to(PACKAGE)} imports {other}"
            for other in _imports(file, package)
            if own in level and other in level and level[other] < level[own]
        ]
    return found


def _folders(folder):
    return {x.name for x in folder.iterdir() if x.is_dir() and (x / "__init__.py").exists()}


def test_imports_point_one_way():
    assert not _upward(PACKAGE, LAYERS, "jax_tilekern")


def test_imports_of_families_point_one_way():
    assert not _upward(PACKAGE / "ops", FAMILIES, "jax_tilekern.ops")


def test_families_of_a_layer_do_not_import_each_other():
    level = _levels(FAMILIES)
    assert not [
        f"{file.relative_to(PACKAGE)} imports {other}"
        for family in level
        for file in sorted((PACKAGE / "ops" / family).rglob("*.py"))
        for other in _imports(file, "jax_tilekern.ops")
        if other != family and level.get(other) == level[family]
    ]


def test_every_folder_has_a_layer():
    assert _folders(PACKAGE) <= set(_levels(LAYERS))
    assert _folders(PACKAGE / "ops") == set(_levels(FAMILIES))
