"""Imports of the package's folders point one way (docs/design.md, "Where things live")."""

import ast
from pathlib import Path

import jax_tilekern

PACKAGE = Path(jax_tilekern.__file__).parent

# A folder imports from itself and from the folders below it.
LAYERS = [
    {"cli"},
    {"tuning", "out_of_core", "linalg", "optimizers", "fusion"},
    {"ops"},
    {"primitives", "epilogue", "lanes"},
    {"partitioning"},
    {"interop", "inspection"},
    {"plans"},
    {"compilation"},
]
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}


def _imports(file):
    """The folders of the package that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "jax_tilekern"
                else [node.module]
            )
            for name in names:
                root, *rest = name.split(".")
                if root == "jax_tilekern" and rest[0] in LEVEL:
                    yield rest[0]


def test_imports_point_one_way():
    upward = []
    for file in sorted(PACKAGE.rglob("*.py")):
        folder = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if folder in LEVEL:
            upward += [
                f"{file.relative_to(PACKAGE)} imports {other}"
                for other in _imports(file)
                if LEVEL[other] < LEVEL[folder]
            ]
    assert not upward


def test_every_folder_has_a_layer():
    folders = {x.name for x in PACKAGE.iterdir() if x.is_dir() and (x / "__init__.py").exists()}
    assert folders <= set(LEVEL)
