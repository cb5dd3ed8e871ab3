"""Names that docstrings mark with a role, such as ``:func:`jax_tilekern.matmul```, become links."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):<code>~?([\w.]+)</code>")
_SEE_ALSO = re.compile(r'(?<=<details class="see-also" open>).*?(?=</details>)', re.DOTALL)
_SEEN = re.compile(r"(?<=<p>)([\w.]+) : |(?<=\n)([\w.]+) : ")


def on_page_content(html: str, **_: Any) -> str:
    """Link names of this library, and show all others as code."""
    html = _SEE_ALSO.sub(lambda section: _SEEN.sub(_seen, section[0]), html)
    return _ROLE.sub(lambda match: _reference(match[1]), html)


def _seen(match: re.Match[str]) -> str:
    return f"{_reference(match[1] or match[2])}: "


def _reference(name: str) -> str:
    # Names without a package are this library's. Unlike JAX's own, they are found on a page.
    full = name if name.startswith(("jax", "numpy")) else f"jax_tilekern.{name}"
    return f'<autoref identifier="{full}" optional><code>{name}</code></autoref>'
