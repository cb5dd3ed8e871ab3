"""Pages are written for the repository, as GitHub shows them, and become those of the site here.

They link to files outside of this folder, such as ``../examples/moe.py``. The site has a page of
each such source with its code highlighted, a copy of each record, and a page that lists each
folder. GitHub wants a bar in a table escaped also in code, where Python-Markdown shows the
backslash, and reads Markdown within HTML, which Python-Markdown does only where an attribute says
so.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
_DOCS = "docs/"
_SOURCES = "source/"
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {
    ".cc": "cpp", ".cu": "cuda", ".cuh": "cuda", ".in": "text", ".md": "markdown", ".py": "python",
    ".toml": "toml", ".txt": "cmake",
}  # fmt: skip
_PAGES = {
    "README.md": "index.md",
    "LICENSE": "source/LICENSE.md",
    "benchmarks/README.md": "performance/method.md",
    "benchmarks/results": "performance.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add every file beside this folder that a page links to."""
    files.append(_page_of(ROOT / "benchmarks/README.md", "performance/method.md", config))
    pending = [(file.content_string, _origin(file.src_uri)) for file in files.documentation_pages()]
    while pending:
        text, origin = pending.pop()
        for target, _ in _LINK.findall(_FENCE.sub("", text)):
            path = _repository_path(origin, target)
            uri = _site_uri(path)
            if files.get_file_from_path(uri) or path.startswith(_DOCS):
                continue
            source = ROOT / path
            if not source.exists():
                raise PluginError(f"{origin} links to {target}, which does not exist")
            if uri.endswith(".md"):
                files.append(page := _page_of(source, uri, config))
                pending.append((page.content_string, _origin(uri)))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Point links at the site's own pages and files, and write what Python-Markdown reads."""
    origin = _origin(page.file.src_uri)

    def relinked(match: re.Match[str]) -> str:
        uri = _site_uri(_repository_path(origin, match[1]))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + (
            match[2] or ""
        )

    def converted(text: str) -> str:
        text = text.replace("<details>", '<details markdown="1">')
        return _TABLE_ROW.sub(_bars_in_code, _LINK.sub(relinked, text))

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [converted(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, converted(markdown[end:])])


def _bars_in_code(row: re.Match[str]) -> str:
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _origin(uri: str) -> str:
    """Return where the text of a page lies in the repository, or would."""
    if uri.startswith(_SOURCES):
        return uri.removeprefix(_SOURCES)
    return {page: path for path, page in _PAGES.items() if path.endswith(".md")}.get(
        uri if uri != "index.md" else "", _DOCS + uri
    )


def _repository_path(origin: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _site_uri(path: str) -> str:
    """Return where the site has a file or a folder of the repository."""
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    if path in _PAGES:
        return _PAGES[path]
    if (ROOT / path).is_dir():
        has_readme = (ROOT / path / "README.md").exists()
        return _site_uri(f"{path}/README.md") if has_readme else f"{_SOURCES}{path}/index.md"
    if Path(path).suffix in _LANGUAGES:
        return f"{_SOURCES}{path}.md" if not path.endswith(".md") else f"{_SOURCES}{path}"
    return f"files/{path}"


def _page_of(source: Path, uri: str, config: Any) -> File:
    """Return a page with a file's text: as it is if that is markdown, else as code.

    That of a folder lists its files.
    """
    if source.is_dir():
        names = sorted(file.name for file in source.iterdir() if file.is_file())
        links = "".join(f"- [{name}]({name})\n" for name in names)
        return File.generated(config, uri, content=f"# {source.name}\n\n{links}")
    text = source.read_text()
    if source.suffix != ".md":
        name = source.relative_to(ROOT)
        language = _LANGUAGES.get(source.suffix, "text")
        text = f"# {source.name}\n\n`{name}`\n\n```{language}\n{text}```\n"
    return File.generated(config, uri, content=text)
