"""Make docs/ladder.md, its figures and its plots from the ladder's records.

    python docs/ladder/make_page.py

``page.md.in`` has the text; ``{{ ... }}`` in it is replaced by what a Python expression comes to.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Python searches the folder of a script for modules, and the benchmarks are a package of the root.
sys.path.append(str(HERE.parents[1]))

import claim
import claims_products
import claims_transpose
import expectations
import figures
import tables
from records import FOLDER, LADDERS, Records

from benchmarks.ladder import report
from jax_tilekern.cli.console import rate

PAGE = HERE.parent / "ladder.md"


def page(records: Records) -> str:
    """Return the page."""

    def ceiling(ladder: str) -> str:
        record = records[ladder]
        bounds = dict.fromkeys(problem["bound"] for problem in record["problems"])
        return " and ".join(
            f"a long {bound} at {rate(record[f'{bound}_bytes_per_second'], 'B')}"
            for bound in bounds
        )

    def counters(ladder: str) -> str:
        return "\n\n".join(
            f"<details><summary>Counters of the {problem['title']}</summary>\n\n"
            f"{tables.counters(records, ladder, problem)}\n\n</details>"
            for problem in records.problems(ladder)
        )

    namespace = {
        "PEAK": claim.PEAK,
        "PRODUCT": claim.PRODUCT,
        "claims": {
            "T": claims_transpose.T,
            "S": claims_transpose.S,
            "D": claims_products.D,
            "M": claims_products.M,
        },
        "rate": rate,
        "ceiling": ceiling,
        "counters": counters,
        "ideas": tables.ideas,
        "state": lambda: tables.state(records),
        "reuse": lambda: tables.reuse(records, claim.PRODUCT),
        "times": lambda *of: tables.times(records, *of),
        "table": lambda of: claim.table(of, records),
        "expectations": lambda ladder: expectations.table(ladder, records),
    }
    made = "<!-- Made by docs/ladder/make_page.py from page.md.in and the records. -->\n\n"
    text = (HERE / "page.md.in").read_text()
    # The template is a part of this program, so its expressions are evaluated as they are.
    return made + re.sub(r"{{ (.+?) }}", lambda found: str(eval(found[1], namespace)), text)


def main() -> None:
    """Write everything."""
    records = Records()
    PAGE.write_text(page(records))
    for name, drawing in figures.FIGURES.items():
        (HERE / f"{name}.svg").write_text(drawing())
    for ladder in LADDERS:
        report.plot(records[ladder], FOLDER / f"{ladder}.png")


if __name__ == "__main__":
    main()
