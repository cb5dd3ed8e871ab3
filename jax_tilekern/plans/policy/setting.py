"""The policy that a user asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, get_args

from jax_tilekern.scope import Setting, scoped

Policy = Literal["auto", "kernels", "xla"]

_policy: Setting[Policy] = Setting("policy", "auto", is_traced=True)
# Whether programs are counted and do not run.
_counted = Setting("counted", False)


@scoped
def policy(name: Policy) -> Iterator[None]:
    """Set what decides between the library's kernels and XLA's operations.

    Holds for the current thread, inside the context. A call that is traced inside has the policy
    wherever it is lowered and differentiated, also where the context is in a function under
    ``jax.jit``. A call that is traced outside of every policy has that of where it is lowered.

    Parameters
    ----------
    name
        ``"auto"``, the default, takes the kernel that is predicted, or was tuned, to be faster.
        ``"kernels"`` takes a kernel wherever one exists, the fastest by prediction.
        ``"xla"`` takes XLA's operation for every call. No kernel is compiled, and kernels of
        :func:`jax_tilekern.cuda_kernel` are replaced by their references.

    Raises
    ------
    ValueError
        If there is no such policy.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> with jtk.policy("xla"):
    ...     print(jtk.explain(jtk.matmul, jnp.ones((64, 64)), jnp.ones((64, 64)))[0].reason)
    jax_tilekern.policy("xla") takes XLA's operation
    """
    if name not in get_args(Policy):
        raise ValueError(f"policy: name is one of {', '.join(get_args(Policy))}, not {name!r}")
    with _policy(name):
        yield


def current_policy() -> Policy:
    return "xla" if _counted.value else _policy.value


def counted() -> AbstractContextManager[None]:
    """Return a context in which every call is left to XLA, whatever policy it was traced under."""
    return _counted(True)


def why_excluded() -> str | None:
    """Return in words why no kernel may be used, or ``None`` if kernels may."""
    excluded = current_policy() == "xla"
    return 'jax_tilekern.policy("xla") takes XLA\'s operation' if excluded else None
