"""Random calls of described operations by kernels on the GPU, under compute-sanitizer.

    gpu_calls.py operation ...

See ``.ci/sanitize``, and ``benchmarks/catalog`` for the operations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import fuzz

from benchmarks.catalog import FAMILIES

# Each operation is called so often.
CALLS = 30
# These families have scripts of their own, or run kernels that the others' scripts do.
OTHERS = {
    "attention", "cuda_kernel", "epilogues", "grouped", "lanes", "linalg", "mixture", "optimisers",
    "products", "quantised",
}  # fmt: skip
PARTS = [
    f"'{description.name}'"
    for family, descriptions in FAMILIES.items()
    for description in descriptions
    if family not in OTHERS or description.name.endswith(", weights")
]


def check_calls(name: str) -> int:
    """Run calls of an operation; return how many were wrong."""
    found = list(fuzz.outcomes(np.random.default_rng(0), CALLS, [name], policy="kernels"))
    wrong = [outcome for outcome in found if outcome.failed and outcome.known is None]
    print(f"{name}: {len(found)} calls, {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(sum(map(check_calls, sys.argv[1:])) > 0)
