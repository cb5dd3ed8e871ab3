"""The snippets of a page: found in its text, run in their order, and compared with it.

``python tests/guides.py PAGE...`` runs pages as a user does, without the settings of the tests.
"""

import contextlib
import doctest
import io
import re
import sys
import traceback
from pathlib import Path
from unittest import mock

from jax_tilekern.compilation import nvrtc

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"^Needs (.*?)\n\n", re.MULTILINE | re.DOTALL)


def snippets(text):
    """Each Python block: its line, its code, and what the page says that it prints."""
    found = []
    for block in _BLOCK.finditer(text):
        if block[1] == "text":
            found[-1][2] = block[2]
        else:
            found.append([text[: block.start(2)].count("\n"), block[2], ""])
    return found


def needs(text):
    """What a page says above its first block that its snippets need."""
    found = _NEEDS.search(text.partition("```")[0])
    return found[1] if found else ""


def run_snippets(text, name):
    namespace = {"__name__": "guide"}
    for line, code, expected in snippets(text):
        printed = io.StringIO()
        # Empty lines in front, so that errors have the page's own line numbers.
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, name, "exec"), namespace)
        check = doctest.OutputChecker().check_output
        assert check(expected, printed.getvalue(), doctest.ELLIPSIS), (
            f"{name}:{line}: not as the page says:\n{printed.getvalue()}"
        )


def missing_nvrtc():
    raise nvrtc.NvrtcNotFound("the page does not say that it needs NVRTC")


def main(pages):
    """Run pages and return how many fail. NVRTC is hidden from pages that do not name it."""
    failed = 0
    for page in pages:
        text = Path(page).read_text()
        hidden = mock.patch.object(nvrtc, "_load", missing_nvrtc)
        try:
            with contextlib.nullcontext() if "NVRTC" in needs(text) else hidden:
                run_snippets(text, page)
        except Exception:
            traceback.print_exc()
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
