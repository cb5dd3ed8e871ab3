"""The platform for which a call is lowered, which its reference may take into account."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

# Part of the key under which JAX keeps what it has traced.
_platform = jax.make_user_context("")


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Trace references for a platform."""
    with _platform(platform):
        yield


def lowering_platform() -> str:
    """Return the platform for which a reference is traced, or an empty string."""
    platform: str = _platform.value
    return platform
