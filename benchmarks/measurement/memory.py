"""Memory of compiled programs."""

from __future__ import annotations

from typing import Any


def temporaries(program: Any) -> int:
    """Return the bytes of a compiled program's temporaries."""
    nbytes: int = program.memory_analysis().temp_size_in_bytes
    return nbytes
