"""The tables of JAX's primitives: what translates each for a kernel of lanes, or why none does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jax_tilekern.ops.kernel.translation.text  # noqa: F401 - registers the rules
from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_elementwise
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation import complex_numbers, keys
from jax_tilekern.ops.kernel.translation.refusals import REASONS
from jax_tilekern.ops.kernel.translation.writer import RULES

# What JAX does not import itself.
_OTHERS = (
    "jax.experimental.checkify", "jax.export", "jax.extend.core.primitives", "jax.scipy.linalg",
    "jax.scipy.special",
)  # fmt: skip


# Modules that users import by themselves. Whether a process has them must not change the table.
_IMPORTED_BY_NAME = "pallas", "experimental", "xla_metadata"


def names() -> list[str]:
    """Return the names of all primitives of JAX itself, without those of Pallas."""
    for name in _OTHERS:
        importlib.import_module(name)
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("jax.") and not any(x in name for x in _IMPORTED_BY_NAME)
    ]
    values = (x for module in modules for x in list(vars(module).values()))
    return sorted({x.name for x in values if isinstance(x, compat.Primitive)})


def translator(name: str) -> str | None:
    """Return the module that translates a primitive, if one does."""
    if name in RULES:
        return RULES[name][0].__module__
    if name in INNER_JAXPR or is_elementwise(name):
        return is_elementwise.__module__
    modules = (x for x in (keys, complex_numbers) if name in x.translated())
    return next((x.__name__ for x in modules), None)


def primitives(kind: str) -> Iterator[str]:
    """Yield the lines of the table of those that are ``translated``, or ``refused``."""
    yield f"| {'translated as' if kind == 'translated' else 'not translated, as'} | primitives |"
    yield "|---|---|"
    found: dict[str, list[str]] = {}
    for name in names():
        module = translator(name)
        if (module is not None) == (kind == "translated"):
            found.setdefault(_title(module) if module else REASONS[name], []).append(f"`{name}`")
    for title in sorted(found):
        yield f"| {title} | {', '.join(found[title])} |"


def _title(module: str) -> str:
    """Return what a module says that it does, and a link to it."""
    path = f"{module.replace('.', '/')}.py"
    title = (sys.modules[module].__doc__ or "").split("\n")[0].partition(":")[0].rstrip(".")
    return f"{title} ([{Path(path).name}](../{path}))"
