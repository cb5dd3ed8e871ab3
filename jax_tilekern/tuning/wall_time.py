"""Wall time of calls until their results are ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

# Waits for every array in a result, and returns it. JAX's own function has no type annotations.
ready: Callable[[Any], Any] = jax.block_until_ready


def wall_seconds(run: Callable[[], Any]) -> float:
    """Return the seconds until every result of ``run()`` is ready."""
    start = time.perf_counter()
    ready(run())
    return time.perf_counter() - start


def repeated(call: Callable[[], Any], times: int) -> Any:
    """Call several times without waiting in between; return the last result."""
    for _ in range(times - 1):
        call()
    return call()
