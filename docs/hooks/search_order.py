"""What the search finds: guides and stories, then the reference; no records, logs, sources."""

from __future__ import annotations

from typing import Any

_EXCLUDED = ("ladder.md", "performance/", "source/", "tuning-log.md")
_OF_DEVELOPERS = ("CONTRIBUTING.md", "add-an-operation.md", "design.md", "testing.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Set how the search treats a page."""
    page.meta["search"] = search(page.file.src_uri)


def search(uri: str) -> dict[str, Any]:
    """Return the metadata that Material's search reads."""
    if uri.startswith(_EXCLUDED):
        return {"exclude": True}
    guide = uri.startswith("stories/") or ("/" not in uri and uri not in _OF_DEVELOPERS)
    return {"boost": 2 if guide else 1}
