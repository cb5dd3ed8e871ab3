"""The library's strict mode, and its log.

The logger ``jax_tilekern`` reports at INFO each call that falls back to XLA's own operation, and
each kernel that is compiled or read from the kernel cache (``compiler.py``).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import warnings
from collections.abc import Iterator

from jax_tilekern.plans.policy import current_policy
from jax_tilekern.scope import Setting, scoped

logger = logging.getLogger("jax_tilekern")


class FallbackError(RuntimeError):
    """Inside :func:`strict`: no kernel covers a call, so XLA's own operation would compute it."""


class _Mode(enum.Enum):
    DEFAULT = enum.auto()
    STRICT_COMPILATION = enum.auto()
    STRICT = enum.auto()


_mode = Setting("mode", _Mode.DEFAULT)


@scoped
def strict(*, allow_fallbacks: bool = False) -> Iterator[None]:
    """Raise an error where a kernel cannot be compiled, or where there is none for a call.

    Outside of it, a kernel that cannot be compiled is a warning, and XLA's own operation runs.
    Holds for the current thread.

    Parameters
    ----------
    allow_fallbacks
        Whether calls that no kernel covers may fall back to XLA's own operation.

    Raises
    ------
    FallbackError
        While a function is traced or lowered: a call falls back, for the reason in the message.
    CompileError
        While a function is lowered: a kernel cannot be compiled. The message has the compiler's
        log.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> with jtk.strict():
    ...     product = jax.jit(jtk.matmul)(jnp.ones((64, 64)), jnp.ones((64, 64)))
    """
    with _mode(_Mode.STRICT_COMPILATION if allow_fallbacks else _Mode.STRICT):
        yield


def current() -> str:
    """Return the mode by a name that :func:`entered` takes, also in another process."""
    return _mode.value.name


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Enter a mode of :func:`current`; ``DEFAULT`` is the mode outside every context."""
    with _mode(_Mode[name]):
        yield


def note_fallback(call: str, reason: str, platform: str | None = None) -> None:
    """Report that XLA's own operation computes a call, which :func:`strict` forbids.

    Without a platform it does so on every one.

    Raises
    ------
    FallbackError
        Inside :func:`strict`, unless it allows fallbacks.
    """
    where = "" if platform is None else f" on {platform}"
    logger.info("%s%s falls back to XLA: %s", call, where, reason)
    if _mode.value is _Mode.STRICT and current_policy() != "xla":
        raise FallbackError(
            f"{call} falls back to XLA{where}, which jax_tilekern.strict() forbids: {reason}"
        )


def note_failure(error: Exception) -> str:
    """Report that a kernel cannot be compiled or launched, and return that in one line.

    Raises
    ------
    Exception
        ``error`` itself, inside :func:`strict`.
    """
    if _mode.value in (_Mode.STRICT, _Mode.STRICT_COMPILATION):
        raise error
    first_line, *_ = str(error).splitlines()
    reason = f"its kernel failed: {first_line.rstrip(':')}"
    logger.info("a kernel failed: %s", error)
    warnings.warn(
        f"jax_tilekern leaves a call to XLA, because {reason} "
        "(inside jax_tilekern.strict() this is an error, with the compiler's log)",
        RuntimeWarning,
        stacklevel=2,
    )
    return reason
