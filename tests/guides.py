"""The snippets of a guide: found in its text, run in their order, and compared with it."""

import contextlib
import doctest
import io
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(text):
    """Each Python block: its line, its code, and what it prints where the guide says."""
    found = []
    for block in _BLOCK.finditer(text):
        if block[1] == "text":
            found[-1][2] = block[2]
        else:
            found.append([text[: block.start(2)].count("\n"), block[2], None])
    return found


def run_snippets(text, name):
    namespace = {"__name__": "guide"}
    for line, code, expected in snippets(text):
        printed = io.StringIO()
        # Empty lines in front, so that errors have the guide's own line numbers.
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, name, "exec"), namespace)
        if expected is not None:
            check = doctest.OutputChecker().check_output
            assert check(expected, printed.getvalue(), doctest.ELLIPSIS), (line, printed.getvalue())
