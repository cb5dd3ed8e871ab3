"""The problem of the largest elements of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# The most elements whose order fits shared memory beside the counts.
MAX_K = 2048


@dataclass(frozen=True)
class TopK:
    """The ``k`` largest elements of each row."""

    rows: int
    columns: int
    k: int
    dtype: np.dtype[Any]
