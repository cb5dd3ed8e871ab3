"""What a user imports is documented, where a module of the package has the same name."""

from __future__ import annotations

from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Let ``package.name`` be what ``__init__.py`` imports, as it is at run time."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace modules that an import of the same name hides."""
        for name in map(str, pkg.exports or ()):
            module = pkg.members[name]
            if pkg.imports.get(name) == f"{module.path}.{name}" and module.is_module:
                pkg.set_member(name, griffe.Alias(name, module.members[name], parent=pkg))
