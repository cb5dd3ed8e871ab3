"""Print the commands of ``gpu_*.py``, one a line: a script's ``PARTS`` are the arguments of each.

commands.py [tool]    those that the tool of compute-sanitizer runs
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# racecheck reports products with scales of columns: reads of scales, and the bulk copy to their
# stage when the ring of stages comes round. An mbarrier is between them, and its report is the same
# with a barrier of all reading threads before the arrival. It reports tiles that are claimed, too,
# when the ring of their slots comes round, and statistics of rows in the gradient of attention,
# also with such a barrier. The emulator finds an early release of each.
REPORTED_BY_RACECHECK = {"gpu_fp8.py products", "gpu_symmetric.py claimed", "gpu_attention.py"}


def commands(tool: str = "") -> list[str]:
    """Return the scripts with their arguments, as shell words."""
    found = [
        f"{file.name} {part}".rstrip()
        for file in sorted(Path(__file__).parent.glob("gpu_*.py"))
        for part in getattr(importlib.import_module(file.stem), "PARTS", [""])
    ]
    assert set(found) >= REPORTED_BY_RACECHECK
    return [x for x in found if tool != "racecheck" or x not in REPORTED_BY_RACECHECK]


if __name__ == "__main__":
    for command in commands(*sys.argv[1:]):
        print(f"tests/sanitize/{command}")
